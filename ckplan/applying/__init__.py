"""Apply a plan to a model."""

from ckplan.applying.hooks.choices import RegionStatus
from ckplan.applying.regions import (
    Status,
    applied_plan,
    apply,
    planned,
    remove,
    status,
)

__all__ = [
    "RegionStatus",
    "Status",
    "applied_plan",
    "apply",
    "planned",
    "remove",
    "status",
]
