"""The step of one rank: what several processes divide, gather and reduce."""

from ckplan.graph.sharding.schemes import SCHEMES, Sharding, shard, sharded

__all__ = ["SCHEMES", "Sharding", "shard", "sharded"]
