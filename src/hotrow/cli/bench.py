"""`hotrow bench`: a training step on a table of the user's size, beside torch's optimizers."""

from __future__ import annotations

import json as _json
import math
import os
from importlib.metadata import version
from typing import Annotated

import torch
import typer

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
from hotrow.errors import HotrowError
from hotrow.inputs import files
from hotrow.inputs.text import format_size
from hotrow.lesson import times
from hotrow.verify.measure import free_memory

# A line with nothing but \b keeps the lines up to the next blank one as they are.
BENCH_HELP = f"""Measure a training step on a table of your size, hotrow beside torch's optimizers.

All train the same table on the same ids: hotrow; torch's dense optimizer by default, with
foreach=True and with fused=True; and nn.Embedding(sparse=True) with SGD, Adagrad or SparseAdam.
SparseAdam trains a different model: it skips rows without a gradient. hotrow's rows are first
compared with dense torch's. Then all take turns in one process, with the settings that are best
for torch. Times are medians, with the 20th and 80th percentile in brackets.

\\b
Examples:
  hotrow bench
  hotrow bench --rows 1_000_000 --columns 256 --ids 16384 \\\\
      --optimizer AdamW
  hotrow bench --rows 50257 --columns 768 --ids 4096 --dtype bfloat16
  hotrow bench --optimizer SGD --uniform --threads 1 --json bench.json

\\b
The ids of a batch follow Zipf's law, as words and products do: the id
of rank k is drawn with a probability proportional to 1 / k^{ZIPF_EXPONENT}.
--zipf sets another exponent, --uniform draws all ids equally often.

\\b
Exit code:
  0 measured, and hotrow's rows equal dense torch's; 1 they are not equal;
  2 input that cannot be used; 3 a fault of hotrow's own
"""
NOT_EQUAL = terminal.DIFFERENT
DTYPES = ("float32", "bfloat16", "float64")
MAX_COUNT = 2**31 - 1  # of rows, columns and ids
MAX_EXPONENT = 10.0
# Above this a one-hot matmul takes too long to be measured along with the others.
MAX_ONE_HOT_MULTIPLICATIONS = 2_000_000_000
DENSE_VALUES_PER_TURN = 100_000_000  # table values that a dense peer updates in a turn
MAX_STEPS_PER_TURN = 20


def bench_command(
    rows: Annotated[
        str, typer.Option(help="Rows of the table, as in 1_000_000.", metavar="N")
    ] = "1_000_000",
    columns: Annotated[str, typer.Option(help="Columns of the table.", metavar="N")] = "64",
    ids: Annotated[str, typer.Option(help="Ids in a batch.", metavar="N")] = "16384",
    optimizer: Annotated[
        str, typer.Option(help="The optimizer, as torch names it.", metavar="NAME")
    ] = "AdamW",
    dtype: Annotated[
        str, typer.Option(help="Of the table: float32, bfloat16 or float64.", metavar="DTYPE")
    ] = "float32",
    zipf: Annotated[
        str | None,
        typer.Option(help=f"Exponent of Zipf's law; {ZIPF_EXPONENT} by default.", metavar="X"),
    ] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="Draw ids uniformly.")] = False,
    threads: Annotated[
        str | None,
        typer.Option(help="Threads of every peer; torch's own number by default.", metavar="N"),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Also write every number into this JSON file.", metavar="FILE"),
    ] = None,
) -> None:
    """Measure, print, and exit with whether hotrow's rows equal dense torch's."""
    workload = make_workload(rows, columns, ids, optimizer, dtype, zipf, uniform)
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
        content = {"hotrow": version("hotrow"), **record}
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
) -> TableWorkload:
    """The workload of these options.

    Raises:
        HotrowError: an option cannot be used.
    """
    if dtype not in DTYPES:
        raise HotrowError(
            f"--dtype {dtype!r:.60} is none of the dtypes that are measured",
            fix=f"one of {', '.join(DTYPES)}",
        )
    if uniform and zipf is not None:
        raise HotrowError(f"--uniform and --zipf {zipf} exclude each other", fix="give one of them")
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
        zipf_exponent=None if uniform else parse_exponent(zipf),
        warmup_steps=200,
        dense_steps_per_turn=min(max(dense_steps, 1), MAX_STEPS_PER_TURN),
    )


def parse_count(option: str, text: str, most: int) -> int:
    """A whole number from 1 to `most`, with or without underscores.

    >>> parse_count("--rows", "1_000_000", MAX_COUNT), parse_count("--rows", "1000000", MAX_COUNT)
    (1000000, 1000000)
    """
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= most:
        raise HotrowError(
            f"{option} {text!r:.60} is not a whole number from 1 to {most:,}",
            fix="write it as 1000000 or 1_000_000" if most == MAX_COUNT else None,
        )
    return count


def parse_exponent(text: str | None) -> float:
    """The exponent of Zipf's law."""
    if text is None:
        return ZIPF_EXPONENT
    try:
        exponent = float(text)
    except ValueError:
        exponent = math.nan
    if not 0 < exponent <= MAX_EXPONENT:
        raise HotrowError(
            f"--zipf {text!r:.60} is not a number above 0 and up to {MAX_EXPONENT:g}",
            fix=f"write it as {ZIPF_EXPONENT}, or give --uniform",
        )
    return exponent


def check_memory(workload: TableWorkload) -> None:
    """Raise if hotrow itself does not fit into free memory."""
    case = case_of(workload)
    table_and_state, step = estimate_bytes(HOTROW.type_name, PEER_TYPES[HOTROW.type_name], case, {})
    # Output, its gradient and its copies; the odds of the rows and their count of steps.
    batch = case.ids * (4 * case.columns * case.dtype.itemsize + 64) + 24 * case.rows
    try:
        memory.MemoryBudget(free_memory()).check(table_and_state, step + batch)
    except MemoryError as error:
        raise HotrowError(
            f"--rows {case.rows:,} --columns {case.columns:,} --ids {case.ids:,} with "
            f"{case.optimizer} do not fit into free memory ({error}; table and state alone are "
            f"{format_size(table_and_state)})",
            fix="take fewer rows, columns or ids",
        ) from None


def measure(workload: TableWorkload, threads: int) -> Record:
    """The record of the workload, measured in a child process."""
    environment = describe_environment(threads)
    arguments = {
        "workload": vars(workload) | {"peers": [config.type_name for config in workload.peers]}
    }
    with terminal.show_progress() as tell:

        def report_progress(share: float, activity: str) -> None:
            tell(activity, round(100 * share), 100)

        try:
            record = run_job("hotrow.cli.bench:run_workload", arguments, threads, report_progress)
        except JobError as error:
            if not error.kind:
                raise HotrowError(
                    f"the measurement ended without a result ({error})",
                    fix="it may have run out of memory: take fewer rows, columns or ids",
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
    """Leave the times of look-up and matmul to `hotrow learn`, if both were measured."""
    timing = times.from_record(record)
    if timing is None:
        return
    try:
        times.save_times([timing])
        terminal.write_output("\n  hotrow learn shows the times of look-up and matmul in its chart")
    except (HotrowError, OSError, RuntimeError) as error:  # there is no folder for caches
        terminal.write_output(f"\n  The times are not kept for hotrow learn: {error}")
