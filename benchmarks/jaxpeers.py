"""A table trained by JAX: with optax, densely, and by hand, in the touched rows only.

Two compiled functions: the look-up, and the step, which is given table and state for good and
updates them in place. In one function, the look-up would have XLA copy the whole table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Case, Peer, new_weight

REMEDY = "pip install jax==0.10.2 optax==0.2.8"
Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # table, state, ids, gradient


class Jax(Peer):
    """A table of JAX's, and the step that `run` makes of it, if any."""

    def __init__(
        self, case: Case, run: Step | None, state: Any, label: str, counterpart: str | None
    ) -> None:
        import jax

        super().__init__(case, None, None, label, counterpart)
        self.table = jax.numpy.array(new_weight(case).numpy())  # a copy, of JAX's own
        self.values = state(self.table)
        self.run = None if run is None else jax.jit(run, donate_argnums=(0, 1))
        self.look_up = jax.jit(lambda table, ids: table.at[ids].get(mode="promise_in_bounds"))

    def step(self, ids: Tensor, gradient: Tensor) -> dict[str, float]:
        """The look-up, and everything else in one call."""
        import jax

        given = jax.numpy.array(ids.int().numpy()), jax.numpy.array(gradient.numpy())
        jax.block_until_ready(given)
        begin = time.perf_counter()
        jax.block_until_ready(self.look_up(self.table, given[0]))
        middle = time.perf_counter()
        if self.run is None:
            return {"forward": middle - begin}
        self.table, self.values = self.run(self.table, self.values, *given)
        jax.block_until_ready((self.table, self.values))
        return {"forward": middle - begin, "rest": time.perf_counter() - middle}

    def read(self, rows: Tensor) -> Tensor:
        """A copy of some rows."""
        return torch.from_numpy(np.array(self.look_up(self.table, rows.int().numpy())))

    def gradient(self, rows: Tensor) -> Tensor:
        """Some rows of the gradient that the last step left."""
        return torch.from_numpy(np.array(self.look_up(self.values, rows.int().numpy())))

    def clear(self) -> None:
        """Nothing to do."""

    def state(self) -> Iterator[Tensor]:
        """None is torch's."""
        yield from ()

    def bytes_held(self) -> int:
        """The table and the state, if it steps."""
        import jax

        held = jax.tree.leaves((self.table, self.values if self.case.rule else ()))
        return sum(leaf.nbytes for leaf in held if leaf.ndim == 2)


def dense(case: Case, others: dict[str, Peer]) -> Peer:
    """The gradient of the whole table, and optax's step; without a rule the gradient alone."""
    import jax
    import optax

    def backward(table: Any, ids: Any, gradient: Any) -> Any:
        back = jax.vjp(lambda t: t.at[ids].get(mode="promise_in_bounds"), table)[1]
        return back(gradient)[0]

    if case.rule is None:

        def give(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
            return table, backward(table, ids, gradient)

        run = None if case.task == "forward" else give
        state = (lambda table: None) if run is None else jax.numpy.zeros_like
        peer = Jax(case, run, state, "JAX", None)
        peer.dense = run is not None
        return peer

    defaults = getattr(torch.optim, case.rule)([torch.zeros(1)]).defaults
    makers = {
        "SGD": lambda: optax.sgd(defaults["lr"]),
        "Adagrad": lambda: optax.adagrad(
            defaults["lr"], initial_accumulator_value=0.0, eps=defaults["eps"]
        ),
        "Adam": lambda: optax.adam(defaults["lr"]),
        "AdamW": lambda: optax.adamw(defaults["lr"], weight_decay=defaults["weight_decay"]),
    }
    rule = makers[case.rule]()

    def run_dense(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = rule.update(backward(table, ids, gradient), state, table)
        return optax.apply_updates(table, updates), state

    peer = Jax(case, run_dense, rule.init, f"JAX, optax.{case.rule.lower()}", case.rule)
    peer.dense = True
    return peer


def lazy(case: Case, others: dict[str, Peer]) -> Peer:
    """Touched rows only, by hand: as torch's sparse optimizers do, so that idle rows stay."""
    import jax
    import jax.numpy as jnp

    assert case.rule is not None
    defaults = getattr(torch.optim, case.rule)([torch.zeros(1)]).defaults
    rate, eps = defaults["lr"], defaults.get("eps", 0.0)

    def touched(ids: Any, gradient: Any) -> tuple[Any, Any]:
        """Distinct ids, and beyond the table what fills their place up; summed gradients."""
        distinct, places = jnp.unique(ids, size=case.ids, fill_value=case.rows, return_inverse=True)
        return distinct, jax.ops.segment_sum(gradient, places, num_segments=case.ids)

    def sgd(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        return table.at[ids].add(-rate * gradient), state

    def adagrad(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        rows, found = touched(ids, gradient)
        state = state.at[rows].add(found**2, mode="drop", unique_indices=True)
        move = -rate * found / (jnp.sqrt(state.at[rows].get(mode="clip")) + eps)
        return table.at[rows].add(move, mode="drop", unique_indices=True), state

    def adam(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        first, second, t = state
        t = t + 1
        b1, b2 = defaults["betas"]
        rows, found = touched(ids, gradient)
        m = b1 * first.at[rows].get(mode="clip") + (1 - b1) * found
        v = b2 * second.at[rows].get(mode="clip") + (1 - b2) * found**2
        move = -rate / (1 - b1**t) * m / (jnp.sqrt(v / (1 - b2**t)) + eps)
        state = (
            first.at[rows].set(m, mode="drop", unique_indices=True),
            second.at[rows].set(v, mode="drop", unique_indices=True),
            t,
        )
        return table.at[rows].add(move, mode="drop", unique_indices=True), state

    def moments(table: Any) -> Any:
        return jnp.zeros_like(table), jnp.zeros_like(table), jnp.zeros((), jnp.float32)

    rules: dict[str, tuple[Step, Any]] = {
        "SGD": (sgd, lambda table: ()),
        "Adagrad": (adagrad, jnp.zeros_like),
        "Adam": (adam, moments),
        "AdamW": (adam, moments),
    }
    run, state = rules[case.rule]
    counterpart = "Adam" if case.rule == "AdamW" else case.rule
    return Jax(case, run, state, f"JAX, lazy {counterpart} by hand", counterpart)
