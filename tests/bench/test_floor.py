"""Test the bandwidth floor: the bytes that a step must move, and the copy speed."""

from hotrow import optim
from hotrow.bench import floor


def test_bytes_that_a_step_must_move():
    # 3 ids, 2 of them distinct; each row has 4 values of 4 bytes.
    assert floor.bytes_moved("forward", None, 4, 3, 2, 4) == 16 * (2 + 3)
    assert floor.bytes_moved("gradient", None, 4, 3, 2, 4) == 16 * (2 + 3 + 3 + 2)
    assert floor.bytes_moved("step", "SGD", 4, 3, 2, 4) == 16 * (2 * 2 + 3 + 3)
    assert floor.bytes_moved("step", "AdamW", 4, 3, 2, 2) == 8 * (2 * 2 * 3 + 3 + 3)
    counts = {name: floor.state_count(name) for name in optim.__all__}
    assert counts == {
        "SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "Adamax": 2,
        "NAdam": 2, "RAdam": 2, "Adadelta": 2, "Rprop": 2,
    }  # fmt: skip


def test_copy_speed_counts_bytes_read_and_written(monkeypatch):
    monkeypatch.setattr(floor, "COPY_BYTES", 1000)
    copy_speed = floor.CopySpeed()
    copy_speed.measure(3)
    assert len(copy_speed.seconds) == 3
    copy_speed.seconds = [4.0, 1.0, 2.0]
    assert copy_speed.bytes_per_second() == 1000.0
