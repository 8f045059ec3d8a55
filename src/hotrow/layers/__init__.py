"""Embedding and linear layers that accept both ids and one-hots.

Each layer subclasses a torch layer, has the same constructor and `state_dict` keys, and uses
torch's operators. The layers check ids first, so an invalid id raises an error instead of selecting
the wrong row. A table has V rows and D columns.

Known limits:

- `torch.fx.symbolic_trace` and `torch.jit.script` don't support the id checks, but `torch.export`
  and `torch.compile` do.
- On a GPU, the id checks of these layers synchronize with the CPU, so a CUDA graph can't capture
  them. A converted `torch.nn.Embedding` checks ids on the GPU; see the guide "Train on a GPU".
- The id checks have no DTensor sharding rule, so they don't work in tensor-parallel layers.
"""

from hotrow.layers.embedding import Embedding
from hotrow.layers.embedding_bag import EmbeddingBag
from hotrow.layers.one_hot_linear import OneHotLinear

__all__ = ["Embedding", "EmbeddingBag", "OneHotLinear"]
