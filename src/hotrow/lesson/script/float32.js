// float32 arithmetic as in torch: round every result, keep every bit, print as in Python.

const f32 = Math.fround;

const bitsView = new DataView(new ArrayBuffer(4));

function fromHex(text) {
  const values = [];
  for (let at = 0; at < text.length; at += 8) {
    bitsView.setUint32(0, parseInt(text.slice(at, at + 8), 16));
    values.push(bitsView.getFloat32(0));
  }
  return values;
}

function toHex(values) {
  return values
    .map((value) => {
      bitsView.setFloat32(0, value);
      return bitsView.getUint32(0).toString(16).padStart(8, "0");
    })
    .join("");
}

// Fused multiply-add: the product of two float32 values is exact in double precision.
const fused = (a, b, c) => f32(a + b * c);

// Bitwise equality: NaN equals NaN, and 0.0 does not equal -0.0.
const sameBits = (a, b) => Object.is(a, b);

// Compare two matrices. Return how many values have the same bits (`same`), whether all do
// (`equal`), and whether the values differ at most in the sign of zeros (`signs`).
function compareBits(a, b) {
  let same = 0;
  let total = 0;
  let signs = true;
  a.forEach((line, i) =>
    line.forEach((value, j) => {
      total += 1;
      const alike = sameBits(value, b[i][j]);
      same += alike ? 1 : 0;
      signs &&= alike || value === b[i][j];
    }),
  );
  return { same, total, signs, equal: same === total };
}

// Round to bfloat16: 8 significant bits, ties to even.
function bfloat16(value) {
  if (!Number.isFinite(value)) return value;
  bitsView.setFloat32(0, value);
  const bits = bitsView.getUint32(0);
  bitsView.setUint32(0, (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000);
  return bitsView.getFloat32(0);
}

// Round ties to the even digit, as Python does; toFixed would round them up.
function fourDecimals(size) {
  const scaled = size * 1e4; // exact for a float32 below 1e5
  const down = Math.floor(scaled);
  return scaled - down === 0.5 && down % 2 === 0 ? (down / 1e4).toFixed(4) : size.toFixed(4);
}

function scientific(size, digits = 2) {
  const [exact, power] = size.toExponential(60).split("e");
  const kept = exact.slice(0, digits + 2);
  const tie = /[02468]$/.test(kept) && /^50*$/.test(exact.slice(digits + 2));
  const rounded = tie ? `${kept}e${power}` : size.toExponential(digits);
  return rounded.replace(/e([+-])(\d)$/, "e$10$2");
}

const isNegative = (value) => value < 0 || Object.is(value, -0);

// Format for display: four decimals, or scientific notation for very small and very large values.
function number(value) {
  if (Number.isNaN(value)) return "nan";
  const sign = isNegative(value) ? "-" : "";
  const size = Math.abs(value);
  if (size === Infinity) return `${sign}inf`;
  return sign + (size !== 0 && (size < 1e-3 || size >= 1e5) ? scientific(size) : fourDecimals(size));
}

// The shortest decimal that parses to the same float32.
function shortest(value) {
  for (let digits = 1; digits < 9; digits++) {
    const found = Number(value.toPrecision(digits));
    if (f32(found) === value) return found;
  }
  return Number(value.toPrecision(9));
}

// Format as an exact Python literal.
function literal(value) {
  if (Number.isNaN(value)) return 'float("nan")';
  if (!Number.isFinite(value)) return `float("${value < 0 ? "-" : ""}inf")`;
  if (Object.is(value, -0)) return "-0.0";
  return decimal(shortest(value));
}

// Format a finite double as a Python float.
function decimal(value) {
  const text = String(value);
  return /[.e]/.test(text) ? text : `${text}.0`;
}

// Format for an input field.
function typed(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value < 0 ? "-inf" : "inf";
  return Object.is(value, -0) ? "-0.0" : String(shortest(value));
}
