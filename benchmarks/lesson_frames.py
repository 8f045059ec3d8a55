"""Count the frames that the lesson page draws while the vocabulary slider moves.

python -m benchmarks.lesson_frames

The test environment has the browser driver, and `make test` installs Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from hotrow import lesson

SECONDS = 6.0
REFRESH = 60  # frames per second of a headless browser
CASES = [  # name, script that answers the page's questions, whether to drag
    ("idle", "revealAll()", False),
    ("drag V", "revealAll()", True),
    ("drag V, folds open", "showEverything()", True),
]
RECORD_FRAMES = """() => {
window.frames_ms = [];
const record = (now) => { window.frames_ms.push(now); requestAnimationFrame(record) };
requestAnimationFrame(record);
}"""


def count_frames(page: Page, seconds: float, drag: bool) -> tuple[float, float, int]:
    """Return frames per second, the longest gap in ms, and the number of slider values seen."""
    slider = page.locator("#waste-slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box is not None
    left, right, y = box["x"] + 12, box["x"] + box["width"] - 12, box["y"] + box["height"] / 2
    page.mouse.move(left, y)
    page.mouse.down()
    seen = set()
    page.evaluate(RECORD_FRAMES)
    start = time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        there_and_back = abs(passed % 2 - 1)  # each direction takes a second
        page.mouse.move(left + (right - left) * (1 - there_and_back) * drag, y)
        seen.add(slider.input_value())
        time.sleep(1 / REFRESH)
    times = page.evaluate("window.frames_ms")
    page.mouse.up()
    page.reload()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return 1000 * len(gaps) / (times[-1] - times[0]), max(gaps), len(seen)


def main() -> int:
    """Print the frames per second while V is dragged, and while the page is idle."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("Chromium is missing: run `make test`, or install it", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "lesson.html"
        path.write_text(lesson.build_page("en"), encoding="utf-8")
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(path.as_uri())
        for name, show, drag in CASES:
            page.evaluate(show)
            rate, gap, values = count_frames(page, SECONDS, drag)
            print(
                f"{name:<20} {rate:5.1f} frames per second; longest gap {gap:4.0f} ms; "
                f"slider values: {values}"
            )
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
