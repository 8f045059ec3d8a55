"""Every rule by the name of torch's class."""

from __future__ import annotations

from hotrow.optim import (
    adadelta,
    adagrad,
    adam,
    adamax,
    asgd,
    nadam,
    radam,
    rmsprop,
    rprop,
    sgd,
)
from hotrow.optim.rule import Rule

# AdamW is Adam with `decoupled_weight_decay` in its groups, in torch as well.
RULES: dict[str, Rule] = {
    "SGD": sgd.rule,
    "Adam": adam.rule,
    "AdamW": adam.rule,
    "Adamax": adamax.rule,
    "NAdam": nadam.rule,
    "RAdam": radam.rule,
    "Adagrad": adagrad.rule,
    "Adadelta": adadelta.rule,
    "RMSprop": rmsprop.rule,
    "ASGD": asgd.rule,
    "Rprop": rprop.rule,
}
