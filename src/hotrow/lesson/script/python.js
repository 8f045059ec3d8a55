// The code of "Show this in Python". It contains exact values and runs on its own.

const literals = (values) => `[${values.map(literal).join(", ")}]`;

const matrix = (rows) => `torch.tensor([\n${rows.map((row) => `    ${literals(row)},\n`).join("")}])`;

const listed = (values) => `[${values.join(", ")}]`;

const lines = (...parts) => parts.flat().filter((part) => part !== null).join("\n");

function tableCode(table) {
  if (table.edited || isExcerpt(table)) return `table = ${matrix(table.rows)}`;
  return lines(
    "_ = torch.manual_seed(123)",
    `table = torch.nn.Embedding(${table.V}, ${table.D}).weight.detach()`,
  );
}

function embeddingCode(table) {
  if (table.edited || isExcerpt(table)) {
    return lines(tableCode(table), "embedding = torch.nn.Embedding.from_pretrained(table, freeze=False)");
  }
  return lines("_ = torch.manual_seed(123)", `embedding = torch.nn.Embedding(${table.V}, ${table.D})`);
}

// For an excerpt, the code contains only the rows on the page, numbered from 0.
function heldNote(table) {
  return isExcerpt(table)
    ? `# ${say("python.excerpt", { included: table.labels.join(", ") })}`
    : null;
}

function idsCode(table, ids) {
  return `ids = torch.tensor(${listed(placesOf(table, ids))})`;
}

// Write a section's code, its output, and a link that saves the code as a file.
function writePython(section, result) {
  const code = section.code(state);
  const install = /^import hotrow$/m.test(code) ? say("python.hotrow") : say("python.torch");
  const text = `${install}\n\n${code}\n`;
  put(find(`${section.id}-code`), text);
  put(find(`${section.id}-prints`), section.prints(state, result));
  find(`${section.id}-file`).href = `data:text/x-python;charset=utf-8,${encodeURIComponent(text)}`;
}

function setting(state) {
  return lines(
    "import torch",
    "import torch.nn.functional as F",
    "",
    heldNote(state.table),
    tableCode(state.table),
    idsCode(state.table, state.ids),
  );
}
