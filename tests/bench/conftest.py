"""Small tables, one thread, and a small copy for the bandwidth."""

import pytest
import torch

from hotrow.bench import floor


@pytest.fixture(scope="module", autouse=True)
def _small_measurements():
    """Threads that wait for each other are of no use to tables this small."""
    threads, size = torch.get_num_threads(), floor.COPY_BYTES
    torch.set_num_threads(1)
    floor.COPY_BYTES = 1 << 20
    yield
    torch.set_num_threads(threads)
    floor.COPY_BYTES = size
