"""The layers: torch's embedding and linear layers, which take ids and one-hots alike.

Each is a subclass of torch's layer with the same constructor and `state_dict` keys, and computes
with torch's own operators; ids are checked first, so that a bad one is an error and never another
row. V rows, D columns.

Known limits: `torch.fx.symbolic_trace` and `torch.jit.script` cannot see through the checks
(`torch.export` and `torch.compile` can); on a GPU the check waits for the ids, and so cannot be
captured in a CUDA graph; the checks have no sharding rule for tensor parallel layers.
"""

from hotrow.layers.embedding import Embedding
from hotrow.layers.embedding_bag import EmbeddingBag
from hotrow.layers.one_hot_linear import OneHotLinear

__all__ = ["Embedding", "EmbeddingBag", "OneHotLinear"]
