"""`hotrow check`: compare a hotrow optimizer's steps with those of its torch counterpart."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli import sameness_report, terminal
from hotrow.cli.optimizer_options import parse_optimizer, parse_options, parse_scales
from hotrow.cli.options import Device, check_device
from hotrow.cli.terminal import DIFFERENT, EQUAL
from hotrow.errors import HotrowError
from hotrow.verify.sameness import SCALES, Batches, measure_sameness

# A line with only \b keeps the line breaks of the following paragraph.
CHECK_HELP = """\
Check that a hotrow optimizer takes the same steps as torch's dense optimizer.

The command trains a table three times on the same ids and gradients: with torch.optim in float64
as the reference, with torch.optim in float32, and with hotrow.optim in float32. The check passes if
hotrow's error is at most torch's float32 error plus 2 ulp at each gradient scale.

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
  Rprop, SGD. Each accepts the same options as in torch.optim.

\b
Exit code:
  0 same step, 1 different step, 2 invalid input, 3 internal error
"""

_SCALES = ",".join(f"{scale:g}" for scale in SCALES)
# Each step has its own seed, about 1000 times this one; torch accepts seeds below 2**64.
_MAX_SEED = 2**53


def check_command(
    optimizer: Annotated[
        str | None, typer.Option(help="Name of the optimizer, as in torch.optim.", metavar="NAME")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a constructor option; repeat to set more options.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Number of training steps.", min=1, metavar="N")
    ] = 2500,
    rows: Annotated[
        int, typer.Option(help="Number of rows in the table.", min=4, metavar="N")
    ] = 300,
    columns: Annotated[
        int, typer.Option(help="Number of columns in the table.", min=1, metavar="N")
    ] = 19,
    ids: Annotated[
        int,
        typer.Option(
            help="Number of ids per step, drawn from a Zipf distribution.", min=1, metavar="N"
        ),
    ] = 12,
    scales: Annotated[
        str, typer.Option(help="Gradient scales, separated by commas.", metavar="SCALES")
    ] = _SCALES,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed for the table, ids and gradients.", min=0, max=_MAX_SEED, metavar="N"
        ),
    ] = 0,
    device: Device = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the check, print the report, and set the exit code."""
    if optimizer is None:
        raise HotrowError("--optimizer is missing", fix="hotrow check --optimizer AdamW")
    check_device(device)
    name = parse_optimizer(optimizer)
    parsed, scale_values = parse_options(name, options or []), parse_scales(scales)
    with terminal.show_progress() as report_progress:
        report_progress("drawing the ids", 0, 1)
        batches = Batches(steps=steps, rows=rows, columns=columns, ids=ids, seed=seed)
        sameness = measure_sameness(
            name, parsed, batches, scales=scale_values, device=device, progress=report_progress
        )
    if json:
        terminal.write_output(sameness_report.to_json(sameness))
    else:
        terminal.write_output(
            terminal.render(lambda console: sameness_report.print_sameness(sameness, console))
        )
    raise typer.Exit(EQUAL if sameness else DIFFERENT)
