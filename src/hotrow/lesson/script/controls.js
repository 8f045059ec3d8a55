// Controls and state. `data-field` names a control's field, `data-do` a button's action.

// {id, uses, result(state), draw(state, result), code(state), prints(state, result), intro(state)}.
// `uses` names all fields that the section depends on; without it, every change draws the section.
// `prints` is the output of `code`. `intro` draws what stands before the question.
const sections = [];
const actions = {};

let state = defaults(presets[START]);

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 30rem)");

let endAnimation = null;

// Call `work` every `pause` milliseconds until it returns true, then `end`. Another animation, or
// an edit, ends this one.
function animate(work, pause = 30, end = () => {}) {
  stopAnimation();
  const timer = setInterval(() => work() && stopAnimation(), pause);
  endAnimation = () => {
    clearInterval(timer);
    end();
  };
}

function stopAnimation() {
  const end = endAnimation;
  endAnimation = null;
  end?.();
}

let typing = null; // the text field that contains uncommitted text

const errorOf = (control) => control.closest(".field").querySelector(".error");

function complain(control, bad) {
  const place = errorOf(control);
  control.bad = bad;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", place.id);
  put(place, say(bad.key, bad.values));
}

function forgive(control) {
  if (!control.bad) return;
  control.bad = null;
  control.removeAttribute("aria-invalid");
  control.removeAttribute("aria-describedby");
  put(errorOf(control), "");
}

// Run `work`. If it throws Bad, show the message next to the control and leave the view unchanged.
function attempt(control, work) {
  try {
    work();
    forgive(control);
  } catch (error) {
    if (!(error instanceof Bad)) throw error;
    complain(control, error);
  }
}

// `control` is null while an animation plays.
function change(patch, control) {
  if (control) stopAnimation();
  state = fitted({ ...state, ...patch }, state);
  show(control);
}

function edit(name, text, control) {
  attempt(control, () => change({ [name]: fields[name].read(text, state) }, control));
}

function show(control) {
  draw();
  remember();
  tell(control);
}

function draw() {
  drawSections();
  questions.forEach(writeQuestion);
  document.querySelectorAll("[data-field]").forEach(follow);
}

// The fields that only sections with `uses` depend on.
const RARE = ["vocabulary", "learned", "noun", "alone"];

let last = null; // the state that the sections show

// Draw only the open sections that a change can affect, to save time.
function drawSections() {
  const rare = state !== last && Object.keys(state).every((name) => RARE.includes(name) || state[name] === last?.[name]);
  last = state;
  for (const section of sections) {
    const part = find(section.id);
    section.intro?.(state);
    if (part.querySelector(":scope > .fold:not([open]), .after[hidden]")) continue;
    if (rare && !section.uses) continue;
    const drawn = section.uses && [language, ...section.uses.map((name) => state[name])];
    if (drawn && drawn.every((value, n) => value === section.drawn?.[n])) continue;
    section.drawn = drawn;
    const result = section.result(state);
    section.draw(state, result);
    if (section.code) writePython(section, result);
  }
}

// Show the state in a control. Don't touch a focused control that already shows this text, nor a
// field in which the user is typing.
function follow(control) {
  if (control === typing) return;
  const name = control.dataset.field;
  const text = fields[name].write(state[name]);
  if (control.type === "radio") control.checked = control.value === text;
  else if (control.type === "checkbox") control.checked = text === "yes";
  else if (control !== document.activeElement || control.bad || control.value.trim() !== text) {
    control.value = text;
  }
  forgive(control);
}

let announcement = "";
let announcing = null;

// Announce a change to screen readers. Of several changes in a row, announce only the last.
function announce(text) {
  announcement = text;
  clearTimeout(announcing);
  announcing = setTimeout(() => put(find("live"), announcement), 300);
}

// Announce the text or last table row of the element that `data-tells` names, or else the section's
// verdict.
function tell(control) {
  const named = control?.dataset.tells && find(control.dataset.tells);
  const line = named?.querySelector("tbody tr:last-child");
  const verdict = control?.closest("section")?.querySelector(".verdict");
  if (line) announce([...line.cells].map((cell) => cell.textContent).join(" "));
  else if (named?.textContent && !named.querySelector("table")) announce(named.textContent);
  else if (verdict) announce(verdict.textContent);
}

function onInput(event) {
  const control = event.target;
  const name = control.dataset.field;
  // Read a text field when the user commits it, and any other control immediately.
  const text = control.tagName === "INPUT" && control.type === "text";
  if (!name || text !== (event.type === "change")) return;
  if (control.type === "checkbox") edit(name, control.checked ? "yes" : "no", control);
  else edit(name, control.value, control);
}

function onClick(event) {
  const button = event.target.closest("button[data-do]");
  if (button) actions[button.dataset.do](button);
}

// Show a button's error next to the field that the button edits.
function choose(ids, name, button) {
  edit(name, fields[name].write(ids), find(name));
  tell(button);
}

let remembering = null;

function remember() {
  clearTimeout(remembering);
  remembering = setTimeout(writeAddress, 150);
}

function writeAddress() {
  remembering = null;
  const hash = addressOf(state);
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

// Open a folded section.
function unfold(id) {
  const fold = find(id).querySelector(":scope > .fold");
  if (fold) fold.open = true;
  find(id).scrollIntoView();
}

function readAddress(hash = location.hash) {
  clearTimeout(remembering);
  stopAnimation();
  const notice = find("notice");
  put(notice, "");
  // An address that names a section contains no view: the browser scrolls to the section.
  const section = sections.some((each) => `#${each.id}` === hash);
  try {
    if (!section && hash.length > 1) {
      const found = fromAddress(hash);
      state = found.state;
      if (found.lang) language = found.lang;
      if (found.shared) revealAll();
    }
    if (section) unfold(hash.slice(1));
  } catch (error) {
    // If the address is invalid, show the initial view.
    state = defaults(presets[START]);
    notice.bad = error instanceof Bad && error.key !== "bad.address" ? error : new Bad("bad.address");
    put(notice, say("bad.notice", { why: say(notice.bad.key, notice.bad.values) }));
  }
  setLanguage(language);
}

function setLanguage(lang) {
  language = lang;
  translate();
  document.querySelectorAll("[data-lang]").forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.lang === lang));
  });
  document.querySelectorAll("[aria-invalid]").forEach((control) => complain(control, control.bad));
  const notice = find("notice");
  if (notice.textContent) put(notice, say("bad.notice", { why: say(notice.bad.key, notice.bad.values) }));
  drawKeeping();
  remember();
}

// Redraw in another language, but keep each rejected text and its message.
function drawKeeping() {
  const refused = [...document.querySelectorAll("[aria-invalid]")].map((control) => [
    control,
    control.value,
    control.bad,
  ]);
  draw();
  refused.forEach(([control, text, bad]) => {
    const again = control.isConnected ? control : find(control.id);
    again.value = text;
    complain(again, bad);
  });
}
