"""Test that every row of docs/reference/compatibility.md is correct and up to date."""

import pytest

from tests.docs import compatibility
from tests.docs.compatibility import FEATURES, PARALLEL
from tests.support.exhaustive import grid

# The excluded features start processes, or compile kernels that no other test needs.
QUICK = grid(
    FEATURES,
    lambda each: each.section != PARALLEL and not each.name.startswith("`maximize`"),
)


@pytest.mark.parametrize("each", QUICK, ids=[each.name.replace("`", "") for each in FEATURES])
def test_the_row_is_correct(each):
    each.test()


def test_the_page_is_generated_from_the_list():
    assert compatibility.PAGE.read_text() == compatibility.page()
