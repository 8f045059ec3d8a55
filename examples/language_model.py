"""Train a small language model with a large table, using torch.optim and hotrow side by side.

The model predicts the next byte in the source code of Python's standard library. The table is
large: each n-gram of preceding bytes (n = 1 .. 4) is hashed to a row. The head is small: it
predicts one of 256 bytes. A batch touches a few thousand rows. Dense AdamW updates the whole table,
because momentum and weight decay also change idle rows. hotrow reaches the same losses.

    python examples/language_model.py
"""

from __future__ import annotations

import os

# Set this before importing torch: huge pages make torch's dense step faster on Linux.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import copy
import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import SideBySide, Step, options
from torch import Tensor, nn

import hotrow

ORDERS = 4  # n-grams of 1 .. 4 bytes


class LanguageModel(nn.Module):
    """A network with one hidden layer that predicts the next byte from the last n-grams."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.hidden = nn.Linear(ORDERS * width, 2 * width)
        self.head = nn.Linear(2 * width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, 256) logits of the next byte."""
        ids = self.ngrams(text)  # (B, T, 4)
        x = self.table(ids).flatten(-2)  # (B, T, 4 D)
        return self.head(F.gelu(self.hidden(x)))

    def ngrams(self, text: Tensor) -> Tensor:
        """Return the hashed ids of the n-grams that end at each byte."""
        ids, key = [], torch.zeros_like(text)
        for n in range(ORDERS):
            shifted = F.pad(text, (n, 0))[:, : text.shape[1]]  # n bytes earlier
            key = key * 1_000_003 + shifted + 1
            ids.append(((key * 0x1E3779B97F4A7C15) >> 20) % len(self.table.weight))
        return torch.stack(ids, -1)


def standard_library() -> tuple[Tensor, Tensor]:
    """Return the bytes of all modules as (train, held_out), with every tenth module held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < 10:
        sys.exit(f"no Python sources in {folder}: use a Python installation that includes them")
    train = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 10)
    held_out = b"".join(file.read_bytes() for file in files[::10])
    return tuple(
        torch.frombuffer(bytearray(t), dtype=torch.uint8).long() for t in (train, held_out)
    )


def crops(text: Tensor, seed: int, count: int, length: int) -> Tensor:
    """Return a (count, length + 1) batch of bytes from random positions."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=random)
    return text[starts + torch.arange(length + 1)]


def bits(model: nn.Module, text: Tensor) -> Tensor:
    """Return the loss in bits per byte."""
    logits = model(text[:, :-1])  # (B, T, 256)
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


def unigram(train: Tensor, held_out: Tensor) -> float:
    """Return the held-out loss of predicting each byte from its frequency, in bits per byte."""
    counts = torch.bincount(train, minlength=256).double() + 1
    return -(counts / counts.sum()).log2()[held_out].mean().item()


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Step:
    """Return a training step with warm-up, a cosine schedule and gradient clipping by norm."""
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * t / steps))
    )

    def step(text: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = bits(model, text)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return step


def main(arguments: list[str] | None = None) -> int:
    """Train with torch and with hotrow, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        steps=(1000, "training steps"),
        rows=(2**18, "number of rows in the hashed table"),
        width=(64, "number of columns in the table"),
        batch=(32, "texts per step"),
        length=(64, "bytes per text"),
        lr=(2e-3, "peak learning rate"),
        seed=(0, "random seed for weights and batches"),
    )
    train, held_out = standard_library()
    torch.manual_seed(args.seed)
    dense = LanguageModel(args.rows, args.width)
    model = copy.deepcopy(dense)

    # With torch, use its fastest (fused) optimizer:
    dense_optimizer = torch.optim.AdamW(dense.parameters(), lr=args.lr, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    print(hotrow.convert.report(model))
    print(f"{len(train):,} training bytes, {len(held_out):,} held out; losses in bits per byte")
    ids = args.batch * args.length * ORDERS
    print(f"{ids:,} ids per step, four per byte")
    n = args.steps
    sides = SideBySide([trainer(dense, dense_optimizer, n), trainer(model, optimizer, n)])
    sides.train(lambda t: crops(train, args.seed * n + t, args.batch, args.length), n)
    with torch.no_grad():
        text = crops(held_out, args.seed, 64, 256)
        sides.compare("held-out loss", [bits(each, text).item() for each in (dense, model)])
    print(f"{'  unigram baseline':24}{unigram(train, held_out):14.4f}\n")
    sides.print_times()
    sides.print_memory([dense, model])
    return sides.print_verdict()


if __name__ == "__main__":
    sys.exit(main())
