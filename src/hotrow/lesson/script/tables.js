// A table on the page: some rows, the ids of these rows, and the size of the whole table.

const LIMITS = { rows: 16, columns: 8, ids: 16, steps: 8, letters: 16 };

// Whether a text is a word of a table on the page. Control characters are not.
const isWord = (text) => /^[^\s\p{C}]+$/u.test(text) && text.length <= LIMITS.letters;

function split(values, width) {
  const rows = [];
  for (let at = 0; at < values.length; at += width) rows.push(values.slice(at, at + width));
  return rows;
}

function presetFrom(each) {
  const rows = split(fromHex(each.rows), each.columns);
  return {
    ...each,
    rows,
    linear: each.linear && split(fromHex(each.linear), rows.length),
    positions: each.positions && split(fromHex(each.positions), each.columns),
    edited: false,
  };
}

const presets = Object.fromEntries(data.tables.map((each) => [each.name, presetFrom(each)]));

const START = presets.own ? "own" : "A";

// A table of the reader's own numbers; `rows` is the whole table.
function plainTable(rows) {
  const labels = rows.map((_, k) => k);
  const ids = [2, 3, 1].filter((id) => id < rows.length);
  return {
    name: "",
    V: rows.length,
    D: rows[0].length,
    labels,
    rows,
    ids: ids.length ? ids : [0],
    tokens: null,
    edited: true,
  };
}

// A table of the reader's own words. Its ids are those of all words but the last.
const wordTable = (rows, tokens) => ({ ...plainTable(rows), tokens, ids: tokens.slice(1).map((_, k) => k) });

const isExcerpt = (table) => table.V > table.rows.length || table.D > table.rows[0].length;

// Whether an inf or nan outside the excerpt makes the whole product differ from the lookup. It does
// not if the only row that contains one is also the only selected row.
const isSpoiled = (table, ids) =>
  Boolean(table.spoiled) &&
  (table.spoiled > 1 || ids.some((id) => id !== table.firstSpoiled));

const placesOf = (table, ids) => ids.map((id) => table.labels.indexOf(id));

// A copy of the table with one value changed.
function withValue(table, k, j, value) {
  const rows = table.rows.map((row) => row.slice());
  rows[k][j] = value;
  return { ...table, rows, edited: true };
}

// Change the number of rows and columns. New values are random, from the seed.
function resized(table, height, width, seed) {
  const fresh = split(normals(seed, height * width), width);
  return plainTable(
    fresh.map((row, k) => row.map((value, j) => table.rows[k]?.[j] ?? value)),
  );
}

// Write a table for the address: a preset's name or the size, then all bits if it was edited, then the
// reader's own words.
function tableText(table) {
  const sizes = `${table.rows.length}x${table.rows[0].length}`;
  const tokens = !table.name && table.tokens ? `~${table.tokens.join(" ")}` : "";
  return table.edited ? `${table.name || sizes}.${toHex(table.rows.flat())}${tokens}` : table.name;
}

function tableFromText(text) {
  const match = /^(?:([A-Za-z]{1,3})|(\d{1,2})x(\d))(?:\.((?:[0-9a-f]{8})+)(?:~(.*))?)?$/.exec(text);
  if (!match) throw new Bad("bad.table");
  const [, name, height, width, bits, words] = match;
  const preset = name === undefined ? null : presets[name];
  if (preset === undefined || (!preset && !bits)) throw new Bad("bad.table");
  if (!bits) return preset;
  const [tall, wide] = preset
    ? [preset.rows.length, preset.rows[0].length]
    : [Number(height), Number(width)];
  const fits = preset || (tall >= 1 && tall <= LIMITS.rows && wide >= 1 && wide <= LIMITS.columns);
  if (!fits || bits.length !== 8 * tall * wide) throw new Bad("bad.table");
  const rows = split(fromHex(bits), wide);
  const tokens = words?.split(" ") ?? null;
  const valid = !preset && tall > 1 && tokens?.length === tall && new Set(tokens).size === tall && tokens.every(isWord);
  if (tokens && !valid) throw new Bad("bad.table");
  if (tokens) return wordTable(rows, tokens);
  return preset ? { ...preset, rows, edited: true } : plainTable(rows);
}
