"""Apply a plan to a model."""

from ckplan.applying.hooks.choices import RegionStatus
from ckplan.applying.regions import Status, apply, planned, remove, status

__all__ = ["RegionStatus", "Status", "apply", "planned", "remove", "status"]
