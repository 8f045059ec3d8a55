"""What a training by several processes needs beside the model: ranks, shares, one voice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Together:
    """The processes that torchrun has started, or one that was started without it."""

    def __init__(self) -> None:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        self._ours = not dist.is_initialized()
        if self._ours:
            dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.count,))

    def say(self, text: str = "") -> None:
        """Print, on the first rank only."""
        if not self.rank:
            print(text, flush=True)

    def share(self, batch: Any) -> Any:
        """What a rank has of a batch, of nested tuples of tensors."""
        if isinstance(batch, Tensor):
            return batch.tensor_split(self.count)[self.rank]
        return tuple(map(self.share, batch))

    def mean(self, sum_here: Tensor, size: int) -> Tensor:
        """Of a sum over this rank's share, what is averaged over the ranks to the batch's mean.

        Shares may differ in size, by which the mean of their means would not be that.
        """
        return sum_here * (self.count / size)

    def total(self, value: Tensor) -> float:
        """The mean over the ranks."""
        value = value.detach().double()
        dist.all_reduce(value)
        return value.item() / self.count

    def train(
        self,
        steps: range,
        all_steps: int,
        step: Callable[[int], Tensor],
    ) -> None:
        """Make the steps and print the mean loss of each tenth of them."""
        losses = []
        for t in steps:
            losses.append(self.total(step(t)))
            if (t + 1) * 10 // all_steps > t * 10 // all_steps:
                self.say(f"step {t + 1:6,}, train loss {sum(losses) / len(losses):12.4f}")
                losses = []

    def save(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """A checkpoint of torch's, which any number of ranks can read."""
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)

    def load(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take model and optimizer to where a checkpoint has them."""
        weights, state = get_state_dict(model, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    def end(self) -> None:
        """Leave the group, if it was made here."""
        if self._ours:
            dist.destroy_process_group()
