"""Embedding and linear layers that accept both ids and one-hots.

Each is a subclass of torch's layer with the same constructor and `state_dict` keys, and computes
with torch's own operators. It checks ids first, so a bad id raises an error and never reads another
row. A table has V rows and D columns.

Known limits:

- `torch.fx.symbolic_trace` and `torch.jit.script` don't support the checks. `torch.export` and
  `torch.compile` do.
- On a GPU, the check synchronizes, so a CUDA graph can't capture it.
- The checks have no sharding rule for tensor parallel layers.
"""

from hotrow.layers.embedding import Embedding
from hotrow.layers.embedding_bag import EmbeddingBag
from hotrow.layers.one_hot_linear import OneHotLinear

__all__ = ["Embedding", "EmbeddingBag", "OneHotLinear"]
