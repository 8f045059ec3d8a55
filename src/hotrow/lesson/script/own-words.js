// The reader's own sentence on the first screen. Its distinct words become a vocabulary: each new word
// gets the next id and a row of random numbers, those of `torch.manual_seed(123)`. The last row is for
// all other words, so one row is never looked up.

const OWN = { seed: 123, columns: 5 };
const UNKNOWN = "<unk>";

// Split a text into words with the browser's rules, which know words in Chinese, too.
function readWords(text) {
  const parts = [...new Intl.Segmenter(language, { granularity: "word" }).segment(text.normalize("NFC"))];
  const words = parts.filter((part) => part.isWordLike).map((part) => part.segment);
  if (!words.length) throw new Bad("bad.words");
  const most = LIMITS.rows - 1;
  if (words.length > most) throw new Bad("bad.crowd", { n: words.length, most });
  const long = words.find((word) => !isWord(word));
  if (long !== undefined) throw new Bad("bad.word", { text: clip(long), most: LIMITS.letters });
  return words;
}

function sentenceState(words) {
  const tokens = [...new Set(words), UNKNOWN];
  const rows = split(normals(OWN.seed, tokens.length * OWN.columns), OWN.columns);
  const start = defaults(wordTable(rows, tokens));
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
