// 4. The gradient: add each row of the upstream gradient to the row that its id selected.

sections.push({
  id: "gradient",

  result(state) {
    const { table, ids } = state;
    const places = placesOf(table, ids);
    const above = split(state.upstream, columns(state));
    const gradient = scatter(places, above, table.rows.length, columns(state));
    const multiplied = matmul(transpose(oneHot(places, table.rows.length)), above);
    return { above, gradient, multiplied, compared: compareBits(gradient, multiplied) };
  },

  draw(state, { above, gradient, compared }) {
    const { table, ids, column } = state;
    const names = ids.map((_, n) => placeName(table, ids, n));
    inputGrid(find("gradient-upstream"), {
      id: "upstream",
      caption: say("gradient.upstream", { N: ids.length, D: columns(state) }),
      heads: columnNames(table),
      rowHeads: names,
      classes: ids.map((id) => hue(ids, id)),
      label: (n, j) => `${names[n]}${say("comma")}${say("column", { column: j })}`,
      values: above,
      set: setUpstream,
    });
    put(
      find("gradient-table"),
      grid(
        say("gradient.table", { V: table.V, D: table.D }),
        [...columnNames(table), say("gradient.uses")],
        gradient.map((row, k) => {
          const uses = ids.filter((id) => id === table.labels[k]).length;
          return {
            head: rowName(table, k),
            cells: [...numbers(row, scaleOf(gradient)), uses ? say("gradient.used", { n: uses }) : say("gradient.never")],
            class: uses ? hue(ids, table.labels[k]) : "zero",
          };
        }),
      ),
    );
    const full = ids.length === LIMITS.ids;
    find("gradient-repeat").disabled = full;
    find("gradient-remove").disabled = ids.length === 1;
    put(find("gradient-full"), full ? say("gradient.full", { most: LIMITS.ids }) : "");
    put(find("gradient-sums"), sums(table, ids, above, gradient, column));
    verdict("gradient-verdict", compared, state, { opening: "equal.gradient", multiplies: false });
  },

  code: (state) =>
    lines(
      setting(state),
      `upstream = ${matrix(split(state.upstream, columns(state)))}`,
      "",
      "weight = table.clone().requires_grad_()",
      "F.embedding(ids, weight).backward(upstream)",
      "gradient = weight.grad",
      "one_hot = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "print(gradient)",
      "print(one_hot.T @ upstream)",
    ),

  prints: (_, { gradient, multiplied }) => lines(tensorText(gradient), tensorText(multiplied)),
});

function setUpstream(n, j, value, control) {
  const upstream = state.upstream.slice();
  upstream[n * columns(state) + j] = value;
  change({ upstream }, control);
}

// List the sum of each selected row, with its terms in the order of the ids.
function sums(table, ids, above, gradient, column) {
  return [...new Set(ids)].map((id) => {
    const parts = above.filter((_, n) => ids[n] === id).map((line) => number(line[column]));
    const total = number(gradient[table.labels.indexOf(id)][column]);
    return h(
      "li",
      { class: hue(ids, id) },
      parts.length === 1
        ? say("gradient.single", { id: idName(table, id), column, total })
        : say("gradient.sum", { id: idName(table, id), column, parts: parts.join(" + "), total }),
    );
  });
}

actions["gradient-repeat"] = (button) => choose([...state.ids, state.ids[0]], "ids", button);

actions["gradient-remove"] = (button) => choose(state.ids.slice(0, -1), "ids", button);
