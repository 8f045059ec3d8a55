// What a row means: train a small table in the page and watch the rows of similar words move
// together.
//
// Each word is followed by some verbs. The model is an embedding layer with two columns, a linear
// layer and cross-entropy; the optimizer is SGD on all sentences at once. The Chinese verbs are not
// translations: each suits its group of words.

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
const RATE_ALONE = 1; // for one sentence; with a larger rate, a word could leave the map
const STEPS = 100;
const mapSize = () =>
  narrow.matches ? { width: 330, height: 400, margin: 40 } : { width: 640, height: 390, margin: 26 };

let snapshots = null; // the table before training and after each step
const losses = []; // the loss of each of these tables
const outputs = []; // the linear layer's weight (verbs x 2) that belongs to each of these tables

const verbsOf = (noun) => SENTENCES.filter(([each]) => each === noun).map(([, verb]) => verb);

// No model can have a lower loss: the mean entropy of the verbs that follow a word. Each sentence
// occurs once, so the verbs of a word are equally frequent.
const LOWEST = SENTENCES.reduce((sum, [noun]) => sum + Math.log(verbsOf(noun).length), 0) / SENTENCES.length;

// The probability of each verb after a word: the softmax of the scores.
function chances(row, weight) {
  const scores = weight.map(([x, y]) => x * row[0] + y * row[1]);
  const top = Math.max(...scores);
  const sizes = scores.map((score) => Math.exp(score - top));
  const total = sizes.reduce((sum, size) => sum + size);
  return sizes.map((size) => size / total);
}

// Return the loss of the sentences, the table's gradient, and the table and weight after one step of
// SGD on them.
function sgdStep(table, weight, sentences, rate) {
  let loss = 0;
  const [up, across] = [zeros(NOUNS.length, 2), zeros(VERBS.length, 2)];
  for (const [noun, verb] of sentences) {
    const guess = chances(table[noun], weight);
    loss -= Math.log(guess[verb]) / sentences.length;
    guess.forEach((chance, k) => {
      const error = (chance - Number(k === verb)) / sentences.length;
      for (const j of [0, 1]) {
        up[noun][j] += error * weight[k][j];
        across[k][j] += error * table[noun][j];
      }
    });
  }
  const moved = (rows, gradient) =>
    rows.map((row, k) => row.map((value, j) => f32(value - rate * gradient[k][j])));
  return { loss, gradient: up, table: moved(table, up), weight: moved(weight, across) };
}

// Return the table (words x 2) before training and after each step.
function trainings() {
  const random = torchRandom(SEED);
  let table = split(random(NOUNS.length * 2), 2);
  let weight = split(random(VERBS.length * 2), 2);
  const tables = [table];
  for (let step = 0; step <= STEPS; step++) {
    const next = sgdStep(table, weight, SENTENCES, LEARNING_RATE);
    losses.push(next.loss);
    outputs.push(weight);
    ({ table, weight } = next);
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

const verbText = (k) => say("meaning.verbs").split(" ")[k];

const sentenceText = ([noun, verb]) => say("meaning.sentence", { noun: nounText(noun), verb: verbText(verb) });

const firstSentence = (noun) => [noun, verbsOf(noun)[0]];

const MOST_GUESSES = 4;

// The likeliest verbs after a word, with a mark at those that follow it in the sentences.
function guesses(row, weight, noun) {
  const chance = chances(row, weight);
  const order = VERBS.map((_, k) => k).sort((a, b) => chance[b] - chance[a]);
  return several(
    order.slice(0, MOST_GUESSES).map((k) => {
      const unbroken = verbText(k).replace(/(?<=\p{Script=Han})(?=\p{Script=Han})/gu, "\u2060");
      const verb = unbroken + (verbsOf(noun).includes(k) ? "\u00a0✓" : "");
      return say("meaning.chance", { verb, percent: Math.round(100 * chance[k]) });
    }),
  );
}

// The table and weight of the view: after `learned` steps, and after one more on a single sentence if
// `alone` is "yes".
function modelAt({ learned, noun, alone }) {
  snapshots ??= trainings();
  const before = { table: snapshots[learned], weight: outputs[learned] };
  const step = alone === "yes" ? sgdStep(before.table, before.weight, [firstSentence(noun)], RATE_ALONE) : null;
  const { table, weight } = step ?? before;
  const loss = step ? sgdStep(table, weight, SENTENCES, 0).loss : losses[learned];
  return { before: before.table, table, weight, loss, gradient: step?.gradient };
}

const pairText = (values) => listed(values.map(unbroken)).replaceAll(" ", "\u00a0");

sections.push({
  id: "meaning",
  uses: ["learned", "noun", "alone"],

  result: modelAt,

  // A worked score stands before the question.
  intro(state) {
    const { table, weight } = modelAt(state);
    const [noun, verb] = firstSentence(state.noun);
    const [row, pair] = [table[noun], weight[verb]];
    const score = row[0] * pair[0] + row[1] * pair[1];
    put(find("meaning-first"), say("meaning.first", { word: nounText(noun), id: noun, verb: verbText(verb) }));
    put(find("meaning-score"), `${row.map((value, j) => `${bracketed(value)}\u00a0×\u00a0${bracketed(pair[j])}`).join(" + ")} = ${unbroken(score)}`);
  },

  draw({ learned, noun, alone }, { before, table, weight, loss, gradient }) {
    find("meaning-slider").max = String(STEPS);
    const now = alone === "yes" ? say("meaning.extra", { learned }) : say("meaning.step", { learned });
    put(find("meaning-now"), say("meaning.now", { now, loss: loss.toFixed(2) }));
    nameTrainButton();
    drawMap(before, noun, table);
    const word = nounText(noun);
    const sentence = sentenceText(firstSentence(noun));
    put(find("meaning-every"), say("meaning.every", { n: SENTENCES.length }));
    put(find("meaning-one"), say("meaning.one", { sentence }));
    const still = table.filter((row, k) => row.every((value, j) => sameBits(value, before[k][j]))).length;
    const told = { sentence, learned, word, n: NOUNS.length, moved: NOUNS.length - still, still };
    put(find("meaning-alone"), gradient ? say("meaning.alone", told) : "");
    const [from, slope, to] = gradient ? [before, gradient, table].map((rows) => pairText(rows[noun])) : [];
    put(find("meaning-update"), gradient ? `${from} − ${RATE_ALONE}\u00a0×\u00a0${slope} = ${to}` : "");
    // Before the first step, there is nothing to compare with.
    const start = learned === 0 && alone === "no";
    put(
      find("meaning-near"),
      say(start ? "meaning.near.start" : "meaning.near", {
        word,
        before: pairText(snapshots[0][noun]),
        values: pairText(table[noun]),
        near: several(nearest(table, noun).map(nounText)),
        now,
      }),
    );
    put(
      find("meaning-guess"),
      say(start ? "meaning.guess.start" : "meaning.guess", { word, now, guesses: guesses(table[noun], weight, noun) }),
    );
    const element = find("meaning-verdict");
    element.className = "verdict";
    const same = { before: sameGroup(snapshots[0]), same: sameGroup(table), all: 3 * NOUNS.length, now };
    put(element, say(start ? "meaning.verdict.start" : "meaning.verdict", same));
    const errors = { first: losses[0].toFixed(2), loss: loss.toFixed(2), lowest: LOWEST.toFixed(2) };
    put(find("meaning-loss"), say(start ? "meaning.loss.start" : "meaning.loss", errors));
    put(
      find("meaning-sentences"),
      say("meaning.sentences", {
        n: SENTENCES.length,
        seed: SEED,
        word,
        sentences: several(verbsOf(noun).map((verb) => sentenceText([noun, verb]))),
      }),
    );
  },

  code: ({ learned, noun, alone }) =>
    lines(
      "import torch",
      "",
      `nouns = torch.tensor(${longList(SENTENCES.map(([noun]) => noun))})`,
      `verbs = torch.tensor(${longList(SENTENCES.map(([, verb]) => verb))})`,
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
      ...(alone === "yes" ? aloneCode(firstSentence(noun)) : []),
      "rows = embedding.weight.detach()",
      `print(rows[${noun}])`,
      `print(torch.cdist(rows, rows)[${noun}].argsort()[1:4])  # the ids of the nearest words`,
    ),

  prints({ noun, alone }, { before, table }) {
    const moved = table.filter((row, k) => row.some((value, j) => value !== before[k][j])).length;
    const rows = [tensorText(table[noun]), integersText(nearest(table, noun))];
    return lines(alone === "yes" ? `rows changed: ${moved}` : null, rows);
  },
});

const longList = (values) => `[\n${split(values, 16).map((part) => `    ${part.join(", ")},\n`).join("")}]`;

const aloneCode = ([noun, verb]) => [
  "before = embedding.weight.detach().clone()",
  `optimizer.param_groups[0]["lr"] = ${RATE_ALONE}`,
  "optimizer.zero_grad()",
  `score = torch.nn.functional.linear(embedding(torch.tensor([${noun}])), output)`,
  `torch.nn.functional.cross_entropy(score, torch.tensor([${verb}])).backward()`,
  "optimizer.step()",
  'print("rows changed:", (embedding.weight != before).any(1).sum().item())',
];

// Draw every word at the coordinates in its row. A line joins the places of a word that one sentence
// has moved: from its row in `before` to its row in `table`. The layers are halos of the labels, dots
// and labels, so that nothing covers a dot.
function drawMap(before, noun, table) {
  const { width, height, margin } = mapSize();
  // Both axes have the same scale, so that distances on the screen are distances between rows.
  const rows = snapshots.at(-1).concat(snapshots[0]);
  const [across, up] = [0, 1].map((j) => Math.max(...rows.map((row) => Math.abs(row[j]))));
  const scale = Math.min((width / 2 - margin) / across, (height / 2 - margin) / up);
  const near = nearest(table, noun);
  const place = ([x, y]) => [width / 2 + x * scale, height / 2 - y * scale];
  const points = table.map(place);
  const labels = placeLabels(points, NOUNS.map((_, k) => labelWidth(k)), { width, height, size: letterSize(), dot: CHOSEN_DOT, before: lastLabels });
  lastLabels = labels;
  const name = (k) => `h${groupOf(k)}${k === noun ? " chosen" : near.includes(k) ? " near" : ""}`;
  const text = (k, kind) =>
    svg("text", { class: `${kind} ${name(k)}`, "data-noun": k, "aria-hidden": "true", x: labels[k].x.toFixed(1), y: labels[k].y.toFixed(1), "text-anchor": labels[k].anchor }, nounText(k));
  const dot = ([x, y], k) =>
    svg(
      "g",
      {
        id: `noun-${k}`,
        class: `noun ${name(k)}`,
        "data-noun": k,
        tabindex: 0,
        role: "button",
        "aria-pressed": String(k === noun),
        "aria-label": nounText(k),
      },
      svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: k === noun ? CHOSEN_DOT : DOT }),
    );
  const threads = near.map((k) => {
    const [[x1, y1], [x2, y2]] = [points[noun], points[k]];
    return svg("line", { x1, y1, x2, y2, class: "thread" });
  });
  const [[x1, y1], [x2, y2]] = [place(before[noun]), points[noun]];
  const path = svg("line", { x1, y1, x2, y2, class: "path" });
  // A label that is not next to its dot gets a line to it.
  const leaders = points.flatMap(([x, y], k) => {
    const { box, distance } = labels[k];
    const end = { x2: clamp(x, box.left, box.right), y2: clamp(y, box.top, box.bottom) };
    return distance ? [svg("line", { x1: x, y1: y, ...end, class: "leader" })] : [];
  });
  const all = NOUNS.map((_, k) => k);
  put(
    find("meaning-map"),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": say("meaning.map") },
      svg("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2 }),
      svg("line", { x1: width / 2, x2: width / 2, y1: 0, y2: height }),
      path, ...threads, ...leaders, ...all.map((k) => text(k, "halo")), ...points.map(dot), ...all.map((k) => text(k, "label"))),
  );
}

const [DOT, CHOSEN_DOT] = [5, 7]; // pixels
const letterSize = () => (narrow.matches ? 13 : 15);

let lastLabels = [];

const canvas = document.createElement("canvas").getContext("2d");

// The width of a label in bold type, so that a label does not move when its word is chosen.
function labelWidth(k) {
  canvas.font = `700 ${letterSize()}px ${getComputedStyle(find("meaning-now")).fontFamily}`;
  return canvas.measureText(nounText(k)).width;
}

// Choose a word by its dot or label.
function chooseNoun(event) {
  const noun = event.target.closest("[data-noun]")?.dataset.noun;
  if (noun === undefined) return;
  change({ noun: Number(noun) }, find("meaning-slider"));
  find(`noun-${noun}`).focus({ focusVisible: event.type === "keydown" });
}

let training = false;

function nameTrainButton() {
  const { learned } = state;
  put(find("meaning-train"), say(training ? "meaning.running" : learned === STEPS ? "meaning.again" : "meaning.play"));
}

const [STEP_TIME, LOOK_TIME] = [45, 500]; // milliseconds for one step, and to look at the start

actions["meaning-play"] = (button) => {
  find("meaning-map").scrollIntoView({ block: "nearest" });
  if (calm.matches) return change({ learned: STEPS }, button);
  change({ learned: 0 }, button);
  training = true;
  nameTrainButton();
  const start = Date.now();
  return animate(() => {
    if (Date.now() - start < LOOK_TIME) return false;
    change({ learned: Math.min(STEPS, state.learned + 1) }, null);
    return state.learned === STEPS;
  }, STEP_TIME, () => {
    training = false;
    nameTrainButton();
  });
};

// A press on a word ends the training, because each step draws the words again.
find("meaning-map").addEventListener("pointerdown", stopAnimation);
find("meaning-map").addEventListener("click", chooseNoun);
find("meaning-map").addEventListener("keydown", (event) => {
  if (![" ", "Enter"].includes(event.key)) return;
  event.preventDefault();
  chooseNoun(event);
});

actions["meaning-one"] = (button) => change({ alone: "yes" }, button);
