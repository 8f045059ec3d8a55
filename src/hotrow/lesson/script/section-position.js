// 7. Token and position: the sum of two lookups is one product with two concatenated one-hot
// vectors.

// Example C has its own position table. Other tables and longer id lists get random numbers.
const hasPositions = ({ table, ids }) =>
  Boolean(table.positions) && ids.length <= table.positions.length;

function positionTable(state) {
  const { table, ids, seed } = state;
  if (hasPositions(state)) return table.positions.slice(0, ids.length);
  return split(normals(seed + 1, ids.length * columns(state)), columns(state));
}

sections.push({
  id: "position",

  result(state) {
    const { table, ids } = state;
    const positions = positionTable(state);
    const places = placesOf(table, ids);
    const tokens = lookUp(table.rows, places);
    const output = tokens.map((row, n) => addRows([row, positions[n]]));
    const stacked = [...table.rows, ...positions];
    const left = oneHot(places, table.rows.length);
    const right = oneHot(ids.map((_, n) => n), ids.length);
    const twoHot = left.map((line, n) => [...line, ...right[n]]);
    const multiplied = matmul(twoHot, stacked);
    return { positions, tokens, twoHot, output, multiplied, compared: compareBits(output, multiplied) };
  },

  draw(state, { positions, tokens, twoHot, output, compared }) {
    const { table, ids } = state;
    const included = table.rows.length;
    put(
      find("position-twohot"),
      grid(
        say("position.twohot", { N: ids.length, V: table.V, L: positions.length, all: table.V + positions.length }),
        [
          "",
          ...table.labels.map((id) => say("class", { id })),
          ...positions.map((_, n) => say("position.class", { n })),
        ],
        twoHot.map((line, n) => ({
          head: say("place", { place: n, id: idName(table, ids[n]) }),
          cells: line.map((value, k) =>
            h("td", { class: `${value ? "one" : "zero"}${k === included ? " border" : ""}` }, String(value)),
          ),
          class: hue(ids, ids[n]),
        })),
      ),
    );
    put(
      find("position-output"),
      grid(
        say("position.output"),
        columnNames(table),
        ids.flatMap((id, n) => [
          { head: say("place", { place: n, id: idName(table, id) }), cells: numbers(tokens[n]), class: hue(ids, id) },
          { head: say("position.plus", { n }), cells: numbers(positions[n]) },
          { head: say("position.equals", { n }), cells: numbers(output[n]), class: "total" },
        ]),
      ),
    );
    put(find("position-note"), hasPositions(state) ? say("position.C") : say("position.random"));
    verdict("position-verdict", compared, state);
  },

  code(state) {
    const { table, ids } = state;
    if (isExampleC(state)) return exampleC(state);
    return lines(
      setting(state),
      `positions = ${matrix(positionTable(state))}`,
      "",
      "output = F.embedding(ids, table) + positions",
      "one_hot = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "two_hot = torch.cat([one_hot, torch.eye(len(ids))], dim=-1)",
      "stacked = torch.cat([table, positions])",
      "print(torch.equal(two_hot @ stacked, output))",
    );
  },

  prints: (state, { output, multiplied }) =>
    isExampleC(state)
      ? [[8, 4, state.table.D], [4, state.table.D], [8, 4, state.table.D]].map(sizeText).join(" ")
      : torchEqual(multiplied, output),
});

const isExampleC = ({ table, ids }) => table.name === "C" && !table.edited && String(ids) === String(table.ids);

const exampleC = (state) =>
  lines(
    "import torch",
    "",
    "_ = torch.manual_seed(123)",
    "tokens = torch.nn.Embedding(50_257, 256)",
    "positions = torch.nn.Embedding(4, 256)",
    "batch = torch.randint(50_257, (8, 4))",
    "embedded = tokens(batch) + positions(torch.arange(4))",
    "print(tokens(batch).shape, positions.weight.shape, embedded.shape)",
    `output = embedded[0, :, :${columns(state)}].detach()`,
  );

const sizeText = (size) => `torch.Size(${listed(size)})`;
