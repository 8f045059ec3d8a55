// Core path, one-hot times the table: every row times its number, then the sum of all rows.

const FACTORS = [0, 1, 2];

sections.push({
  id: "vector",
  uses: ["table", "factors"],

  result({ table, factors }) {
    const parts = table.rows.map((row, k) => row.map((value) => f32(factors[k] * value)));
    return { parts, sum: matmul([factors], table.rows)[0] };
  },

  draw({ table, factors }, { parts, sum }) {
    const width = table.rows[0].length;
    // The multiplication, small, and the product below it. Without −0.
    const cells = (row, k) =>
      numbers(row.map((value) => value + 0)).map((cell, j) => {
        cell.prepend(h("small", {}, h("span", {}, `${factors[k]} × `), unbroken(table.rows[k][j])), h("br"));
        return cell;
      });
    put(
      find("vector-table"),
      grid(
        say("vector.caption"),
        ["", say("vector.head"), ...columnNames(table).slice(1)],
        [
          ...parts.map((row, k) => ({
            head: rowName(table, k),
            cells: [h("td", {}, factorButton(table, factors, k)), ...cells(row, k)],
            class: `${factors[k] ? "picked" : "dim used"} ${colourOf(table.labels[k])}`,
          })),
          { head: say("product.sum"), cells: ["", ...numbers(sum)], class: "total" },
        ],
      ),
    );
    const ones = factors.filter(Boolean);
    const zeros = factors.length - ones.length;
    const single = ones.length === 1 && ones[0] === 1;
    const verdict = single ? "vector.single" : ["vector.none", "vector.twice"][ones.length] ?? "vector.other";
    find("vector-verdict").className = `verdict ${single ? "equal" : ""}`;
    const row = table.labels[factors.findIndex(Boolean)];
    const sizes = { zeros: zeros * width, all: factors.length * width };
    put(find("vector-verdict"), say(verdict, { values: listed(factors), row, n: ones.length, ...sizes }));
    put(find("vector-note"), isExcerpt(table) ? say("vector.excerpt", { included: factors.length, width, V: table.V, D: table.D }) : "");
    put(find("vector-rounded"), roundingNote(table.rows, factors));
  },

  code: (state) =>
    lines(
      "import torch",
      "",
      heldNote(state.table),
      tableCode(state.table),
      `vector = torch.tensor([${state.factors.map((factor) => `${factor}.0`).join(", ")}])`,
      "output = vector @ table",
      "print(output)",
    ),

  prints: (_, { sum }) => tensorText(sum),
});

// Explain a number in a doubled row whose double, as shown, is not twice the number that is shown.
function roundingNote(rows, factors) {
  const value = rows.filter((_, k) => factors[k] === 2).flat().find((each) => {
    const shown = [number(each), number(2 * each)];
    return shown.every((text) => /^-?\d+\.\d{4}$/.test(text)) && number(2 * Number(shown[0])) !== shown[1];
  });
  if (value === undefined) return "";
  return say("gap") + say("vector.rounded", { value: unbroken(value), product: unbroken(2 * value), exact: value.toFixed(6).replace("-", "-\u2060") });
}

const factorButton = (table, factors, k) =>
  h(
    "button",
    {
      type: "button",
      id: `factor-${k}`,
      class: "factor",
      "aria-label": say("vector.change", { row: table.labels[k], value: factors[k] }),
      on: {
        click: (event) => {
          const next = FACTORS[(FACTORS.indexOf(factors[k]) + 1) % FACTORS.length];
          change({ factors: factors.map((factor, n) => (n === k ? next : factor)) }, event.target);
          find(`factor-${k}`).focus();
          tell(find(`factor-${k}`));
        },
      },
    },
    String(factors[k]),
  );
