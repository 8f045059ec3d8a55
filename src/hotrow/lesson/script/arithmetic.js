// The lookup, the one-hot product, and the gradients of both. V rows, D columns, N ids. `places`
// are the positions of the ids among the rows on the page.

const lookUp = (rows, places) => places.map((place) => rows[place].slice());

function oneHot(places, width) {
  return places.map((place) => Array.from({ length: width }, (_, k) => (k === place ? 1 : 0)));
}

// The products of one output value, in the order of addition.
function products(line, rows, column) {
  let sum = 0;
  return line.map((factor, k) => {
    const product = f32(factor * rows[k][column]);
    sum = f32(sum + product); // starts from +0, so a lone -0 gives +0, as in torch
    return { factor, value: rows[k][column], product, sum };
  });
}

// (N, V) @ (V, D) -> (N, D)
function matmul(left, rows) {
  return left.map((line) => rows[0].map((_, column) => products(line, rows, column).at(-1).sum));
}

const transpose = (rows) => rows[0].map((_, column) => rows.map((row) => row[column]));

const zeros = (height, width) => Array.from({ length: height }, () => new Array(width).fill(0));

// Add each row of the upstream gradient to the row of its id, in the order of the ids.
function scatter(places, upstream, height, width) {
  const gradient = zeros(height, width);
  places.forEach((place, n) => {
    upstream[n].forEach((value, j) => {
      gradient[place][j] = f32(gradient[place][j] + value);
    });
  });
  return gradient;
}

const addRows = (rows) =>
  rows.slice(1).reduce((sum, row) => sum.map((value, j) => f32(value + row[j])), rows[0]);
