"""`hotrow bench`: benchmark hotrow and torch on a training step."""

from __future__ import annotations

import json as _json
import math
import os
from typing import Annotated

import torch
import typer

from hotrow import __version__
from hotrow.bench import memory
from hotrow.bench.batches import ZIPF_EXPONENT
from hotrow.bench.environment import describe_environment
from hotrow.bench.equality import EqualityError
from hotrow.bench.measurement import Measurement, case_of
from hotrow.bench.peers import FUSED_OPTIMIZERS, PEER_TYPES, estimate_bytes
from hotrow.bench.process import JobError, run_job
from hotrow.bench.workload import HOTROW, PeerConfig, Record, ReportProgress, TableWorkload
from hotrow.cli import bench_report, terminal
from hotrow.cli.optimizer_options import parse_optimizer
from hotrow.cli.options import Device, check_device
from hotrow.errors import HotrowError
from hotrow.inputs import files
from hotrow.inputs.text import format_size
from hotrow.lesson import times
from hotrow.verify.measure import free_memory

# A line with only \b keeps the line breaks of the following paragraph.
BENCH_HELP = f"""Benchmark hotrow and torch on a training step of a single table.

The command measures hotrow, torch's dense optimizer (default, foreach=True and fused=True), and
nn.Embedding(sparse=True) with SGD, Adagrad or SparseAdam, on the same table and ids. SparseAdam
trains a different model: it skips rows without a gradient. Before timing starts, the command
compares hotrow's rows with those of dense training. Times are medians, and ranges are from the 20th
to the 80th percentile.

\b
Examples:
  hotrow bench
  hotrow bench --rows 1_000_000 --columns 256 --ids 16384 \\
      --optimizer AdamW
  hotrow bench --rows 50257 --columns 768 --ids 4096 --dtype bfloat16
  hotrow bench --optimizer SGD --uniform --threads 1 --json bench.json

\b
The ids in a batch follow Zipf's law, as word frequencies do. The id
of rank k is drawn with a probability proportional to 1 / k^{ZIPF_EXPONENT}. --zipf sets
another exponent; --uniform draws all ids with equal probability.

\b
Exit code:
  0 measured and equal to dense training, 1 not equal, 2 invalid input,
  3 internal error
"""
NOT_EQUAL = terminal.DIFFERENT
DTYPES = ("float32", "bfloat16", "float64")
MAX_COUNT = 2**31 - 1  # upper limit for --rows, --columns and --ids
MAX_EXPONENT = 10.0
# With more multiplications than this, the one-hot matmul takes too long to measure.
MAX_ONE_HOT_MULTIPLICATIONS = 2_000_000_000
DENSE_VALUES_PER_TURN = 100_000_000  # table values that a dense optimizer updates per turn
MAX_STEPS_PER_TURN = 20


def bench_command(
    rows: Annotated[
        str, typer.Option(help="Number of rows in the table.", metavar="N")
    ] = "1_000_000",
    columns: Annotated[
        str, typer.Option(help="Number of columns in the table.", metavar="N")
    ] = "64",
    ids: Annotated[str, typer.Option(help="Number of ids per batch.", metavar="N")] = "16384",
    optimizer: Annotated[
        str, typer.Option(help="Name of the optimizer, as in torch.optim.", metavar="NAME")
    ] = "AdamW",
    dtype: Annotated[
        str, typer.Option(help="Dtype: float32, bfloat16 or float64.", metavar="DTYPE")
    ] = "float32",
    zipf: Annotated[
        str | None,
        typer.Option(help=f"Exponent of Zipf's law.  [default: {ZIPF_EXPONENT}]", metavar="X"),
    ] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="Draw ids uniformly.")] = False,
    threads: Annotated[
        str | None,
        typer.Option(help="Number of threads; by default, torch chooses.", metavar="N"),
    ] = None,
    device: Device = "cpu",
    json: Annotated[
        str | None,
        typer.Option(help="Also write all results to this file as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Run the benchmark and print a report; exit with 1 if hotrow differs from dense training."""
    check_device(device)
    workload = make_workload(rows, columns, ids, optimizer, dtype, zipf, uniform, device)
    thread_count = (
        torch.get_num_threads()
        if threads is None
        else parse_count("--threads", threads, os.cpu_count() or 1)
    )
    if json is not None:
        files.check_writable(json)
    check_memory(workload)
    record = measure(workload, thread_count)
    text = terminal.render(lambda console: bench_report.print_record(record, console))
    terminal.write_output(text)
    if json is not None:
        content = {"hotrow": __version__, **record}
        files.write_text(json, _json.dumps(content, indent=2, allow_nan=False) + "\n")
    keep_times(record)


def make_workload(
    rows: str,
    columns: str,
    ids: str,
    optimizer: str,
    dtype: str,
    zipf: str | None,
    uniform: bool,
    device: str = "cpu",
) -> TableWorkload:
    """Return the workload that these options describe.

    Raises:
        HotrowError: an option is invalid.
    """
    if dtype not in DTYPES:
        raise HotrowError(
            f"--dtype {dtype!r:.60} is not supported",
            fix=f"choose one of {', '.join(DTYPES)}",
        )
    if uniform and zipf is not None:
        raise HotrowError(
            f"--uniform and --zipf {zipf} cannot be combined", fix="use only one of the two"
        )
    name = parse_optimizer(optimizer)
    row_count, column_count, id_count = (
        parse_count(option, text, MAX_COUNT)
        for option, text in (("--rows", rows), ("--columns", columns), ("--ids", ids))
    )
    peers = [HOTROW]
    if name in FUSED_OPTIMIZERS:
        peers += [PeerConfig("torch sparse"), PeerConfig("torch fused")]
    peers += [PeerConfig("torch foreach"), PeerConfig("torch default")]
    if row_count * column_count * id_count <= MAX_ONE_HOT_MULTIPLICATIONS:
        peers.append(PeerConfig("one-hot matmul"))
    dense_steps = DENSE_VALUES_PER_TURN // (row_count * column_count)
    return TableWorkload(
        "bench",
        "a training step",
        name,
        row_count,
        column_count,
        id_count,
        tuple(peers),
        dtype=dtype,
        device=device,
        zipf_exponent=None if uniform else parse_exponent(zipf),
        warmup_steps=200,
        dense_steps_per_turn=min(max(dense_steps, 1), MAX_STEPS_PER_TURN),
    )


def parse_count(option: str, text: str, most: int) -> int:
    """Parse an integer from 1 to `most`, with or without underscores.

    >>> parse_count("--rows", "1_000_000", MAX_COUNT), parse_count("--rows", "1000000", MAX_COUNT)
    (1000000, 1000000)
    """
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= most:
        raise HotrowError(
            f"{option} {text!r:.60} is not an integer from 1 to {most:,}",
            fix="write it as 1000000 or 1_000_000" if most == MAX_COUNT else None,
        )
    return count


def parse_exponent(text: str | None) -> float:
    """Parse the exponent of Zipf's law."""
    if text is None:
        return ZIPF_EXPONENT
    try:
        exponent = float(text)
    except ValueError:
        exponent = math.nan
    if not 0 < exponent <= MAX_EXPONENT:
        raise HotrowError(
            f"--zipf {text!r:.60} is not a number greater than 0 and at most {MAX_EXPONENT:g}",
            fix=f"use a number such as {ZIPF_EXPONENT}, or --uniform",
        )
    return exponent


def check_memory(workload: TableWorkload) -> None:
    """Raise HotrowError if training with hotrow needs more memory than is free."""
    case = case_of(workload)
    table_and_state, step = estimate_bytes(HOTROW.type_name, PEER_TYPES[HOTROW.type_name], case, {})
    # Each id needs memory for its output, its gradient and copies of both.
    # Each row needs memory for its probability and last step.
    batch = case.ids * (4 * case.columns * case.dtype.itemsize + 64) + 24 * case.rows
    try:
        memory.MemoryBudget(free_memory(case.device)).check(table_and_state, step + batch)
    except MemoryError as error:
        raise HotrowError(
            f"--rows {case.rows:,} --columns {case.columns:,} --ids {case.ids:,} with "
            f"{case.optimizer} do not fit in free memory ({error}; the table and state alone need "
            f"{format_size(table_and_state)})",
            fix="use fewer rows, columns or ids",
        ) from None


def measure(workload: TableWorkload, threads: int) -> Record:
    """Measure the workload in a child process and return its record."""
    environment = describe_environment(threads)
    arguments = {
        "workload": vars(workload) | {"peers": [config.type_name for config in workload.peers]}
    }
    with terminal.show_progress() as show:

        def report_progress(share: float, activity: str) -> None:
            show(activity, round(100 * share), 100)

        try:
            record = run_job("hotrow.cli.bench:run_workload", arguments, threads, report_progress)
        except JobError as error:
            if not error.kind:
                raise HotrowError(
                    f"the measurement ended without a result ({error})",
                    fix="use fewer rows, columns or ids; the process may have run out of memory",
                ) from None
            if error.kind != EqualityError.__name__:
                raise
            terminal.write_output(f"NOT equal: {str(error).partition(': ')[2]}")
            raise typer.Exit(NOT_EQUAL) from None
    return record | {"environment": environment}


def run_workload(workload: Record, report_progress: ReportProgress) -> Record:
    """Measure a workload in this process."""
    peers = tuple(PeerConfig(type_name) for type_name in workload["peers"])
    table_workload = TableWorkload(**workload | {"peers": peers})
    return Measurement(table_workload, report_progress=report_progress).run()


def keep_times(record: Record) -> None:
    """Save the lookup and matmul times for `hotrow learn`, if both were measured."""
    timing = times.from_record(record)
    if timing is None:
        return
    try:
        times.save_times([timing])
        terminal.write_output("\n  hotrow learn now charts these lookup and matmul times")
    except (HotrowError, OSError, RuntimeError) as error:  # no cache folder
        terminal.write_output(f"\n  The times were not saved for hotrow learn: {error}")
