// Core path, the linear layer: its weight is the table, transposed.

const MOST_TERMS = 6;

// Output 0, written as a sum: each input times its weight. Of a long sum, show the first terms and
// the one that is not zero.
function sumOf(table, id) {
  const terms = table.rows.map((row, k) => {
    const term = `${Number(table.labels[k] === id)}\u00a0×\u00a0${bracketed(row[0])}`;
    return table.labels[k] === id ? h("strong", {}, term) : term;
  });
  const kept = terms.filter((term, k) => terms.length <= MOST_TERMS || k < 4 || typeof term !== "string");
  if (kept.length < terms.length || isExcerpt(table)) kept.push("…");
  const result = number(table.rows[table.labels.indexOf(id)][0]);
  return [`${say("linear.out", { j: 0 })} = `, ...kept.flatMap((term, n) => (n ? [" + ", term] : [term])), ` = ${result}`];
}

// Separate the output from the weight.
function bordered(cell) {
  cell.classList.add("border");
  return cell;
}

const bracketed = (value) => (value < 0 ? `(${unbroken(value)})` : number(value));

sections.push({
  id: "layer",
  uses: ["table", "ids", "pick", "layout"],

  result({ table, ids }) {
    const places = placesOf(table, ids);
    return { looked: lookUp(table.rows, places), output: matmul(oneHot(places, table.rows.length), table.rows) };
  },

  // The written-out sum stands before the question.
  intro({ table, ids, pick }) {
    put(find("layer-first"), say("layer.first", { word: wordName(table, ids[pick]) }));
    put(find("layer-sum"), ...sumOf(table, ids[pick]));
  },

  draw(state, { looked, output }) {
    const { table, ids, pick, layout } = state;
    const id = ids[pick];
    const chosen = `picked ${colourOf(id)}`;
    const sum = numbers(output[pick]);
    const rows = () =>
      grid(say("linear.rows", { V: table.V, D: table.D }), columnNames(table), [
        ...table.rows.map((row, k) => ({
          head: rowName(table, k),
          cells: numbers(row),
          class: `${table.labels[k] === id ? "picked" : "used"} ${colourOf(table.labels[k])}`,
        })),
        { head: say("layer.output"), cells: sum, class: "total" },
      ]);
    const columns = () =>
      grid(
        say("linear.columns", { V: table.V, D: table.D }),
        [...idHeads(table), say("layer.output")],
        [
          { head: say("product.factor"), cells: [...table.labels.map((label) => h("td", { class: label === id ? chosen : "dim" }, String(Number(label === id)))), ""] },
          ...transpose(table.rows).map((row, j) => ({
            head: say("linear.out", { j }),
            cells: [...idCells(table, row, (label) => label === id), bordered(sum[j])],
          })),
        ],
      );
    put(find("layer-weight"), layout === "rows" ? rows() : columns());
    const read = table.rows[table.labels.indexOf(id)].map(unbroken).concat(isExcerpt(table) ? "…" : []);
    const name = { id: idName(table, id), row: id };
    put(find("layer-note"), layout === "rows" ? say("layer.rows", { ...name, values: listed(read) }) : say("layer.columns", name));
    // The lookup has nothing to compare with the row that it returns.
    find("layer-verdict").hidden = layout === "rows";
    verdict("layer-verdict", compareBits([looked[pick]], [output[pick]]), state, { key: "bits.shown", opening: "equal.row" });
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

  prints: (_, { looked, output }) => torchEqual(output, looked),
});
