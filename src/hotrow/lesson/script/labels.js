// Place the labels of the dots on a map.

// The directions from a dot to its label, in the order of preference, and the distances to try in
// pixels, beyond the usual gap.
const AROUND = [[1, 0], [-1, 0], [1, -1], [1, 1], [-1, -1], [-1, 1], [0, -1], [0, 1]];
const DISTANCES = [0, 8, 16, 26, 38, 52];
const PLACES = DISTANCES.flatMap((distance) => AROUND.map(([right, down]) => ({ right, down, distance })));
const GAP = 4;
const ROUNDS = 3;

// Return a place for each label: {n, box, distance, x, y, anchor}. It covers no dot and no other
// label if there is such a place. `before` contains the last places: a label stays at its place
// while nothing is in the way, so that it does not jump during an animation.
function placeLabels(points, widths, { width, height, size, dot, before = [] }) {
  const around = ([x, y]) => ({ left: x - dot, right: x + dot, top: y - dot, bottom: y + dot });
  const dots = points.map(around);
  const outside = ({ left, right, top, bottom }) => left < 2 || right > width - 2 || top < 2 || bottom > height - 2;
  const placed = [];
  const place = (k) => {
    const others = [...dots, ...placed.filter((_, m) => m !== k).map(({ box }) => box)];
    return PLACES.map((each, n) => {
      const box = labelBox(points[k], widths[k], 1.2 * size, dot + GAP, each);
      const covered = others.reduce((sum, other) => sum + overlap(box, other), 0);
      const reach = gapTo(box, points[k]) + GAP;
      const closer = points.filter((point, m) => m !== k && gapTo(box, point) < reach).length;
      const cost = (outside(box) ? 1e6 : 0) + 100 * covered + 16 * closer + n - (n === before[k]?.n ? 8 : 0);
      return { n, box, distance: each.distance, cost };
    }).reduce((best, each) => (each.cost < best.cost ? each : best));
  };
  // In the first round, a label does not yet know the places of the labels after it.
  for (let round = 0; round < ROUNDS; round++) points.forEach((_, k) => (placed[k] = place(k)));
  return placed.map((each) => ({ ...each, ...textOf(each, size) }));
}

function labelBox([x, y], wide, high, away, { right, down, distance }) {
  const middle = [
    x + right * (away + distance + wide / 2),
    y + down * (high / 2 + (right ? distance : away + distance)),
  ];
  return { left: middle[0] - wide / 2, right: middle[0] + wide / 2, top: middle[1] - high / 2, bottom: middle[1] + high / 2 };
}

// The attributes of a label's text. It is aligned to the side of its dot.
function textOf({ n, box }, size) {
  const { right } = PLACES[n];
  const anchor = right > 0 ? "start" : right < 0 ? "end" : "middle";
  const x = right > 0 ? box.left : right < 0 ? box.right : (box.left + box.right) / 2;
  return { anchor, x, y: box.top + 0.94 * size };
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// The distance from a box to a point.
const gapTo = ({ left, right, top, bottom }, [x, y]) => Math.hypot(x - clamp(x, left, right), y - clamp(y, top, bottom));

// The area that two boxes share.
const overlap = (a, b) =>
  Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) *
  Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
