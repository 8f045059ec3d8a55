// The first screen: words, a table and an output. A word's row travels to the output.

let flight = 0; // the number of the current animation; a new one ends the others

sections.push({
  id: "hero",
  uses: ["table", "ids", "way", "pick"],

  intro: showWords,

  result({ table, ids, pick }) {
    const places = placesOf(table, ids);
    const looked = lookUp(table.rows, places);
    const sum = matmul(oneHot([places[pick]], table.rows.length), table.rows);
    return { places, looked, sum, compared: compareBits([looked[pick]], sum) };
  },

  draw(state, { places, looked, sum, compared }) {
    flight += 1; // animations end here, because their rows are redrawn
    find("hero-stage").querySelectorAll(".flying").forEach((copy) => copy.remove());
    const { table, ids, way, pick } = state;
    const id = ids[pick];
    put(find("hero-words"), ids.map((id, n) => wordButton(table, id, n, n === pick)));
    // Both ways draw the same columns and rows, so that a change of the way moves nothing.
    const product = way === "product";
    const factor = (chosen) =>
      product
        ? h("td", { class: `factor ${chosen ? "one" : "zero"}` }, `${Number(chosen)} ×`)
        : h("td", { class: "factor" }, chosen ? "→" : "");
    put(
      find("hero-table"),
      grid(
        say(product ? "hero.multiply" : "hero.table", { V: table.V, D: table.D }),
        [],
        [
          ...table.rows.map((row, k) => ({
            head: rowName(table, k),
            cells: [factor(table.labels[k] === id), ...numbers(row)],
            class: `${table.labels[k] === id ? "picked" : "used"} ${colourOf(table.labels[k])}`,
          })),
          { head: say("product.sum"), cells: ["", ...numbers(sum[0])], class: product ? "total" : "total absent" },
        ],
      ),
    );
    const place = (n) => say("position.class", { n }) + (tokenOf(table, places[n]) || `${say("gap")}${say("class", { id: ids[n] })}`);
    put(find("hero-output"), outputGrid(say("lookup.output", { N: ids.length, D: table.D }), table, ids, looked, [], place));
    put(find("hero-for"), say(product ? "hero.for" : "hero.copy", { word: wordName(table, id) }));
    writeCounts(heroCounts(state, table.V, table.V - 1));
    if (product) verdict("hero-verdict", compared, state, { key: "bits.shown", opening: "equal.row" });
    else {
      find("hero-verdict").className = "verdict equal";
      put(find("hero-verdict"), say("hero.read", { row: id }));
    }
  },
});

const wordButton = (table, id, n, pressed) =>
  h(
    "button",
    {
      type: "button",
      class: colourOf(id),
      "aria-pressed": String(pressed),
      on: {
        click: (event) => {
          change({ pick: n }, event.target);
          const button = find("hero-words").children[n];
          button.focus();
          tell(button);
          travel();
        },
      },
    },
    ...wordOf(table, id),
  );

// The token with its id, or only the id.
function wordOf(table, id) {
  const token = tokensOf(table)?.[table.labels.indexOf(id)];
  const number = say("class", { id });
  return token ? [h("bdi", {}, token), h("small", {}, ` ${number}`)] : [h("span", {}, number)];
}

const wordName = (table, id) => tokensOf(table)?.[table.labels.indexOf(id)] ?? say("class", { id });

// For one word: the multiplications so far, how many are by zero, and the numbers read.
function heroCounts({ table, way }, rows, zeros) {
  if (way === "lookup") return [0, 0, table.D];
  return [BigInt(rows) * BigInt(table.D), BigInt(zeros) * BigInt(table.D), BigInt(rows) * BigInt(table.D)];
}

function writeCounts([multiplications, zeros, read]) {
  const names = [say("hero.multiplications"), say("hero.zeros"), say("hero.numbers")];
  put(
    find("hero-counts"),
    [multiplications, zeros, read].map((n, k) => h("div", {}, h("dt", {}, names[k]), h("dd", {}, count(n)))),
  );
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// Animate the selected word. For a product, visit every row first. Then move the word's row to the
// output.
async function travel() {
  if (calm.matches) return;
  const number = ++flight;
  const { table, ids, way, pick } = state;
  const place = table.labels.indexOf(ids[pick]);
  const lines = () => find("hero-table").querySelectorAll("tbody tr:not(.total)");
  const target = find("hero-output").querySelectorAll("tbody tr")[pick];
  target.classList.add("coming");
  if (way === "product") {
    const results = [find("hero-table").querySelector("tr.total"), find("hero-verdict")];
    results.forEach((result) => result.classList.add("coming"));
    for (let k = 0; k < table.rows.length; k++) {
      lines().forEach((line, n) => line.classList.toggle("dim", n !== k));
      writeCounts(heroCounts(state, k + 1, k + 1 - Number(k >= place)));
      await pause(k === place ? 420 : 300);
      if (number !== flight) return;
    }
    writeCounts(heroCounts(state, table.V, table.V - 1));
    results.forEach((result) => result.classList.remove("coming"));
  }
  lines().forEach((line, n) => line.classList.toggle("dim", n !== place));
  await fly(way === "product" ? find("hero-table").querySelector("tr.total") : lines()[place], target);
  if (number !== flight) return;
  lines().forEach((line) => line.classList.remove("dim"));
  target.classList.remove("coming");
}

// Move a copy of a table row to the position of a row in another table.
async function fly(from, to) {
  const stage = find("hero-stage");
  const [start, end, frame] = [from, to, stage].map((each) => each.getBoundingClientRect());
  const line = from.cloneNode(true);
  [...from.cells].forEach((cell, n) => (line.cells[n].style.width = `${cell.getBoundingClientRect().width}px`));
  const copy = h("table", { class: "flying", "aria-hidden": "true" }, h("tbody", {}, line));
  copy.style.left = `${start.left - frame.left}px`;
  copy.style.top = `${start.top - frame.top}px`;
  stage.append(copy);
  const path = { transform: ["none", `translate(${end.right - start.right}px, ${end.top - start.top}px)`] };
  await copy.animate(path, { duration: 650, easing: "cubic-bezier(.3,.9,.3,1)" }).finished;
  copy.remove();
}

// The event "input" has drawn the new way before the event "change".
document.querySelectorAll("[name=way]").forEach((radio) => radio.addEventListener("change", travel));
