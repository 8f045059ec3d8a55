"""Train the model from language_model.py with a replica of its table in each process.

The losses are the same for any number of processes:

    python examples/replicated.py
    torchrun --nproc-per-node 2 examples/replicated.py
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from language_model import LanguageModel, bits, crops, standard_library
from process_group import ProcessGroup
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow.distributed import replicate


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, text in (
        ("steps", 1000, "training steps"),
        ("rows", 2**18, "number of rows in the hashed table"),
        ("width", 64, "number of columns in the table"),
        ("batch", 32, "texts per step, summed over all processes"),
        ("length", 64, "bytes per text"),
    ):
        help_ = f"{text} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default 0.002)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train the model and print its losses."""
    args = options(arguments)
    group = ProcessGroup()
    train, held_out = standard_library()
    torch.manual_seed(0)
    model = hotrow.convert(LanguageModel(args.rows, args.width), min_entries=0)

    model = replicate(model, group.mesh)  # the table
    ddp_model = DistributedDataParallel(model)  # the other layers
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=args.lr)
    group.print_once(f"processes: {group.size}, rows on each rank: {args.rows:,}")

    def step(t: int) -> Tensor:
        text = group.local_share(crops(train, t, args.batch, args.length))
        optimizer.zero_grad()
        logits = ddp_model(text[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        loss = group.scale_to_mean(losses / math.log(2), args.batch * args.length)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
        optimizer.step()
        return loss

    group.train(range(args.steps), args.steps, step)
    with torch.no_grad():
        loss = bits(model, crops(held_out, 0, 64, 256))
    group.print_once(f"held-out loss {loss.item():16.4f}")
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
