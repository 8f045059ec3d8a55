// One idea, four operations: a one-hot times numbers of its shape keeps one number in each row. So its
// products and sums are a lookup, a gather, a scatter-add and a count.

sections.push({
  id: "idea",
  uses: ["table", "ids", "upstream"],

  result(state) {
    const { table, ids } = state;
    const places = placesOf(table, ids);
    const height = table.rows.length;
    const encoded = oneHot(places, height);
    const above = split(state.upstream, columns(state));
    const looked = lookUp(table.rows, places);
    // A score for each position and id: the looked-up row times the id's row.
    const scores = matmul(looked, transpose(table.rows));
    const kept = encoded.map((line, n) => line.map((factor, k) => f32(factor * scores[n][k])));
    const added = scatter(places, above, height, columns(state));
    return {
      scores,
      kept,
      looked,
      gathered: places.map((place, n) => scores[n][place]),
      added,
      counts: encoded[0].map((_, k) => places.filter((place) => place === k).length),
      dense: {
        looked: matmul(encoded, table.rows),
        gathered: kept.map((line) => line.reduce((sum, value) => f32(sum + value), 0)),
        added: matmul(transpose(encoded), above),
        counts: encoded[0].map((_, k) => encoded.reduce((sum, line) => sum + line[k], 0)),
      },
    };
  },

  draw({ table, ids }, { kept, looked, gathered, added, counts, dense }) {
    put(
      find("idea-kept"),
      grid(
        say("idea.kept", { N: ids.length, V: table.V }),
        ["", ...table.labels.map((id) => say("class", { id }))],
        kept.map((line, n) => ({
          head: placeName(table, ids, n),
          cells: line.map((value, k) =>
            table.labels[k] === ids[n]
              ? tint(h("td", { class: "one" }, value === 0 ? "0" : number(value)), value, scaleOf(kept))
              : h("td", { class: "zero" }, value === 0 ? "0" : number(value)),
          ),
          class: hue(ids, ids[n]),
        })),
      ),
    );
    const [id] = ids;
    const row = table.labels.indexOf(id);
    put(find("idea-looked"), `${say("row", { row: id })} = ${valuesText(looked[0])}`);
    put(find("idea-gathered"), valuesText(gathered));
    put(find("idea-added"), `${say("row", { row: id })} = ${valuesText(added[row])}`);
    put(find("idea-counts"), listed(counts));
    const flat = (each) => [each.looked.flat(), each.gathered, each.added.flat(), each.counts];
    verdict("idea-verdict", compareBits(flat({ looked, gathered, added, counts }), flat(dense)), { table, ids }, { opening: "idea.equal" });
  },

  code: (state) =>
    lines(
      setting(state),
      `G = ${matrix(split(state.upstream, columns(state)))}`,
      "",
      "X = F.one_hot(ids, num_classes=len(table)).to(table.dtype)",
      "Q = F.embedding(ids, table) @ table.T",
      "looked, gathered, added, counts = X @ table, (X * Q).sum(1), X.T @ G, X.sum(0)",
      "print(torch.equal(looked, table[ids]))",
      "print(torch.equal(gathered, Q.gather(1, ids.unsqueeze(1)).squeeze(1)))",
      "print(torch.allclose(added, torch.zeros_like(table).index_add(0, ids, G)))",
      "print(torch.equal(counts, torch.bincount(ids, minlength=len(table)).to(table.dtype)))",
    ),

  prints: (_, { looked, gathered, added, counts, dense }) =>
    lines(torchEqual(dense.looked, looked), torchEqual(dense.gathered, gathered), allClose(dense.added, added), torchEqual(dense.counts, counts)),
});

const valuesText = (values) => listed(values.map(unbroken));
