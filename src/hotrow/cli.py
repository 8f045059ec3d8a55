"""The command line: arguments in, a report and an exit code out."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import hotrow
from hotrow import _examples, files, loading, report, terminal
from hotrow._compare import Comparison, compare
from hotrow._sameness import SCALES, Batches, measure
from hotrow._saved import Saved, saved
from hotrow.cli_bench import BENCH, bench_command
from hotrow.cli_learn import LEARN, learn_command
from hotrow.errors import HotrowError
from hotrow.options import optimizer_name, parse_options, parse_scales
from hotrow.text import printable

EQUAL, DIFFERENT, UNUSABLE, BROKEN = 0, 1, 2, 3
_PATIENCE = 2.0  # seconds before progress is shown

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

# A line with nothing but \b keeps the lines up to the next blank one as they are.
_COMPARE = """Multiply by the one-hot and look the rows up; say whether they are the same.

Both ways run forward and backward on the same table and ids, every value is compared, and what
each way cost is printed. Without --table: the lesson's 4 x 5 table, then a random one of
GPT-2's size.

With MODEL, a whole model is run, as it is and as hotrow.convert makes it: what became a look-up,
what was left and why, whether outputs and gradients are the same, and what is saved. MODEL is
module:function, and the function, called without arguments, returns the model. The inputs are a
tensor, a tuple of arguments, or a dict of keyword arguments.

\b
Examples:
  hotrow compare
  hotrow compare --table model.safetensors --tokenizer tokenizer.json \\
      --text "the same numbers"
  hotrow compare --table model.safetensors --tensor wte.weight \\
      --ids 5,9,5 --html report.html
  hotrow compare package.models:build --inputs package.models:batch
  hotrow compare models:build --inputs inputs.pt --seed 1
  hotrow compare models:build --inputs inputs.pt --to matmul

\b
Exit code:
  0 equal, 1 not equal, 2 input that cannot be used, 3 a fault of hotrow's own
"""

_CHECK = """Train a table with torch.optim and with hotrow.optim; say whether the step is the same.

The same ids and gradients train it three times: by torch.optim in float64, which is the truth, by
torch.optim in float32, and by hotrow.optim in float32 on touched rows only. It is the same step
if hotrow ends no further from the truth than torch in float32 does, plus 2 ulp: at each scale of
the gradients, with rows that are idle for thousands of steps and rows that are never touched,
under a learning rate that warms up and falls again.

\b
Examples:
  hotrow check --optimizer AdamW
  hotrow check --optimizer AdamW --set weight_decay=0.1 \\
      --set betas=0.8,0.95 --set amsgrad=true
  hotrow check --optimizer SGD --set momentum=0.9 --set nesterov=true \\
      --steps 500 --scales 1,1e-6

\b
Optimizers:
  Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop,
  Rprop, SGD; each takes the options of torch's constructor.

\b
Exit code:
  0 the same step, 1 not, 2 input that cannot be used, 3 a fault of
  hotrow's own
"""


@dataclass(frozen=True)
class _Source:
    """Where the ids come from: the option that says so, and the text or the ids themselves."""

    option: str
    content: str
    is_text: bool


def _source(
    text: str | None, text_file: str | None, ids: str | None, ids_file: str | None
) -> _Source | None:
    options = {"--text": text, "--text-file": text_file, "--ids": ids, "--ids-file": ids_file}
    given = [(option, value) for option, value in options.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(option for option, _ in given)
        raise HotrowError(f"{names} were given, but the ids come from one of them", fix="give one")
    option, value = given[0]
    content = files.read_text(value) if option.endswith("-file") else value
    return _Source(option, content, option.startswith("--text"))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotrow {hotrow.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """A linear layer over one-hot input is a row look-up: the same numbers, none of the zeros."""


@app.command("compare", help=_COMPARE, short_help="Is the look-up the same as the matmul?")
def compare_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A model to compare, as module:function.", metavar="MODEL"),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="What the model is called with: module:function, a .pt file of tensors, "
            "or a .safetensors file.",
            metavar="INPUTS",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the model's random numbers; 0 unless given.", min=0, metavar="N"),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="How the model is converted: lookup, or matmul for the other way."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="A safetensors file with the table.", metavar="FILE")
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(
            help="Its name in the file; may be left out if only one qualifies.", metavar="NAME"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, for the text.", metavar="FILE")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to look up.", metavar="TEXT")] = None,
    text_file: Annotated[
        str | None, typer.Option(help="A UTF-8 file with it; - for standard input.", metavar="FILE")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="The ids to look up, as in 5,9,5.", metavar="IDS")
    ] = None,
    ids_file: Annotated[
        str | None,
        typer.Option(help="A text file with them; - for standard input.", metavar="FILE"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory that the dense way may take, as in 500MB or 2GiB; "
            "half of what is free unless given.",
            metavar="SIZE",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    html: Annotated[
        str | None,
        typer.Option(help="Also write a self-contained page with figures.", metavar="FILE"),
    ] = None,
) -> None:
    """Compare, print, and exit with the verdict."""
    if any(each is not None for each in (model, inputs, seed, to)):
        given = {
            "--table": table,
            "--tensor": tensor,
            "--tokenizer": tokenizer,
            "--text": text,
            "--text-file": text_file,
            "--ids": ids,
            "--ids-file": ids_file,
            "--budget": budget,
            "--html": html,
        }
        others = [option for option, value in given.items() if value is not None]
        found = _compare_model(context, model, inputs, seed, to, others)
        terminal.put(report.saved_json(found) if json else str(found))
        raise typer.Exit(EQUAL if found else DIFFERENT)
    if html is not None:
        files.check_writable(html)
    limit = None if budget is None else parse_size(budget)
    source = _source(text, text_file, ids, ids_file)
    if table is not None:
        comparisons = [_compare_file(table, tensor, tokenizer, source, limit)]
    else:
        needy = [
            option
            for option, value in (
                (source and source.option, source),
                ("--tensor", tensor),
                ("--tokenizer", tokenizer),
            )
            if value is not None
        ]
        if needy:
            raise HotrowError(f"{needy[0]} needs a table", fix="name its file with --table")
        comparisons = [_compare_example(example, limit) for example in _examples.ALL]
    if html is not None:
        files.write_text(html, report.to_html(comparisons))
    terminal.put(report.to_json(comparisons) if json else _readable(comparisons, html))
    raise typer.Exit(EQUAL if all(comparisons) else DIFFERENT)


@app.command("check", help=_CHECK, short_help="Is the optimizer's step the same as torch's?")
def check_command(
    optimizer: Annotated[
        str | None, typer.Option(help="The optimizer, as torch names it.", metavar="NAME")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An option of its constructor; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 2500,
    rows: Annotated[int, typer.Option(help="Rows of the table.", min=4)] = 300,
    columns: Annotated[int, typer.Option(help="Columns of the table.", min=1)] = 19,
    ids: Annotated[int, typer.Option(help="Ids of each step; Zipf.", min=1)] = 12,
    scales: Annotated[
        str, typer.Option(help="Scales of the gradients, separated by commas.", metavar="SCALES")
    ] = ",".join(f"{scale:g}" for scale in SCALES),
    seed: Annotated[int, typer.Option(help="Of the table, ids and gradients.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure, print, and exit with the verdict."""
    if optimizer is None:
        raise HotrowError(
            "check needs an optimizer", fix="name it, as in hotrow check --optimizer AdamW"
        )
    name = optimizer_name(optimizer)
    given, wanted = parse_options(name, options or []), parse_scales(scales)
    with _progress() as tell:
        tell("drawing the ids", 0, 1)
        batches = Batches(steps=steps, rows=rows, columns=columns, ids=ids, seed=seed)
        found = measure(name, given, batches, scales=wanted, progress=tell)
    if json:
        terminal.put(report.sameness_json(found))
    else:
        terminal.put(terminal.captured(lambda console: report.print_sameness(found, console)))
    raise typer.Exit(EQUAL if found else DIFFERENT)


app.command("bench", help=BENCH, short_help="What does a step cost, beside the peers?")(
    bench_command
)
app.command("learn", help=LEARN, short_help="The lesson: an embedding, to see and to change.")(
    learn_command
)


def _readable(comparisons: list[Comparison], html: str | None) -> str:
    """The report as text, with the terminal's colours if there is one."""

    def show(console: Console) -> None:
        for comparison in comparisons:
            report.print_report(comparison, console)
        if html is not None:
            where = f"The page with the figures is in {printable(html)}"
            console.print(where, markup=False, soft_wrap=True)

    return terminal.captured(show)


def _compare_example(example: _examples.Example, limit: int | None) -> Comparison:
    with _progress() as tell:
        tell("making the table", 0, 1)
        table = example.table()
        return compare(table, example.ids, title=example.title, budget=limit, progress=tell)


def _compare_file(
    table: str,
    tensor: str | None,
    tokenizer: str | None,
    source: _Source | None,
    limit: int | None,
) -> Comparison:
    if source is None:
        raise HotrowError(
            "a table alone has nothing to look up",
            fix="give one of --text, --text-file, --ids, --ids-file",
        )
    if source.is_text and tokenizer is None:
        raise HotrowError(f"{source.option} needs a tokenizer", fix="name it with --tokenizer")
    with _progress() as tell:
        tell("reading", 0, 1)
        name, values = files.read_table(table, tensor)
        reader = None
        if tokenizer is not None:
            reader = files.read_tokenizer(tokenizer, len(values), f"the table {name}")
        texts: tuple[str, ...] | None = None
        if source.is_text and reader is not None:
            tokens = files.tokenize(reader, source.content)
            ids, texts = tokens.ids, tokens.texts
        else:
            ids = files.parse_ids(source.content, source.option)
            if reader is not None:
                texts = files.token_texts(reader, ids)
        title = f"{name} in {Path(table).name}"
        return compare(values, ids, tokens=texts, title=title, budget=limit, progress=tell)


def _compare_model(
    context: typer.Context,
    model: str | None,
    inputs: str | None,
    seed: int | None,
    to: str | None,
    others: list[str],
) -> Saved:
    if model is None:
        named = (("--inputs", inputs), ("--seed", seed), ("--to", to))
        needy = next(name for name, value in named if value is not None)
        raise HotrowError(
            f"{needy} needs a model",
            fix="name it first, as in hotrow compare models:build --inputs models:batch",
        )
    if not loading.is_name(model):
        context.fail(f"Got unexpected extra argument ({model}); a model is module:function")
    if others:
        names = " and ".join(others)
        raise HotrowError(
            f"{names} {'is' if len(others) == 1 else 'are'} for comparing a table, and {model} is "
            "a model",
            fix="give one or the other",
        )
    if inputs is None:
        raise HotrowError(
            f"{model} alone has nothing to run on",
            fix="give --inputs, as module:function, a .pt or a .safetensors file",
        )
    # What the model's own code prints is not the report.
    with _progress() as tell, redirect_stdout(sys.stderr):
        tell("loading", 0, 1)
        seed = seed or 0
        with torch.random.fork_rng():
            built, given = loading.load_model(model, seed), loading.load_inputs(inputs, seed)
        return saved(built, given, title=model, to=to or "lookup", seed=seed, progress=tell)


def parse_size(text: str) -> int:
    """Bytes from a number with or without a unit: 1500000, 500MB, 2GiB.

    >>> parse_size("2GiB"), parse_size("1.5 kB")
    (2147483648, 1500)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise HotrowError(f"--budget {text!r} is not a size", fix="write it as 500MB or 2GiB")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower() or " ")
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, if that is a terminal, from the second second on."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("starting", total=1)
    timer = threading.Timer(_PATIENCE, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()  # a bar that is just being started can be stopped only then
            bar.stop()


def main() -> None:
    """Run the command line; no traceback reaches its user."""
    try:
        sys.exit(app(standalone_mode=True))
    except HotrowError as error:
        code = _complain(f"Error: {error.problem}", error.fix, UNUSABLE)
    except Exception as error:
        if os.environ.get("HOTROW_DEBUG"):
            raise
        code = _complain(
            f"hotrow failed, by a fault of its own: {type(error).__name__}: {error}",
            "set HOTROW_DEBUG=1 to see where, and please report it",
            BROKEN,
        )
    sys.exit(code)


def _complain(problem: str, fix: str | None, code: int) -> int:
    lines = [*problem.splitlines(), *([] if fix is None else [f"  try: {fix}"])]
    for line in lines:
        print(printable(line), file=sys.stderr)
    return code
