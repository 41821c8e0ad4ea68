"""Derive the step of one rank from the step of one process: DDP, ZeRO, FSDP2."""

from ckplan.graph.sharding.schemes import SCHEMES, Sharding, shard, sharded

__all__ = ["SCHEMES", "Sharding", "shard", "sharded"]
