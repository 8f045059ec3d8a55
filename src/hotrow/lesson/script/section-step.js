// 5. The step: which rows an optimizer changes, inside and outside the batch.

const FORMULAS = {
  sgd: "w ← w − lr · g",
  momentum: "b ← momentum · b + g\nw ← w − lr · b",
  adam:
    "m ← m + (1 − β₁) · (g − m)\n" +
    "v ← β₂ · v + (1 − β₂) · g²\n" +
    "w ← w − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)",
};

const EPS = 1e-8;

// Each use of a row adds `size` × (1, 2, 3, ...) to its gradient, one number for each column.
const sentBack = (state) => state.table.rows[0].map((_, j) => f32(state.size * (j + 1)));

sections.push({
  id: "step",

  result(state) {
    const { table, rule, batches, taken, settle } = state;
    const steps = batches.map((ids) => placesOf(table, ids));
    const run = (way, until, settled = true) =>
      train(rule, { ...state, eps: EPS }, table.rows, steps.slice(0, until), sentBack(state), way, settled);
    const dense = run("dense", taken);
    const skip = run("skip", taken);
    const later = run("later", taken, settle === "yes");
    return {
      dense,
      skip,
      later,
      settled: run("later", taken).rows,
      before: run("dense", Math.max(taken - 1, 0)).rows,
      skipped: compareBits(skip.rows, dense.rows),
      compared: compareBits(later.rows, dense.rows),
    };
  },

  draw(state, result) {
    const { batches, rule, taken, column, table } = state;
    put(find("step-formula"), FORMULAS[rule]);
    put(find("step-idle"), untouchedWords(state));
    for (const [name, uses] of [["momentum", ["momentum"]], ["beta1", ["adam"]], ["beta2", ["adam"]]]) {
      find(name).closest(".field").hidden = !uses.includes(rule);
    }
    find("taken").max = String(batches.length);
    put(find("taken-now"), say("step.taken", { taken, all: batches.length }));
    put(find("step-batches"), batchGrid(state));
    put(find("step-rows"), rowGrid(state, result));
    put(find("step-moved"), movedWords(state, result));
    put(
      find("step-work"),
      say("step.work", {
        dense: result.dense.updates,
        skip: result.skip.updates,
        later: result.later.updates,
        missed: result.later.missed,
        settled: result.later.settled,
      }),
    );
    const { same, total, equal } = result.skipped;
    put(
      find("step-skipped"),
      (equal ? say("equal") : say("different")) + say("gap") + say("step.skip", { n: same, total }),
    );
    const key = result.compared.equal ? "step.later" : "step.lagging";
    verdict("step-verdict", result.compared, state, { key, multiplies: false });
    put(find("step-column"), say("step.column", { column, D: table.D }));
  },

  code(state) {
    const { table, rule, batches, taken } = state;
    const [lr, momentum, beta1, beta2] = ["lr", "momentum", "beta1", "beta2"].map((name) => decimal(state[name]));
    const made = {
      sgd: `SGD(parameters, lr=${lr})`,
      momentum: `SGD(parameters, lr=${lr}, momentum=${momentum})`,
      adam: `Adam(parameters, lr=${lr}, betas=(${beta1}, ${beta2}))`,
    }[rule];
    const steps = batches.slice(0, taken).map((ids) => `    ${listed(placesOf(table, ids))},\n`);
    return lines(
      "import torch",
      "import hotrow",
      "",
      heldNote(table),
      tableCode(table),
      `batches = [\n${steps.join("")}]`,
      `upstream = torch.tensor(${literals(sentBack(state))})`,
      "",
      "def train(model, optim):",
      "    parameters = model.parameters()",
      `    optimizer = optim.${made}`,
      "    for ids in batches:",
      "        optimizer.zero_grad()",
      "        output = model(torch.tensor(ids, dtype=torch.long))",
      "        output.backward(upstream.expand(output.shape))",
      "        optimizer.step()",
      "    return model.weight.detach().clone()",
      "",
      "def layer():",
      "    return torch.nn.Embedding.from_pretrained(table.clone(), freeze=False)",
      "",
      "dense = train(layer(), torch.optim)",
      "later = train(hotrow.convert(layer(), min_entries=0), hotrow.optim)",
      "print(dense)",
      "print(torch.allclose(dense, later, atol=1e-6))  # combined steps round differently",
    );
  },

  prints: (_, { dense, settled }) => lines(tensorText(dense.rows), allClose(dense.rows, settled, 1e-6)),
});

// Describe what the rule does to a row whose gradient is zero. If momentum or beta1 is zero, the
// row does not change.
function untouchedWords({ rule, momentum, beta1 }) {
  if (rule === "momentum") return momentum ? say("step.idle.momentum") : say("step.idle.nomomentum");
  if (rule === "adam") return beta1 ? say("step.idle.adam") : say("step.idle.nobeta1");
  return say("step.idle.sgd");
}

function batchGrid({ table, batches, taken }) {
  return grid(
    say("step.batches"),
    [say("step.number"), say("step.ids"), say("step.state")],
    batches.map((ids, n) => ({
      head: count(n + 1),
      cells: [
        words(ids.length ? several(ids.map((id) => idName(table, id))) : say("step.none")),
        n < taken ? say("step.done") : say("step.ahead"),
      ],
      class: n < taken ? "" : "zero",
    })),
  );
}

function rowGrid({ table, batches, taken, column }, { dense, skip, later, before }) {
  const now = taken ? batches[taken - 1] : [];
  return grid(
    say("step.table", { taken, column }),
    ["", say("step.start"), say("step.dense"), say("step.skip.head"), say("step.later.head"), say("step.asof.head"), say("step.last")],
    table.rows.map((row, k) => {
      const id = table.labels[k];
      const [a, b, c] = [dense, skip, later].map((way) => way.rows[k][column]);
      const idle = taken > 0 && !now.includes(id);
      const moving = !dense.rows[k].every((value, j) => sameBits(value, before[k][j]));
      return {
        head: rowName(table, k),
        cells: [
          number(row[column]),
          number(a),
          differs(number(b), sameBits(a, b)),
          differs(number(c), sameBits(a, c)),
          count(later.done[k]),
          words(taken ? (idle ? (moving ? say("step.drift") : say("step.still")) : say("step.touched")) : ""),
        ],
        class: idle ? (moving ? `drift ${colourOf(id)}` : "") : hue(now, id),
      };
    }),
  );
}

const differs = (text, same) => (same ? text : h("strong", { class: "different" }, `≠ ${text}`));

function movedWords({ table, batches, taken }, { dense, before }) {
  if (!taken) return say("step.before");
  const now = batches[taken - 1];
  const idle = table.labels.filter((id, k) => {
    const moving = !dense.rows[k].every((value, j) => sameBits(value, before[k][j]));
    return moving && !now.includes(id);
  });
  return idle.length
    ? say("step.moved", { n: idle.length, step: taken, ids: several(idle) })
    : say("step.unmoved", { step: taken });
}
