// What a row means: train a small table in the page and watch the rows of similar words move
// together.
//
// Each word is followed by some verbs. The model is an embedding layer with two columns, a linear
// layer and cross-entropy; the optimizer is SGD on all sentences at once.

const GROUPS = [ // [words, verbs]; each word but the last lacks one of the verbs
  [["cat", "dog", "horse", "mouse", "rabbit"], ["sleeps", "runs", "eats", "jumps"]],
  [["bread", "soup", "apple", "cheese", "rice"], ["smells", "tastes", "cooks", "cools"]],
  [["teacher", "girl", "boy", "doctor", "friend"], ["speaks", "reads", "laughs", "writes"]],
  [["train", "bus", "car", "ship", "bicycle"], ["arrives", "stops", "turns", "breaks"]],
];
const LACKS = [3, 0, 1, 2, -1];
const ALSO = [["friend", "eats"], ["girl", "runs"], ["train", "runs"], ["horse", "turns"], ["doctor", "arrives"]];

// Neighboring ids belong to different groups.
const NOUNS = LACKS.flatMap((_, n) => GROUPS.map(([nouns]) => nouns[n]));
const VERBS = GROUPS.flatMap(([, verbs]) => verbs);
const SENTENCES = [ // [word, verb] as indices
  ...GROUPS.flatMap(([nouns, verbs]) =>
    nouns.flatMap((noun, n) => verbs.filter((_, k) => k !== LACKS[n]).map((verb) => [noun, verb])),
  ),
  ...ALSO,
].map(([noun, verb]) => [NOUNS.indexOf(noun), VERBS.indexOf(verb)]);
const SEED = 1;
const LEARNING_RATE = 2;
const STEPS = 100;
const mapSize = () =>
  narrow.matches ? { width: 330, height: 400, margin: 24 } : { width: 640, height: 390, margin: 26 };

let snapshots = null; // the table before training and after each step
const losses = []; // the loss of each of these tables

// Return the table (words x 2) before training and after each step.
function trainings() {
  const random = torchRandom(SEED);
  let table = split(random(NOUNS.length * 2), 2);
  let weight = split(random(VERBS.length * 2), 2);
  const tables = [table];
  for (let step = 0; step <= STEPS; step++) {
    let loss = 0;
    const [up, across] = [zeros(NOUNS.length, 2), zeros(VERBS.length, 2)];
    for (const [noun, verb] of SENTENCES) {
      const scores = weight.map(([x, y]) => x * table[noun][0] + y * table[noun][1]);
      const top = Math.max(...scores);
      const sizes = scores.map((score) => Math.exp(score - top));
      const total = sizes.reduce((sum, size) => sum + size);
      loss -= Math.log(sizes[verb] / total) / SENTENCES.length;
      sizes.forEach((size, k) => {
        const error = (size / total - Number(k === verb)) / SENTENCES.length;
        for (const j of [0, 1]) {
          up[noun][j] += error * weight[k][j];
          across[k][j] += error * table[noun][j];
        }
      });
    }
    losses.push(loss);
    const moved = (rows, gradient) =>
      rows.map((row, k) => row.map((value, j) => f32(value - LEARNING_RATE * gradient[k][j])));
    [table, weight] = [moved(table, up), moved(weight, across)];
    if (step < STEPS) tables.push(table);
  }
  return tables;
}

const distance = ([a, b], [c, d]) => Math.hypot(a - c, b - d);

// The three words whose rows are nearest to that of `noun`.
const nearest = (table, noun) =>
  NOUNS.map((_, k) => k)
    .filter((k) => k !== noun)
    .sort((a, b) => distance(table[a], table[noun]) - distance(table[b], table[noun]))
    .slice(0, 3);

// Of the three nearest words of each word, count those in the same group as the word.
const sameGroup = (table) =>
  NOUNS.reduce((sum, _, k) => sum + nearest(table, k).filter((near) => groupOf(near) === groupOf(k)).length, 0);

const groupOf = (noun) => GROUPS.findIndex(([nouns]) => nouns.includes(NOUNS[noun]));

const nounText = (k) => say("meaning.nouns").split(" ")[k];

sections.push({
  id: "meaning",
  uses: ["learned", "noun"],

  result({ learned }) {
    snapshots ??= trainings();
    return { table: snapshots[learned] };
  },

  draw({ learned, noun }, { table }) {
    find("meaning-slider").max = String(STEPS);
    put(find("meaning-now"), say("meaning.now", { learned, loss: losses[learned].toFixed(2) }));
    put(document.querySelector("[data-do=meaning-play]"), say(learned === STEPS ? "meaning.again" : "meaning.play"));
    drawMap(table, noun);
    const near = nearest(table, noun);
    put(
      find("meaning-near"),
      say("meaning.near", {
        word: nounText(noun),
        id: noun,
        before: listed(snapshots[0][noun].map(unbroken)),
        values: listed(table[noun].map(unbroken)),
        near: several(near.map(nounText)),
        learned,
      }),
    );
    const element = find("meaning-verdict");
    element.className = "verdict";
    put(element, say("meaning.verdict", { before: sameGroup(snapshots[0]), same: sameGroup(table), all: 3 * NOUNS.length, learned, loss: losses[learned].toFixed(2), first: losses[0].toFixed(2) }));
    const verbs = say("meaning.verbs").split(" ");
    put(
      find("meaning-sentences"),
      say("meaning.sentences", {
        n: SENTENCES.length,
        seed: SEED,
        sentences: several(
          SENTENCES.filter(([each]) => each === noun).map(([, verb]) => say("meaning.sentence", { noun: nounText(noun), verb: verbs[verb] })),
        ),
      }),
    );
  },

  code: ({ learned }) =>
    lines(
      "import torch",
      "",
      `nouns = ${listed(SENTENCES.map(([noun]) => noun))}`,
      `verbs = ${listed(SENTENCES.map(([, verb]) => verb))}`,
      "nouns, verbs = torch.tensor(nouns), torch.tensor(verbs)",
      `_ = torch.manual_seed(${SEED})`,
      `embedding = torch.nn.Embedding(${NOUNS.length}, 2)`,
      `output = torch.nn.Parameter(torch.randn(${VERBS.length}, 2))`,
      `optimizer = torch.optim.SGD([embedding.weight, output], lr=${LEARNING_RATE})`,
      `for step in range(${learned}):`,
      "    optimizer.zero_grad()",
      "    scores = torch.nn.functional.linear(embedding(nouns), output)",
      "    loss = torch.nn.functional.cross_entropy(scores, verbs)",
      "    loss.backward()",
      "    optimizer.step()",
      "print(embedding.weight)",
    ),
});

// Draw every word at the coordinates in its row. Move overlapping labels apart.
function drawMap(table, noun) {
  const { width, height, margin } = mapSize();
  // Both axes have the same scale, so that distances on the screen are distances between rows.
  const rows = snapshots.at(-1).concat(snapshots[0]);
  const [across, up] = [0, 1].map((j) => Math.max(...rows.map((row) => Math.abs(row[j]))));
  const scale = Math.min((width / 2 - margin) / across, (height / 2 - margin) / up);
  const at = ([x, y]) => [width / 2 + x * scale, height / 2 - y * scale];
  const near = nearest(table, noun);
  const points = table.map(at);
  const labels = spread(points.map(([x, y]) => ({ x, y: y + 5 })));
  const marks = points.map(([x, y], k) => {
    const mark = svg(
      "g",
      {
        id: `noun-${k}`,
        class: `noun h${groupOf(k)}${k === noun ? " chosen" : near.includes(k) ? " near" : ""}`,
        tabindex: 0,
        role: "button",
        "aria-pressed": String(k === noun),
        "aria-label": nounText(k),
      },
      svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: k === noun ? 7 : 5 }),
      svg("text", { x: (x < width - 90 ? x + 10 : x - 10).toFixed(1), y: labels[k].y.toFixed(1), "text-anchor": x < width - 90 ? "start" : "end" }, nounText(k)),
    );
    const choose = () => {
      change({ noun: k }, find("meaning-slider"));
      find(`noun-${k}`).focus();
    };
    mark.addEventListener("click", choose);
    mark.addEventListener("keydown", (event) => {
      if (![" ", "Enter"].includes(event.key)) return;
      event.preventDefault();
      choose();
    });
    return mark;
  });
  const threads = near.map((k) => {
    const [[x1, y1], [x2, y2]] = [points[noun], points[k]];
    return svg("line", { x1, y1, x2, y2, class: "thread" });
  });
  put(
    find("meaning-map"),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": say("meaning.map") },
      svg("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2 }),
      svg("line", { x1: width / 2, x2: width / 2, y1: 0, y2: height }),
      ...threads, ...marks),
  );
}

// Move overlapping labels up or down.
function spread(labels) {
  const apart = 15;
  const order = labels.map((_, k) => k).sort((a, b) => labels[a].y - labels[b].y);
  for (let round = 0; round < 12; round++) {
    for (const [n, k] of order.entries()) {
      for (const other of order.slice(0, n)) {
        const [upper, lower] = [labels[other], labels[k]];
        const overlap = apart - (lower.y - upper.y);
        if (Math.abs(lower.x - upper.x) < 58 && overlap > 0) {
          upper.y -= overlap / 2;
          lower.y += overlap / 2;
        }
      }
    }
  }
  return labels;
}

actions["meaning-play"] = (button) => {
  if (calm.matches) return change({ learned: STEPS }, button);
  change({ learned: 0 }, button);
  return animate(() => {
    change({ learned: Math.min(STEPS, state.learned + 1) }, null);
    return state.learned === STEPS;
  });
};

// A press on a word ends the training, because each step draws the words again.
find("meaning-map").addEventListener("pointerdown", stopAnimation);

narrow.addEventListener("change", () => snapshots && drawMap(snapshots[state.learned], state.noun));
