// Core path, count the zeros: one token's one-hot vector, drawn to scale.

const GPT2 = 50_257; // the size of its vocabulary
const SMALLEST = 4;
const WIDTH = 768; // the columns of GPT-2's table
const LARGEST_CELL = 24;

// Pixels for one number of the one-hot vector, with its gap. The squares shrink while V is small,
// but the picture grows with V.
const cellSize = (vocabulary) =>
  Math.max(narrow.matches ? 2 : 3, Math.floor(LARGEST_CELL * Math.cbrt(SMALLEST / vocabulary)));

const vocabularyAt = (place) => Math.round(SMALLEST * (GPT2 / SMALLEST) ** (Number(place) / 1000));

sections.push({
  id: "waste",
  uses: ["vocabulary"],

  result: ({ vocabulary }) => ({ all: vocabulary * WIDTH, zeros: (vocabulary - 1) * WIDTH }),

  draw({ vocabulary }, { all, zeros }) {
    const slider = find("waste-slider");
    if (vocabularyAt(slider.value) !== vocabulary) {
      slider.value = String((1000 * Math.log(vocabulary / SMALLEST)) / Math.log(GPT2 / SMALLEST));
    }
    slider.setAttribute("aria-valuetext", count(vocabulary));
    put(find("waste-now"), `V = ${count(vocabulary)}`);
    const speed = speedOfThisBrowser();
    put(
      find("waste-counts"),
      grid(
        say("waste.caption", { D: WIDTH }),
        ["", say("product.multiplied"), say("product.looked")],
        [
          { head: say("hero.multiplications"), cells: [count(all), "0"] },
          { head: say("hero.zeros"), cells: [count(zeros), "0"] },
          { head: say("waste.bytes"), cells: [bytes(4 * (vocabulary + all)), bytes(8 + 4 * WIDTH)] },
          { head: say("waste.time"), cells: [duration(all / speed.products), duration(WIDTH / speed.copies)] },
        ],
      ),
    );
    find("waste-verdict").className = "verdict";
    put(find("waste-verdict"), say("waste.verdict", { share: share(vocabulary), V: vocabulary, n: vocabulary - 1 }));
    put(find("waste-rate"), say("waste.rate", { rate: inLargeUnits(speed.products) }));
    put(find("waste-scale"), say("waste.scale", { V: vocabulary }));
    drawZeros(vocabulary);
  },

  code: ({ vocabulary }) =>
    lines(
      "import torch",
      "import torch.nn.functional as F",
      "",
      `V, D = ${vocabulary}, ${WIDTH}`,
      "one_hot = F.one_hot(torch.tensor([2]), num_classes=V)",
      "zeros = (one_hot == 0).sum().item() * D",
      'print(f"{V * D:,} multiplications, {zeros:,} of them by zero")',
    ),

  prints: (_, { all, zeros }) => `${count(all)} multiplications, ${count(zeros)} of them by zero`,
});

// The squares are one background picture, so that drawing costs the same for every V.
function drawZeros(vocabulary) {
  const box = find("waste-zeros");
  const cell = cellSize(vocabulary);
  box.setAttribute("aria-label", say("waste.picture", { V: vocabulary, n: vocabulary - 1 }));
  const acrossOf = (size) => Math.max(1, Math.floor(box.clientWidth / size));
  const across = acrossOf(cell);
  const [full, rest, one] = box.children;
  box.style.setProperty("--cell", `${cell}px`);
  // The box has room for the largest picture, so that nothing below it moves.
  const smallest = cellSize(GPT2);
  box.style.height = `${Math.ceil(GPT2 / acrossOf(smallest)) * smallest}px`;
  full.style.width = `${across * cell}px`;
  full.style.height = `${Math.floor(vocabulary / across) * cell}px`;
  rest.style.width = `${(vocabulary % across) * cell}px`;
  rest.style.height = vocabulary % across ? `${cell}px` : "0";
  one.style.outlineWidth = cell < 6 ? "2px" : "0"; // a tiny square needs an outline to be seen
  const place = Math.min(2, vocabulary - 1); // the id of the token: 2
  one.style.left = `${(place % across) * cell}px`;
  one.style.top = `${Math.floor(place / across) * cell}px`;
}

// In billions, or in Chinese in units of 100 million.
const inLargeUnits = (value) => String(Number((value / (language === "en" ? 1e9 : 1e8)).toPrecision(2)));

let speed = null;

// Products and copies per second, measured once: the best of several rounds.
function speedOfThisBrowser() {
  speed ??= {
    products: bestRate((from, to, sum) => {
      for (let k = 0; k < from.length; k++) to[k & 1023] += sum * from[k];
    }),
    copies: bestRate((from, to) => {
      for (let k = 0; k < from.length; k += to.length) to.set(from.subarray(k, k + to.length));
    }),
  };
  return speed;
}

function bestRate(work) {
  const from = new Float32Array(1 << 18).fill(0.5);
  const to = new Float32Array(1 << 10);
  let best = 0;
  for (let round = 0; round < 6; round++) {
    const start = performance.now();
    let done = 0;
    do {
      work(from, to, 0.5);
      done += from.length;
    } while (performance.now() - start < 4);
    best = Math.max(best, (1000 * done) / (performance.now() - start));
  }
  return best;
}

function duration(seconds) {
  const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const rounded = seconds >= 1 ? seconds : Number(seconds.toPrecision(2));
  const [name, size] = units.find(([, size]) => rounded >= size) ?? units.at(-1);
  return `${Number((rounded / size).toPrecision(3))} ${name}`;
}

find("waste-slider").addEventListener("input", (event) => {
  edit("vocabulary", String(vocabularyAt(event.target.value)), event.target);
});
addEventListener("resize", () => drawZeros(state.vocabulary));

// Let V grow from its smallest to its largest value.
actions["waste-play"] = (button) => {
  if (calm.matches) return change({ vocabulary: GPT2 }, button);
  const start = performance.now();
  return animate(() => {
    const passed = Math.min(1, (performance.now() - start) / 2500);
    change({ vocabulary: vocabularyAt(1000 * passed) }, null);
    return passed === 1;
  });
};
