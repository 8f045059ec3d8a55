"""Train tables in several processes, with any torch.distributed backend such as gloo or NCCL.

`shard` splits tables by rows over the ranks of a mesh. `replicate` keeps a full copy of
each table on every rank. `look_up` looks up ids in several sharded tables with one exchange.
docs/scale.md explains how to scale from one process to many, and has formulas for the number of
bytes sent.
"""

from hotrow.distributed.replication import replicate
from hotrow.distributed.sharding import look_up, shard

__all__ = ["look_up", "replicate", "shard"]
