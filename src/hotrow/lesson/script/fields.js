// The fields of the state: how to read, validate and write the text of each. Controls and the
// address both use them, so both accept the same values.

// An invalid value. `key` names the message, which is looked up in the current language when shown.
class Bad extends Error {
  constructor(key, values = {}) {
    super(key);
    Object.assign(this, { key, values });
  }
}

const clip = (text) => (text.length > 24 ? `${text.slice(0, 24)}…` : text);

// Accept full-width digits and signs.
const plain = (text) => text.normalize("NFKC").replace(/[−–]/g, "-").trim();

function readReal(text) {
  const found = plain(text).toLowerCase();
  const special = { inf: Infinity, "+inf": Infinity, "-inf": -Infinity, nan: NaN }[found];
  if (special !== undefined) return special;
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(found)) {
    throw new Bad("bad.number", { text: clip(text) });
  }
  const value = f32(Number(found));
  if (!Number.isFinite(value)) throw new Bad("bad.huge", { text: clip(text) });
  return value;
}

function readWhole(text, low, high) {
  const found = plain(text).replace(/,/g, "");
  if (!/^[+-]?\d{1,15}$/.test(found)) throw new Bad("bad.whole", { text: clip(text) });
  const value = Number(found) + 0; // -0 becomes 0
  if (value < low || value > high) throw new Bad("bad.range", { value, low, high });
  return value;
}

function readIds(text, table, most) {
  const words = plain(text).split(/[\s,、;]+/).filter(Boolean);
  if (!words.length) throw new Bad("bad.empty");
  if (words.length > most) throw new Bad("bad.many", { n: words.length, most });
  return words.map((word) => {
    if (!/^[+-]?\d{1,15}$/.test(word)) throw new Bad("bad.whole", { text: clip(word) });
    const id = Number(word) + 0;
    if (id < 0 || id >= table.V) throw new Bad("bad.id", { id, V: table.V, last: table.V - 1 });
    if (!table.labels.includes(id)) {
      throw new Bad("bad.excerpt", { id, included: table.labels.join(", ") });
    }
    return id;
  });
}

const whole = (low, high) => ({
  read: (text, state) => readWhole(text, low, typeof high === "function" ? high(state) : high),
  write: String,
});

// A double-precision number, because an optimizer's options are doubles in Python.
const real = (low, high) => ({
  read: (text) => {
    const value = readReal(text);
    if (!(value >= low && value <= high)) {
      throw new Bad("bad.between", { text: clip(text), low: String(low), high: String(high) });
    }
    return Number(plain(text)) + 0;
  },
  write: String,
});

const choice = (...values) => ({
  read: (text) => {
    if (!values.includes(text)) throw new Bad("bad.choice", { text: clip(text) });
    return text;
  },
  write: (value) => value,
});

const idList = (most) => ({
  read: (text, state) => readIds(text, state.table, most),
  write: (ids) => ids.join(", "),
});

const oneId = {
  read: (text, state) => readIds(text, state.table, 1)[0],
  write: String,
};

const reals = (counted) => ({
  read: (text, state) => {
    const values = plain(text).split(/[\s,、;]+/).filter(Boolean).map(readReal);
    const n = counted(state);
    if (values.length !== n) throw new Bad("bad.count", { n, found: values.length });
    return values;
  },
  write: (values) => values.map(typed).join(", "),
});

const listedPlain = (values) => values.join(",");

const columns = (state) => state.table.rows[0].length;

const FIGURES = ["bytes_written", "multiplications", "additions"];
if (data.timings.length) FIGURES.push("milliseconds");

// The address is read in this order, because a field can depend on the fields before it.
const fields = {
  table: { read: tableFromText, write: tableText },
  seed: whole(0, 999999),
  ids: idList(LIMITS.ids),
  pick: whole(0, (state) => state.ids.length - 1),
  column: whole(0, (state) => columns(state) - 1),
  shown: whole(0, (state) => state.table.rows.length),
  way: choice("lookup", "product"),
  single: oneId,
  factors: {
    read: (text, state) => {
      const values = plain(text).split(",").map((value) => readWhole(value, 0, 2));
      const n = state.table.rows.length;
      if (values.length !== n) throw new Bad("bad.count", { n, found: values.length });
      return values;
    },
    write: listedPlain,
  },
  layout: choice("rows", "columns"),
  vocabulary: whole(4, 50_257),
  learned: whole(0, 100),
  noun: whole(0, 19),
  alone: choice("no", "yes"), // one step on the word's first sentence
  linear: choice("copied", "own"),
  upstream: reals((state) => state.ids.length * columns(state)),
  rule: choice("sgd", "momentum", "adam"),
  lr: real(0, 10),
  momentum: real(0, 0.999999),
  beta1: real(0, 0.999999),
  beta2: real(0, 0.999999),
  size: real(-1000, 1000),
  batches: {
    read: (text, state) => {
      const steps = plain(text).split("/");
      if (steps.length > LIMITS.steps) throw new Bad("bad.steps", { most: LIMITS.steps });
      return steps.map((step) => (step.trim() ? readIds(step, state.table, LIMITS.ids) : []));
    },
    write: (batches) => batches.map((ids) => ids.join(", ")).join(" / "),
  },
  taken: whole(0, (state) => state.batches.length),
  settle: choice("yes", "no"),
  softA: oneId,
  softB: oneId,
  p: real(0, 1),
  bag: idList(LIMITS.ids),
  case: choice("inf", "nan", "signed", "range", "low", "order"),
  place: oneId,
  outside: whole(-999999999, 999999999),
  times: whole(1, 2000),
  three: reals(() => 3),
  V: whole(1, 1_000_000),
  D: whole(1, 4096),
  N: whole(1, 65_536),
  figure: choice(...FIGURES),
};

// The initial state for a table.
function defaults(table) {
  const [first] = table.ids;
  const other = table.ids.find((id) => id !== first) ?? first;
  const idle = table.labels.find((id) => !table.ids.includes(id)) ?? first;
  const width = table.rows[0].length;
  return {
    table,
    seed: 1,
    ids: table.ids,
    pick: 0,
    column: 0,
    shown: table.rows.length,
    way: "lookup",
    single: other,
    factors: oneHot(placesOf(table, [first]), table.rows.length)[0],
    layout: "rows",
    vocabulary: 4,
    learned: 0,
    noun: 0,
    alone: "no",
    linear: "copied",
    upstream: counting(table.ids.length, width),
    rule: "adam",
    lr: 0.1,
    momentum: 0.9,
    beta1: 0.9,
    beta2: 0.999,
    size: 0.1,
    batches: [table.ids, [first], [first], [first]],
    taken: 4,
    settle: "yes",
    softA: first,
    softB: other,
    p: 0.75,
    bag: [...table.ids.slice(0, 3), first],
    case: "inf",
    place: idle,
    outside: table.V,
    times: 300,
    three: [1e8, 1, -1e8],
    V: table.V >= 1000 ? table.V : 50_257,
    D: table.V >= 1000 ? table.D : 768,
    N: 300,
    figure: "bytes_written",
  };
}

// 1, 2, 3 and so on. Sums of small whole numbers are exact and easy to follow.
const counting = (height, width) => Array.from({ length: height * width }, (_, n) => n + 1);

// After a change to the ids or the table, bring the dependent fields back into range.
function fitted(state, before) {
  const height = state.table.rows.length;
  const width = columns(state);
  const all = before.shown === before.table.rows.length;
  const size = state.ids.length * width;
  const kept = columns(before) === width ? state.upstream : [];
  return {
    ...state,
    single: state.table.labels.includes(state.single) ? state.single : state.ids[0],
    factors: state.factors.length === height
      ? state.factors
      : oneHot(placesOf(state.table, [state.ids[0]]), height)[0],
    alone: state.learned === before.learned && state.noun === before.noun ? state.alone : "no",
    pick: Math.min(state.pick, state.ids.length - 1),
    column: Math.min(state.column, width - 1),
    shown: all && before.table.rows.length !== height ? height : Math.min(state.shown, height),
    taken: Math.min(state.taken, state.batches.length),
    upstream: kept.length === size ? kept : counting(size, 1).map((value, n) => kept[n] ?? value),
  };
}

// Return the same view with another table. Keep every field whose value is still valid.
function moved(state, table) {
  const start = defaults(table);
  return Object.entries(fields).reduce((next, [name, field]) => {
    if (name === "table") return next;
    try {
      const value = field.read(field.write(state[name]), next);
      return fitted({ ...next, [name]: value }, next);
    } catch (error) {
      if (error instanceof Bad) return next;
      throw error;
    }
  }, start);
}
