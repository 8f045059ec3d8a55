"""Helpers for multi-process training: ranks, shares of a batch, output and checkpoints."""

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


class ProcessGroup:
    """The processes started by torchrun, or a single process."""

    def __init__(self) -> None:
        single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in single.items():
            os.environ.setdefault(name, value)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.size,))

    def print_once(self, text: str = "") -> None:
        """Print only on the first rank."""
        if not self.rank:
            print(text, flush=True)

    def local_share(self, batch: Any) -> Any:
        """Return this rank's share of a batch (a tensor or a nested tuple of tensors)."""
        if isinstance(batch, Tensor):
            return batch.tensor_split(self.size)[self.rank]
        return tuple(map(self.local_share, batch))

    def scale_to_mean(self, local_sum: Tensor, batch_size: int) -> Tensor:
        """Scale this rank's sum so that averaging it over the ranks gives the mean over the batch.

        Averaging the ranks' means would be wrong, because shares may differ in size.
        """
        return local_sum * (self.size / batch_size)

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean of a value over all ranks."""
        value = value.detach().double()
        dist.all_reduce(value)
        return value.item() / self.size

    def train(
        self,
        steps: range,
        all_steps: int,
        step: Callable[[int], Tensor],
    ) -> None:
        """Run the steps, and print the mean loss after every 10% of all steps."""
        losses = []
        for t in steps:
            losses.append(self.mean_over_ranks(step(t)))
            if (t + 1) * 10 // all_steps > t * 10 // all_steps:
                self.print_once(f"step {t + 1:6,}, train loss {sum(losses) / len(losses):12.4f}")
                losses = []

    def save(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save a distributed checkpoint, which any number of ranks can load, in a new folder."""
        weights, state = get_state_dict(model, optimizer)
        # A crash while torch overwrites a checkpoint would leave neither the old nor the new one.
        writer = dcp.FileSystemWriter(path, overwrite=False)
        dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)

    def load(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the model and the optimizer from a checkpoint."""
        weights, state = get_state_dict(model, optimizer)
        checkpoint = {"model": weights, "optimizer": state}
        dcp.load(checkpoint, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=checkpoint["model"],
            optim_state_dict=checkpoint["optimizer"],
        )

    def close(self) -> None:
        """Destroy the process group if this object created it."""
        if self._owns_group:
            dist.destroy_process_group()
