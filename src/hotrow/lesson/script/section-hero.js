// The first screen: words, a table and an output. A word's row travels to the output.

let flight = 0; // the number of the current animation; a new one ends the others

sections.push({
  id: "hero",
  uses: ["table", "ids", "way", "pick"],

  result({ table, ids, pick }) {
    const places = placesOf(table, ids);
    const looked = lookUp(table.rows, places);
    const product = matmul(oneHot([places[pick]], table.rows.length), table.rows);
    return { looked, product, compared: compareBits([looked[pick]], product) };
  },

  draw(state, { looked, product, compared }) {
    flight += 1; // animations end here, because their rows are redrawn
    find("hero-stage").querySelectorAll(".flying").forEach((copy) => copy.remove());
    const { table, ids, way, pick } = state;
    put(find("hero-words"), ids.map((id, n) => wordButton(table, id, n, n === pick)));
    const factor = (k) => (way === "product" ? [h("td", { class: ids[pick] === table.labels[k] ? "one" : "zero" },
      `${Number(ids[pick] === table.labels[k])} ×`)] : []);
    put(
      find("hero-table"),
      grid(
        say(way === "product" ? "hero.multiply" : "linear.rows", { V: table.V, D: table.D }),
        [],
        [
          ...table.rows.map((row, k) => ({
            head: rowName(table, k),
            cells: [...factor(k), ...numbers(row)],
            class: hue([ids[pick]], table.labels[k]) || hue(ids, table.labels[k]).replace("picked", "used"),
          })),
          ...(way === "product" ? [{ head: say("product.sum"), cells: ["", ...numbers(product[0])], class: "total" }] : []),
        ],
      ),
    );
    put(find("hero-output"), outputGrid(say("lookup.output", { N: ids.length, D: table.D }), table, ids, looked, []));
    writeCounts(heroCounts(state, table.V, table.V - 1));
    if (way === "product") verdict("hero-verdict", compared, state);
    else {
      find("hero-verdict").className = "verdict equal";
      put(find("hero-verdict"), say("hero.read", { id: idName(table, ids[pick]) }));
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
  return token ? [h("bdi", {}, token), h("small", {}, ` ${id}`)] : [say("class", { id })];
}

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
    for (let k = 0; k < table.rows.length; k++) {
      lines().forEach((line, n) => line.classList.toggle("dim", n !== k));
      writeCounts(heroCounts(state, k + 1, k + 1 - Number(k >= place)));
      await pause(k === place ? 420 : 300);
      if (number !== flight) return;
    }
    writeCounts(heroCounts(state, table.V, table.V - 1));
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

document.querySelectorAll("[name=way]").forEach((radio) => radio.addEventListener("change", () => setTimeout(travel)));
