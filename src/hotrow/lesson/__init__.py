"""The interactive lesson: one self-contained page, put together from the files beside this one.

It is put together when it is asked for, not kept built: a few milliseconds, no copy to hold to
its sources, and a reader's own tokens and rows go in the same way as the examples.
"""

from hotrow.lesson import times
from hotrow.lesson.excerpt import Excerpt, own_excerpt
from hotrow.lesson.location import place
from hotrow.lesson.page import LANGUAGES, page
from hotrow.lesson.times import Timing

__all__ = ["LANGUAGES", "Excerpt", "Timing", "own_excerpt", "page", "place", "times"]
