"""`hotrow check`: compare the optimizer's step with torch's."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli import sameness_report, terminal
from hotrow.cli.optimizer_options import parse_optimizer, parse_options, parse_scales
from hotrow.cli.terminal import DIFFERENT, EQUAL
from hotrow.errors import HotrowError
from hotrow.verify.sameness import SCALES, Batches, measure_sameness

# A line with nothing but \b keeps the lines up to the next blank one as they are.
CHECK_HELP = """\
Train a table with torch.optim and with hotrow.optim; say whether the step is the same.

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

_SCALES = ",".join(f"{scale:g}" for scale in SCALES)


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
    ] = _SCALES,
    seed: Annotated[int, typer.Option(help="Of the table, ids and gradients.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure, print, and exit with the verdict."""
    if optimizer is None:
        raise HotrowError(
            "check needs an optimizer", fix="name it, as in hotrow check --optimizer AdamW"
        )
    name = parse_optimizer(optimizer)
    parsed, scale_values = parse_options(name, options or []), parse_scales(scales)
    with terminal.show_progress() as report_progress:
        report_progress("drawing the ids", 0, 1)
        batches = Batches(steps=steps, rows=rows, columns=columns, ids=ids, seed=seed)
        sameness = measure_sameness(
            name, parsed, batches, scales=scale_values, progress=report_progress
        )
    if json:
        terminal.write_output(sameness_report.to_json(sameness))
    else:
        terminal.write_output(
            terminal.render(lambda console: sameness_report.print_sameness(sameness, console))
        )
    raise typer.Exit(EQUAL if sameness else DIFFERENT)
