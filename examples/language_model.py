"""A small language model with a large memory, trained by torch.optim and by hotrow side by side.

It predicts the next byte of Python's standard library. A hashed table holds a row for each n-gram
of preceding bytes (n = 1 .. 4), so it is large; there are only 256 bytes to predict, so the head
is small. A batch touches a few thousand rows of the table, but dense AdamW moves all of them: the
idle ones by momentum and weight decay. hotrow ends with the same numbers.

    python examples/language_model.py
"""

from __future__ import annotations

import os

# torch reads it once. Large tensors on huge pages make its dense step faster: its best form.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import argparse
import copy
import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import SideBySide
from torch import Tensor, nn

import hotrow

ORDERS = 4  # n-grams of 1 .. 4 bytes


class LanguageModel(nn.Module):
    """The rows of the last n-grams, side by side, through a hidden layer to 256 logits."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.hidden = nn.Linear(ORDERS * width, 2 * width)
        self.head = nn.Linear(2 * width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, 256) logits of the byte that follows each."""
        ids = self.ngrams(text)  # (B, T, 4)
        x = self.table(ids).flatten(-2)  # (B, T, 4 D)
        return self.head(F.gelu(self.hidden(x)))

    def ngrams(self, text: Tensor) -> Tensor:
        """For each byte, the rows of the n-grams that end with it, hashed into the table."""
        ids, key = [], torch.zeros_like(text)
        for n in range(ORDERS):
            before = F.pad(text, (n, 0))[:, : text.shape[1]]  # n bytes earlier
            key = key * 1_000_003 + before + 1
            ids.append(((key * 0x1E3779B97F4A7C15) >> 20) % len(self.table.weight))
        return torch.stack(ids, -1)


def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes of the library's modules in order of name: (train, held out), every 10th held."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 10)
    held = b"".join(file.read_bytes() for file in files[::10])
    return tuple(torch.frombuffer(bytearray(t), dtype=torch.uint8).long() for t in (train, held))


def crops(text: Tensor, seed: int, count: int, length: int) -> Tensor:
    """(count, length + 1) bytes from random places."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=random)
    return text[starts + torch.arange(length + 1)]


def bits(model: nn.Module, text: Tensor) -> Tensor:
    """Bits per byte."""
    logits = model(text[:, :-1])  # (B, T, 256)
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


def unigram(train: Tensor, held: Tensor) -> float:
    """The held-out bits per byte of a model that knows only how frequent each byte is."""
    counts = torch.bincount(train, minlength=256).double() + 1
    return -(counts / counts.sum()).log2()[held].mean().item()


def trainer(model, optimizer, steps):
    """A training step as anywhere: warm-up and cosine, clipping by norm."""
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * t / steps))
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
    """Run both, and return the exit code."""
    asked = options(arguments)
    train, held = standard_library()
    torch.manual_seed(asked.seed)
    dense = LanguageModel(asked.rows, asked.width)
    model = copy.deepcopy(dense)

    # With torch, in its fastest form:
    dense_optimizer = torch.optim.AdamW(dense.parameters(), lr=asked.lr, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=asked.lr, fused=True)

    print(f"{len(train):,} bytes to learn from, {len(held):,} held out; bits per byte")
    ids = asked.batch * asked.length * ORDERS
    print(f"table {asked.rows:,} x {asked.width}, {ids:,} ids a step")
    sides = SideBySide(
        [trainer(dense, dense_optimizer, asked.steps), trainer(model, optimizer, asked.steps)]
    )
    first = asked.seed * asked.steps
    sides.train(lambda t: crops(train, first + t, asked.batch, asked.length), asked.steps)
    with torch.no_grad():
        text = crops(held, asked.seed, 64, 256)
        sides.compare("held-out loss", [bits(each, text).item() for each in (dense, model)])
    print(f"{'  unigram baseline':24}{unigram(train, held):14.4f}\n")
    sides.times()
    sides.memory([dense, model])
    return sides.verdict()


def options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=2**18, help="n-grams are hashed into so many")
    parser.add_argument("--width", type=int, default=64, help="numbers in a row")
    parser.add_argument("--batch", type=int, default=32, help="pieces of text in a step")
    parser.add_argument("--length", type=int, default=64, help="bytes of a piece")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
