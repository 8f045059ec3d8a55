// The optimizers' steps, with the same order of operations and rounding as torch in float32.
// A rule takes a value, its gradient and its two slots, and returns the new value and slots.

const rules = {
  sgd: (options) => (w, g) => [fused(w, g, f32(-options.lr)), 0, 0],

  momentum: (options) => (w, g, buffer) => {
    const next = f32(f32(buffer * f32(options.momentum)) + g);
    return [fused(w, next, f32(-options.lr)), next, 0];
  },

  adam: (options) => (w, g, m, v, step) => {
    const { lr, beta1, beta2, eps } = options;
    const mean = fused(m, f32(1 - beta1), f32(g - m));
    const square = fused(f32(v * f32(beta2)), f32(f32(1 - beta2) * g), g);
    const root = f32(Math.sqrt(1 - beta2 ** step));
    const below = f32(f32(f32(Math.sqrt(square)) / root) + f32(eps));
    const size = f32(-lr / (1 - beta1 ** step));
    return [f32(w + f32(f32(size * mean) / below)), mean, square];
  },
};

const slots = (rows) => rows.map((row) => ({ w: row.slice(), a: row.map(() => 0), b: row.map(() => 0) }));

function stepRow(rule, row, gradient, step) {
  gradient.forEach((g, j) => {
    [row.w[j], row.a[j], row.b[j]] = rule(row.w[j], g, row.a[j], row.b[j], step);
  });
}

// Train the rows with all `batches` (a list of row positions for each step). Each occurrence of a
// row in a batch adds `upstream` to the row's gradient. `way` is one of:
//   dense: update every row in every step.
//   skip: update only the touched rows.
//   later: update only the touched rows, but first apply the steps that a row has missed.
// `settle` applies the steps that are still missing at the end. The result counts all row
// `updates`, the `missed` ones among them, and how often a row was `settled`.
function train(name, options, rows, batches, upstream, way, settle = true) {
  const rule = rules[name](options);
  const states = slots(rows);
  const done = rows.map(() => 0); // the last step applied to each row
  const none = upstream.map(() => 0);
  let [updates, missed, settled] = [0, 0, 0];
  const update = (place, gradient, step) => {
    stepRow(rule, states[place], gradient, step);
    done[place] = step;
    updates += 1;
  };
  const catchUp = (place, step) => {
    if (done[place] < step) settled += 1;
    for (; done[place] < step; missed += 1) update(place, none, done[place] + 1);
  };
  batches.forEach((places, before) => {
    const step = before + 1;
    const gradient = scatter(places, places.map(() => upstream), rows.length, upstream.length);
    rows.forEach((_, place) => {
      if (way === "dense") update(place, gradient[place], step);
      else if (places.includes(place)) {
        if (way === "later") catchUp(place, before);
        update(place, gradient[place], step);
      }
    });
  });
  if (way === "later" && settle) rows.forEach((_, place) => catchUp(place, batches.length));
  return { rows: states.map((state) => state.w), done, updates, missed, settled };
}
