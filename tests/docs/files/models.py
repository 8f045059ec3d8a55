"""A model for `hotrow compare models:build`."""

import torch
from torch.nn import Linear, Module, Sequential, Tanh, functional


class Policy(Module):
    def __init__(self):
        super().__init__()
        self.net = Sequential(Linear(20_000, 64), Tanh(), Linear(64, 64), Tanh())
        self.actor, self.critic = Linear(64, 6), Linear(64, 1)

    def forward(self, state):
        hidden = self.net(functional.one_hot(state, 20_000).float())
        return self.actor(hidden), self.critic(hidden)


def build():
    return Policy()


def batch():
    return torch.randint(20_000, (256,))
