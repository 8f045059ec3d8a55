// Start the page: add "Show this in Python" and event listeners, and show the view in the address.

function pythonFor(section) {
  const id = `${section.id}-code`;
  const region = (label, content) =>
    h("pre", { class: "wide", tabindex: "0", role: "group", "data-label": label }, content);
  const copy = h("button", { type: "button", "data-word": "python.copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(find(id).textContent);
      announce(say("python.copied"));
    } catch {
      getSelection().selectAllChildren(find(id));
      announce(say("python.select"));
    }
  });
  return h(
    "details",
    { class: "python" },
    h("summary", { "data-word": "python.show" }),
    h("div", { class: "controls" }, copy, h("a", { id: `${section.id}-file`, download: `lesson-${section.id}.py`, "data-word": "python.file" })),
    region("python.cell", h("code", { id })),
    h("p", { class: "note", "data-word": "python.prints" }),
    region("python.printed", h("samp", { id: `${section.id}-prints` })),
  );
}

// Link the documents. Without a source checkout there is nothing to link.
function documents() {
  const links = Object.values(data.documents)
    .map((pair) => pair[language === "zh-CN" ? 1 : 0])
    .filter(({ href }) => href)
    .map(({ name, href }) => h("li", {}, h("a", { href }, name)));
  put(find("documents"), links);
  find("model-more").hidden = !links.length;
}

const MODEL = [
  "",
  "model = torch.nn.Sequential(torch.nn.Embedding(10_000, 64), torch.nn.Linear(64, 2))",
  "model = hotrow.convert(model)",
  "optimizer = hotrow.optim.AdamW(model.parameters(), lr=1e-3)",
  "",
  "loss = model(torch.tensor([2, 3, 1])).square().mean()",
  "loss.backward()",
  "optimizer.step()",
  "print(hotrow.convert.report(model))",
];

// This code does not depend on the state, so neither does its output.
const MODEL_REPORT = "0  Embedding(10000, 64)  table";

sections.push({
  id: "model",
  result: () => null,
  draw: documents,
  code: () => lines("import torch", "import hotrow", ...MODEL),
  prints: () => MODEL_REPORT,
});

for (const section of sections) {
  if (section.code) find(section.id).querySelector(".after").append(pythonFor(section));
}
questions.forEach(addQuestion);
document.querySelectorAll(".fold").forEach((fold) => fold.addEventListener("toggle", draw));

document.querySelectorAll(".field").forEach((field, n) => {
  field.append(h("p", { class: "error", id: `error-${n}` }));
});
document.querySelectorAll("[data-lang]").forEach((button) => {
  button.addEventListener("click", () => setLanguage(button.dataset.lang));
});
document.addEventListener("input", ({ target }) => (typing = target.type === "text" ? target : null), true);
document.addEventListener("change", () => (typing = null), true);
// If a slider lies in a text selection, a press on it would drag the text instead.
document.addEventListener("pointerdown", ({ target }) => target.type === "range" && getSelection().removeAllRanges(), true);
document.addEventListener("focusout", () => (typing = null));
// Figures have another size on a narrow page.
narrow.addEventListener("change", () => {
  sections.forEach((section) => (section.drawn = null));
  draw();
});
document.addEventListener("input", onInput);
document.addEventListener("change", onInput);
document.addEventListener("click", onClick);
// Use the address in the event: by now, the page may have replaced the current address.
addEventListener("hashchange", (event) => readAddress(new URL(event.newURL).hash));
put(find("version"), data.version);

language = data.lang ?? (navigator.language.startsWith("zh") ? "zh-CN" : "en");
readAddress();
