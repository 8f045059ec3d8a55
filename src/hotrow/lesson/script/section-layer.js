// Core path, the linear layer: its weight is the table, transposed.

sections.push({
  id: "layer",
  uses: ["table", "ids", "layout"],

  result({ table, ids }) {
    const places = placesOf(table, ids);
    const output = matmul(oneHot(places, table.rows.length), table.rows);
    return { output, compared: compareBits(lookUp(table.rows, places), output) };
  },

  draw(state, { compared }) {
    const { table, ids, layout } = state;
    const [V, D] = [table.V, table.D];
    const lines = table.rows.map((row, k) => ({
      head: rowName(table, k),
      cells: numbers(row),
      class: hue(ids, table.labels[k]),
    }));
    const columns = transpose(table.rows).map((row, j) => ({
      head: say("linear.out", { j }),
      cells: numbers(row).map((cell, k) => {
        if (ids.includes(table.labels[k])) cell.classList.add("picked", colourOf(table.labels[k]));
        return cell;
      }),
    }));
    put(
      find("layer-weight"),
      layout === "rows"
        ? grid(say("linear.rows", { V, D }), columnNames(table), lines)
        : grid(
            say("linear.columns", { V, D }),
            ["", ...table.labels.map((id, k) => say("class", { id }) + tokenOf(table, k))],
            columns,
          ),
    );
    put(find("layer-note"), layout === "rows" ? say("layer.rows", { id: ids[0] }) : say("layer.columns", { id: ids[0] }));
    verdict("layer-verdict", compared, state);
  },

  code: (state) =>
    lines(
      setting(state),
      "",
      `linear = torch.nn.Linear(${state.table.rows.length}, ${columns(state)}, bias=False)`,
      "with torch.no_grad():",
      "    linear.weight.copy_(table.T)",
      "one_hot = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "output = linear(one_hot).detach()",
      "print(torch.equal(output, F.embedding(ids, table)))",
    ),
});
