"""Compare all peers with dense training and measure their memory and times, in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hotrow.bench import equality, floor, memory
from hotrow.bench.batches import Batches
from hotrow.bench.peers import (
    PEER_TYPES,
    TASK_PARTS,
    Case,
    Peer,
    PeerType,
    estimate_bytes,
    initial_weight,
)
from hotrow.bench.percentiles import percentiles, turn_ratios
from hotrow.bench.workload import (
    HOTROW,
    PeerConfig,
    Record,
    ReportProgress,
    TableWorkload,
    ignore_progress,
)
from hotrow.inputs.text import one_line
from hotrow.verify.measure import free_memory

Turns = list[list[dict[str, float]]]  # for each turn and step of a peer: milliseconds by part
WARMUP_SHARE = 0.65  # the warm-up's share of the total time


def case_of(workload: TableWorkload, config: PeerConfig = HOTROW) -> Case:
    """Return the case for a peer: its task, optimizer and sizes."""
    return Case(
        workload.task,
        workload.optimizer,
        config.rows or workload.rows,
        workload.columns,
        config.ids or workload.ids,
        getattr(torch, workload.dtype),
        workload.device,
    )


class Measurement:
    """The measurement of one workload: its peers and their results so far."""

    def __init__(
        self,
        workload: TableWorkload,
        peer_types: Mapping[str, PeerType] = PEER_TYPES,
        report_progress: ReportProgress = ignore_progress,
    ) -> None:
        self.workload, self.peer_types = workload, peer_types
        self.report_progress = report_progress
        self.configs = {config.name: config for config in workload.peers}
        self.cases = {name: case_of(workload, config) for name, config in self.configs.items()}
        self.peers: dict[str, Peer] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.next_batch: dict[str, int] = {}
        self.batches = {
            name: Batches(case.rows, case.ids, workload.zipf_exponent)
            for name, case in self.cases.items()
        }
        most_ids = max(case.ids for case in self.cases.values())
        random = torch.Generator().manual_seed(1)
        self.gradient = torch.randn(most_ids, workload.columns, generator=random).to(
            workload.device, self.cases[HOTROW.name].dtype
        )
        self.thread_count = torch.get_num_threads()
        self.copy_speed = floor.CopySpeed(workload.device)

    def run(self) -> Record:
        """Measure all peers and return the record, without the environment.

        Raises:
            EqualityError: hotrow's rows differ from the rows after dense training.
        """
        self.prepare_peers()
        turns = self.time_rounds()
        samples = {
            name: [[sum(step.values()) for step in turn] for turn in peer_turns]
            for name, peer_turns in turns.items()
        }
        copy_speed = self.copy_speed.bytes_per_second()
        for name, peer_turns in turns.items():
            self.results[name] |= self.summarize(peer_turns)
            if name != HOTROW.name:
                ratio = turn_ratios(samples[HOTROW.name], samples[name])
                self.results[name]["hotrow_ratio"] = ratio
            self.results[name] |= self.compare_with_floor(name, copy_speed)
        workload = self.workload
        return {
            "workload": workload.name,
            "about": workload.about,
            "task": workload.task,
            "optimizer": workload.optimizer,
            "rows": workload.rows,
            "columns": workload.columns,
            "ids": workload.ids,
            "dtype": workload.dtype,
            "device": workload.device,
            "zipf_exponent": workload.zipf_exponent,
            "distinct_ids_per_step": self.distinct_ids(HOTROW.name),
            "warmup_steps": workload.warmup_steps,
            "dense_warmup_steps": workload.dense_warmup_steps,
            "rounds": workload.rounds,
            "copy_bytes_per_s": copy_speed,
            "peers": self.results,
        }

    def prepare_peers(self) -> None:
        """Prepare each peer; if a peer fails, its result contains the reason.

        Each peer's memory is estimated in advance, because much of it is allocated only when the
        peer runs a step.
        """
        budget = memory.MemoryBudget(free_memory(self.workload.device))
        references: dict[Any, Tensor] = {}
        for number, (name, config) in enumerate(self.configs.items()):
            share = WARMUP_SHARE * number / len(self.configs)
            self.report_progress(share, f"{name}: warm-up")
            sizes = {"ids": config.ids, "threads": config.threads}
            rows = self.cases[name].rows
            self.results[name] = {"rows": rows} | {k: v for k, v in sizes.items() if v}
            self.next_batch[name] = 0
            self.attempt(name, functools.partial(self.prepare, name, budget, references))

    def prepare(
        self, name: str, budget: memory.MemoryBudget, references: dict[Any, Tensor]
    ) -> None:
        """Build a peer, warm it up, compare its rows and measure its memory."""
        type_name, case = self.configs[name].type_name, self.cases[name]
        peer_type = self.peer_types[type_name]
        needed = estimate_bytes(type_name, peer_type, case, self.peers)
        budget.check(*needed)
        peer = peer_type.build(case, self.peers)
        self.peers[name], self.results[name]["label"] = peer, peer.label
        self.warm_up(name, peer, references)
        if case.device == "cpu" and memory.is_supported():
            memory.make_state_resident(peer)
            peer.zero_grad()
            peak = memory.measure_peak(functools.partial(self.run_steps, name, peer, 1))
            self.results[name]["memory"] = {
                "peak_extra_bytes": peak + peer.bookkeeping_bytes(),
                "table_and_state_bytes": peer.table_and_state_bytes(),
            }
        peer.zero_grad()  # frees memory for the other peers
        budget.reserve(*needed)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; if the peer fails, remove the peer and return None."""
        type_name = self.configs[name].type_name
        try:
            return work()
        except Exception as error:
            if type_name == HOTROW.type_name:
                raise
            self.peers.pop(name, None)
            self.results[name]["error"] = one_line(error)
            install_command = self.peer_types[type_name].install_command
            if isinstance(error, ImportError) and install_command:
                self.results[name]["install_command"] = install_command
            return None

    def warm_up(self, name: str, peer: Peer, references: dict[Any, Tensor]) -> None:
        """Run the warm-up steps, and compare the peer's rows with those of dense training."""
        workload = self.workload
        steps = workload.dense_warmup_steps if peer.is_dense else workload.warmup_steps
        if peer.is_reference:
            self.run_steps(name, peer, steps)
            return
        case, rows = self.cases[name], equality.sample_rows(self.batches[name])
        initial = peer.read(rows.to(case.device)).cpu()
        if case.task == "forward":
            table = initial_weight(case).cpu()[rows]
            comparison = equality.compare_rows(initial, table, lambda dtype: table.to(dtype))
            comparison["equal"] = torch.equal(initial, table)
            self.run_steps(name, peer, steps)
        else:
            if case.task == "gradient":
                steps = 1
            self.run_steps(name, peer, steps)
            places = rows.to(case.device)
            read = peer.read if case.task == "step" else peer.gradient
            values = read(places).cpu()

            @functools.cache
            def draw_ids() -> list[Tensor]:
                return [self.batches[name][t] for t in range(steps)]

            def train_dense(dtype: torch.dtype) -> Tensor:
                key = peer.counterpart, case, steps, dtype
                if key not in references:
                    gradient = self.gradient[: case.ids].cpu()
                    references[key] = equality.train_rows(
                        peer.counterpart, initial, rows, draw_ids(), gradient, dtype
                    )
                return references[key]

            comparison = equality.compare_rows(values, initial, train_dense)
        reference = peer.counterpart and f"torch.optim.{peer.counterpart}"
        self.results[name]["equality"] = comparison | {"reference": reference}
        if not comparison["equal"] and self.configs[name].type_name == HOTROW.type_name:
            error, allowed = comparison["max_error"], comparison["max_error_of_dense"]
            raise equality.EqualityError(
                f"{name} differs from dense training: max error {error:.3g} against "
                f"{reference or 'torch'} in float64 on {comparison['rows_compared']} rows; torch's "
                f"own {workload.dtype} error is {allowed:.3g}"
            )

    def run_steps(self, name: str, peer: Peer, count: int) -> list[dict[str, float]]:
        """Run `count` steps of one peer; for each step, return the milliseconds of each part."""
        torch.set_num_threads(self.configs[name].threads or self.thread_count)
        gradient = self.gradient[: self.cases[name].ids]
        times = []
        try:
            # Draw ids before the steps so that the drawing is not timed.
            for begin in range(0, count, 32):
                first = self.next_batch[name] + begin
                batches = [self.batches[name][first + k] for k in range(min(32, count - begin))]
                for ids in [ids.to(self.workload.device) for ids in batches]:
                    seconds = peer.step(ids, gradient)
                    times.append({part: 1e3 * value for part, value in seconds.items()})
        finally:
            torch.set_num_threads(self.thread_count)
        self.next_batch[name] += count
        return times

    def time_rounds(self) -> dict[str, Turns]:
        """Time the peers alternately (A B A B); return each peer's step times by turn."""
        workload = self.workload
        turns: dict[str, Turns] = {name: [] for name in self.peers}
        for number in range(workload.rounds):
            share = WARMUP_SHARE + (1 - WARMUP_SHARE) * number / workload.rounds
            self.report_progress(share, f"round {number + 1}")
            self.copy_speed.measure()
            for name, peer in list(self.peers.items()):
                steps = workload.dense_steps_per_turn if peer.is_dense else workload.steps_per_turn
                work = functools.partial(self.run_steps, name, peer, 1 + steps)
                times = self.attempt(name, work)
                if times is not None:
                    turns[name].append(times[1:])  # the first step has cold caches
                    peer.zero_grad()
        return {name: peer_turns for name, peer_turns in turns.items() if name in self.peers}

    def summarize(self, turns: Turns) -> dict[str, Any]:
        """Return percentiles of the step times and of the times of each part."""
        steps = [step for turn in turns for step in turn]
        summary = {"step": percentiles([sum(step.values()) for step in steps])}
        for part in TASK_PARTS[self.workload.task]:
            if part in steps[0]:
                summary[part] = percentiles([step[part] for step in steps])
        return summary

    def distinct_ids(self, name: str) -> int:
        """Return the number of distinct ids in this peer's first batch."""
        return len(torch.unique(self.batches[name][0]))

    def compare_with_floor(self, name: str, copy_speed: float) -> dict[str, Any]:
        """Return the bandwidth floor of a step, and the ratios of a peer's times to the floor."""
        case, step = self.cases[name], self.results[name]["step"]
        moved = floor.bytes_moved(
            case.task,
            case.optimizer,
            case.columns,
            case.ids,
            self.distinct_ids(name),
            case.dtype.itemsize,
        )
        floor_ms = 1e3 * moved / copy_speed
        ratio = {k.removesuffix("_ms"): float(f"{v / floor_ms:.5g}") for k, v in step.items()}
        return {"floor_bytes": moved, "floor_ms": floor_ms, "floor_ratio": ratio}
