// 9. What each way costs at real sizes, by the formulas of hotrow.cost.

const TOPS = { V: 1_000_000, D: 4096, N: 65_536 };
const CHART = { width: 640, height: 300, left: 66, right: 16, top: 16, bottom: 44 };

sections.push({
  id: "cost",

  result: ({ V, D, N }) => costOf(V, D, N),

  draw(state, { matmul, lookup }) {
    const { V, D, N } = state;
    for (const name of ["V", "D", "N"]) {
      const slider = find(`${name}-slider`);
      slider.value = String((1000 * Math.log(state[name])) / Math.log(TOPS[name]));
      slider.setAttribute("aria-valuetext", count(state[name]));
    }
    const names = {
      multiplications: say("cost.multiplications"),
      by_zero: say("cost.zeros"),
      additions: say("cost.additions"),
      bytes_written: say("cost.bytes"),
    };
    put(
      find("cost-table"),
      grid(
        say("cost.table", { V, D, N }),
        ["", say("product.multiplied"), say("product.looked"), say("cost.ratio")],
        Object.entries(names).map(([name, head]) => ({
          head,
          cells: [amount(name, matmul[name]), amount(name, lookup[name]), ratio(matmul[name], lookup[name])],
        })),
      ),
    );
    put(find("cost-share"), say("cost.share", { V, but: V - 1, share: share(V) }));
    put(find("cost-chart"), chart(state, names));
    put(find("cost-measured"), measured());
    put(
      find("cost-verdict"),
      say("cost.verdict", { V, D, N, matmul: bytes(matmul.bytes_written), lookup: bytes(lookup.bytes_written) }),
    );
  },

  code: ({ V, D, N }) => lines("import hotrow", "", `cost = hotrow.cost(${V}, ${D}, ${N})`, "print(cost)"),
});

const amount = (name, n) => (name === "bytes_written" ? `${count(n)} (${bytes(n)})` : count(n));

const ratio = (a, b) => (b === 0n ? say("cost.none") : `${count(Number((Number(a) / Number(b)).toPrecision(3)))} ×`);

// V - 1 of V, never rounded up to all of them.
const share = (V) => `${(Math.floor((1e6 * (V - 1)) / V) / 1e4).toFixed(4).replace(/\.?0+$/, "")} %`;

// Both ways over V, each axis a power of ten a grid line.
function chart(state, names) {
  const { width, height, left, right, top, bottom } = CHART;
  const { V, D, N, figure } = state;
  const places = Array.from({ length: 61 }, (_, n) => Math.round(10 ** (n / 10)));
  const value = (way, v) => Math.max(Number(costOf(v, D, N)[way][figure]), 1);
  const highest = Math.ceil(Math.log10(Math.max(value("matmul", TOPS.V), value("lookup", TOPS.V)) * 1.01));
  const x = (v) => left + (Math.log10(v) / 6) * (width - left - right);
  const y = (amount) => height - bottom - (Math.log10(amount) / highest) * (height - top - bottom);
  const parts = [svg("title", {}, say("cost.chart", { what: names[figure], D, N }))];
  const text = (at, content, attributes = {}) =>
    svg("text", { x: at[0], y: at[1], ...attributes }, content);
  for (let power = 0; power <= 6; power++) {
    parts.push(svg("line", { x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: height - bottom }));
    parts.push(text([x(10 ** power), height - bottom + 18], power < 6 ? count(10 ** power) : "1M", { "text-anchor": power === 6 ? "end" : "middle" }));
  }
  const every = Math.max(1, Math.ceil(highest / 5));
  for (let power = 0; power <= highest; power += every) {
    parts.push(svg("line", { x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }));
    const label = figure === "bytes_written" ? bytes(10 ** power) : `1e${power}`;
    parts.push(text([left - 8, y(10 ** power) + 4], label, { "text-anchor": "end" }));
  }
  parts.push(text([width - right, height - 6], say("cost.axis"), { "text-anchor": "end" }));
  for (const way of ["matmul", "lookup"]) {
    const d = places.map((v, n) => `${n ? "L" : "M"}${x(v).toFixed(1)} ${y(value(way, v)).toFixed(1)}`);
    parts.push(svg("path", { d: d.join(""), class: way }));
    const here = [x(V), y(value(way, V))];
    parts.push(svg("circle", { cx: here[0], cy: here[1], r: 5, class: way }));
  }
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, ...parts);
}

function measured() {
  if (!data.timings.length) return h("p", { class: "note" }, rich("cost.unmeasured"));
  return grid(
    say("cost.timings"),
    ["V", "D", "N", say("product.multiplied"), say("product.looked"), say("cost.ratio")].slice(0),
    data.timings.map((each, n) => ({
      head: count(each.V),
      cells: [count(each.D), count(each.N), milliseconds(each.matmul_ms), milliseconds(each.lookup_ms),
        `${(each.matmul_ms / each.lookup_ms).toPrecision(3)} ×`],
    })),
  );
}

const milliseconds = (value) => `${value >= 100 ? count(Math.round(value)) : value.toPrecision(3)} ms`;

for (const name of ["V", "D", "N"]) {
  find(`${name}-slider`).addEventListener("input", (event) => {
    const value = Math.round(TOPS[name] ** (Number(event.target.value) / 1000));
    edit(name, String(value), find(name));
    tell(event.target);
  });
}
