"""Train tables on many processes with torch.distributed: gloo, NCCL or any other backend.

`shard` splits tables by rows over the ranks of a mesh. `replicate` keeps a whole table on each
rank. `look_up` looks up in several sharded tables in one exchange. docs/scale.md has a guide from
one process to many, and formulas for the number of bytes sent.
"""

from hotrow.distributed.replication import replicate
from hotrow.distributed.sharding import look_up, shard

__all__ = ["look_up", "replicate", "shard"]
