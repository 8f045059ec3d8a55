// 9. The cost of both methods at real sizes, from the formulas of hotrow.cost.

const TOPS = { V: 1_000_000, D: 4096, N: 65_536 };
const chartSize = () => ({ width: narrow.matches ? 330 : 640, height: 300, left: 66, right: 16, top: 16, bottom: 44 });

sections.push({
  id: "cost",

  result: ({ V, D, N }) => costOf(V, D, N),

  draw(state, { matmul, lookup }) {
    const { V, D, N } = state;
    for (const name of ["V", "D", "N"]) {
      const slider = find(`${name}-slider`);
      // Several slider positions round to the same size. Don't move the slider between them.
      if (sizeAt(name, slider.value) !== state[name]) {
        slider.value = String((1000 * Math.log(state[name])) / Math.log(TOPS[name]));
      }
      slider.setAttribute("aria-valuetext", count(state[name]));
    }
    const names = {
      multiplications: say("cost.multiplications"),
      by_zero: say("cost.zeros"),
      additions: say("cost.additions"),
      bytes_written: say("cost.bytes"),
    };
    const drawn = { ...names, milliseconds: say("cost.milliseconds") };
    options(find("figure"), FIGURES.map((name) => [name, drawn[name]]));
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
    const none = state.figure === "multiplications" || state.figure === "by_zero";
    put(find("cost-zero"), none ? say("cost.zero") : "");
    put(find("cost-measured"), measured());
    put(
      find("cost-verdict"),
      say("cost.verdict", { V, D, N, matmul: bytes(matmul.bytes_written), lookup: bytes(lookup.bytes_written) }),
    );
  },

  code: ({ V, D, N }) => lines("import hotrow", "", `cost = hotrow.cost(${V}, ${D}, ${N})`, "print(cost)"),

  prints({ V, D, N }, { matmul, lookup }) {
    const line = (name, a, b) => name.padEnd(24) + a.padStart(22) + b.padStart(16);
    const names = { multiplications: "multiplications", by_zero: "  of them by zero", additions: "additions", bytes_written: "bytes written" };
    return lines(
      `${count(N)} ids, table ${count(V)} x ${count(D)}, 4 bytes`,
      line("", "one-hot matmul", "lookup"),
      Object.entries(names).map(([key, name]) => line(name, count(matmul[key]), count(lookup[key]))),
    );
  },
});

const sizeAt = (name, place) => Math.round(TOPS[name] ** (Number(place) / 1000));

const amount = (name, n) => (name === "bytes_written" ? `${count(n)} (${bytes(n).replace(" ", "\u00a0")})` : count(n));

const ratio = (a, b) => (b === 0n ? say("cost.none") : `${count(Number((Number(a) / Number(b)).toPrecision(3)))}\u00a0×`);

// (V - 1) / V as a percentage, rounded to two decimals, or to more if it would show 100%.
function share(V) {
  const percent = (100 * (V - 1)) / V;
  let decimals = 2;
  while (Number(percent.toFixed(decimals)) === 100) decimals += 1;
  return `${Number(percent.toFixed(decimals))}%`;
}

// The curve and points of one method: [V, amount] pairs from the formulas, or measured times.
function series(way, { V, D, N, figure }) {
  if (figure === "milliseconds") {
    return { line: [], points: data.timings.map((each) => [each.V, each[`${way}_ms`]]) };
  }
  // A logarithmic axis can't show zero.
  const at = (v) => [v, Number(costOf(v, D, N)[way][figure])];
  const positive = ([, amount]) => amount > 0;
  const sizes = Array.from({ length: 10 * decadesOf(V) + 1 }, (_, n) => Math.round(10 ** (n / 10)));
  return { line: sizes.map(at).filter(positive), points: [at(V)].filter(positive) };
}

// The number of powers of ten on the V axis: six, or more for a larger table.
const decadesOf = (V) =>
  Math.max(6, ...[V, ...data.timings.map((each) => each.V)].map((size) => Math.ceil(Math.log10(size))));

// Draw the cost of both methods against V. Both axes are logarithmic, with grid lines at powers
// of ten.
function chart(state, names) {
  const { width, height, left, right, top, bottom } = chartSize();
  const { V, D, N, figure } = state;
  const decades = decadesOf(V);
  const ways = ["matmul", "lookup"].map((way) => [way, series(way, state)]);
  const powers = ways
    .flatMap(([, { line, points }]) => [...line, ...points])
    .map(([, amount]) => Math.log10(amount));
  const low = Math.floor(Math.min(0, ...powers));
  const high = Math.ceil(Math.max(...powers) + 0.01);
  const x = (v) => left + (Math.log10(v) / decades) * (width - left - right);
  const y = (power) => height - bottom - ((power - low) / (high - low)) * (height - top - bottom);
  const place = ([v, amount]) => [x(v).toFixed(1), y(Math.log10(amount)).toFixed(1)];
  const text = (across, down, content, anchor) =>
    svg("text", { x: across, y: down, "text-anchor": anchor }, content);
  const what = names[figure];
  const title =
    figure === "milliseconds" ? say("cost.timings") : say("cost.chart", { what, D, N });
  const parts = [svg("title", {}, title)];
  for (let power = 0; power <= decades; power += Math.ceil(decades / (narrow.matches ? 4 : 8))) {
    const at = x(10 ** power);
    const label = power < 6 ? count(10 ** power) : power === 6 ? "1M" : `1e${power}`;
    parts.push(svg("line", { x1: at, x2: at, y1: top, y2: height - bottom }));
    parts.push(text(at, height - bottom + 18, label, power < decades ? "middle" : "end"));
  }
  for (let power = low; power <= high; power += Math.ceil((high - low) / 6)) {
    const label = figure === "bytes_written" ? bytes(10 ** power) : `1e${power}`;
    parts.push(svg("line", { x1: left, x2: width - right, y1: y(power), y2: y(power) }));
    parts.push(text(left - 8, y(power) + 4, label, "end"));
  }
  parts.push(text(width - right, height - 6, say("cost.axis"), "end"));
  for (const [way, { line, points }] of ways) {
    const d = line.map((point, n) => `${n ? "L" : "M"}${place(point).join(" ")}`).join("");
    if (d) parts.push(svg("path", { d, class: way }));
    for (const [cx, cy] of points.map(place)) parts.push(mark(way, Number(cx), Number(cy)));
  }
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, ...parts);
}

// A circle for the product, a square for the lookup: color alone is not accessible.
const mark = (way, cx, cy) =>
  way === "matmul"
    ? svg("circle", { cx, cy, r: 7, class: way })
    : svg("rect", { x: cx - 5, y: cy - 5, width: 10, height: 10, class: way });

function measured() {
  if (!data.timings.length) return h("p", { class: "note" }, rich("cost.unmeasured"));
  return grid(
    say("cost.timings"),
    ["V", "D", "N", say("product.multiplied"), say("product.looked"), say("cost.ratio")],
    data.timings.map((each) => ({
      head: count(each.V),
      cells: [count(each.D), count(each.N), milliseconds(each.matmul_ms), milliseconds(each.lookup_ms),
        `${(each.matmul_ms / each.lookup_ms).toPrecision(3)} ×`],
    })),
  );
}

const milliseconds = (value) => `${value >= 100 ? count(Math.round(value)) : value.toPrecision(3)} ms`;

for (const name of ["V", "D", "N"]) {
  find(`${name}-slider`).addEventListener("input", (event) => {
    edit(name, String(sizeAt(name, event.target.value)), find(name));
    tell(event.target);
  });
}
