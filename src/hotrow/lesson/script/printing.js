// What Python prints: numbers and small tensors in the layout of torch 2's `print(tensor)`.

const LINE = 80; // characters; torch breaks longer lines
const OPENING = "tensor(";

// Python's f"{value:.4f}", f"{value:.4e}" and f"{value:.0f}" of a float32.
const spelled = (value, format) =>
  Number.isNaN(value) ? "nan" : (isNegative(value) ? "-" : "") + (Math.abs(value) === Infinity ? "inf" : format(Math.abs(value)));

const fixed = (value) => spelled(value, fourDecimals);
const exponential = (value) => spelled(value, (size) => scientific(size, 4));
const integral = (value) => spelled(value, String);

// Choose the format of a tensor from its finite nonzero values. Return {width, format}.
function floatFormat(values) {
  const shown = values.filter((value) => Number.isFinite(value) && value !== 0);
  const sizes = shown.map(Math.abs);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const whole = shown.every(Number.isInteger);
  const wide = shown.length > 0 && (high / low > 1000 || high > 1e8 || (!whole && low < 1e-4));
  const format = wide ? exponential : whole ? (value) => integral(value) + (Number.isFinite(value) ? "." : "") : fixed;
  return { format, width: Math.max(1, ...shown.map((value) => format(value).length)) };
}

const integerFormat = (values) => ({ format: String, width: Math.max(...values.map((value) => String(value).length)) });

// A list or a list of lists, as torch prints it. `suffix` is a dtype, for example.
function tensorText(values, { suffix = "", format: formatOf = floatFormat } = {}) {
  const { format, width } = formatOf(values.flat());
  const vector = (row, indent) => {
    const perLine = Math.max(1, Math.floor((LINE - indent) / (width + 2)));
    const cells = row.map((value) => format(value).padStart(width));
    const rows = split(cells, perLine).map((part) => part.join(", "));
    return `[${rows.join(`,\n${" ".repeat(indent + 1)}`)}]`;
  };
  const indent = OPENING.length;
  const body = Array.isArray(values[0])
    ? `[${values.map((row) => vector(row, indent + 1)).join(`,\n${" ".repeat(indent + 1)}`)}]`
    : vector(values, indent);
  return `${OPENING}${body}${suffix && `, ${suffix}`})`;
}

const integersText = (values) => tensorText(values, { format: integerFormat });

const boolText = (value) => (value ? "True" : "False");

// torch.equal and torch.allclose: nan equals nothing, and 0.0 equals -0.0.
const paired = (a, b) => a.flat().map((value, n) => [value, b.flat()[n]]);
const torchEqual = (a, b) => boolText(paired(a, b).every(([x, y]) => x === y));
const allClose = (a, b, atol = 1e-8) =>
  boolText(paired(a, b).every(([x, y]) => x === y || (Math.abs(x - y) <= atol + 1e-5 * Math.abs(y) && Number.isFinite(y))));
