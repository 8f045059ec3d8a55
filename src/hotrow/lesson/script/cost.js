// The formulas of hotrow.cost for the forward pass and gradient in float32. BigInt is exact for any
// size.

function costOf(rows, columns, ids) {
  const [V, D, N] = [rows, columns, ids].map(BigInt);
  const size = 4n;
  const but = (n) => (n > 0n ? n - 1n : 0n);
  return {
    matmul: {
      multiplications: 2n * N * V * D,
      by_zero: 2n * N * but(V) * D,
      additions: N * but(V) * D + V * but(N) * D,
      bytes_written: size * (N * V + N * D + V * D),
    },
    lookup: {
      multiplications: 0n,
      by_zero: 0n,
      additions: N * D,
      bytes_written: 2n * size * N * D + 8n * N,
    },
  };
}

// Format a number of bytes with three significant digits.
function bytes(n) {
  let value = Number(n);
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  while (value >= 999.5 && units.length > 1) {
    value /= 1000;
    units.shift();
  }
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(3))} ${units[0]}`;
}
