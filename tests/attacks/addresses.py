"""Open the lesson with hostile addresses, and print "N tried, M wrong".

    python -m tests.attacks.addresses 500
    python -m tests.attacks.addresses 500 --seed 7

The page must show each address, or report that the address is invalid. It must do so within
the time limit, and must not raise an error, send a request, add markup or show a NaN. If the page
accepts an address, it rewrites the address in its own form. This form must show the same page.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Error, Page, sync_playwright

from hotrow import lesson
from tests.support.browser import BROWSER_ARGUMENTS, find_browser

MILLISECONDS = 30_000  # for one address
FAST = "speed = {products: 1e9, copies: 1e9}; showEverything()"  # replaces the measured speed
MARKUP = "<img src=x>"  # short, because messages truncate long values
NUMBERS = (
    *("0", "-0", "1", "2", "3", "7", "-1", "0.5", "1e-45", "1e38", "-1e38", "1e39", "1e-400"),
    *("999999", "50257", "1000000", "65536", "999999999999999", "9" * 400, "0x10", "1_0", "٣"),
    *("NaN", "nan", "inf", "-inf", "Infinity", "", " ", "%00", "１２", "−1"),
)
BITS = ("00000000", "80000000", "7f800000", "ff800000", "7fc00000", "ffffffff", "7f7fffff")
BITS += ("00000001", "3f800000", "c0490fdb")
WORDS = ("toString", "__proto__", "constructor", MARKUP, "\u2028", "\ud800", "词元", "a" * 9999)
CHOICES = {
    "lang": ("en", "zh-CN", "fr"),
    "table": ("A", "B", "own", "C"),
    "way": ("lookup", "product"),
    "layout": ("rows", "columns"),
    "alone": ("yes", "no"),
    "linear": ("copied", "own"),
    "rule": ("sgd", "momentum", "adam"),
    "settle": ("yes", "no"),
    "case": ("inf", "nan", "signed", "range", "low", "order"),
    "figure": ("bytes_written", "multiplications", "additions", "milliseconds"),
}
# Numbers that each field accepts; most other numbers are rejected.
RANGES = {
    **{"seed": 999_999, "pick": 0, "column": 2, "shown": 4, "learned": 100, "noun": 19},
    **{"taken": 1, "outside": 99, "times": 2000, "V": 1_000_000, "D": 4096, "N": 65_536},
    **{"single": 3, "softA": 3, "softB": 3, "place": 3, "vocabulary": 50_257},
}
REALS = {"lr": 10, "momentum": 0.99, "beta1": 0.99, "beta2": 0.99, "size": 1000, "p": 1}
LISTS = {"ids": ", ", "bag": ",", "batches": " / ", "factors": ",", "upstream": ",", "three": ","}

# Show an address, and return what is wrong with the page.
SHOW = """text => {
  const begin = performance.now();
  const markup = "script, img, iframe, object, embed, form";
  const elements = () => document.querySelectorAll(markup).length;
  const before = elements();
  const show = (hash) => {
    readAddress(new URL(hash, location.href).hash);
    showEverything();
    const texts = [...document.querySelectorAll("main, #notice")].map(part => part.innerText);
    const controls = [...document.querySelectorAll("input, select")];
    return texts + controls.map(each => `${each.value} ${Boolean(each.checked)}`).join();
  };
  const wrong = [];
  const shown = show("#" + text);
  const isRefused = find("notice").textContent !== "";
  if (!isRefused && show(addressOf(state)) !== shown) wrong.push("its own address differs");
  const odd = /.{0,40}(NaN|Infinity|undefined(?! values)|\\[object).{0,40}/.exec(shown);
  if (odd && !isRefused) wrong.push(odd[0]);  // a message may repeat the address
  for (const each of document.querySelectorAll("svg, svg *, [style]"))
    for (const {name, value} of each.attributes)
      if (/NaN|Infinity|undefined/.test(value)) wrong.push(`${each.tagName} ${name}=${value}`);
  if (elements() !== before) wrong.push("new markup");
  if ({}.polluted !== undefined) wrong.push("a changed prototype");
  const seconds = (performance.now() - begin) / 1000;
  if (seconds > 10) wrong.push(`it takes ${seconds} s`);
  return {wrong: [...new Set(wrong)].slice(0, 5), isRefused};
}"""


def addresses(seed: int) -> Iterator[str]:
    """Yield hostile addresses endlessly."""
    chance = random.Random(seed)
    names = [*CHOICES, *RANGES, *REALS, *LISTS]
    while True:
        # A few fields with mostly valid values, so that the page shows their combination.
        rate = chance.choice([0, 0, 0.1, 0.3, 0.6])
        fields = chance.sample(names, chance.choice([1, 2, 3, 6, len(names)]))
        parts = [(name, _value(name, chance, rate)) for name in fields]
        if chance.random() < rate:
            parts.append((chance.choice([*WORDS, *names]), chance.choice([*WORDS, *NUMBERS])))
        text = "&".join(
            f"{_encode(name, chance)}={_encode(value, chance)}" for name, value in parts
        )
        if chance.random() < rate / 2:
            at = chance.randrange(len(text) + 1)
            text = (
                text[:at] + chance.choice(["%", "%E0%A4%A", "#", "&", "=", "\0", "+"]) + text[at:]
            )
        yield text


def _encode(text: str, chance: random.Random) -> str:
    return quote(text, safe="", errors="replace") if chance.random() < 0.7 else text


def _value(name: str, chance: random.Random, rate: float) -> str:
    if chance.random() < rate:
        return chance.choice([*NUMBERS, *WORDS])
    if name == "table" and chance.random() < 0.5:
        height, width = chance.choice([(1, 1), (4, 5), (6, 3), (16, 8), (2, 7)])
        bits = [chance.choice(BITS) for _ in range(height * width)]
        return f"{height}x{width}.{''.join(bits)}"
    if name in CHOICES:
        return chance.choice(CHOICES[name])
    if name in RANGES:
        return str(chance.choice([1, 4, chance.randrange(RANGES[name] + 1), RANGES[name]]))
    if name in REALS:
        return chance.choice(["0", "1e-45", "0.5", f"{REALS[name]}", f"{chance.random():.3g}"])
    count = chance.choice([1, 3, 4, 6, 15, 16])
    items = NUMBERS[:12] if name in ("upstream", "three") else ("0", "1", "2", "3")
    return LISTS[name].join(chance.choice(items) for _ in range(count))


def attack(count: int, seed: int = 0) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each address, what is wrong with its page, and whether the page rejects the address."""
    lines = addresses(seed)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "page.html")
        file.write_text(lesson.build_page("en"), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=find_browser(), args=BROWSER_ARGUMENTS)
        page = browser.new_page(reduced_motion="reduce")
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: messages.append(request.url))
        for _ in range(count):
            text = next(lines)
            if page.url == "about:blank":
                page.goto(file.as_uri())
                page.evaluate(FAST)
                messages.clear()
            wrong, is_refused = _show(page, text)
            yield text, [*wrong, *messages], is_refused
            messages.clear()
        browser.close()


def _show(page: Page, text: str) -> tuple[list[str], bool]:
    try:
        # Unlike `evaluate`, this function has a time limit.
        found = page.wait_for_function(SHOW, arg=text, timeout=MILLISECONDS).json_value()
        return found["wrong"], found["isRefused"]
    except Error as error:
        page.goto("about:blank")
        return [str(error)], False


def main() -> None:
    """Open hostile addresses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong = refused = 0
    for text, problems, is_refused in attack(arguments.count, arguments.seed):
        wrong += bool(problems)
        refused += is_refused
        if problems:
            print(f"#{text[:300]!a}\n    {problems}"[:1500], file=sys.stderr, flush=True)
    print(f"addresses: {arguments.count:,} tried, {wrong} wrong ({refused:,} refused)", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
