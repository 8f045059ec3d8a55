"""The interactive lesson: a self-contained page, built from the files in this folder.

`build_page` builds the page on each call, which takes a few milliseconds. The page therefore never
becomes outdated, and it includes the user's tokens and rows the same way as the examples.
"""

from hotrow.lesson import times
from hotrow.lesson.excerpt import Excerpt, user_excerpt
from hotrow.lesson.location import write_page
from hotrow.lesson.page import LANGUAGES, build_page
from hotrow.lesson.times import Timing

__all__ = ["LANGUAGES", "Excerpt", "Timing", "build_page", "times", "user_excerpt", "write_page"]
