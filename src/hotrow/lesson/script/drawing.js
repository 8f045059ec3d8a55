// Drawing functions for several sections: row names and colors, matrices, verdicts.

const HUES = 6;

// A number that does not wrap after its minus sign.
const unbroken = (value) => number(value).replace("-", "-\u2060");

// A table cell with text that can wrap.
const words = (text) => h("td", { class: "words" }, text);

// The color class of an id: the same in every figure of a table.
const colourOf = (id) =>
  `h${(state.table.V <= HUES ? id : state.table.labels.indexOf(id)) % HUES}`;

// The CSS classes for the row of an id. The row is colored if the id is selected.
const hue = (ids, id) => (ids.includes(id) ? `picked ${colourOf(id)}` : "");

// The tokens of the examples are words in the page's language.
const tokensOf = (table) =>
  ({ A: say("tokens.A").split(" "), B: say("tokens.B").split(" ") })[table.name] ?? table.tokens;

// The space allows a line break between a number and its token on a narrow page.
const tokenOf = (table, k) => (tokensOf(table)?.[k] ? ` “${tokensOf(table)[k]}”` : "");

const rowName = (table, k) => say("row", { row: table.labels[k] }) + tokenOf(table, k);

const idName = (table, id) => String(id) + tokenOf(table, table.labels.indexOf(id));

const columnNames = (table) => ["", ...table.rows[0].map((_, j) => say("column", { column: j }))];

// The largest absolute value among a table's finite values. It gets the strongest color.
const scaleOf = (rows) => Math.max(...rows.flat().map(Math.abs).filter(Number.isFinite), 0);

// One table cell per number, colored by value: blue above zero, orange below.
const numbers = (values, scale = scaleOf(state.table.rows)) =>
  values.map((value) => tint(h("td", {}, number(value)), value, scale));

function tint(cell, value, scale) {
  const strength = Number.isFinite(value) && scale ? Math.min(1, Math.abs(value) / scale) : 0;
  cell.classList.add("value", value < 0 ? "below" : "above");
  cell.style.setProperty("--strength", `${Math.round(100 * strength)}%`);
  return cell;
}

// The heads of a weight that has one column for each id.
const idHeads = (table) => [
  "",
  ...table.labels.map((id, k) => h("span", { class: colourOf(id) }, say("class", { id }), h("br"), tokenOf(table, k))),
];

// The cells of a row of such a weight. The columns of the selected ids are bold.
const idCells = (table, row, isChosen, scale) =>
  numbers(row, scale).map((cell, k) => {
    const id = table.labels[k];
    if (isChosen(id)) cell.classList.add("picked", colourOf(id));
    return cell;
  });

const placeName = (table, ids, n) => say("place", { place: n, id: idName(table, ids[n]) });

function outputGrid(caption, table, ids, output, heads = columnNames(table), name = (n) => placeName(table, ids, n)) {
  return grid(
    caption,
    heads,
    output.map((row, n) => ({
      head: name(n),
      cells: numbers(row),
      class: hue(ids, ids[n]),
    })),
  );
}

// Write a verdict: equal, equal within rounding or not equal, with the number of equal values. If
// values outside an excerpt make the whole product differ from the lookup, say so first.
function verdict(id, compared, { table, ids }, { key = "bits", multiplies = true, opening = "equal" } = {}) {
  const { equal, near, signs, same, total } = compared;
  const element = find(id);
  const spoils = multiplies && isSpoiled(table, ids);
  element.className = `verdict ${(equal || near || signs) && !spoils ? "equal" : "different"}`;
  const text = equal ? say(opening) : signs ? say("numbers") : near ? say("near") : say("different");
  const all = { bits: "bits.all", "bits.shown": "bits.shown" }[key];
  const some = all ? "bits" : key;
  const counted = say(!equal && signs ? "signs" : (equal && all) || some, { n: same, total });
  const parts = [text, counted];
  if (spoils) parts.unshift(say("spoiled", { n: table.spoiled, row: table.firstSpoiled }));
  if (isExcerpt(table)) parts.push(say("excerpt"));
  put(element, parts.join(say("gap")));
}

// Join names with the comma of the page's language.
const several = (names) => names.join(say("comma"));

// Draw a table of inputs. Rebuild it only if its shape or labels change, to keep the focus.
function inputGrid(region, { id, caption, heads, rowHeads, classes, label, values, set }) {
  const scale = scaleOf(values);
  const names = rowHeads.map((head) => head.textContent ?? head);
  const made = [language, caption, ...names].join("|");
  if (region.dataset.made !== made) {
    region.dataset.made = made;
    const input = (n, j) =>
      h("input", {
        type: "text",
        inputmode: "decimal",
        autocomplete: "off",
        spellcheck: "false",
        id: `${id}-${n}-${j}`,
        "aria-label": label(n, j),
        on: {
          change: (event) =>
            attempt(event.target, () => set(n, j, readReal(event.target.value), event.target)),
        },
      });
    put(
      region,
      grid(
        caption,
        heads,
        values.map((line, n) => ({ head: rowHeads[n], cells: line.map((_, j) => input(n, j)) })),
      ),
    );
  }
  region.querySelectorAll("tbody tr").forEach((line, n) => {
    line.className = classes[n];
    line.querySelectorAll("input").forEach((input, j) => {
      const value = values[n][j];
      input.title = typed(value);
      tint(input.closest("td"), value, scale);
      if (input === typing) return;
      input.value = number(value);
      forgive(input);
    });
  });
}
