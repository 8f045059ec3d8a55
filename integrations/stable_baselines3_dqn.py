"""DQN from Stable-Baselines3, in an environment with 50,000 states.

Stable-Baselines3 passes the state to the first linear layer as a one-hot vector. With
`hotrow.convert`, this layer looks up a column of its weight instead of multiplying by the one-hot.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

import hotrow
from hotrow.table.parameter import Table
from integrations.common import Clock, library_of

STATES, ACTIONS, STEPS = 50_000, 4, 40


class Walk(gymnasium.Env[int, int]):
    """A random walk on a ring of states; the reward is 1 in every tenth state."""

    observation_space = gymnasium.spaces.Discrete(STATES)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        """Start in a random state."""
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(STATES))
        return self.state, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Move by a random distance that depends on the action."""
        self.state = (
            self.state + int(self.np_random.integers(1, 100)) * (1 + int(action))
        ) % STATES
        return self.state, float(self.state % 10 == 0), False, False, {}


class Tick(BaseCallback):
    """Call `clock.tick` after each environment step.

    Once learning has started, each of these steps also trains the network once.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def _on_step(self) -> bool:
        self.clock.tick()
        return True


def train(way: str) -> tuple[DQN, float]:
    """Train an agent; return it, and the median duration of a step."""
    options = {"fused": True} if way == "fused" else {}
    kwargs = {
        "net_arch": [64, 64],
        "optimizer_class": library_of(way).Adam,
        "optimizer_kwargs": options,
    }
    agent = DQN("MlpPolicy", Walk(), learning_starts=32, train_freq=1, policy_kwargs=kwargs, seed=0)
    if way == "hotrow":
        hotrow.convert(agent.policy)
    clock = Clock()
    agent.learn(32 + STEPS, callback=Tick(clock))
    clock.seconds = clock.seconds[32:]  # until then, the agent only fills its replay buffer
    return agent, clock.median


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(f"Stable-Baselines3 DQN, {STATES:,} states")
    runs = {way: train(way) for way in ("dense", "fused", "hotrow")}
    weights = {
        way: torch.nn.utils.parameters_to_vector(agent.q_net.parameters()).detach()
        for way, (agent, _) in runs.items()
    }
    agent = runs["hotrow"][0]
    assert any(isinstance(each, Table) for each in agent.q_net.parameters())
    assert "looked up" in str(hotrow.convert.report(agent.policy))
    distances = {way: float((each - weights["dense"]).abs().max()) for way, each in weights.items()}
    # Stable-Baselines3 computes in float32, and another summation order changes the rounding.
    assert distances["hotrow"] <= 4 * distances["fused"] + 1e-6, distances
    assert np.array_equal(*(runs[way][0].replay_buffer.actions for way in ("dense", "hotrow")))
    for way, (_, seconds) in runs.items():
        ratio = seconds / runs["hotrow"][1]
        print(
            f"  {way:<12} {1e3 * seconds:8.2f} ms per step {ratio:6.2f} x hotrow's time"
            f"   the same model (largest difference {distances[way]:.1e})"
        )
