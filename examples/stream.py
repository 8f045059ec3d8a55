"""Train a recommender on a stream: new items arrive every day, and the item table grows.

The data are synthetic (interactions.py). Each day, a model trains on the day's interactions. It is
then tested on the interactions of the next day, which may include new items. The example compares
three ways to store the items:

- growing: `hotrow.vocabulary.Vocabulary` adds a row for each new item, and keeps the optimizer's
  state.
- hashed: items share the rows of a table that never grows, as is common without a vocabulary.
- retrained: after the last day, a new torch model with rows for all items is trained on all days.

The growing model reaches the same AUC as the retrained model.

    python examples/stream.py
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from interactions import World
from recommender import auc
from side_by_side import options
from torch import Tensor, nn

import hotrow
from hotrow.vocabulary import Vocabulary

Day = list[tuple[Tensor, list[str], Tensor]]  # batches of users, item names and likes


class TwoTables(nn.Module):
    """The dot product of a user's and an item's vector, plus the item's bias."""

    def __init__(self, user_vectors: Tensor, item_rows: int) -> None:
        super().__init__()
        users, width = user_vectors.shape
        self.user = nn.Embedding(users, width, _weight=user_vectors.clone())
        self.item = nn.Embedding(item_rows, width, _weight=torch.zeros(item_rows, width))
        self.bias = nn.Embedding(item_rows, 1, _weight=torch.zeros(item_rows, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Two (B,) id tensors -> (B,) logits."""
        return (self.user(user) * self.item(item)).sum(-1) + self.bias(item).squeeze(-1)


class InitialRows:
    """The initial values of new rows, in the order in which the rows are added."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.used = values, 0

    def __call__(self, rows: Tensor) -> None:
        """Write the next values to `rows`; biases start at 0."""
        if rows.shape[1] == 1:
            rows.zero_()
        else:
            rows.copy_(self.values[self.used : self.used + len(rows)])
            self.used += len(rows)


def make_day(world: World, birthdays: Tensor, day: int, steps: int, batch: int, seed: int) -> Day:
    """Return a day's interactions with the items that exist on this day."""
    result = []
    for step in range(steps):
        (user, item, _, _), liked = world.batch(batch, seed + 1 + day * steps + step)
        exists = birthdays[item] <= day
        names = [f"item {number}" for number in item[exists].tolist()]
        result.append((user[exists], names, liked[exists]))
    return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids, day: Day) -> float:
    """Train on a day's interactions; return the median time of a step in ms.

    `ids` maps names to item ids.
    """
    times = []
    for user, names, liked in day:
        begin = time.perf_counter()
        item = ids(names)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(user, item), liked).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@torch.no_grad()
def test(model: nn.Module, ids, day: Day) -> float:
    """Return the AUC on a day's interactions."""
    logits = torch.cat([model(user, ids(names)) for user, names, _ in day])
    return auc(logits, torch.cat([liked for _, _, liked in day]))


def main(arguments: list[str] | None = None) -> int:
    """Train the three models, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        days=(7, "days of training"),
        steps=(60, "training steps per day"),
        rows=(20_000, "number of users, and of items"),
        width=(32, "number of columns in each table"),
        batch=(1024, "interactions per step"),
        lr=(1e-2, "learning rate"),
        seed=(0, "random seed for data and weights"),
    )
    world = World(args.rows, args.rows, max(1, args.rows // 50), args.seed)
    torch.manual_seed(args.seed)
    birthdays = torch.randint(args.days + 1, (args.rows,))
    days = [
        make_day(world, birthdays, day, args.steps, args.batch, args.seed)
        for day in range(args.days + 1)
    ]
    user_vectors = 0.1 * torch.randn(args.rows, args.width)
    item_vectors = 0.1 * torch.randn(args.rows + 1, args.width)

    growing = hotrow.convert(TwoTables(user_vectors, 1), min_entries=0)
    growing.item.weight.data[0] = item_vectors[0]  # the row for unknown items
    optimizer = hotrow.optim.Adam(growing.parameters(), lr=args.lr)
    items = Vocabulary(
        [growing.item, growing.bias],
        optimizer,
        unknown="row",
        init=InitialRows(item_vectors[1:]),
    )

    buckets = args.rows // 4
    hashed = hotrow.convert(TwoTables(user_vectors, buckets), min_entries=0)
    hashed.item.weight.data.copy_(item_vectors[:buckets])
    hashed_optimizer = hotrow.optim.Adam(hashed.parameters(), lr=args.lr)
    hashes = Vocabulary(hashed.item, unknown="hash", unknown_rows=buckets, admit_after=0)

    print(f"{'':8}{'items':>8}{'AUC on the next day':>30}{'median step':>22}")
    print(f"{'':8}{'':8}{'growing':>18}{'hashed':>12}{'growing':>22}")
    seconds = 0.0
    for number, day in enumerate(days[:-1]):
        begin = time.perf_counter()
        step_ms = train(growing, optimizer, items.admit, day)
        seconds += time.perf_counter() - begin
        train(hashed, hashed_optimizer, hashes.look_up, day)
        tomorrow = days[number + 1]
        results = test(growing, items.look_up, tomorrow), test(hashed, hashes.look_up, tomorrow)
        count = len(items) - 1
        print(
            f"day {number + 1:<4}{count:8,}{results[0]:18.4f}{results[1]:12.4f}{step_ms:19.2f} ms"
        )

    retrained = TwoTables(user_vectors, len(items))
    retrained.item.weight.data.copy_(item_vectors[: len(items)])
    torch_optimizer = torch.optim.Adam(retrained.parameters(), lr=args.lr, fused=True)
    begin = time.perf_counter()
    for day in days[:-1]:
        train(retrained, torch_optimizer, items.look_up, day)
    again = time.perf_counter() - begin
    final = test(retrained, items.look_up, days[-1])
    print(f"\nretrained in torch with all rows: AUC {final:.4f} after {again:.1f} s")
    print(f"growing, all days together:       AUC {results[0]:.4f} after {seconds:.1f} s")
    is_same = f"{final:.4f}" == f"{results[0]:.4f}"
    print(f"\nAUC: {'the same' if is_same else 'NOT the same'} to four decimals")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
