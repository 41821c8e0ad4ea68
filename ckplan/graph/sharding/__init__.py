"""Derive the step of one rank from the step of one process: DDP, ZeRO, FSDP2."""

from ckplan.graph.sharding.scheme import SCHEMES, Sharding
from ckplan.graph.sharding.schemes import shard, sharded
from ckplan.graph.sharding.traffic import (
    Communication,
    Traffic,
    communication,
    traffic_of,
)

__all__ = [
    "SCHEMES",
    "Communication",
    "Sharding",
    "Traffic",
    "communication",
    "shard",
    "sharded",
    "traffic_of",
]
