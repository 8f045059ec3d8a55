"""`hotrow compare`: compare lookup and matmul, or a model before and after conversion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hotrow.cli import model_report, report, terminal
from hotrow.cli.options import Device, TableFile, TensorName, TokenizerFile, check_device
from hotrow.cli.terminal import DIFFERENT, EQUAL
from hotrow.errors import HotrowError
from hotrow.inputs import examples, files, loader
from hotrow.inputs.text import escape_unprintable, one_line
from hotrow.inputs.tokenizer import open_tokenizer
from hotrow.kernels import devices
from hotrow.verify.compare import Comparison, compare
from hotrow.verify.models.compare import compare_models
from hotrow.verify.models.comparison import ModelComparison
from hotrow.verify.sides import check_operation_name

# A line with only \b keeps the line breaks of the following paragraph.
COMPARE_HELP = """\
Compare a row lookup with the one-hot matmul, or a model before and after conversion.

The command runs both methods forward and backward on the same table and ids, compares every value,
and prints the cost of each method. Without --table, the command runs two examples: a 4 x 5 table,
and a random table of GPT-2's size.

With --operation, the command compares another operation on the one-hot X of the ids with the same
operation on a dense X. A gather is (X * scores).sum(1), a scatter is X.T @ rows, and a count is
X.sum(0). The scores and rows are random numbers.

With MODEL, the command compares a whole model before and after hotrow.convert. The report lists
which one-hots and embeddings were converted, and explains why others were not. It shows whether
outputs and gradients are equal, and how much time and memory the conversion saves. MODEL has the
form module:function; the function takes no arguments and returns the model. The inputs are a
tensor, a tuple of arguments, or a dict of keyword arguments.

\b
Examples:
  hotrow compare
  hotrow compare --table model.safetensors --tokenizer tokenizer.json \\
      --text "the same numbers"
  hotrow compare --table model.safetensors --tensor wte.weight \\
      --ids 5,9,5 --html report.html
  hotrow compare --operation scatter
  hotrow compare package.models:build --inputs package.models:batch
  hotrow compare models:build --inputs inputs.pt --seed 1
  hotrow compare models:build --inputs inputs.pt --to matmul

\b
Exit code:
  0 equal, 1 not equal, 2 invalid input, 3 internal error
"""

_MAX_SEED = 2**64 - 1  # the largest seed that torch accepts
# Python refuses to convert numbers of more than 4300 digits, or of a lower limit, at least 640.
_SIZE = re.compile(r"\s*([0-9]{1,600}(?:\.[0-9]{1,600})?)\s*([kMGT]?)(i?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class _IdSource:
    """The option that supplies the ids, and its content: text or a list of ids."""

    option: str
    content: str
    is_text: bool


def _read_source(
    text: str | None, text_file: str | None, ids: str | None, ids_file: str | None
) -> _IdSource | None:
    options = {"--text": text, "--text-file": text_file, "--ids": ids, "--ids-file": ids_file}
    given = [(option, value) for option, value in options.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(option for option, _ in given)
        raise HotrowError(f"{names} cannot be combined", fix="use only one of these options")
    option, value = given[0]
    content = files.read_text(value) if option.endswith("-file") else value
    return _IdSource(option, content, option.startswith("--text"))


def compare_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Model to compare, as module:function.", metavar="MODEL"),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Inputs to the model: module:function, a .pt file of tensors, or a "
            ".safetensors file.",
            metavar="INPUTS",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed for the model's random numbers; default 0.",
            min=0,
            max=_MAX_SEED,
            metavar="N",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Direction of the conversion: lookup (the default) or matmul.", metavar="METHOD"
        ),
    ] = None,
    operation: Annotated[
        str | None,
        typer.Option(
            help="Operation on the one-hot: lookup (the default), gather, scatter or count.",
            metavar="NAME",
        ),
    ] = None,
    table: TableFile = None,
    tensor: TensorName = None,
    tokenizer: TokenizerFile = None,
    text: Annotated[str | None, typer.Option(help="Text to look up.", metavar="TEXT")] = None,
    text_file: Annotated[
        str | None,
        typer.Option(help="UTF-8 file with the text; - reads standard input.", metavar="FILE"),
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="Ids to look up, such as 5,9,5.", metavar="IDS")
    ] = None,
    ids_file: Annotated[
        str | None,
        typer.Option(help="Text file with the ids; - reads standard input.", metavar="FILE"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory limit for the one-hot matmul, such as 500MB or 2GiB; default: half of the "
            "free memory.",
            metavar="SIZE",
        ),
    ] = None,
    device: Device = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Annotated[
        str | None,
        typer.Option(help="Also write a self-contained HTML page with figures.", metavar="FILE"),
    ] = None,
) -> None:
    """Run the comparison, print the report, and set the exit code."""
    check_device(device)
    if any(each is not None for each in (model, inputs, seed, to)):
        given = {
            "--operation": operation,
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
        comparison = _compare_model(context, model, inputs, seed, to, device, others)
        terminal.write_output(
            model_report.to_json(comparison) if json else model_report.to_text(comparison)
        )
        raise typer.Exit(EQUAL if comparison else DIFFERENT)
    operation = check_operation_name(operation or "lookup")
    if html is not None:
        files.check_writable(html, inputs=(table, tokenizer, text_file, ids_file))
    byte_limit = None if budget is None else parse_size(budget)
    source = _read_source(text, text_file, ids, ids_file)
    if table is not None:
        comparisons = [
            _compare_file(table, tensor, tokenizer, source, byte_limit, operation, device)
        ]
    else:
        dependent = [
            option
            for option, value in (
                (source and source.option, source),
                ("--tensor", tensor),
                ("--tokenizer", tokenizer),
            )
            if value is not None
        ]
        if dependent:
            raise HotrowError(f"{dependent[0]} needs a table", fix="add --table model.safetensors")
        comparisons = [
            _compare_example(each, byte_limit, operation, device) for each in examples.ALL
        ]
    if html is not None:
        files.write_text(html, report.to_html(comparisons))
    terminal.write_output(
        report.to_json(comparisons) if json else _render_report(comparisons, html)
    )
    raise typer.Exit(EQUAL if all(comparisons) else DIFFERENT)


def _render_report(comparisons: list[Comparison], html: str | None) -> str:
    """Return the report as text, with colors if the output is a terminal."""

    def show(console: Console) -> None:
        for comparison in comparisons:
            report.print_report(comparison, console)
        if html is not None:
            where = f"Wrote the page with the figures to {escape_unprintable(html)}"
            console.print(where, markup=False, soft_wrap=True)

    return terminal.render(show)


def _compare_example(
    example: examples.Example, byte_limit: int | None, operation: str, device: str
) -> Comparison:
    with terminal.show_progress() as report_progress:
        report_progress("creating the table", 0, 1)
        table = example.table().to(device)
        return compare(
            table,
            example.ids,
            operation=operation,
            title=example.title,
            budget=byte_limit,
            progress=report_progress,
        )


def _compare_file(
    table: str,
    tensor: str | None,
    tokenizer: str | None,
    source: _IdSource | None,
    byte_limit: int | None,
    operation: str,
    device: str,
) -> Comparison:
    if source is None:
        raise HotrowError(
            "--table needs ids or text to look up",
            fix="add one of --text, --text-file, --ids, --ids-file",
        )
    if source.is_text and tokenizer is None:
        raise HotrowError(
            f"{source.option} needs a tokenizer", fix="add --tokenizer tokenizer.json"
        )
    with terminal.show_progress() as report_progress:
        report_progress("reading", 0, 1)
        name, values = files.read_table(table, tensor)
        ids = [] if source.is_text else files.parse_ids(source.content, source.option)
        texts: tuple[str, ...] | None = None
        if tokenizer is not None:
            with open_tokenizer(tokenizer, len(values), f"the table {name}") as reader:
                if source.is_text:
                    tokens = reader.encode(source.content)
                    ids, texts = tokens.ids, tokens.texts
                else:
                    texts = reader.token_texts(ids)
        title = f"{name} in {Path(table).name}"
        return compare(
            values.to(device),
            ids,
            operation=operation,
            tokens=texts,
            title=title,
            budget=byte_limit,
            progress=report_progress,
        )


def _compare_model(
    context: typer.Context,
    model: str | None,
    inputs: str | None,
    seed: int | None,
    to: str | None,
    device: str,
    others: list[str],
) -> ModelComparison:
    if model is None:
        named = (("--inputs", inputs), ("--seed", seed), ("--to", to))
        dependent = next(name for name, value in named if value is not None)
        raise HotrowError(
            f"{dependent} needs a model",
            fix="hotrow compare models:build --inputs models:batch",
        )
    if not loader.is_import_name(model):
        extra = escape_unprintable(model)
        context.fail(f"Got unexpected extra argument ({extra}); write a model as module:function")
    if others:
        names = " and ".join(others)
        raise HotrowError(
            f"{names} cannot be used with the model {model}, only with a table",
            fix=f"remove {names}, or compare a table",
        )
    if inputs is None:
        raise HotrowError(
            f"{model} needs inputs",
            fix="add --inputs with module:function, a .pt file or a .safetensors file",
        )
    with terminal.show_progress() as report_progress, terminal.redirect_output():
        report_progress("loading", 0, 1)
        seed = seed or 0
        with torch.random.fork_rng(devices.all_accelerators()):
            built, given = loader.load_model(model, seed), loader.load_inputs(inputs, seed)
        try:
            return compare_models(
                built,
                given,
                title=model,
                to="lookup" if to is None else to,
                seed=seed,
                device=None if device == "cpu" else device,
                progress=report_progress,
            )
        except HotrowError:
            raise
        except Exception as error:  # typer would exit with 0 or 1 after some errors
            raise RuntimeError(f"{model} fails: {one_line(error)}") from error


def parse_size(text: str) -> int:
    """Parse a size in bytes, with or without a unit, such as 1500000, 500MB or 2GiB.

    >>> parse_size("2GiB"), parse_size("1.5 kB")
    (2147483648, 1500)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise HotrowError(
            f"--budget {text!r:.60} is not a size", fix="use a size such as 500MB or 2GiB"
        )
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower() or " ")
    return int(Fraction(number) * (1024 if binary else 1000) ** power)
