"""The memory that a step needs over its table and the optimizer's state; Linux only.

Resident memory of a process of its own: its peak during the steps (VmHWM, set back just before by
writing 5 to /proc/self/clear_refs), less what was resident before the table was made, less the
bytes of table and state. So it has the output, the gradient, what the step computes, and what is
kept beside the state from step to step (hotrow: 4 bytes a row, and the ledger); not the ids and
the output's gradient, which the caller brings. The kernels have been loaded before, by a small
table.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotrow._measure import free_memory
from hotrow.bench.batches import Batches
from hotrow.bench.kinds import build
from hotrow.bench.peers import Peer
from hotrow.bench.tables import OURS, Entry, Tables
from hotrow.bench.timing import case_of
from hotrow.bench.workload import Told, quiet

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PAGE_FLOATS = 1024
FEW = 13_000  # rows of 8 columns: as many entries as hotrow makes a table of


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def measure(workload: Tables, entry: Entry, told: Told = quiet) -> dict[str, Any]:
    """Peak extra bytes of a step, and the bytes of table and state.

    Empty for a peer that fails: the record of its times says why.
    """
    try:
        return _measure(workload, entry, told)
    except Exception:
        if entry.kind == OURS.kind:
            raise
        return {}


def _measure(workload: Tables, entry: Entry, told: Told) -> dict[str, Any]:
    case = case_of(workload, entry)
    few = build(entry.kind, replace(case, rows=FEW, columns=8, ids=256), {}, free_memory())
    train(few, Batches(FEW, 256), torch.ones(256, 8, dtype=case.dtype), 0, 3)
    del few
    gc.collect()
    batches = Batches(case.rows, case.ids, workload.zipf)
    gradient = torch.randn(case.ids, case.columns).to(case.dtype)
    before = resident("VmRSS")
    told(0.1, "table")
    peer = build(entry.kind, case, {}, free_memory())
    train(peer, batches, gradient, 0, 2)
    for state in peer.state():  # zeros that were never written to are not resident yet
        state.view(-1)[::PAGE_FLOATS].add_(0)
    steps = workload.few_before if peer.dense else workload.turn
    train(peer, batches, gradient, 2, steps)
    told(0.7, "steps")
    CLEAR.write_text("5")
    train(peer, batches, gradient, 2 + steps, steps)
    peak, held = resident("VmHWM"), peer.bytes_held()
    return {"peak_extra_bytes": peak - before - held, "table_and_state_bytes": held}


def train(peer: Peer, batches: Batches, gradient: torch.Tensor, first: int, steps: int) -> None:
    """Steps first, first + 1, ..."""
    for t in range(first, first + steps):
        peer.step(batches[t], gradient)
