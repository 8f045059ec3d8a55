// 8. Where the results of the two methods differ.

sections.push({
  id: "differ",

  result(state) {
    const { table, ids, pick, column, place, outside, times, three } = state;
    const places = placesOf(table, ids);
    const ways = (rows) => {
      const looked = lookUp(rows, places);
      const multiplied = matmul(oneHot(places, rows.length), rows);
      return { looked, multiplied, compared: compareBits(looked, multiplied) };
    };
    const poisoned = (value, id) => {
      const { rows } = withValue(table, table.labels.indexOf(id), column, value);
      return { rows, ...ways(rows) };
    };
    const [a, b, c] = three;
    const one = bfloat16(1);
    let sum = 0;
    for (let n = 0; n < times; n++) sum = bfloat16(f32(sum + one));
    return {
      inf: poisoned(Infinity, place),
      nan: poisoned(NaN, place),
      signed: poisoned(-0, ids[pick]),
      range: { known: outside >= 0 && outside < table.V, output: table.rows[0].map(() => 0) },
      low: { looked: sum, multiplied: bfloat16(times) },
      order: { looked: f32(f32(a + b) + c), multiplied: f32(f32(a + c) + b) },
    };
  },

  draw(state, result) {
    const { table, ids, pick, column, place } = state;
    const found = result[state.case];
    for (const part of document.querySelectorAll("#differ [data-case]")) {
      part.hidden = !part.dataset.case.split(" ").includes(state.case);
    }
    options(find("differ-place"), table.labels.map((id) => [id, idName(table, id)]));
    put(find("differ-why"), whyWords(state));
    const [first, second] = [find("differ-first"), find("differ-second")];
    if (found.rows) put(find("differ-table"), changedGrid(state, found.rows));
    if (state.case === "range") put(first, outsideGrid(state, found));
    else if (found.compared) {
      put(first, outputGrid(say("product.looked"), table, ids, found.looked));
      put(second, outputGrid(say("product.multiplied"), table, ids, found.multiplied));
    } else put(first, twoSums(state, found));
    if (found.compared) verdict("differ-verdict", found.compared, state);
    else if (state.case === "range") differVerdict(found.known);
    else differVerdict(sameBits(found.looked, found.multiplied));
    put(find("differ-where"), { inf: where(place, column), nan: where(place, column), signed: where(ids[pick], column) }[state.case] ?? "");
  },

  code(state) {
    const { table, ids, pick, column, place, outside, times, three } = state;
    const value = { inf: 'float("inf")', nan: 'float("nan")', signed: "-0.0" }[state.case];
    if (value) {
      const row = table.labels.indexOf(state.case === "signed" ? ids[pick] : place);
      return lines(
        setting(state),
        "",
        "table = table.clone()",
        `table[${row}, ${column}] = ${value}`,
        "looked = F.embedding(ids, table)",
        "multiplied = F.one_hot(ids, num_classes=len(table)).to(table.dtype) @ table",
        "print(looked)",
        "print(multiplied)",
      );
    }
    if (state.case === "range") {
      return lines(
        "import torch",
        "",
        `layer = torch.nn.Embedding(${table.V}, ${columns(state)})`,
        "try:",
        `    layer(torch.tensor([${outside}]))`,
        "    known = True",
        "except IndexError as error:",
        "    known = False",
        "    print(error)",
        `one_hot = torch.arange(${table.V}) == ${outside}`,
        'print(int(one_hot.sum()), "of", len(one_hot), "numbers are not zero")',
      );
    }
    if (state.case === "low") {
      return lines(
        "import torch",
        "",
        "one = torch.ones(1, dtype=torch.bfloat16)",
        "looked = torch.zeros(1, dtype=torch.bfloat16)",
        `for _ in range(${times}):`,
        "    looked += one",
        `multiplied = torch.tensor([float(${times})]).to(torch.bfloat16)`,
        "print(looked)",
        "print(multiplied)",
      );
    }
    return lines(
      "import torch",
      "",
      `a, b, c = ${matrix(three.map((each) => [each])).replace(/\n */g, "")}`,
      "looked = (a + b) + c",
      "multiplied = (a + c) + b",
      "print(looked)",
      "print(multiplied)",
    );
  },

  prints(state, result) {
    const { looked, multiplied, known } = result[state.case];
    if (state.case === "range") {
      const error = known ? null : "index out of range in self";
      return lines(error, `${Number(known)} of ${state.table.V} numbers are not zero`);
    }
    const suffix = state.case === "low" ? "dtype=torch.bfloat16" : "";
    return lines([looked, multiplied].map((value) => tensorText([value].flat(), { suffix })));
  },
});

// The table with the changed value.
function changedGrid({ table, ids, column, place, pick, ...state }, rows) {
  const changed = table.labels.indexOf(state.case === "signed" ? ids[pick] : place);
  const made = grid(
    say("lookup.table", { V: table.V, D: table.D }),
    columnNames(table),
    rows.map((row, k) => ({
      head: rowName(table, k),
      cells: numbers(row),
      class: hue(ids, table.labels[k]),
    })),
  );
  made.querySelectorAll("tbody tr")[changed].querySelectorAll("td")[column].classList.add("chosen");
  return made;
}

const where = (id, column) => say("differ.where", { id, column });

function whyWords(state) {
  return {
    inf: say("differ.inf"),
    nan: say("differ.nan"),
    signed: say("differ.signed"),
    range: say("differ.range"),
    low: say("differ.low"),
    order: say("differ.order"),
  }[state.case];
}

function differVerdict(equal) {
  const element = find("differ-verdict");
  element.className = `verdict ${equal ? "equal" : "different"}`;
  put(element, equal ? say("differ.same") : say("differ.not"));
}

function outsideGrid({ table, outside }, { known, output }) {
  const description = known
    ? say("differ.known", { id: outside })
    : say("bad.id", { id: outside, V: table.V, last: table.V - 1 });
  return grid(say("differ.outside", { id: outside }), ["", say("differ.gives")], [
    { head: say("product.looked"), cells: [words(description)] },
    { head: say("product.multiplied"), cells: [words(known ? description : several(output.map(number)))] },
  ]);
}

function twoSums(state, { looked, multiplied }) {
  const low = state.case === "low";
  return grid(low ? say("differ.lowtable", { n: state.times }) : say("differ.ordertable"), ["", say("product.sum")], [
    { head: low ? say("differ.each") : "(a + b) + c", cells: [typed(looked)] },
    { head: low ? say("differ.once") : "(a + c) + b", cells: [typed(multiplied)] },
  ]);
}
