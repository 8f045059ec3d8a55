// 6. Probabilities and bags: a vector of probabilities, or a vector of counts.

// p and 1 - p, rounded to float32.
const sharesOf = (p) => [f32(p), f32(1 - f32(p))];

sections.push({
  id: "mix",

  result({ table, softA, softB, p, bag }) {
    const { rows } = table;
    const [[a, b], places] = [placesOf(table, [softA, softB]), placesOf(table, bag)];
    const [one, other] = sharesOf(p);
    const soft = rows.map((_, k) => f32((k === a ? one : 0) + (k === b ? other : 0)));
    const counts = rows.map((_, k) => places.filter((place) => place === k).length);
    const added = [addRows([...zeros(1, rows[0].length), ...lookUp(rows, places)])]; // torch adds to +0
    const multiplied = matmul([counts], rows);
    return {
      soft,
      mixed: matmul([soft], rows)[0],
      rowA: rows[a],
      rowB: rows[b],
      counts,
      added: added[0],
      multiplied: multiplied[0],
      compared: {
        ...compareBits(added, multiplied),
        // The error of each sum is at most n * 2^-24 times the sum of |x| (Higham, section 4.2).
        near: added[0].every((sum, j) => {
          const sizes = places.reduce((total, place) => total + Math.abs(rows[place][j]), 0);
          return Math.abs(sum - multiplied[0][j]) <= 2 * places.length * 2 ** -24 * sizes;
        }),
      },
    };
  },

  draw(state, { soft, mixed, rowA, rowB, counts, added, multiplied, compared }) {
    const { table, softA, softB, p, bag } = state;
    const choices = table.labels.map((id) => [id, idName(table, id)]);
    for (const name of ["softA", "softB"]) options(find(name), choices);
    put(find("p-now"), say("mix.now", { p: p.toFixed(2), q: (1 - p).toFixed(2) }));
    const shares = sharesOf(p);
    const line = (id, share, row) => ({
      head: `${share.toFixed(2)} × ${say("row", { row: id })}`,
      cells: numbers(row.map((value) => f32(share * value) + 0)),
      class: hue([softA, softB], id),
    });
    put(
      find("mix-table"),
      grid(say("mix.table"), columnNames(table), [
        line(softA, shares[0], rowA),
        line(softB, shares[1], rowB),
        { head: say("mix.sum"), cells: numbers(mixed), class: "total" },
      ]),
    );
    put(find("mix-vector"), say("mix.vector", { values: soft.map((value) => typed(value)).join(", ") }));
    const alone = p === 1 || softA === softB ? softA : p === 0 ? softB : null;
    const single = mixed.every((value, j) => value === (alone === softA ? rowA : rowB)[j]);
    const clean = mixed.every(Number.isFinite);
    put(
      find("mix-note"),
      !clean ? say("mix.spoiled") : alone !== null && single ? say("mix.single", { id: alone }) : say("mix.between"),
    );
    put(
      find("bag-table"),
      grid(say("bag.table", { n: bag.length }), columnNames(table), [
        ...bag.map((id, n) => ({
          head: say("place", { place: n, id: idName(table, id) }),
          cells: numbers(table.rows[table.labels.indexOf(id)]),
          class: hue(bag, id),
        })),
        { head: say("bag.added"), cells: numbers(added), class: "total" },
        { head: say("bag.multiplied"), cells: numbers(multiplied), class: "total" },
      ]),
    );
    put(find("bag-vector"), say("bag.vector", { values: counts.join(", ") }));
    const key = !compared.equal && compared.near ? "bag.order" : "bits";
    verdict("mix-verdict", compared, { table, ids: bag }, { key });
  },

  code(state) {
    const { table, softA, softB, p, bag } = state;
    const [a, b] = placesOf(table, [softA, softB]);
    const [one, other] = sharesOf(p);
    return lines(
      setting({ ...state, ids: bag }),
      "",
      "soft = torch.zeros(1, len(table))",
      `soft[0, ${a}] += ${literal(one)}`,
      `soft[0, ${b}] += ${literal(other)}`,
      "mixed = soft @ table",
      "counts = F.one_hot(ids, num_classes=len(table)).sum(0, keepdim=True).to(table.dtype)",
      'added = F.embedding_bag(ids.unsqueeze(0), table, mode="sum")',
      "print(mixed)",
      "print(added)",
      "print(counts @ table)",
    );
  },

  prints: (_, { mixed, added, multiplied }) => lines([mixed, added, multiplied].map((row) => tensorText([row]))),
});
