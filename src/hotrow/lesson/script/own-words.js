// The reader's own sentence on the first screen. Its distinct words become a vocabulary: each new word
// gets the next id and a row of random numbers, those of `torch.manual_seed(123)`.

const OWN = { seed: 123, columns: 5 };

// Split a text into words with the browser's rules, which know words in Chinese, too.
function readWords(text) {
  const parts = [...new Intl.Segmenter(language, { granularity: "word" }).segment(text.normalize("NFC"))];
  const words = parts.filter((part) => part.isWordLike).map((part) => part.segment);
  if (!words.length) throw new Bad("bad.words");
  if (words.length > LIMITS.ids) throw new Bad("bad.crowd", { n: words.length, most: LIMITS.ids });
  const long = words.find((word) => !isWord(word));
  if (long !== undefined) throw new Bad("bad.word", { text: clip(long), most: LIMITS.letters });
  return words;
}

function sentenceState(words) {
  const tokens = [...new Set(words)];
  const rows = split(normals(OWN.seed, tokens.length * OWN.columns), OWN.columns);
  const start = defaults({ ...plainTable(rows), tokens });
  return fitted({ ...start, way: state.way, ids: words.map((word) => tokens.indexOf(word)) }, start);
}

// Show the current sentence in the field, but don't touch a text that the reader is typing.
function showWords({ table, ids }) {
  const input = find("words");
  if (input === typing) return;
  const tokens = isExcerpt(table) ? null : tokensOf(table);
  input.value = tokens ? placesOf(table, ids).map((k) => tokens[k]).join(" ") : "";
  forgive(input);
}

find("words").addEventListener("change", ({ target }) =>
  attempt(target, () => {
    state = sentenceState(readWords(target.value));
    show(target);
    travel();
  }),
);
