"""JAX peers: a dense step with optax, and a hand-written step that updates only touched rows.

Each peer compiles two functions. The first looks up rows. The second computes the gradient and
updates the donated table and state in place. If one function did both, XLA would copy the whole
table for the lookup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.bench.peers import Case, Peer, initial_weight

INSTALL_COMMAND = "pip install jax==0.10.2 optax==0.2.8"
Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # table, state, ids, gradient


class JaxPeer(Peer):
    """A peer that stores its table in a JAX array. A step runs the compiled `update`, if any."""

    def __init__(
        self, case: Case, update: Step | None, init_state: Any, label: str, counterpart: str | None
    ) -> None:
        import jax

        super().__init__(case, None, None, label, counterpart)
        self.table = jax.numpy.array(initial_weight(case).numpy())  # copy into memory that JAX owns
        self.values = init_state(self.table)
        self.update = None if update is None else jax.jit(update, donate_argnums=(0, 1))
        self.look_up = jax.jit(lambda table, ids: table.at[ids].get(mode="promise_in_bounds"))

    def step(self, ids: Tensor, gradient: Tensor) -> dict[str, float]:
        """Run a step; return the seconds spent in the lookup and in the rest of the step."""
        import jax

        inputs = jax.numpy.array(ids.int().numpy()), jax.numpy.array(gradient.numpy())
        jax.block_until_ready(inputs)
        begin = time.perf_counter()
        jax.block_until_ready(self.look_up(self.table, inputs[0]))
        middle = time.perf_counter()
        if self.update is None:
            return {"forward": middle - begin}
        self.table, self.values = self.update(self.table, self.values, *inputs)
        jax.block_until_ready((self.table, self.values))
        return {"forward": middle - begin, "rest": time.perf_counter() - middle}

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy of the given rows."""
        return torch.from_numpy(np.array(self.look_up(self.table, rows.int().numpy())))

    def gradient(self, rows: Tensor) -> Tensor:
        """Return the given rows of the last step's gradient."""
        return torch.from_numpy(np.array(self.look_up(self.values, rows.int().numpy())))

    def zero_grad(self) -> None:
        """Do nothing: JAX has no gradient to release."""

    def state(self) -> Iterator[Tensor]:
        """Yield nothing: the state isn't stored in torch tensors."""
        yield from ()

    def table_and_state_bytes(self) -> int:
        """Return the size in bytes of the table and, if there is an optimizer, its state."""
        import jax

        leaves = jax.tree.leaves((self.table, self.values if self.case.optimizer else ()))
        return sum(leaf.nbytes for leaf in leaves if leaf.ndim == 2)


def build_dense(case: Case, others: dict[str, Peer]) -> Peer:
    """Build a peer with a dense gradient and, if there is an optimizer, an optax step."""
    import jax
    import optax

    def backward(table: Any, ids: Any, gradient: Any) -> Any:
        back = jax.vjp(lambda t: t.at[ids].get(mode="promise_in_bounds"), table)[1]
        return back(gradient)[0]

    if case.optimizer is None:

        def return_gradient(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
            return table, backward(table, ids, gradient)

        update = None if case.task == "forward" else return_gradient
        init_state = (lambda table: None) if update is None else jax.numpy.zeros_like
        peer = JaxPeer(case, update, init_state, "JAX", None)
        peer.is_dense = update is not None
        return peer

    defaults = getattr(torch.optim, case.optimizer)([torch.zeros(1)]).defaults
    optimizers = {
        "SGD": lambda: optax.sgd(defaults["lr"]),
        "Adagrad": lambda: optax.adagrad(
            defaults["lr"], initial_accumulator_value=0.0, eps=defaults["eps"]
        ),
        "Adam": lambda: optax.adam(defaults["lr"]),
        "AdamW": lambda: optax.adamw(defaults["lr"], weight_decay=defaults["weight_decay"]),
    }
    optimizer = optimizers[case.optimizer]()

    def update_dense(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(backward(table, ids, gradient), state, table)
        return optax.apply_updates(table, updates), state

    peer = JaxPeer(
        case, update_dense, optimizer.init, f"JAX, optax.{case.optimizer.lower()}", case.optimizer
    )
    peer.is_dense = True
    return peer


def build_lazy(case: Case, others: dict[str, Peer]) -> Peer:
    """Build a peer that updates only the touched rows, like torch's sparse optimizers."""
    import jax
    import jax.numpy as jnp

    assert case.optimizer is not None
    defaults = getattr(torch.optim, case.optimizer)([torch.zeros(1)]).defaults
    lr, eps = defaults["lr"], defaults.get("eps", 0.0)

    def sum_by_row(ids: Any, gradient: Any) -> tuple[Any, Any]:
        """Return the distinct ids and their summed gradients.

        The distinct ids are padded to a fixed length with an out-of-range id.
        """
        distinct, places = jnp.unique(ids, size=case.ids, fill_value=case.rows, return_inverse=True)
        return distinct, jax.ops.segment_sum(gradient, places, num_segments=case.ids)

    def sgd(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        return table.at[ids].add(-lr * gradient), state

    def adagrad(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        rows, sums = sum_by_row(ids, gradient)
        state = state.at[rows].add(sums**2, mode="drop", unique_indices=True)
        move = -lr * sums / (jnp.sqrt(state.at[rows].get(mode="clip")) + eps)
        return table.at[rows].add(move, mode="drop", unique_indices=True), state

    def adam(table: Any, state: Any, ids: Any, gradient: Any) -> tuple[Any, Any]:
        first, second, t = state
        t = t + 1
        b1, b2 = defaults["betas"]
        rows, sums = sum_by_row(ids, gradient)
        m = b1 * first.at[rows].get(mode="clip") + (1 - b1) * sums
        v = b2 * second.at[rows].get(mode="clip") + (1 - b2) * sums**2
        move = -lr / (1 - b1**t) * m / (jnp.sqrt(v / (1 - b2**t)) + eps)
        state = (
            first.at[rows].set(m, mode="drop", unique_indices=True),
            second.at[rows].set(v, mode="drop", unique_indices=True),
            t,
        )
        return table.at[rows].add(move, mode="drop", unique_indices=True), state

    def init_moments(table: Any) -> Any:
        return jnp.zeros_like(table), jnp.zeros_like(table), jnp.zeros((), jnp.float32)

    updates: dict[str, tuple[Step, Any]] = {
        "SGD": (sgd, lambda table: ()),
        "Adagrad": (adagrad, jnp.zeros_like),
        "Adam": (adam, init_moments),
        "AdamW": (adam, init_moments),
    }
    update, init_state = updates[case.optimizer]
    counterpart = "Adam" if case.optimizer == "AdamW" else case.optimizer
    return JaxPeer(case, update, init_state, f"JAX, hand-written lazy {counterpart}", counterpart)
