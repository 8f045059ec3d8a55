// 1. Ids and a table: each id selects its row.

let lookedUp = Infinity; // how many output rows to show while the lookup plays

sections.push({
  id: "lookup",

  result: ({ table, ids }) => ({ output: lookUp(table.rows, placesOf(table, ids)) }),

  draw(state, { output }) {
    const { table, ids } = state;
    for (const name of ["A", "B", "C", "own"]) {
      const button = find(`preset-${name}`);
      button.hidden = !presets[name];
      button.setAttribute("aria-pressed", String(table.name === name && !table.edited));
    }
    for (const [id, value] of [["rows", table.rows.length], ["columns", columns(state)]]) {
      const input = find(id);
      input.value = String(value);
      input.disabled = isExcerpt(table);
      forgive(input);
    }
    put(find("lookup-about"), about(table));
    put(find("lookup-count"), say("lookup.counting", { row: ids[0], nth: ids[0] + 1 }));
    const region = find("lookup-table");
    inputGrid(region, {
      id: "value",
      caption: say("lookup.table", { V: table.V, D: table.D }),
      heads: columnNames(table),
      rowHeads: table.labels.map((id, k) => rowButton(table, id, k)),
      classes: table.labels.map((id) => hue(ids, id)),
      label: (k, j) => `${rowName(table, k)}${say("comma")}${say("column", { column: j })}`,
      values: table.rows,
      set: setValue,
    });
    put(find("lookup-ids"), ids.map((id, place) => chip(table, ids, id, place)));
    const shown = output.slice(0, lookedUp);
    put(
      find("lookup-output"),
      outputGrid(say("lookup.output", { N: ids.length, D: columns(state) }), table, ids, shown),
    );
    const names = several(ids);
    put(find("lookup-verdict"), say("lookup.verdict", { ids: names, n: ids.length }));
  },

  code: (state) => lines(setting(state), "", "output = F.embedding(ids, table)", "print(output)"),

  prints: (_, { output }) => tensorText(output),
});

function setValue(k, j, value, control) {
  change({ table: withValue(state.table, k, j, value) }, control);
}

function about(table) {
  const parts = [];
  if (table.title) parts.push(table.title + say("stop"));
  if (table.name === "C") parts.push(say("about.C"));
  if (["A", "B"].includes(table.name)) {
    const text = placesOf(table, table.ids).map((k) => tokensOf(table)[k]).join(" ");
    parts.push(say("about.tokens", { text, ids: several(table.ids) }));
  }
  const [included, width] = [table.rows.length, table.rows[0].length];
  if (table.random) parts.push(say("about.random", { V: table.V, included, width }));
  else if (isExcerpt(table)) {
    parts.push(say("about.excerpt", { V: table.V, D: table.D, included, width }));
    parts.push(table.spoiled ? say("spoiled", { n: table.spoiled, row: table.firstSpoiled }) : say("about.finite"));
  }
  if (table.rounded) parts.push(say("about.rounded"));
  if (table.left) parts.push(say("about.left", { n: table.left }));
  return parts.join(say("gap"));
}

function rowButton(table, id, k) {
  return h(
    "button",
    {
      type: "button",
      class: "row",
      id: `row-${id}`,
      title: say("lookup.add", { id }),
      on: { click: (event) => choose([...state.ids, id], "ids", event.target) },
    },
    rowName(table, k),
  );
}

function chip(table, ids, id, place) {
  return h(
    "li",
    { class: hue(ids, id) },
    h("bdi", {}, idName(table, id)),
    h(
      "button",
      {
        type: "button",
        "aria-label": say("lookup.remove", { id, place }),
        disabled: ids.length === 1,
        on: {
          click: (event) => {
            // Keep the same word selected.
            const pick = state.pick - Number(place < state.pick);
            change({ ids: ids.filter((_, n) => n !== place), pick }, event.target);
            find("ids").focus(); // this button no longer exists
          },
        },
      },
      "×",
    ),
  );
}

const preset = (name) => (button) => {
  state = defaults(presets[name]);
  show(button);
};

Object.assign(actions, {
  "preset-A": preset("A"),
  "preset-B": preset("B"),
  "preset-C": preset("C"),
  "preset-own": preset("own"),

  random(button) {
    const { name, tokens, rows } = state.table;
    const fresh = split(normals(state.seed, rows.flat().length), columns(state));
    takeTable(!name && tokens ? wordTable(fresh, tokens) : plainTable(fresh), button);
  },

  "lookup-play"(button) {
    if (calm.matches) return tell(button);
    const region = find("lookup-output");
    stopAnimation();
    region.classList.add("playing");
    lookedUp = 0;
    draw();
    return animate(() => {
      lookedUp += 1;
      draw();
      return lookedUp === state.ids.length;
    }, 700, () => {
      lookedUp = Infinity;
      region.classList.remove("playing");
      draw();
      tell(button);
    });
  },
});

// Switch to a table of another size or with other numbers. Throw Bad if a selected id would lose
// its row.
function takeTable(table, control) {
  const gone = state.ids.find((id) => id >= table.V);
  if (gone !== undefined && !isExcerpt(state.table)) throw new Bad("bad.shrink", { id: gone });
  state = moved(state, table);
  show(control);
}

function resize(control) {
  attempt(control, () => {
    const height = readWhole(find("rows").value, 1, LIMITS.rows);
    const width = readWhole(find("columns").value, 1, LIMITS.columns);
    takeTable(resized(state.table, height, width, state.seed), control);
  });
}

find("rows").addEventListener("change", (event) => resize(event.target));
find("columns").addEventListener("change", (event) => resize(event.target));
