// Predict, then see: each section asks a question and shows the rest after the answer. Nothing is
// scored or stored.

// {id, ask, answers, right, why, not, values(state), after(button)}. The answers are keys of texts;
// `right` is the index of the correct one, and `not` says of each other one why it is wrong. `after`
// runs when the reader has answered. An answered question keeps the values of the state that the
// reader saw, which `asked` stores.
const questions = [
  {
    id: "row", ask: "row.ask", answers: ["row.a", "row.b"], right: 1, why: "row.why", not: ["row.not.a", null],
    values: ({ single }) => ({ id: single, before: ordinal(single), nth: ordinal(single + 1) }),
  },
  {
    id: "vector", ask: "vector.ask", answers: ["vector.a", "vector.b", "vector.c"], right: 1, why: "vector.why", not: ["vector.not.a", null, "vector.not.c"],
    values: (state) => ({ values: listed(doubled(state)), row: state.table.labels[second(state)] }),
    after: (button) => change({ factors: doubled(state) }, button),
  },
  {
    id: "layer", ask: "layer.ask", answers: ["layer.a", "layer.b"], right: 1, why: "layer.why", not: ["layer.not.a", null],
    values: ({ table: { V, D }, ids, pick }) => ({ V, D, row: ids[pick] }),
    after: (button) => change({ layout: "columns" }, button),
  },
  {
    id: "waste", ask: "waste.ask", answers: ["waste.a", "waste.b", "waste.c"], right: 2, why: "waste.why", not: ["waste.not.a", "waste.not.b", null],
    values: () => ({ V: GPT2, most: GPT2 - 1, half: Math.round(GPT2 / 2) }),
    after: (button) => actions["waste-play"](button),
  },
  {
    id: "meaning", ask: "meaning.ask", answers: ["meaning.a", "meaning.b", "meaning.c"], right: 2, why: "meaning.why", not: ["meaning.not.a", "meaning.not.b", null],
  },
  {
    id: "lookup", ask: "lookup.ask", answers: ["lookup.a", "lookup.b"], right: 0, why: "lookup.why", not: [null, "lookup.not.b"],
    values: ({ table, ids }) => ({
      ids: several(ids), n: ids.length, D: table.D, V: table.V, few: ids.length * table.D, all: table.V * table.D,
    }),
    after: (button) => actions["lookup-play"](button),
  },
  {
    id: "product", ask: "product.ask", answers: ["product.a", "product.b"], right: 0, why: "product.answer", not: [null, "product.not.b"],
    values: ({ table }) => ({ V: table.V }),
    after: (button) => actions["product-play"](button),
  },
  {
    id: "linear", ask: "linear.ask", answers: ["linear.a", "linear.b"], right: 1, why: "linear.why", not: ["linear.not.a", null],
    values: ({ table }) => ({ V: table.V, D: table.D }),
  },
  {
    id: "gradient", ask: "gradient.ask", answers: ["gradient.a", "gradient.b"], right: 0, why: "gradient.answer", not: [null, "gradient.not.b"],
    values: ({ table, ids }) => ({ ids: several([...new Set(ids)]), V: table.V }),
  },
  { id: "step", ask: "step.ask", answers: ["step.a", "step.b"], right: 1, why: "step.answer", not: ["step.not.a", null] },
  {
    id: "mix", ask: "mix.ask", answers: ["mix.a", "mix.b"], right: 1, why: "mix.why", not: ["mix.not.a", null],
    values: ({ softA, softB }) => ({ a: softA, b: softB }),
  },
  { id: "position", ask: "position.ask", answers: ["position.a", "position.b"], right: 0, why: "position.answer", not: [null, "position.not.b"] },
  {
    id: "idea", ask: "idea.ask", answers: ["idea.a", "idea.b"], right: 0, why: "idea.why", not: [null, "idea.not.b"],
    values: ({ table }) => ({ V: table.V }),
  },
  { id: "differ", ask: "differ.ask", answers: ["differ.a", "differ.b"], right: 1, why: "differ.answer", not: ["differ.not.a", null] },
  { id: "cost", ask: "cost.ask", answers: ["cost.a", "cost.b"], right: 0, why: "cost.why", not: [null, "cost.not.b"] },
  { id: "model", ask: "model.ask", answers: ["model.a", "model.b"], right: 0, why: "model.why", not: [null, "model.not.b"] },
];

// The second row of the table, or the only one.
const second = ({ table }) => Math.min(1, table.rows.length - 1);

// A vector of zeros with a 2 in the second place.
const doubled = (state) => state.table.rows.map((_, k) => (k === second(state) ? 2 : 0));

// Insert the question before the part of the section that shows the answer.
function addQuestion(question) {
  const section = find(question.id);
  const after = section.querySelector(".after");
  const button = (n) =>
    h("button", { type: "button", id: `${question.id}-answer-${n}`, on: { click: (event) => answer(question, n, event.target) } });
  const box = h(
    "div",
    { class: "question", role: "group", "aria-labelledby": `${question.id}-question` },
    h("p", { id: `${question.id}-question` }),
    h("div", { class: "controls" }, question.answers.map((_, n) => button(n)),
      h("button", { type: "button", class: "skip", "data-word": "ask.skip", on: { click: () => showAnswer(question) } })),
    h("p", { id: `${question.id}-reason`, class: "reason" }),
  );
  after.before(box);
  after.hidden = true;
}

// Show the hidden part of the section. The question stays, so the reader can change the answer.
function reveal(question) {
  uncover(question);
  draw();
}

function uncover(question) {
  const section = find(question.id);
  section.querySelector(".after").hidden = false;
  const skip = section.querySelector(".skip");
  if (document.activeElement === skip) find(`${question.id}-question`).nextSibling.firstChild.focus();
  skip.hidden = true;
}

// Show the answer to a reader who does not want to guess.
function showAnswer(question) {
  question.asked ??= state;
  question.shown = true;
  reveal(question);
  writeQuestion(question);
}

function answer(question, chosen, button) {
  question.asked ??= state;
  question.chosen = chosen;
  reveal(question);
  writeQuestion(question);
  question.after?.(button);
  announce(find(`${question.id}-reason`).textContent);
}

// Write a question with the values of the view, and mark the answer.
function writeQuestion(question) {
  const { id, ask, answers, right, why, not, chosen, shown, asked } = question;
  const values = question.values?.(asked ?? state) ?? {};
  put(find(`${id}-question`), say(ask, values));
  const texts = answers.map((key) => say(key, values));
  const isRight = (n) => texts[n] === texts[right]; // two answers can be the same number
  texts.forEach((text, n) => {
    const button = find(`${id}-answer-${n}`);
    put(button, text);
    button.setAttribute("aria-pressed", String(n === chosen));
    button.classList.toggle("right", (shown || chosen !== undefined) && isRight(n));
    button.classList.toggle("wrong", n === chosen && !isRight(n));
  });
  if (chosen === undefined && !shown) return put(find(`${id}-reason`), "");
  const reply = chosen === undefined ? [] : isRight(chosen) ? [say("ask.right")] : [say("ask.wrong"), say(not[chosen], values)];
  return put(find(`${id}-reason`), [...reply, say(why, values)].join(say("gap")));
}

// Show all answers. A link to a view also does this.
function revealAll() {
  questions.forEach(uncover);
  drawSections();
}

// Show all answers and open all folded sections.
function showEverything() {
  document.querySelectorAll(".fold, .more").forEach((fold) => (fold.open = true));
  revealAll();
}
