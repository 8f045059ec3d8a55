"""Simulated failures of disks and ranks lose nothing, and the benchmark would detect a loss."""

import os
import random
import subprocess
import sys

import pytest

from benchmarks import durability
from hotrow.disk import store
from hotrow.disk.journal import WHOLE_FILE
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT


def lost(attack, count, **options):
    results = list(attack(count, random.Random(count), **options))
    assert len(results) == count
    return sum(results)


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=exhaustive)])
def test_killed_processes_lose_no_save(count):
    assert not lost(durability.kills, count)


@exhaustive
def test_flipped_bits_are_found():
    assert not lost(durability.flips, 100)
    assert lost(durability.flips, 20, verify=False) > 5


@exhaustive
def test_full_disks_lose_no_save():
    namespace = [] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    command = [*namespace, sys.executable, "-m", "benchmarks.durability", "full", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "full: 20 tried, 0 lost\n", done.stderr


@exhaustive
def test_no_rank_waits_for_a_killed_rank():
    assert not lost(durability.ranks, 4)


@exhaustive
def test_the_attack_notices_saves_without_a_journal(monkeypatch):
    def write_in_place(folder, layouts, writes, complete):
        writes = list(writes)
        for layout in layouts:
            with folder.open(layout.file_name, "r+b") as file:
                file.truncate(layout.file_bytes)
        for name, offset, data in writes:
            with folder.open(name, "r+b") as file:
                if offset == WHOLE_FILE:
                    file.truncate(0)
                else:
                    file.seek(offset)
                file.write(data)
        complete()

    monkeypatch.setattr(store, "commit", write_in_place)
    assert lost(durability.kills, 60)
