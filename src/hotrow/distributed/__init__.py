"""Tables of many processes, on torch.distributed; gloo, NCCL or any other backend.

`shard` splits tables by rows over the ranks of a mesh; `replicate` keeps a whole one on each.
`look_up` looks up in several sharded tables in one exchange. Formulas of what travels, and a guide
from one process to many, are in docs/scale.md.
"""

from hotrow.distributed.replication import replicate
from hotrow.distributed.sharding import look_up, shard

__all__ = ["look_up", "replicate", "shard"]
