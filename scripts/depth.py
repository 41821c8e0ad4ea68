"""Memory and time against depth: the same block, stacked ever higher.

Peaks are predicted, with what does not depend on the plan taken off: parameters,
gradients, optimizer state and inputs. The smallest plan that ckplan finds is compared
with rerunning every block, and with Chen's segments of about sqrt(n) blocks; beside it,
the least memory that costs no more than rerunning every block does.

    python scripts/depth.py
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _measuring import ROOT, Report, add_output, finish, make_parser, make_table, run

import ckplan
from ckplan.errors import InfeasibleError
from ckplan.graph import BEFORE_STEP, Graph
from ckplan.solving.baselines import find_layers
from ckplan.solving.practices import practices
from ckplan.solving.solve import Planner
from ckplan.training.workload import load_workload
from ckplan.units import format_bytes, format_percent, format_seconds

DEPTHS = (8, 16, 32, 64, 128, 256)
WIDTH, BATCH = 32, 16384
HEADERS = (
    "blocks",
    "ops",
    "unplanned",
    "every block",
    "overhead",
    "sqrt(n)",
    "overhead",
    "smallest",
    "overhead",
    "as dear as every block",
    "solving, CPU",
)
