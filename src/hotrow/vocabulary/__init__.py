"""Change a vocabulary during training: add, drop, move and freeze rows.

Each operation changes a layer in place, together with the optimizer state of its rows. Dense
training with the same change made by hand gives the same result.
"""

from hotrow.vocabulary.freezing import freeze, unfreeze
from hotrow.vocabulary.key_vocabulary import Vocabulary
from hotrow.vocabulary.reconnecting import reconnect
from hotrow.vocabulary.resizing import resize, take
from hotrow.vocabulary.statistics import Statistics, stats

__all__ = [
    "Statistics",
    "Vocabulary",
    "freeze",
    "reconnect",
    "resize",
    "stats",
    "take",
    "unfreeze",
]
