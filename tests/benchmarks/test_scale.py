"""Test the byte formulas in docs/scale.md, and its example with one to three processes."""

import contextlib
import importlib
import io
import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hotrow
from hotrow.distributed import look_up, replicate, shard
from tests.support.exhaustive import exhaustive, grid
from tests.support.paths import ROOT
from tests.support.ranks import RankError, mesh_of_all, rank_processes

EXAMPLES = ROOT / "examples"
SIZES = (50, 3), (7, 2)  # V, D


# --- Bytes --------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(rank):
    """Record how many bytes this rank sends, with one entry per collective."""
    sent = []
    exchange, broadcast, reduce = dist.all_to_all_single, dist.broadcast, dist.all_reduce

    def counting_exchange(output, input, into=None, out=None, group=None):
        count = dist.get_world_size(group)
        out = out or [len(input) // count] * count
        row = input[:1].numel() * input.element_size() if len(input) else 0
        sent.append(sum(n for to, n in enumerate(out) if to != rank) * row)
        return exchange(output, input, into, out, group=group)

    def counting_broadcast(tensor, group=None, group_src=None, async_op=False):
        if group_src == rank:
            sent.append(tensor.nbytes * (dist.get_world_size(group) - 1))
        return broadcast(tensor, group=group, group_src=group_src, async_op=async_op)

    def counting_reduce(tensor, *arguments, **options):
        sent.append(tensor.nbytes)
        return reduce(tensor, *arguments, **options)

    dist.all_to_all_single, dist.broadcast = counting_exchange, counting_broadcast
    dist.all_reduce = counting_reduce
    try:
        yield sent
    finally:
        dist.all_to_all_single, dist.broadcast, dist.all_reduce = exchange, broadcast, reduce


def bytes_of_step(mode, count, together=False):
    """Return how many bytes this rank sends in a step with two tables, and the rank's ids."""
    rank = dist.get_rank()
    model = hotrow.convert(nn.ModuleList([nn.Embedding(*size) for size in SIZES]))
    {"shard": shard, "replicate": replicate}[mode](model, mesh_of_all(count))
    optimizer = hotrow.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    ids = [torch.randint(rows, (20 + 9 * rank,)) for rows, _ in SIZES]
    with counted(rank) as sent:
        pairs = list(zip(model, ids, strict=True))
        outputs = look_up(*pairs) if together else [layer(each) for layer, each in pairs]
        sum(each.sum() for each in outputs).backward()
        optimizer.step()
    return sum(sent), ids


def distinct(ids, rows, count, rank):
    """Return the number of distinct ids, and how many of their rows other ranks store."""
    found = ids.unique()
    owners = found // -(-rows // count)
    return len(found), int((owners != rank).sum())


@exhaustive
@pytest.mark.parametrize(
    ("count", "together"),
    list(itertools.product((1, 2, 3), (False, True))),
)
def test_bytes_of_a_sharded_step_match_the_formula(count, together):
    found = rank_processes(count).run(bytes_of_step, "shard", count, together)
    exchanges = 1 if together else len(SIZES)
    expected = count * (exchanges * 32 + 17 * len(SIZES)) * (count - 1)
    if together:
        expected += count * 8 * len(SIZES) * (count - 1)
    for rank, (_, every) in enumerate(found):
        for ids, (rows, columns) in zip(every, SIZES, strict=True):
            _, others = distinct(ids, rows, count, rank)
            expected += others * (4 + 2 * 4 * columns)
    assert sum(sent for sent, _ in found) == expected


@exhaustive
@pytest.mark.parametrize("count", grid((1, 2, 3), (3).__eq__))
def test_bytes_of_a_replicated_step_match_the_formula(count):
    found = rank_processes(count).run(bytes_of_step, "replicate", count)
    expected = 0
    for _, every in found:
        for ids, (_, columns) in zip(every, SIZES, strict=True):
            expected += (count - 1) * (48 + len(ids.unique()) * (4 + 4 * columns))
    assert sum(sent for sent, _ in found) == expected


def test_page_and_chart_match_the_record(tmp_path):
    scale = importlib.import_module("benchmarks.scale")
    record = json.loads(scale.RECORD.read_text())
    scale.write_page(record, tmp_path)
    for name in ("scale.md", "scale.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), name
    assert "| sharded | 2 | 1,614,862 | 1,621,184 | 1.004 | 512,000,000 | 316x |" in scale.page(
        record
    )
    for each in record["network"]:
        assert each["counted_bytes_per_step"] < 1.5 * each["formula_bytes_per_step"]
    assert record["disk"][-1]["table_bytes"] > 20e9
    assert record["disk"][-1]["peak_resident_bytes"] < 2e9


# --- Training in one, two and three processes -----------------------------------------------------

SMALL = "--steps=40", "--rows=2000", "--width=8", "--batch=130", "--lr=0.02"
TEXT = "--steps=20", "--rows=2048", "--width=8", "--batch=7", "--lr=0.01"


def example(name, words):
    """Run an example on this rank; return the lines that it prints."""
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert importlib.import_module(name).main(list(words)) == 0
    sys.path.remove(str(EXAMPLES))
    return output.getvalue().splitlines()


def run(count, name, *words):
    """Run an example on all ranks; return the first rank's output without its first line."""
    (first, *lines), *others = rank_processes(count).run(example, name, words)
    assert re.match(rf"processes: {count}, ", first)
    assert not any(others)
    return lines


@exhaustive
def test_two_processes_resumed_by_three_print_the_same_as_one(tmp_path):
    alone = run(1, "sharded", *SMALL)
    folder = str(tmp_path / "checkpoint")
    half = run(2, "sharded", *SMALL, "--until=20", "--save", folder)
    rest = run(3, "sharded", *SMALL, "--begin=20", "--load", folder)
    trained = [text for text in alone if text.startswith("step")]
    assert len(set(trained)) == 10
    assert half[:5] == trained[:5]
    assert rest == alone[5:]


@exhaustive
def test_an_example_does_not_overwrite_a_checkpoint(tmp_path):
    words = *SMALL, "--until=1", "--save", str(tmp_path / "checkpoint")
    run(2, "sharded", *words)
    saved = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert saved
    with pytest.raises(RankError, match="already exists"):
        run(2, "sharded", *words)
    assert saved == {path: path.read_bytes() for path in saved}


@exhaustive
def test_a_replicated_model_prints_the_same_as_one_process():
    alone = run(1, "replicated", *TEXT)
    assert run(3, "replicated", *TEXT) == alone
    assert len(set(alone)) == 11


@exhaustive
def test_torchrun_prints_the_same(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLES / "sharded.py"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == run(1, "sharded", *SMALL)
