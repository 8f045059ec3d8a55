// The address stores the view: the language, and the fields that differ from their initial values.
// Each view replaces the previous one in the browser's history, so "back" leaves the page.

function addressOf(state) {
  const own = defaults(state.table);
  const start = { ...fitted({ ...own, ids: state.ids }, own), ids: own.ids, table: presets[START] };
  const parts = [["lang", language]];
  for (const [name, field] of Object.entries(fields)) {
    const text = field.write(state[name]);
    if (text !== field.write(start[name])) parts.push([name, text]);
  }
  return `#${new URLSearchParams(parts)}`;
}

// Return {state, lang, shared}; `shared` is whether the address contains more than a language.
// Throw Bad for an address that this page would not write.
function fromAddress(hash) {
  if (hash.length > 20000) throw new Bad("bad.address");
  const parts = [...new URLSearchParams(hash.replace(/^#/, ""))];
  const given = new Map(parts);
  const known = (name) => name === "lang" || Object.hasOwn(fields, name);
  if (given.size !== parts.length || !parts.every(([name]) => known(name))) throw new Bad("bad.address");
  const lang = given.get("lang") ?? null;
  if (lang !== null && !Object.hasOwn(data.words, lang)) throw new Bad("bad.address");
  let state = defaults(given.has("table") ? tableFromText(given.get("table")) : presets[START]);
  for (const [name, field] of Object.entries(fields)) {
    if (name !== "table" && given.has(name)) {
      const before = state;
      state = fitted({ ...state, [name]: field.read(given.get(name), state) }, before);
    }
  }
  return { state, lang, shared: parts.some(([name]) => name !== "lang") };
}
