"""Settings for the benchmark tests: one thread, and small copies to measure the copy speed."""

import pytest
import torch

from hotrow.bench import floor


@pytest.fixture(scope="module", autouse=True)
def _small_measurements():
    """Use one thread, and measure the copy speed with small copies, because the tables are tiny."""
    threads, size = torch.get_num_threads(), floor.COPY_BYTES
    torch.set_num_threads(1)
    floor.COPY_BYTES = 1 << 20
    yield
    torch.set_num_threads(threads)
    floor.COPY_BYTES = size
