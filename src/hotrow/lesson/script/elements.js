// Create HTML and SVG elements. Text is always set as text, never parsed as HTML.

const find = (id) => document.getElementById(id);

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") Object.entries(value).forEach((on) => element.addEventListener(...on));
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.append(...children);
  return element;
}

// A table of values. `head` is a list of texts or elements, `lines` a list of {head, cells, class}.
// `data-bold` reserves the width of a row's name in bold, so that selecting a row moves nothing.
function grid(caption, head, lines) {
  const cell = (content) =>
    content instanceof Element && content.tagName === "TD" ? content : h("td", {}, content);
  return h(
    "table",
    {},
    h("caption", {}, caption),
    head.length
      ? h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text))))
      : null,
    h(
      "tbody",
      {},
      lines.map((line) =>
        h(
          "tr",
          { class: line.class || null },
          h("th", { scope: "row", "data-bold": typeof line.head === "string" && line.head }, line.head),
          line.cells.map(cell),
        ),
      ),
    ),
  );
}

// Replace the content of an element. Skip identical text, which a screen reader would repeat.
function put(element, ...content) {
  if (content.length === 1 && typeof content[0] === "string") {
    if (element.textContent !== content[0]) element.textContent = content[0];
  } else {
    element.replaceChildren(...content.flat());
  }
}
