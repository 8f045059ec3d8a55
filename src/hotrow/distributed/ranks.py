"""Collectives that allow a different data size on each rank and raise errors on all ranks.

An exchange starts with a header of two numbers for each rank: a code for the operation, and a
count, usually the number of rows that follow. A rank with an error sends the code `FAILED`. A rank
that receives `FAILED` or the code of another operation raises an error. As a result, no rank waits
for data that is never sent.

With W ranks, each rank sends a 16-byte header to each of the W - 1 other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.errors import HotrowError, is_on_all_ranks, mark_on_all_ranks

_SAME_MODEL = (
    "run the same model and take the same steps on every rank, with an empty batch on ranks "
    "without data"
)
_SAME_CALL = "make the same calls with the same arguments on every rank"
FAILED = -1  # a rank with an error sends this code instead of the operation's code


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _exchange(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make each call of a method an exchange; see `Ranks.exchange`."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        ranks: Any = args[0]
        with ranks.exchange():
            return method(*args, **kwargs)

    return run


class Ranks:
    """The ranks of a process group, and collectives over them.

    Arguments:
        group: the torch.distributed process group.
        device: the device of the exchanged tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.exchange_count = 0  # the number of differentiable exchanges; the same on all ranks
        self.step_count = 0  # the number of steps of replicated tables; the same on all ranks
        self._lock, self._is_interrupted = threading.RLock(), False
        self.count: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        self.members = frozenset(members)
        self.names = [f"rank {member}" for member in members]  # in messages
        self.name = self.names[self.rank]

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Run one exchange of messages, which may contain smaller exchanges.

        Raises:
            HotrowError: another thread is in an exchange, or an error has interrupted an earlier
                exchange on this rank alone. In both cases, the ranks would read wrong messages.
        """
        if not self._lock.acquire(blocking=False):
            raise HotrowError(
                f"two threads of {self.name} use sharded or replicated tables at the "
                "same time, so their messages to the other ranks would mix",
                fix="look up rows in one thread: collectives must run in the same order on all "
                "ranks",
            )
        try:
            if self._is_interrupted:
                raise HotrowError(
                    "an error, such as a KeyboardInterrupt, has interrupted "
                    f"{self.name} while it exchanged messages with the other ranks",
                    fix="start all ranks again, and load the last checkpoint",
                )
            yield
        except BaseException as error:
            self._is_interrupted |= not is_on_all_ranks(error)
            raise
        finally:
            self._lock.release()

    @_exchange
    def all_gather(self, operation: str, value: Any, failure: Exception | None = None) -> list[Any]:
        """Return the values of all ranks; a value can be any picklable object.

        Raises:
            HotrowError: on every other rank, if any rank passed `failure`.
            Exception: `failure`, if this rank passed it.
        """
        problem = None
        if failure is not None:
            kind = "" if isinstance(failure, HotrowError) else f"{type(failure).__name__}: "
            world_size = dist.get_world_size()
            problem = f"{self.name} of {world_size} could not {operation}: {kind}{failure}"
        answers: list[Any] = [None] * self.count
        dist.all_gather_object(answers, (value, problem), group=self.group)
        problems = [problem for _, problem in answers if problem is not None]
        if problems:
            # Wait for all ranks: if a rank exits early, data that it has sent may be lost.
            with contextlib.suppress(RuntimeError):  # raised if another rank has already exited
                dist.barrier(group=self.group)
            error = failure or HotrowError(problems[0])
            mark_on_all_ranks(error)
            vars(error)["gathered"] = [value for value, _ in answers]
            raise error
        return [value for value, _ in answers]

    def first_different(self, values: Sequence[Any]) -> int | None:
        """Return the first rank whose value differs from that of the first rank, or None."""
        return next((rank for rank, each in enumerate(values) if each != values[0]), None)

    @_exchange
    def agree_on_rows(
        self, operation: str, rows: Tensor | None, failure: Exception | None = None
    ) -> Tensor:
        """Return the rows of the first rank.

        Raises:
            HotrowError: on every rank, if the operations differ; on every other rank, if any rank
                passed `failure`.
            Exception: `failure`, if this rank passed it.
        """
        counts = [0] * self.count
        self.exchange_counts(operation, counts, failure, _SAME_CALL, replicas_wait=True)
        assert rows is not None
        rows = rows.contiguous()
        dist.broadcast(rows, group=self.group, group_src=0)
        return rows

    def agree(self, operation: str, value: int = 0, failure: Exception | None = None) -> list[int]:
        """Return the values of all ranks; raise an error unless all of them run the operation."""
        counts = [value] * self.count
        return self.exchange_counts(operation, counts, failure, replicas_wait=True)

    @_exchange
    def norm(self, local_norm: Tensor, order: float) -> Tensor:
        """Return the norm of a tensor split over the ranks, given the norm of this rank's part."""
        if math.isinf(order):
            is_nan = local_norm.isnan()  # the maximum over the ranks may ignore NaN
            parts = torch.stack([local_norm.masked_fill(is_nan, 0), is_nan.to(local_norm.dtype)])
            self.all_reduce_max(parts)
            return torch.where(parts[1] > 0, math.nan, parts[0])
        power = local_norm.double() ** order
        dist.all_reduce(power, group=self.group)
        return (power ** (1 / order)).to(local_norm.dtype)

    @_exchange
    def all_reduce_max(self, value: Tensor) -> None:
        """Set `value` to its maximum over all ranks, in place."""
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)

    @_exchange
    def exchange_counts(
        self,
        operation: str,
        counts: Sequence[int],
        failure: Exception | None = None,
        fix: str = _SAME_MODEL,
        details: str = "",
        replicas_wait: bool = False,
    ) -> list[int]:
        """Send `counts[r]` to each rank r, and return the counts that this rank receives.

        Arguments:
            operation: a name, which must be the same on all ranks.
            counts: non-negative numbers.
            failure: an error of this rank, or None.
            fix: the advice in the error if the operations differ.
            details: more text that must be the same on all ranks.
            replicas_wait: whether the replicas of this rank will exchange something with it after
                the same operation.

        Raises:
            HotrowError: on every rank, if the operations differ; on every other rank, if any rank
                passed `failure`.
            Exception: `failure`, if this rank passed it.
        """
        code = FAILED if failure is not None else hash_text(operation + details)
        header = torch.tensor([[code, count] for count in counts], device=self.device)
        received = torch.empty_like(header)
        dist.all_to_all_single(received, header, group=self.group)
        codes, received_counts = received.t().tolist()
        if set(codes) != {code} or code == FAILED:
            self._raise_failure(operation, operation + details, replicas_wait, failure, fix)
        return list(received_counts)

    def _raise_failure(
        self,
        operation: str,
        text: str,
        replicas_wait: bool,
        failure: Exception | None,
        fix: str,
    ) -> NoReturn:
        """Raise a failed rank's error, or an error that lists the operation of each rank."""
        answers = self.all_gather(operation, (text, replicas_wait), failure)
        operations = "; ".join(
            f"{name}: {each}" for name, (each, _) in zip(self.names, answers, strict=True)
        )
        error = HotrowError(f"the ranks run different operations ({operations})", fix=fix)
        mark_on_all_ranks(error)
        vars(error)["gathered"] = answers
        raise error

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        send_counts: Sequence[Sequence[int]],
        receive_counts: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Send each rank its rows of each tensor, in one exchange.

        Arguments:
            tensors: tensors of shape (rows, ...), with rows ordered by the rank that receives them.
                The dtypes and the other dimensions must be the same on all ranks.
            send_counts: for each tensor, the number of rows to send to each rank.
            receive_counts: for each tensor, the number of rows to receive from each rank.

        Returns:
            For each tensor, the received rows, ordered by the rank that sent them.
        """
        send_bytes = _byte_counts(tensors, send_counts)
        receive_bytes = _byte_counts(tensors, receive_counts)
        parts = [
            torch.split(as_bytes(tensor), sizes)
            for tensor, sizes in zip(tensors, send_bytes, strict=True)
        ]
        sent = _concatenate([part[rank] for rank in range(self.count) for part in parts])
        received = sent.new_empty(sum(map(sum, receive_bytes)))
        receive_sizes, send_sizes = (
            list(map(sum, zip(*sizes, strict=True))) for sizes in (receive_bytes, send_bytes)
        )
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self.group)
        piece_sizes = [sizes[rank] for rank in range(self.count) for sizes in receive_bytes]
        pieces = torch.split(received, piece_sizes)
        results = []
        for i, tensor in enumerate(tensors):
            # torch.cat copies to new memory, which is aligned for any dtype.
            raw = torch.cat(pieces[i :: len(tensors)]) if len(tensors) > 1 else received
            results.append(raw.view(tensor.dtype).view(sum(receive_counts[i]), *tensor.shape[1:]))
        return results

    def all_gather_rows(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Gather the rows of all ranks on every rank; rank r contributes `counts[r]` rows.

        Returns:
            For each tensor, the rows of all ranks, ordered by rank.
        """
        local = _concatenate([as_bytes(tensor) for tensor in tensors])
        byte_counts = _byte_counts(tensors, [counts] * len(tensors))
        rank_sizes = [list(sizes) for sizes in zip(*byte_counts, strict=True)]
        buffers = [
            local if rank == self.rank else local.new_empty(sum(sizes))
            for rank, sizes in enumerate(rank_sizes)
        ]
        works: list[Any] = [
            dist.broadcast(buffer, group=self.group, group_src=rank, async_op=True)
            for rank, buffer in enumerate(buffers)
        ]
        for work in works:
            work.wait()
        parts = [
            torch.split(buffer, sizes) for buffer, sizes in zip(buffers, rank_sizes, strict=True)
        ]
        return [
            torch.cat([part[i] for part in parts])
            .view(tensor.dtype)
            .view(sum(counts), *tensor.shape[1:])
            for i, tensor in enumerate(tensors)
        ]


class AllToAll(torch.autograd.Function):
    """Differentiable `Ranks.all_to_all`; backward returns gradients averaged over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        send_counts: list[list[int]],
        receive_counts: list[list[int]],
        fail_replicas: Callable[[Exception], None] | None,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the rows that this rank receives, for each tensor in `rows`.

        Replicas that wait for gradients need `fail_replicas`, which raises an error there too.
        """
        ctx.set_materialize_grads(False)
        ranks.exchange_count += 1
        ctx.exchange, ctx.fail_replicas = ranks.exchange_count, fail_replicas
        ctx.ranks, ctx.send_counts, ctx.receive_counts = ranks, send_counts, receive_counts
        outputs = tuple(ranks.all_to_all(rows, send_counts, receive_counts))
        ctx.output_metadata = [(output.shape, output.dtype) for output in outputs]
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `rows`, divided by the number of ranks before they are summed.

        DistributedDataParallel also divides gradients before it sums them. If no rank uses an
        output, the gradient of the corresponding rows is None, so the optimizer skips the table.

        Raises:
            HotrowError: on every rank, if the ranks run the backward passes of different exchanges.
        """
        ranks = ctx.ranks
        with ranks.exchange():
            operation = f"send back the gradients of lookup {ctx.exchange}"
            has_replicas = ctx.fail_replicas is not None
            try:
                ranks.exchange_counts(operation, [0] * ranks.count, replicas_wait=has_replicas)
            except Exception as error:
                if has_replicas:
                    ctx.fail_replicas(error)
                raise
            shares = [
                torch.zeros(shape, dtype=dtype, device=ranks.device)
                if gradient is None
                else gradient / ranks.count
                for gradient, (shape, dtype) in zip(gradients, ctx.output_metadata, strict=True)
            ]
            is_used = [[gradient is not None for gradient in gradients]]
            ones = [1] * ranks.count  # send one row of `is_used` to each rank
            shares.append(torch.tensor(is_used * ranks.count, device=ranks.device))
            *row_gradients, used_by_rank = ranks.all_to_all(
                shares, [*ctx.receive_counts, ones], [*ctx.send_counts, ones]
            )
        return (
            None,
            None,
            None,
            None,
            *(
                gradient if used else None
                for gradient, used in zip(row_gradients, used_by_rank.any(0).tolist(), strict=True)
            ),
        )


def hash_text(text: str) -> int:
    """Return a 56-bit hash of a text, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def do_replicas_wait(error: Exception) -> bool:
    """Return whether the replicas of any rank wait after a failed `Ranks.exchange_counts`."""
    return any(replicas_wait for _, replicas_wait in getattr(error, "gathered", []))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, which any backend can send."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def _byte_counts(tensors: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Convert the row counts of each tensor to byte counts."""
    widths = [tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in tensors]
    return [[n * width for n in row] for row, width in zip(counts, widths, strict=True)]


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
