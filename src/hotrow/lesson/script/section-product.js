// 2. The same result with one-hot vectors: list every product and count the zeros.

sections.push({
  id: "product",

  result({ table, ids, pick, column }) {
    const places = placesOf(table, ids);
    const encoded = oneHot(places, table.rows.length);
    const looked = lookUp(table.rows, places);
    const multiplied = matmul(encoded, table.rows);
    return {
      encoded,
      looked,
      multiplied,
      chosen: products(encoded[pick], table.rows, column),
      compared: compareBits(looked, multiplied),
    };
  },

  draw(state, { encoded, looked, multiplied, chosen, compared }) {
    const { table, ids, pick, column, shown } = state;
    put(
      find("product-onehot"),
      grid(
        say(isExcerpt(table) ? "product.onehotexcerpt" : "product.onehot", {
          N: ids.length,
          V: table.V,
          included: table.rows.length,
        }),
        ["", ...table.labels.map((id) => say("class", { id }))],
        encoded.map((line, n) => ({
          head: say("place", { place: n, id: idName(table, ids[n]) }),
          cells: line.map((value) => h("td", { class: value ? "one" : "zero" }, String(value))),
          class: hue(ids, ids[n]),
        })),
      ),
    );
    options(find("pick"), ids.map((id, n) => [n, say("place", { place: n, id: idName(table, id) })]));
    options(find("column"), table.rows[0].map((_, j) => [j, say("column", { column: j })]));
    put(find("product-list"), productGrid(state, chosen));
    const hidden = table.V - table.rows.length;
    put(
      find("product-count"),
      [
        say(hidden ? "product.shownexcerpt" : "product.shown", { shown, included: table.rows.length }),
        say("product.zeros", { n: table.V - 1, V: table.V }),
        hidden ? say("product.hidden", { n: hidden }) : "",
        say("product.all", {
          zeros: BigInt(ids.length) * BigInt(table.V - 1) * BigInt(table.D),
          all: BigInt(ids.length) * BigInt(table.V) * BigInt(table.D),
        }),
      ].filter(Boolean).join(say("gap")),
    );
    put(find("product-looked"), outputGrid(say("product.looked"), table, ids, looked));
    const multipliedGrid = outputGrid(say("product.multiplied"), table, ids, multiplied);
    multipliedGrid.querySelectorAll("tbody tr")[pick].querySelectorAll("td")[column].classList.add("chosen");
    put(find("product-multiplied"), multipliedGrid);
    find("product-back").disabled = shown === 0;
    find("product-next").disabled = shown === table.rows.length;
    verdict("product-verdict", compared, state);
  },

  code: (state) =>
    lines(
      setting(state),
      "",
      "one_hot = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "output = one_hot @ table",
      "looked_up = F.embedding(ids, table)",
      "print(torch.equal(output, looked_up))",
    ),

  prints: (_, { looked, multiplied }) => torchEqual(multiplied, looked),
});

function productGrid({ table, ids, pick, column, shown }, chosen) {
  const whole = table.V === table.rows.length;
  const heads = ["", "product.factor", "product.value", "product.product", "product.sum"];
  return grid(
    say(whole ? "product.caption" : "product.captionexcerpt", { place: pick, id: idName(table, ids[pick]), column }),
    heads.map((key) => (key ? columnTitle(key) : "")),
    chosen.slice(0, shown).map(({ factor, value, product, sum }, k) => ({
      head: rowName(table, k),
      cells: [String(factor), `× ${number(value)}`, `= ${number(product)}`, number(sum)],
      class: factor ? hue(ids, ids[pick]) : "zero",
    })),
  );
}

function columnTitle(key) {
  return {
    "product.factor": say("product.factor"),
    "product.value": say("product.value"),
    "product.product": say("product.product"),
    "product.sum": say("product.sum"),
  }[key];
}

// Set the options of a select element. Rebuild them only if they change.
function options(select, choices) {
  const made = JSON.stringify(choices);
  if (select.dataset.made === made) return;
  select.dataset.made = made;
  put(select, choices.map(([value, text]) => h("option", { value }, text)));
}

const stepTo = (shown, button) => edit("shown", String(shown), button);

Object.assign(actions, {
  "product-back": (button) => stepTo(state.shown - 1, button),
  "product-next": (button) => stepTo(state.shown + 1, button),
  "product-all": (button) => stepTo(state.table.rows.length, button),

  "product-play"(button) {
    const all = state.table.rows.length;
    if (calm.matches) return stepTo(all, button);
    const region = find("product-list");
    stepTo(0, button);
    region.classList.add("playing");
    return animate(() => {
      change({ shown: state.shown + 1 }, null);
      return state.shown === all;
    }, 700, () => {
      region.classList.remove("playing");
      tell(button);
    });
  },
});
