"""The recommender of recommender.py with its tables split over processes.

Any number of processes ends with the same losses, and a run saved by some goes on with others:

    python examples/sharded.py
    torchrun --nproc-per-node 2 examples/sharded.py --until 500 --save checkpoint
    torchrun --nproc-per-node 3 examples/sharded.py --load checkpoint --begin 500
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from interactions import World
from process_group import ProcessGroup
from recommender import Recommender, auc
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow.distributed import shard


def options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, text in (
        ("steps", 1000, "training steps in all"),
        ("begin", 0, "the first of them to make"),
        ("until", 0, "the step before which to stop; 0 for the last"),
        ("rows", 200_000, "users; a quarter as many items, a 200th as many categories"),
        ("width", 64, "numbers in a row"),
        ("batch", 1024, "pairs of user and item in a step, of all processes together"),
    ):
        help_ = f"{text} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 0.001)")
    parser.add_argument("--save", help="folder for a checkpoint of the last step")
    parser.add_argument("--load", help="folder of a checkpoint to begin with")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the losses."""
    args = options(arguments)
    group = ProcessGroup()
    sizes = args.rows, max(1, args.rows // 4), max(1, args.rows // 200)
    world = World(*sizes, seed=0)
    torch.manual_seed(0)
    # Also tables of fewer than 100,000 entries, which convert would leave to torch.
    model = hotrow.convert(Recommender(*sizes, args.width), min_entries=0)

    model = shard(model, group.mesh)  # the tables
    ddp_model = DistributedDataParallel(model)  # all else
    optimizer = hotrow.optim.Adam(model.parameters(), lr=args.lr)
    if args.load:
        group.load(args.load, model, optimizer)

    rows = sum(len(e.weight) for e in (model.user, model.item, model.category))
    group.print_once(f"{group.size} processes; the first has {rows:,} rows of {sum(sizes):,}")

    def step(t: int) -> Tensor:
        fields, liked = group.local_share(world.batch(args.batch, 1 + t))
        optimizer.zero_grad()
        losses = F.binary_cross_entropy_with_logits(ddp_model(*fields), liked, reduction="sum")
        loss = group.scale_to_mean(losses, args.batch)
        loss.backward()
        optimizer.step()
        return loss

    group.train(range(args.begin, args.until or args.steps), args.steps, step)
    if args.save:
        group.save(args.save, model, optimizer)
        group.print_once(f"saved in {args.save}")
    fields, liked = world.batch(20_000, 1 + args.steps)
    with torch.no_grad():  # a look-up by every rank
        logits = model(*fields)
    loss = F.binary_cross_entropy_with_logits(logits, liked)
    group.print_once(f"held-out log loss {loss.item():12.4f}")
    group.print_once(f"held-out AUC {auc(logits, liked):17.4f}")
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
