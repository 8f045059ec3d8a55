// 3. Rows or columns: a linear layer stores the table transposed, (out, in).

sections.push({
  id: "linear",

  result({ table, ids, linear }) {
    const places = placesOf(table, ids);
    const own = linear === "own" && table.linear;
    const weight = own || transpose(table.rows);
    const looked = lookUp(table.rows, places);
    const output = matmul(oneHot(places, table.rows.length), transpose(weight));
    return { weight, looked, output, compared: compareBits(looked, output) };
  },

  draw(state, { weight, looked, output, compared }) {
    const { table, ids, linear } = state;
    const chosen = ids[state.pick];
    put(
      find("linear-rows"),
      grid(
        say("linear.rows", { V: table.V, D: table.D }),
        columnNames(table),
        table.rows.map((row, k) => ({
          head: rowName(table, k),
          cells: numbers(row),
          class: hue(ids, table.labels[k]),
        })),
      ),
    );
    put(
      find("linear-columns"),
      grid(
        say("linear.columns", { V: table.V, D: table.D }),
        idHeads(table),
        weight.map((row, j) => ({
          head: say("linear.out", { j }),
          cells: idCells(table, row, (id) => ids.includes(id), scaleOf(weight)),
        })),
      ),
    );
    find("linear-own").disabled = !table.linear;
    const notes = {
      own: say("linear.note.own", { V: table.V, D: table.D }),
      copied: say("linear.note.copied", { id: chosen }),
      none: say("linear.note.none"),
    };
    const note = linear === "own" ? (table.linear ? "own" : "none") : "copied";
    put(find("linear-note"), notes[note]);
    put(find("linear-looked"), outputGrid(say("product.looked"), table, ids, looked));
    put(find("linear-output"), outputGrid(say("linear.output"), table, ids, output));
    verdict("linear-verdict", compared, state);
  },

  code(state) {
    const { table, linear } = state;
    const size = `torch.nn.Linear(${table.rows.length}, ${columns(state)}, bias=False)`;
    const own = linear === "own" && table.linear;
    return lines(
      setting(state),
      "",
      own ? "_ = torch.manual_seed(123)" : null,
      `linear = ${size}  # weight: (out, in)`,
      own ? null : ["with torch.no_grad():", "    linear.weight.copy_(table.T)"],
      "one_hot = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "output = linear(one_hot).detach()",
      "print(torch.equal(output, F.embedding(ids, table)))",
    );
  },

  prints: (_, { looked, output }) => torchEqual(output, looked),
});
