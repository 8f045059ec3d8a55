"""A process group as tables use it: exchanges whose sizes differ, and errors that reach everyone.

An exchange begins with a header of two numbers for each rank: what is being done, and how many
rows follow. A rank that cannot go on says so in its header; whoever sees that, or that the others
are doing something else, raises, and nobody waits for what will not come.

    bytes sent in the header of an exchange among W ranks     16 (W - 1)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.errors import HotrowError

FAILED = -1  # in the place of what is being done


class Ranks:
    """The ranks of a process group, in its order.

    Arguments:
        group: of torch.distributed.
        device: of the tensors that its collectives take.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.exchanges = 0  # that will go back; each has a number, the same on all ranks
        self.count: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    def gather(self, doing: str, value: Any, failure: HotrowError | None = None) -> list[Any]:
        """What each rank gives, any object.

        Raises:
            HotrowError: `failure`, or what another rank raises. Every rank raises.
        """
        problem = None
        if failure is not None:
            problem = f"rank {self.rank} of {self.count} could not {doing}: {failure}"
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, (value, problem), group=self.group)
        problems = [problem for _, problem in told if problem is not None]
        if problems:
            error = failure or HotrowError(problems[0])
            error.everywhere = True
            raise error
        return [value for value, _ in told]

    def norm(self, own: Tensor, order: float) -> Tensor:
        """The norm of what all ranks have, from that of what this one has."""
        if math.isinf(order):
            dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group)
            return own
        power = own.double() ** order
        dist.all_reduce(power, group=self.group)
        return (power ** (1 / order)).to(own.dtype)

    def any(self, found: Tensor) -> None:
        """Make `found` 1.0 if it is on any rank; in place."""
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)

    def announce(
        self, doing: str, numbers: Sequence[int], failure: HotrowError | None = None
    ) -> list[int]:
        """Tell rank r the r-th of `numbers`; what each of them has told this one.

        Raises:
            HotrowError: `failure`, or what another rank raises, or that ranks do not do the same.
                Every rank raises.
        """
        code = FAILED if failure is not None else zlib.crc32(doing.encode())
        header = torch.tensor([[code, number] for number in numbers], device=self.device)
        received = torch.empty_like(header)
        dist.all_to_all_single(received, header, group=self.group)
        codes, counts = received.t().tolist()
        if set(codes) != {code} or code == FAILED:
            self._raise(doing, failure)
        return list(counts)

    def _raise(self, doing: str, failure: HotrowError | None) -> NoReturn:
        """The error of this rank, of another, or that they do different things."""
        told = self.gather(doing, doing, failure)
        what = "; ".join(f"rank {rank} was to {doing}" for rank, doing in enumerate(told))
        error = HotrowError(
            f"the ranks do not do the same: {what}",
            fix="run the same model on every rank, with an empty batch where there is no data",
        )
        error.everywhere = True
        raise error

    def swap(
        self,
        tensors: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Hand rows to their ranks, several tensors in one exchange.

        Arguments:
            tensors: (rows, ...) each, those for rank 0 first; alike on all ranks but for the rows.
            sent: for each tensor, how many rows go to each rank.
            received: for each tensor, how many come from each.

        Returns:
            For each tensor the rows that have come, those of rank 0 first.
        """
        out, into = _bytes(tensors, sent), _bytes(tensors, received)
        parts = [
            torch.split(_raw(tensor), sizes) for tensor, sizes in zip(tensors, out, strict=True)
        ]
        flat = _joined([each[rank] for rank in range(self.count) for each in parts])
        buffer = flat.new_empty(sum(map(sum, into)))
        taken, given = (list(map(sum, zip(*sizes, strict=True))) for sizes in (into, out))
        dist.all_to_all_single(buffer, flat, taken, given, group=self.group)
        pieces = torch.split(buffer, [sizes[rank] for rank in range(self.count) for sizes in into])
        found = []
        for i, tensor in enumerate(tensors):
            # In memory that begins where any dtype may.
            raw = torch.cat(pieces[i :: len(tensors)]) if len(tensors) > 1 else buffer
            found.append(raw.view(tensor.dtype).view(sum(received[i]), *tensor.shape[1:]))
        return found

    def share(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Give every rank the rows of all; `counts` of each.

        Returns:
            For each of the tensors the rows of all ranks, those of rank 0 first.
        """
        own = _joined([_raw(tensor) for tensor in tensors])
        sizes = [list(each) for each in zip(*_bytes(tensors, [counts] * len(tensors)), strict=True)]
        buffers = [
            own if rank == self.rank else own.new_empty(sum(each))
            for rank, each in enumerate(sizes)
        ]
        works: list[Any] = [
            dist.broadcast(buffer, group=self.group, group_src=rank, async_op=True)
            for rank, buffer in enumerate(buffers)
        ]
        for work in works:
            work.wait()
        parts = [torch.split(buffer, each) for buffer, each in zip(buffers, sizes, strict=True)]
        return [
            torch.cat([part[i] for part in parts])
            .view(tensor.dtype)
            .view(sum(counts), *tensor.shape[1:])
            for i, tensor in enumerate(tensors)
        ]


class Swap(torch.autograd.Function):
    """`Ranks.swap`, whose gradients go back the way the rows came, averaged over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sent: list[list[int]], received: list[list[int]], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """For each of `rows`, what the other ranks have sent of theirs."""
        ctx.set_materialize_grads(False)
        ranks.exchanges += 1
        ctx.number = ranks.exchanges
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        found = tuple(ranks.swap(rows, sent, received))
        ctx.forms = [(each.shape, each.dtype) for each in found]
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Divided before they are added, as DistributedDataParallel does.

        None for what no rank has used: its table is to make no step.

        Raises:
            HotrowError: on every rank, if they go back through different exchanges.
        """
        ranks = ctx.ranks
        ranks.announce(f"send back the gradients of look-up {ctx.number}", [0] * ranks.count)
        shares = [
            torch.zeros(shape, dtype=dtype, device=ranks.device)
            if gradient is None
            else gradient / ranks.count
            for gradient, (shape, dtype) in zip(gradients, ctx.forms, strict=True)
        ]
        used = [[each is not None for each in gradients]]
        one = [1] * ranks.count  # a line of `used` for each rank
        shares.append(torch.tensor(used * ranks.count, device=ranks.device))
        *found, told = ranks.swap(shares, [*ctx.received, one], [*ctx.sent, one])
        return (
            None,
            None,
            None,
            *(
                each if someone else None
                for each, someone in zip(found, told.any(0).tolist(), strict=True)
            ),
        )


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which any backend moves."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def _bytes(tensors: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The bytes of so many rows of each."""
    widths = [tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in tensors]
    return [[n * width for n in each] for each, width in zip(counts, widths, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
