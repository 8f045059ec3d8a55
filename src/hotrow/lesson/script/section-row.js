// Core path, look up: an id is the number of a row, counted from 0.

sections.push({
  id: "row",
  uses: ["table", "single"],

  result({ table, single }) {
    const place = table.labels.indexOf(single);
    return { place, output: lookUp(table.rows, [place]) };
  },

  draw({ table, single }, { place, output }) {
    put(
      find("row-ids"),
      table.labels.map((id) =>
        h("button", {
          type: "button",
          class: colourOf(id),
          "aria-pressed": String(id === single),
          "aria-label": say("lookup.add", { id }),
          on: {
            click: (event) => {
              change({ single: id }, event.target);
              const button = find("row-ids").children[table.labels.indexOf(id)];
              button.focus();
              tell(button);
            },
          },
        }, h("span", {}, String(id))),
      ),
    );
    put(
      find("row-table"),
      grid(
        say("linear.rows", { V: table.V, D: table.D }),
        columnNames(table),
        table.rows.map((row, k) => ({
          head: rowName(table, k),
          cells: numbers(row),
          class: `${k === place ? "picked" : "dim used"} ${colourOf(table.labels[k])}`,
        })),
      ),
    );
    const values = several(output[0].map(unbroken));
    find("row-verdict").className = "verdict equal";
    put(find("row-verdict"), say("row.result", { id: single, nth: ordinal(single + 1), values }));
  },

  code: (state) =>
    lines(
      "import torch",
      "",
      heldNote(state.table),
      embeddingCode(state.table),
      idsCode(state.table, [state.single]),
      "output = embedding(ids).detach()",
      "print(output)",
    ),

  prints: (_, { output }) => tensorText(output),
});
