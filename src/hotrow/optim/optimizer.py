"""The base class of the optimizers, which adds row steps for tables to torch's step.

A table takes a row step if its gradient is a `RowGradient`. The table's `RowLag` records the step
and applies it to the touched rows. torch's step updates all other parameters.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from hotrow.errors import HotrowError
from hotrow.kernels import devices
from hotrow.kernels.tracing import never_trace
from hotrow.optim import exclusive_access, graphs
from hotrow.optim.agreement import StepAgreement
from hotrow.optim.dense_steps import (
    TableGradient,
    check_state_shapes,
    copy_frozen_rows,
    dense_gradient,
    find_reasons,
    find_tables,
    match_strides,
)
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.interrupts import PostponedSignals
from hotrow.optim.lag import Replaced, RowLag, Run, last_run
from hotrow.optim.loading import (
    check_group,
    check_ranges,
    check_state,
    check_structure,
    saved_tables,
)
from hotrow.optim.misuse import (
    check_sparse_gradients,
    has_hooks,
    refuse_unsynchronized,
    warn_of_dense_embeddings,
    warn_of_missing_state,
)
from hotrow.optim.old_rows import refuse_old_rows, register
from hotrow.optim.rule import ParamGroup, Rule, numeric_group
from hotrow.optim.state import RowState, States, sort_new_states
from hotrow.optim.step import step_together
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import TABLE_CLASSES, Table
from hotrow.table.protocols import Backing
from hotrow.table.reading import raise_pending_error
from hotrow.table.row_change import trim_storage

_GRAD: Any = Tensor.grad
_UNSUPPORTED_OPTIONS = ("capturable", "differentiable")
# The template for each optimizer's docstring, filled in with its summary and its rule's formula.
_DOCSTRING = """{summary}

Step t = 1, 2, ... updates an element w with gradient g as follows (`maximize` negates g)::

{formula}

Args:
    params: the parameters of the model, or parameter groups. Tables and dense parameters may be
        mixed.
    others: all other arguments of `torch.optim.{name}`, with the same defaults. Groups with tables
        do not support `capturable` or `differentiable`; `foreach` and `fused` affect only dense
        parameters.

Raises:
    HotrowError: `step` or `load_state_dict` cannot continue. The error is raised before any
        parameter or state changes. See `hotrow.optim` for the causes, and for shapes, dtypes and
        costs.

>>> import torch, hotrow
>>> model = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
>>> optimizer = hotrow.optim.{name}(model.parameters())
>>> model(torch.tensor([2, 0, 2])).sum().backward()
>>> optimizer.step()
"""


def _plain_state(state: Mapping[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a table's state with tensors converted by `convert`."""
    return {
        k: convert(trim_storage(v)) if isinstance(v, Tensor) and v.layout == torch.strided else v
        for k, v in state.items()
    }


# RowOptimizer isn't a subclass of torch's Optimizer. Otherwise, libraries that list torch's
# optimizers by name would also find hotrow's, and get two classes for each name.
if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer
else:
    _Optimizer = object


class RowOptimizer(_Optimizer):
    """Add row steps for tables to a torch optimizer; a subclass also inherits from that optimizer.

    Tables with a `RowGradient` take row steps. All other parameters, including tables with a dense
    gradient, take torch's step. After each step, parameters marked by `hotrow.table.lookup.look_up`
    become tables.
    """

    _count = 0  # the number of steps that this object has taken
    rule: ClassVar[Rule]
    torch_class: ClassVar[type[torch.optim.Optimizer]]

    def __init_subclass__(cls) -> None:
        """Add the formula from the rule's module docstring to the class docstring."""
        super().__init_subclass__()
        rule_doc = sys.modules[cls.rule.update.__module__].__doc__ or ""
        if cls.__doc__:
            cls.__doc__ = _DOCSTRING.format(
                summary=inspect.cleandoc(cls.__doc__),
                formula=rule_doc.partition("\n\n")[2].rstrip(),
                name=cls.torch_class.__name__,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            HotrowError: the group contains a table and an option that tables do not support.
        """
        register(self)
        self._use_row_states()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(isinstance(parameter, Table) for parameter in group["params"]):
            try:
                self._check_options(group)
            except HotrowError:
                self.param_groups.pop()
                raise

    def _use_row_states(self) -> None:
        """Let other code keep the state of a table before the first step."""
        if type(self.state) is defaultdict:  # torch's
            self.state = States(dict, self.state)

    def _check_options(self, group: ParamGroup) -> None:
        for option in filter(group.get, _UNSUPPORTED_OPTIONS):
            raise HotrowError(
                f"{type(self).__name__} does not support {option}=True for tables",
                fix=f"leave {option} out of parameter groups that contain tables",
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `step` unscales gradients for a GradScaler, which row steps can't do."""
        fused = self.__dict__.get("_fused_amp_scaling", False)
        return fused and not find_tables(self.param_groups)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:  # torch sets this attribute
        self.__dict__["_fused_amp_scaling"] = value

    @never_trace
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; see `torch.optim.Optimizer.zero_grad`."""
        with torch._C.DisableTorchFunctionSubclass():  # saves a call for each access to `.grad`
            if not set_to_none or _profiler_enabled():
                super().zero_grad(set_to_none)
                return
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = None

    @staticmethod
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        """Make `step` call hooks and record itself in profiles, as torch does.

        If there are no hooks or profilers, the step skips torch's code for them, which saves 9 us.
        """
        with_hooks = torch.optim.Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def run(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls_hooks = has_hooks(self) or _profiler_enabled()
            return (with_hooks if calls_hooks else step)(self, *args, **kwargs)

        return run

    @never_trace
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one optimizer step to every parameter that has a gradient.

        Args:
            closure: a function that recomputes the loss and its gradients, and returns the loss.

        Returns:
            The result of `closure`, or None.

        Raises:
            HotrowError: a table was resized, moved or cast since its last step, its state is
                incomplete, or its options are not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with PostponedSignals():
            tables = find_tables(self.param_groups)
            if not self._count:
                check_sparse_gradients(self)
                warn_of_dense_embeddings(self)
            self._count += 1
            if tables:
                state_count = len(self.state)
                with torch.no_grad():
                    self._step_tables(tables)
                if len(self.state) > state_count:
                    sort_new_states(self.state, state_count, self.param_groups)
            else:
                self._torch_step()
            self._adopt_tables()
        return loss

    def _step_tables(self, tables: list[tuple[ParamGroup, Table]]) -> None:
        if any(table.backing is not None for _, table in tables):
            with ExclusiveAccess():  # no save may contain the state of a step that fails
                self._step_or_undo(tables)
        else:
            self._step_or_undo(tables)

    def _step_or_undo(self, tables: list[tuple[ParamGroup, Table]]) -> None:
        try:
            self._take_steps(tables)
        except BaseException:
            with ExclusiveAccess():
                self._undo_failed_step(tables)
            raise

    def _undo_failed_step(self, tables: list[tuple[ParamGroup, Table]]) -> None:
        """Remove the lags and the state that a failed step has created, and reopen earlier lags.

        As in torch, the initial state depends on the options of the first step. If the step has
        changed rows, its lag stays: a save contains its state, or later reads and steps raise an
        error.
        """
        for _, table in tables:
            lag = table.lag
            if not isinstance(lag, RowLag) or lag.state is not self.state.get(table):
                continue
            if lag.replaced is None or lag.is_broken:
                table.record_optimizer(self)
            elif lag.discard():
                run = last_run(table)
                if run is None or run.state is not lag.state:
                    self.state.pop(table, None)

    def _take_steps(self, tables: list[tuple[ParamGroup, Table]]) -> None:
        numeric_groups = {
            id(group): numeric_group(group, self.defaults) for group in self.param_groups
        }
        with torch._C.DisableTorchFunctionSubclass():  # saves a call for each access to `.grad`
            gradients = [
                (numeric_groups[id(group)], table, gradient)
                for group, table in tables
                if (gradient := table.grad) is not None
            ]
        must_agree = False
        for _, table, _ in gradients:
            if table.synchronized is not None:
                refuse_unsynchronized(table)
            must_agree |= table.replicas is not None
        reasons = find_reasons(self.rule, gradients, self.param_groups)
        agreement = StepAgreement(self.rule, self.defaults, self.state) if must_agree else None
        if agreement is not None:
            agreement.prepare(gradients, reasons)
        dense, pending_steps = [], []
        for (group, table, gradient), reason in zip(gradients, reasons, strict=True):
            if isinstance(gradient, RowGradient) and reason is None:
                self._check_options(group)
                lag = self._prepare_lag(table, group)
                pending_steps.append((lag, group, gradient.group()))
                continue
            if not isinstance(gradient, RowGradient):
                table.dense_step = table.dense_step or self._count
            raise_pending_error(table)  # torch's step doesn't check for invalid ids
            self.table_state(table)  # raises an error if its rows are old
            table.close_lag()
            dense.append((group, table, gradient))
        if dense or self._has_other_gradients():
            for ledger, group in {lag.ledger: group for lag, group, _ in pending_steps}.items():
                ledger.next_entry(group)  # raises an error before any parameter changes
            with ExclusiveAccess() if dense else nullcontext():  # no other thread may freeze rows
                self._dense_step(gradients, dense)
        if pending_steps:
            with exclusive_access.lock:  # the caller has postponed signals
                # Another thread may have closed a lag, for example in `state_dict`.
                step_together([
                    (self._prepare_lag(lag.table, group) if lag.is_closed else lag, group, batch)
                    for lag, group, batch in pending_steps
                ])  # fmt: skip
        for _, table, _ in gradients:
            table.record_optimizer(self)
            table.steps_taken += 1
        if agreement is not None:
            agreement.complete()
        for lag, _, _ in pending_steps:
            if lag.must_warn:
                lag.warn_about_alias()

    def _dense_step(
        self,
        gradients: list[TableGradient],
        dense: list[TableGradient],
    ) -> None:
        """Run torch's step for the tables in `dense` and for all other parameters."""
        put_back = []
        try:
            for _, table, _ in gradients:
                table.grad = None  # torch skips tables without a gradient
            for group, table, gradient in dense:
                # The table's own setter would turn the gradient of a shard into a row gradient.
                _GRAD.__set__(table, dense_gradient(gradient, group, table, self.state))
                if table.frozen_rows is not None:
                    put_back.append(
                        copy_frozen_rows(table, self.state, self.rule.initial_slots(group))
                    )
            self._torch_step()
        finally:
            for _, table, gradient in gradients:
                table.grad = gradient
            for put_back_rows in put_back:
                put_back_rows()

    def _torch_step(self) -> None:
        """Run torch's step without its hooks, which have already run for this step."""
        for group in self.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                if parameter.grad is not None:
                    check_state_shapes(parameter, self.state)
        step: Callable[..., Any] = self.torch_class.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self)

    def _adopt_tables(self) -> None:
        """Convert looked-up parameters to tables, except in groups with unsupported options."""
        for group in self.param_groups:
            if not any(map(group.get, _UNSUPPORTED_OPTIONS)):
                for parameter in group["params"]:
                    lookup_axis = parameter.__dict__.get("lookup_axis")
                    if lookup_axis and not isinstance(parameter, Table):
                        Table.adopt(parameter, columns=lookup_axis == "columns")
                        self._use_row_states()

    def _has_other_gradients(self) -> bool:
        """Return whether any parameter other than a table has a gradient."""
        return any(
            parameter.grad is not None
            for group in self.param_groups
            for parameter in group["params"]
            if type(parameter) not in TABLE_CLASSES
        )

    def _prepare_lag(self, table: Table, group: ParamGroup) -> RowLag:
        """Return the table's lag, ready to record a step with this group's options."""
        lag, state = table.lag, self.table_state(table)
        is_own = getattr(state, "lag", None) is lag
        if isinstance(lag, RowLag) and is_own and lag.accepts(group):
            return lag
        with ExclusiveAccess():
            replaced = Replaced.by_new_lag(table, state)
            try:
                table.close_lag()  # the lag belongs to another optimizer or has other options
                if not isinstance(state, RowState):
                    state = self.state[table] = RowState(state)
                    state.adopt_data()  # forgets the tensors that no other code keeps
                match_strides(state, table)
                table.lag = lag = RowLag(self.rule, table, group, state)
            except BaseException:
                if table.lag is None:
                    replaced.reopen(table)
                raise
            lag.replaced = replaced
        return lag

    def table_state(self, table: Table) -> Any:
        """Return a table's state; if a table on disk has none yet, return its saved state.

        Raises:
            HotrowError: the rows of the table changed, but not those of this state.
        """
        state = self.state.get(table, {})
        if isinstance(state, RowState):
            if state.aliases:
                state.adopt_data()
            own_lag: object = table.lag
            if state.lag is not own_lag:  # other code has moved the state from another table
                state.close_lag()
            if state.is_old:
                refuse_old_rows(self, table)
        if table.backing is not None and not state and not isinstance(state, RowState):
            run = last_run(table)
            if run is not None and run.rule is self.rule:
                if run.state and table.last_optimizer is self:
                    raise HotrowError(
                        "the state of a table on disk was removed from optimizer.state, but it is "
                        "still in the folder",
                        fix="fill the tensors of optimizer.state[weight] with 0 instead",
                    )
                state = self.state[table] = run.state
                state.adopt_data()  # forgets the tensors that an earlier optimizer has returned
                table.record_optimizer(self)
                warn_of_missing_state(self, state)
        return state

    def prepare_save(self, table: Table) -> None:
        """Let the next save of a table on disk contain a state that other code has assigned."""
        run = last_run(table)
        for group, each in find_tables(self.param_groups):
            state = self.table_state(table) if each is table else None
            is_new = bool(state) and (run is None or state is not run.state)
            state = None  # it refers to the tensors, so it would count as other code
            if is_new:
                self._prepare_lag(table, numeric_group(group, self.defaults)).replaced = None

    def _drop_initial_state(self) -> None:
        """Drop the state that torch's constructor has created for tables on disk.

        Their state is in their folders, or will be created there.
        """
        for _, table in find_tables(self.param_groups):
            if table.backing is not None:
                self.state.pop(table, None)

    @contextmanager
    def _closed_lags(self) -> Iterator[None]:
        """Close all lags, and afterwards open new ones for tables on disk, as saves need them.

        Other threads can't take a step or save until then.
        """
        on_disk = []
        with ExclusiveAccess():
            try:
                for _, table in find_tables(self.param_groups):
                    lag = table.lag
                    state = self.table_state(table)  # read from the folder if not done yet
                    if table.backing is not None and isinstance(lag, RowLag):
                        if state is not lag.state:
                            table.settle()  # the lag belongs to another optimizer
                            continue
                        # The group's options may have changed since the last step.
                        on_disk.append((lag.group_options, table))
                    lag = None  # it refers to the table's memory
                    table.close_lag()
                yield
            finally:
                for group, table in on_disk:
                    self._prepare_lag(table, group).replaced = None

    def prepare_capture(self) -> None:
        """Prepare the tables so that a CUDA graph (`torch.cuda.graph`) can capture a step.

        Call this method after at least one step with a gradient for each table. It reserves memory
        for 65,536 steps.

        Raises:
            HotrowError: no table has a gradient, or a table has not taken a row step on a GPU with
                Triton.
        """
        graphs.prepare_capture([lag for _, lag in self._gpu_lags()])

    def replay(self, graph: graphs.Graph, *others: RowOptimizer) -> None:
        """Take a step by replaying its CUDA graph, with the current learning rate.

        Args:
            graph: the `torch.cuda.CUDAGraph` that contains the step.
            others: the other `hotrow.optim` optimizers whose steps are in the graph.

        Raises:
            HotrowError: the graph no longer matches the tables, their state or the options. The
                error is raised before anything changes.
        """
        optimizers = self, *others
        lags = [
            (lag, numeric_group(group, each.defaults))
            for each in optimizers
            for group, lag in each._gpu_lags()
        ]
        with PostponedSignals(), torch.no_grad():
            graphs.replay(graph, lags)
            for each in optimizers:
                each._count += 1
        for lag, _ in lags:
            if lag.must_warn:
                lag.warn_about_alias()

    def _gpu_lags(self) -> list[tuple[ParamGroup, RowLag]]:
        """Return the lag of each table that has a gradient or is part of a CUDA graph."""
        lags = []
        for group, table in find_tables(self.param_groups):
            lag = table.lag
            is_captured = isinstance(lag, RowLag) and lag.captured is not None
            if table.grad is None and not is_captured:
                continue
            if not (isinstance(lag, RowLag) and devices.has_triton_kernels(table.raw_rows)):
                raise HotrowError(
                    f"a step on a {tuple(table.shape)} table cannot be captured in a CUDA graph",
                    fix="put the table on a GPU with Triton, then take one step without a graph",
                )
            lags.append((group, lag))
        return lags

    def settle(self) -> None:
        """Apply all missed steps to every table, just as reading the tables would.

        Call this method before code that bypasses torch's function protocol when it reads tables,
        such as `torch.jit.script`.
        """
        for _, table in find_tables(self.param_groups):
            table.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, which torch's optimizer of the same name can load.

        This method settles all rows first. The state tensors are not copied.
        """
        with self._closed_lags():
            # torch has no state for parameters without slots, which other code may have replaced.
            known = {parameter for group in self.param_groups for parameter in group["params"]}
            for key, state in list(self.state.items()):
                if isinstance(key, Tensor) and key not in known and not state:
                    del self.state[key]
            result: dict[str, Any] = super().state_dict()
            tables = dict(saved_tables(self.param_groups, result["param_groups"]))
            result["state"] = {
                index: _plain_state(state, tables[index].to_dtensor) if index in tables else state
                for index, state in result["state"].items()
                if index not in tables or state
            }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict saved by hotrow's or torch's optimizer of the same name.

        The state of tables is copied; for a table on disk, into the files of its folder.

        Raises:
            HotrowError: the state dict is incomplete, a table's state does not have the table's
                shape, an option or a scalar has the wrong type, or torch's constructor rejects an
                option. The error is raised before anything is loaded.
        """
        if not isinstance(state_dict, Mapping):
            check_structure(state_dict)
        # The user's hooks, which may change the state dict, run before this one.
        prepare: Any = type(self)._prepare_state_dict
        handle = self.register_load_state_dict_pre_hook(prepare)
        before = self.state
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            if self.state is not before:
                for group, table in find_tables(self.param_groups):
                    table.record_optimizer(self)
                    if table.backing is not None:
                        self._replace_last_run(
                            table, table.backing, numeric_group(group, self.defaults)
                        )

    def _replace_last_run(self, table: Table, backing: Backing, group: ParamGroup) -> None:
        """Let the next save of a table on disk contain the state that was loaded.

        An empty state only replaces a state of the same class. In that case, the next step starts
        without state, as in torch.
        """
        with ExclusiveAccess():
            state, run = self.state.get(table, {}), last_run(table)
            if state or (run is not None and run.rule is self.rule):
                table.close_lag()
                state = self.state[table] = RowState(state)
                backing.state_files.last_run = Run(self.rule, group, state)
            if state:
                self._prepare_lag(table, group).replaced = None  # frees the memory of the tensors

    def _prepare_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state dict, and return a copy with this process's rows."""
        check_structure(state_dict)
        state_dict = {**state_dict, "state": dict(state_dict["state"])}
        tables: dict[Any, Table] = {}
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=False)
        for number, (group, saved) in enumerate(pairs):
            of_group = dict(saved_tables([group], [saved]))
            if of_group:
                check_group(number, saved, self.defaults)
                check_ranges(number, saved, self.torch_class)
                slots = self.rule.initial_slots({**group, **saved})
            for key, table in of_group.items():
                state = state_dict["state"].get(key, {})
                check_state(key, state, table, slots)
                if state:
                    state_dict["state"][key] = {
                        k: table.from_dtensor(v) if isinstance(v, Tensor) else v
                        for k, v in state.items()
                    }
            tables |= of_group
        for table in tables.values():
            table.close_lag()
        # Copy the tensors. Otherwise the caller's tensors would alias the tables' state.
        states = {
            index: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            if index in tables
            else state
            for index, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register(self)
        self._use_row_states()
        for _, table in find_tables(self.param_groups):
            if self.state.get(table) and table.last_optimizer is None and table.backing is None:
                table.record_optimizer(self)  # the table and its optimizer are copies

    def __getstate__(self) -> dict[str, Any]:
        for _, table in find_tables(self.param_groups):
            self.table_state(table)  # read from the folder if not done yet
        state: dict[str, Any] = super().__getstate__()
        return state
