// The texts of both languages. Their markup is `code`, **strong** and [text](address).

const data = JSON.parse(document.getElementById("data").textContent);

let language = "en";

const count = (n) => n.toLocaleString("en-US");

// Sizes and counts get thousands separators. Ids and row numbers do not: in a list, "1,996" would
// read as two ids.
const NAMES = ["id", "row", "place", "column"];

function fill(text, values) {
  return text.replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    const counts = ["number", "bigint"].includes(typeof value) && !NAMES.includes(name);
    return counts ? count(value) : String(value);
  });
}

// 1st, 2nd, 3rd; Chinese texts contain the mark of an ordinal number themselves.
const ordinal = (n) =>
  language === "en" ? n + ({ one: "st", two: "nd", few: "rd" }[new Intl.PluralRules("en", { type: "ordinal" }).select(n)] ?? "th") : String(n);

// Return the text of a key. If a key has a singular and a plural text, `n` selects one.
function say(key, values = {}) {
  const text = data.words[language][key];
  if (text === undefined) throw new Error(`no words for ${key}`);
  return fill(Array.isArray(text) ? text[Number(values.n) === 1 ? 0 : 1] : text, values);
}

// Parse the markup before filling in values, so a value is never taken for markup.
function rich(key, values = {}) {
  const parts = data.words[language][key].split(/(`[^`]+`|\*\*[^*]+\*\*|\[[^\]]+\]\([^)]+\))/);
  return parts.filter(Boolean).map((part) => {
    if (part.startsWith("`")) return h("code", {}, fill(part.slice(1, -1), values));
    if (part.startsWith("**")) return h("strong", {}, fill(part.slice(2, -2), values));
    const link = part.match(/^\[([^\]]+)\]\(([^)]+)\)$/);
    if (link) return h("a", { href: link[2], rel: "noreferrer" }, fill(link[1], values));
    return document.createTextNode(fill(part, values));
  });
}

// Set the text of every element that has `data-word` or `data-label`.
function translate() {
  document.documentElement.lang = language;
  document.title = say("page.title");
  document.querySelectorAll("[data-word]").forEach((element) => {
    element.replaceChildren(...rich(element.dataset.word));
  });
  document.querySelectorAll("[data-label]").forEach((element) => {
    element.setAttribute("aria-label", say(element.dataset.label));
  });
}
