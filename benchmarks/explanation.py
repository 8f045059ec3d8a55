"""Train the small models in docs/explanation and draw their figures.

    python -m benchmarks.explanation [--docs docs/explanation] [--draw]

The script writes the results to runs.json and draws the figures from that file. `--draw` redraws
the figures without training. Each training run takes a few seconds. The script doesn't
time anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from hotrow.figures import svg
from hotrow.inputs.files import write_text

OPTIMIZERS = ("torch.optim.Adam", "hotrow.optim.Adam", "torch.optim.SparseAdam")
WEIGHT_STEPS, WEIGHT_READ, WEIGHT_RATE = 240, 12, 0.01
USERS, ITEMS, COLUMNS, BATCH = 1_000, 300, 8, 64
LOSS_STEPS, LOSS_READ, LOSS_RATES = 2_000, 100, (0.003, 0.01, 0.03)
DRAWN_RATE = 0.01
WIDTH, HEIGHT, MARGIN = 320, 210, 12  # pixels; fits a phone screen without shrinking the text

Record = dict[str, Any]
Fields = tuple[Tensor, Tensor, Tensor]


def make_optimizer(name: str, model: nn.Module, lr: float) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer; convert the model if the optimizer is hotrow's."""
    if name.startswith("hotrow"):
        model = hotrow.convert(model, min_entries=0)
        return model, hotrow.optim.Adam(model.parameters(), lr=lr)
    return model, getattr(torch.optim, name.rpartition(".")[2])(model.parameters(), lr=lr)


def follow_weight(name: str) -> tuple[list[int], list[float]]:
    """Return the steps whose batch contains row 0, and the weight of row 0 after each step.

    The list of weights begins with the initial weight. All optimizers get the same gradients, so
    only their update rules differ. hotrow's table is read only every `WEIGHT_READ` steps, so that
    row 0 misses the steps in between.
    """
    random = np.random.default_rng(5)
    batch_has_row = random.random(WEIGHT_STEPS) < 0.035
    gradients = torch.from_numpy(random.standard_normal((WEIGHT_STEPS, 2))).float()
    torch.manual_seed(0)
    layer = nn.Embedding(10, 1, sparse=name.endswith("SparseAdam"))
    nn.init.zeros_(layer.weight)
    model, optimizer = make_optimizer(name, layer, WEIGHT_RATE)
    weights = [0.0]
    for t in range(WEIGHT_STEPS):
        optimizer.zero_grad()
        ids = torch.tensor([0 if batch_has_row[t] else 2, 1])
        (model(ids)[:, 0] * gradients[t]).sum().backward()
        optimizer.step()
        if not name.startswith("hotrow") or (t + 1) % WEIGHT_READ == 0:
            weights.append(round(model.weight[0, 0].item(), 6))
    return (np.flatnonzero(batch_has_row) + 1).tolist(), weights


def interactions(seed: int = 0) -> Callable[[int], Fields]:
    """Return a function that draws batches: users, items, and whether each user likes the item.

    Users and items follow Zipf's law. Each user and each item has a hidden vector of four
    numbers. The larger the dot product of the two vectors, the more likely the user likes the item.
    """
    random = np.random.default_rng(seed)
    tastes = [random.standard_normal((count, 4)) for count in (USERS, ITEMS)]
    odds = [1 / np.arange(1, count + 1) for count in (USERS, ITEMS)]

    def draw(count: int) -> Fields:
        users, items = (random.choice(len(p), count, p=p / p.sum()) for p in odds)
        agreement = (tastes[0][users] * tastes[1][items]).sum(1)
        likes = random.random(count) < 1 / (1 + np.exp(-1.5 * agreement))
        return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(likes).float()

    return draw


class Factors(nn.Module):
    """Matrix factorization: the logit is the dot product of the user's row and the item's row."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, COLUMNS, sparse=sparse)
        self.item = nn.Embedding(ITEMS, COLUMNS, sparse=sparse)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits of user-item pairs, (B,) users and (B,) items -> (B,)."""
        logits: Tensor = (self.user(users) * self.item(items)).sum(1)
        return logits


def train(name: str, lr: float, steps: int = LOSS_STEPS) -> Iterator[float]:
    """Yield the held-out loss every `LOSS_READ` steps."""
    draw = interactions()
    held_users, held_items, held_likes = draw(20_000)
    torch.manual_seed(0)
    model, optimizer = make_optimizer(name, Factors(name.endswith("SparseAdam")), lr)
    for t in range(steps):
        users, items, likes = draw(BATCH)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(users, items), likes).backward()
        optimizer.step()
        if (t + 1) % LOSS_READ == 0:
            with torch.no_grad():
                logits = model(held_users, held_items)
                yield round(float(F.binary_cross_entropy_with_logits(logits, held_likes)), 4)


def measure() -> Record:
    """Train all models and return the results."""
    weights = {name: follow_weight(name) for name in OPTIMIZERS}
    return {
        "weight": {
            "batches": weights[OPTIMIZERS[0]][0],
            "values": {name: values for name, (_, values) in weights.items()},
        },
        "loss": {
            str(lr): {name: list(train(name, lr)) for name in OPTIMIZERS} for lr in LOSS_RATES
        },
    }


def plot(
    heading: str,
    note: str,
    lines: dict[str, list[tuple[float, float]]],
    heights: list[float],
    steps: list[int],
    marks: list[int],
) -> str:
    """Return an SVG chart with a line for each optimizer, and dots for hotrow."""
    cells = [svg.label(MARGIN, 8, heading, "bold")]
    cells.append(svg.label(MARGIN, 30, note, "muted", svg.SMALL))
    ticks = [f"{height:g}" for height in heights]
    left = MARGIN + max(svg.pixel_width(tick, svg.SMALL) for tick in ticks) + svg.GAP
    top, right = 70.0, left + WIDTH
    bottom = top + HEIGHT
    low, high = heights[0], heights[-1]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        step, value = point
        return (
            left + 10 + (WIDTH - 20) * step / steps[-1],
            bottom - HEIGHT * (value - low) / (high - low),
        )

    cells.append(svg.Cell(left, top, WIDTH, HEIGHT, box="row"))
    curves = []
    for height, tick in zip(heights, ticks, strict=True):
        y = place((0, height))[1]
        curves.append(svg.Curve([(left, y), (right, y)], "grid"))
        cells.append(
            svg.Cell(
                MARGIN, y - 9, left - MARGIN + 2, 18, tick, "muted", anchor="end", size=svg.SMALL
            )
        )
    for step in steps:
        x = place((step, low))[0]
        wide = svg.pixel_width(f"{step:,}", svg.SMALL)
        cells.append(
            svg.Cell(
                min(x - wide / 2, right - wide),
                bottom + 8,
                wide,
                18,
                f"{step:,}",
                "muted",
                anchor="middle",
                size=svg.SMALL,
            )
        )
    for step in marks:
        x = place((step, low))[0]
        curves.append(svg.Curve([(x, bottom), (x, bottom + 8)], "curve h3"))
    y, descriptions = bottom + 30, []
    for name, line in lines.items():
        path = [place(point) for point in line]
        key = left + 10
        if name.startswith("hotrow"):
            curves += [svg.Curve([each, each], "dot h0") for each in path]
            curves.append(svg.Curve([(key + 12, y + 16), (key + 12, y + 16)], "dot h0"))
        else:
            style = "dashed h2" if name.endswith("SparseAdam") else "curve h1"
            curves.append(svg.Curve(path, style))
            curves.append(svg.Curve([(key, y + 16), (key + 24, y + 16)], style))
        cells.append(svg.label(key + 34, y, name, size=svg.SMALL))
        descriptions.append(f"{name} ends at {line[-1][1]:g}.")
        y += 22
    return svg.write(
        svg.Drawing(heading, f"{note}. {' '.join(descriptions)}", cells, [], curves), "en"
    )


def draw_weight(record: Record) -> str:
    """Draw one weight of a row that appears in few batches."""
    lines = {}
    for name, values in record["weight"]["values"].items():
        stride = WEIGHT_READ if name.startswith("hotrow") else 1
        lines[name] = [(float(i * stride), value) for i, value in enumerate(values)]
    return plot(
        "One weight of a row, step by step",
        "marks below the axis: the batches with the row",
        lines,
        [-0.15, -0.1, -0.05, 0, 0.05],
        list(range(0, WEIGHT_STEPS + 1, 60)),
        record["weight"]["batches"],
    )


def draw_loss(record: Record) -> str:
    """Draw the held-out loss of the small recommender."""
    lines = {
        name: [(float((i + 1) * LOSS_READ), loss) for i, loss in enumerate(losses)]
        for name, losses in record["loss"][str(DRAWN_RATE)].items()
    }
    return plot(
        "Held-out loss of a recommender",
        f"log loss over steps, learning rate {DRAWN_RATE:g}",
        lines,
        [0.45, 0.5, 0.55, 0.6, 0.65, 0.7],
        list(range(0, LOSS_STEPS + 1, 500)),
        [],
    )


FIGURES = {"one-weight.svg": draw_weight, "held-out-loss.svg": draw_loss}


def main(arguments: list[str] | None = None) -> int:
    """Train the models unless `--draw` is given, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs/explanation"))
    parser.add_argument(
        "--draw", action="store_true", help="draw the figures from runs.json without training"
    )
    args = parser.parse_args(arguments)
    runs = args.docs / "runs.json"
    if not args.draw:
        write_text(runs, json.dumps(measure(), indent=None) + "\n")
    record = json.loads(runs.read_text(encoding="utf-8"))
    for name, draw in FIGURES.items():
        write_text(args.docs / name, draw(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
