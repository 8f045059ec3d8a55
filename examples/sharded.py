"""Train the model from recommender.py with its tables split across processes.

The losses are the same for any number of processes, even if you resume with a different number:

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
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, text in (
        ("steps", 1000, "training steps in total"),
        ("begin", 0, "first step to run"),
        ("until", 0, "stop before this step; 0 runs all steps"),
        ("rows", 200_000, "users; there are 1/4 as many items and 1/200 as many categories"),
        ("width", 64, "number of columns in each table"),
        ("batch", 1024, "(user, item) pairs per step, summed over all processes"),
    ):
        help_ = f"{text} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 0.001)")
    parser.add_argument("--save", help="write a checkpoint to this new folder")
    parser.add_argument("--load", help="load the checkpoint in this folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train and print the losses."""
    args = options(arguments)
    group = ProcessGroup()
    sizes = args.rows, max(1, args.rows // 4), max(1, args.rows // 200)
    world = World(*sizes, seed=0)
    torch.manual_seed(0)
    # min_entries=0 also converts embeddings with fewer than 100,000 entries.
    model = hotrow.convert(Recommender(*sizes, args.width), min_entries=0)

    model = shard(model, group.mesh)  # the tables
    ddp_model = DistributedDataParallel(model)  # the other layers
    optimizer = hotrow.optim.Adam(model.parameters(), lr=args.lr)
    if args.load:
        group.load(args.load, model, optimizer)

    rows = sum(len(e.weight) for e in (model.user, model.item, model.category))
    group.print_once(f"processes: {group.size}, rows on rank 0: {rows:,} of {sum(sizes):,}")

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
    with torch.no_grad():  # every rank takes part in the lookup
        logits = model(*fields)
    loss = F.binary_cross_entropy_with_logits(logits, liked)
    group.print_once(f"held-out log loss {loss.item():12.4f}")
    group.print_once(f"held-out AUC {auc(logits, liked):17.4f}")
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
