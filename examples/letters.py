"""Predict the next letter from one-hots, with torch.optim and hotrow side by side.

The model concatenates the one-hots of the last letters and predicts the next letter with one hidden
layer. The input to that layer is mostly zeros. The model's code doesn't change: with
`hotrow.convert`, the layer adds up one weight column for each letter instead of multiplying by the
one-hots. The text is Python's language reference, as shown by `help("for")`.

    python examples/letters.py
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from side_by_side import SideBySide, options, trainer
from torch import Tensor, nn

import hotrow


class Letters(nn.Module):
    """A network with one hidden layer that predicts a letter from the preceding letters."""

    def __init__(self, letters: int, context: int, width: int) -> None:
        super().__init__()
        self.letters = letters
        self.hidden = nn.Linear(context * letters, width)
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, K) letters -> (B, V) logits of the next letter."""
        x = F.one_hot(ids, self.letters).float().flatten(1)  # (B, K, V) -> (B, K V)
        return self.head(torch.tanh(self.hidden(x)))


def reference() -> tuple[Tensor, Tensor, int]:
    """Return the training letters, the held-out letters and the alphabet size."""
    texts = [topics[name] for name in sorted(topics)]
    ids = {letter: i for i, letter in enumerate(sorted(set("".join(texts))))}
    held_out = "".join(texts[::10])
    train = "".join(text for i, text in enumerate(texts) if i % 10)
    return *(torch.tensor([ids[letter] for letter in text]) for text in (train, held_out)), len(ids)


def bits(model: nn.Module, pieces: Tensor) -> Tensor:
    """Return the loss of predicting the last letter of each piece, in bits per letter."""
    return F.cross_entropy(model(pieces[:, :-1]), pieces[:, -1]) / math.log(2)


def unigram(train: Tensor, held_out: Tensor, letters: int) -> float:
    """Return the held-out loss of predicting each letter from its frequency, in bits per letter."""
    counts = torch.bincount(train, minlength=letters).double() + 1
    return -(counts / counts.sum()).log2()[held_out].mean().item()


def main(arguments: list[str] | None = None) -> int:
    """Train with torch and with hotrow, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        steps=(1000, "training steps"),
        before=(16, "letters of context"),
        width=(256, "hidden units"),
        batch=(512, "number of letters to predict per step"),
        lr=(0.1, "learning rate"),
        seed=(0, "random seed for weights and batches"),
    )
    train, held_out, letters = reference()
    torch.manual_seed(args.seed)
    dense = Letters(letters, args.before, args.width)
    model = copy.deepcopy(dense)

    # With torch, use its fastest (fused) optimizer:
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=args.lr, momentum=0.9, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, fused=True)

    print(f"{len(train):,} training letters, {len(held_out):,} held out, {letters} distinct")
    columns = args.before * letters
    print(f"one-hots: {args.before} past letters, {columns:,} columns; losses in bits per letter")

    def batch(t: int) -> Tensor:
        random = torch.Generator().manual_seed(args.seed * args.steps + t)
        starts = torch.randint(len(train) - args.before, (args.batch, 1), generator=random)
        return train[starts + torch.arange(args.before + 1)]  # (B, K + 1)

    pairs = (dense, dense_optimizer), (model, optimizer)
    sides = SideBySide([trainer(o, functools.partial(bits, m)) for m, o in pairs])
    sides.train(batch, args.steps)
    pieces = held_out.unfold(0, args.before + 1, 1)[:10_000]
    with torch.no_grad():
        sides.compare("held-out loss", [bits(each, pieces).item() for each in (dense, model)])
    print(f"{'  unigram baseline':24}{unigram(train, held_out, letters):14.4f}\n")
    sides.print_times()
    sides.print_memory([dense, model])
    print(f"\n{hotrow.convert.report(model)}")
    return sides.print_verdict()


if __name__ == "__main__":
    sys.exit(main())
