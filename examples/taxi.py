"""Train an unmodified Stable-Baselines3 agent on Taxi, once with and once without hotrow.

An observation in Taxi-v4 is one of 500 states. Stable-Baselines3 encodes it as a one-hot input for
its policy and value networks. With `hotrow.convert`, the first layer of each network looks up a row
instead of multiplying by the one-hot. Both agents draw the same random numbers, take the same
actions, get the same rewards, and end with the same networks up to rounding.

    pip install stable_baselines3 'gymnasium>=1.4'
    python examples/taxi.py
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from side_by_side import SideBySide, Step, options
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor

import hotrow

ROUNDING = 1e-5  # tolerance relative to the largest value, because the summation order differs
OUTPUTS = "action logits", "values"


def learner(model: PPO, actions: list[Tensor]) -> Step:
    """Return a step that trains on one rollout, records its actions and returns the mean reward."""
    state = generator_state()

    def step(_: Any) -> Tensor:
        nonlocal state
        generator_state(state)  # restore this agent's random state
        model.learn(model.n_steps * model.n_envs, reset_num_timesteps=False, log_interval=None)
        state = generator_state()
        actions.append(torch.tensor(model.rollout_buffer.actions))
        return torch.tensor(model.rollout_buffer.rewards).mean()

    return step


def generator_state(state: Any = None) -> Any:
    """Set the random state of torch and NumPy if one is given, and return the current state."""
    if state is not None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
    return torch.get_rng_state(), np.random.get_state()


@torch.no_grad()
def outputs(model: PPO) -> tuple[Tensor, Tensor]:
    """Return the (500, 6) action logits and the (500, 1) values of all states."""
    states = torch.arange(model.observation_space.n)
    logits = model.policy.get_distribution(states).distribution.logits
    return logits, model.policy.predict_values(states)


def weights(model: PPO) -> Tensor:
    """Return all parameters as one tensor."""
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])


def main(arguments: list[str] | None = None) -> int:
    """Train with torch and with hotrow, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        steps=(10, "rollouts, each followed by training"),
        taxis=(16, "parallel taxis"),
        moves=(128, "moves per taxi in a rollout"),
        width=(64, "hidden units"),
        batch=(256, "moves per optimizer step"),
        lr=(1e-3, "learning rate"),
        seed=(0, "random seed for weights, environments and batches"),
    )

    def driver(adam: type[torch.optim.Adam]) -> PPO:
        """Return a PPO agent that uses Stable-Baselines3's default eps for Adam."""
        return PPO(
            "MlpPolicy",
            make_vec_env("Taxi-v4", args.taxis),
            learning_rate=args.lr,
            n_steps=args.moves,
            batch_size=args.batch,
            policy_kwargs={
                "net_arch": [args.width, args.width],
                "optimizer_class": adam,
                "optimizer_kwargs": {"eps": 1e-5},
            },
            seed=args.seed,
            device="cpu",
        )

    actions: tuple[list[Tensor], list[Tensor]] = [], []
    dense = driver(torch.optim.Adam)
    steps = [learner(dense, actions[0])]

    # With hotrow, use hotrow's Adam and add one line:
    model = driver(hotrow.optim.Adam)
    hotrow.convert(model.policy)
    steps.append(learner(model, actions[1]))

    print(f"{args.taxis * args.moves:,} moves per rollout; rewards are averages per move")
    sides = SideBySide(steps)
    for name, a, b in zip(OUTPUTS, outputs(dense), outputs(model), strict=True):
        sides.compare_tensors(f"{name} before", a, b)
    sides.train(lambda t: t, args.steps, 1, "reward")
    print()
    sides.compare_tensors("actions taken", *map(torch.cat, actions))
    for name, a, b in zip(OUTPUTS, outputs(dense), outputs(model), strict=True):
        sides.compare_tensors(f"{name} after", a, b, ROUNDING)
    sides.compare_tensors("weights and biases", weights(dense), weights(model), ROUNDING)
    print()
    sides.print_times()
    print(f"\n{hotrow.convert.report(model.policy)}")
    return sides.print_verdict("rewards")


if __name__ == "__main__":
    sys.exit(main())
