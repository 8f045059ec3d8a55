"""`torch.nn.functional.embedding` and `embedding_bag` for tables.

`Table.__torch_function__` calls these functions instead of torch's. Each function checks the ids,
reads settled rows, and makes autograd produce a `RowGradient`. Under `torch.compile`, a lookup is
a single operator in the graph, unless it involves other processes or changes rows (`max_norm`).
Bags with `padding_idx` or `scale_grad_by_freq` break the graph too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hotrow.errors import HotrowError
from hotrow.ids import check_bag, check_dtype, normalize_padding
from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.grouping import find_distinct
from hotrow.kernels.tracing import may_trace, never_trace
from hotrow.table.autograd import LookUpOptions, SelectRows, look_up
from hotrow.table.compiled import can_trace, traced_look_up
from hotrow.table.jagged import call_tables_first
from hotrow.table.parameter import (
    LOOKUP_FUNCTIONS,
    Table,
    needs_gradient,
    raise_on_all_ranks,
    table_row_count,
)
from hotrow.table.protocols import Distribution
from hotrow.table.reading import (
    check_look_up,
    has_gpu_reader,
    refuse_make_fx,
    renorm,
    row_reader,
    stale_row_reader,
)
from hotrow.table.stack import caller_stack_level


def _source(table: Table) -> Tensor:
    """Return the tensor that gets the gradient: the table, or a distributed table's `source`."""
    if not table.spans_processes:
        if DistributedDataParallel._active_ddp_module is not None and needs_gradient(table):
            _warn_about_ddp(table)
        return table
    source: Tensor = table
    if needs_gradient(table):
        distributions: tuple[Distribution[Table] | None, ...] = table.shards, table.replicas
        for distribution in distributions:
            source = source if distribution is None else distribution.source(source)
    return source


def embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of a table, like `torch.nn.functional.embedding`."""
    look_up_rows = _embedding
    if may_trace():
        if can_trace(weight, max_norm):
            return traced_look_up(weight, input, padding_idx, scale_grad_by_freq)
        look_up_rows = _untraced_embedding
    return look_up_rows(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
) -> Tensor:
    if weight.spans_processes:
        check_options(weight, padding_idx, max_norm, scale_grad_by_freq)
    if weight.shards is not None:
        _, inverse, compact = weight.shards.fetch(weight, input, padding_idx, max_norm, norm_type)
        return F.embedding(inverse, compact)
    return local_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


_untraced_embedding = never_trace(_embedding)


def local_embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Look up rows that this process stores; see `embedding`."""
    with torch._C.DisableTorchFunctionSubclass():  # avoids a slow call for each attribute access
        shape, columns = weight.shape, weight.columns
        padding = -1 if padding_idx is None else normalize_padding(padding_idx, shape[columns])
        is_trained = needs_gradient(weight)
        reader = row_reader(weight, input, max_norm, norm_type, is_trained)
        if not is_trained:
            return reader[0]()
        options = LookUpOptions(shape, padding, scale_grad_by_freq, columns)
        output: Tensor = look_up(_source(weight), reader, options)  # type: ignore[no-untyped-call]
        return output


def embedding_bag(
    input: Tensor,
    weight: Table,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up bags of ids in a table, like `torch.nn.functional.embedding_bag`."""
    # torch's bags on the CPU divide gradients by other frequencies than its lookups do.
    if padding_idx is None and not scale_grad_by_freq and can_trace(weight, max_norm):
        rows = traced_look_up(weight, input.reshape(-1), None, False)
        return F.embedding_bag(
            torch.arange(input.numel(), device=input.device).view(input.shape),
            rows,
            None if offsets is None else offsets.long(),
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
        )
    return _embedding_bag(
        input,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )


def _warn_about_ddp(table: Table) -> None:
    """Warn once that DistributedDataParallel sends the whole gradient of a table."""
    if not table.has_warned:
        table.has_warned = True
        warnings.warn(
            f"DistributedDataParallel sends the whole gradient of a {tuple(table.shape)} "
            "table, and each step is dense. Call hotrow.distributed.replicate(model, mesh) before "
            "DistributedDataParallel(model) to send only the touched rows",
            stacklevel=caller_stack_level(),
        )


@never_trace
def _embedding_bag(
    input: Tensor,
    weight: Table,
    offsets: Tensor | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    if weight.spans_processes:
        check_options(weight, padding_idx, max_norm, scale_grad_by_freq)
    padding = normalize_padding(padding_idx, table_row_count(weight))
    if max_norm is None and weight.shards is None and has_gpu_reader(weight, input):
        # Only the GPU knows the distinct ids, so look up a row for each id.
        rows = local_embedding(
            input.reshape(-1), weight, padding_idx, None, norm_type, scale_grad_by_freq
        )
        positions = torch.arange(len(rows), device=rows.device)
        if padding_idx is not None:  # all padding ids point to an extra row
            positions = positions.masked_fill(input.reshape(-1) == padding, len(rows))
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return F.embedding_bag(
            positions.view(input.shape),
            rows,
            None if offsets is None else offsets.long(),
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=None if padding_idx is None else len(rows) - 1,
        )
    if weight.spans_processes:  # torch's own checks would raise an error only in this process
        try:
            check_dtype(input, "input")
            offsets = check_bag(
                input.shape,
                offsets,
                per_sample_weights,
                mode=mode,
                table=weight,
                last=include_last_offset,
            )
            if offsets is None and not input.shape[1]:
                raise HotrowError(
                    f"torch does not accept empty bags of shape {tuple(input.shape)}",
                    fix="pass ids of shape (0,) and offsets=torch.zeros(B, dtype=torch.int64)",
                )
        except HotrowError as error:
            raise_on_all_ranks(weight, error)
    if weight.shards is None:
        rows, inverse, compact = _distinct_rows(input, weight, max_norm, norm_type)
    else:
        rows, inverse, compact = weight.shards.fetch(
            weight, input, padding_idx, max_norm, norm_type
        )
    padding_indices = [] if weight.is_meta else (rows == padding).nonzero().tolist()
    with torch._C.DisableTorchFunctionSubclass():
        return F.embedding_bag(
            inverse,
            compact,
            None if offsets is None else offsets.long(),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_indices[0][0] if padding_indices else None,
        )


def _distinct_rows(
    input: Tensor, weight: Table, max_norm: float | None, norm_type: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids (R,), the position of each id among them, and their rows (R, D).

    The distinct ids are in ascending order, so sorting the positions has the same effect as sorting
    the ids. torch's backward pass for bags sorts the positions, so it adds the gradients of a
    repeated id in the same order as for a plain parameter.
    """
    refuse_make_fx()
    table = weight.raw_rows
    check_look_up(input, weight, len(table))
    rows, inverse = find_distinct(input, len(table)).sort()
    read: Callable[[], Tensor] = functools.partial(table.index_select, 0, rows)
    if weight.has_stale_rows:
        row_ids = DistinctIds(rows, torch.arange(len(rows), device=rows.device))
        read = (
            stale_row_reader(weight, row_ids, needs_gradient(weight) and max_norm is None) or read
        )
    if max_norm is not None:
        renorm(weight, input, max_norm, norm_type)
    with torch._C.DisableTorchFunctionSubclass():
        compact = SelectRows.apply(_source(weight), rows, read, weight.columns)  # type: ignore[no-untyped-call]
        return rows, inverse, compact


def check_options(
    table: Table, padding_idx: int | None, max_norm: float | None, scale_grad_by_freq: bool
) -> None:
    """Raise an error in every process if a distributed table doesn't support the options."""
    try:
        normalize_padding(padding_idx, table_row_count(table))
    except HotrowError as error:
        raise_on_all_ranks(table, error)
    if scale_grad_by_freq:
        raise_on_all_ranks(
            table,
            HotrowError(
                "scale_grad_by_freq=True is not supported for a sharded or replicated table: it "
                "would count only the ids of one rank, not those of the whole batch",
                fix="leave scale_grad_by_freq out",
            ),
        )
    if max_norm is not None and table.replicas is not None:
        raise_on_all_ranks(
            table,
            HotrowError(
                "max_norm is not supported for a replicated table: each rank would renormalize "
                "different rows",
                fix="leave max_norm out, or use hotrow.distributed.shard",
            ),
        )


LOOKUP_FUNCTIONS.update({F.embedding: embedding, F.embedding_bag: embedding_bag})
call_tables_first()
