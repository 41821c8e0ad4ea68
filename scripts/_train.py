"""A script that trains one of the loops of ``recorded.py``, without ckplan.

python scripts/_train.py language 20
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from loops import LOOPS, Loop


def _in_trainer(make: Any, train: Any) -> Loop:
    def run(state: tuple[nn.Module], steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            train(state[0], steps, Path(folder), None)

    return Loop(lambda: (make(),), run, lambda state: state[0], "80%")


def loops() -> dict[str, Loop]:
    """All loops by name."""
    from trainer_loops import TRAINERS

    own = {name: loop for name, loop in LOOPS.items() if name != "critic"}
    return own | {name: _in_trainer(*one) for name, one in TRAINERS.items()}


def loop_of(name: str) -> Loop:
    """One loop; those of Trainers need their libraries."""
    return LOOPS[name] if name in LOOPS else loops()[name]


def quietly() -> None:
    """Let no library print what it thinks of a small model."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    quietly()
    chosen = loop_of(sys.argv[1])
    made: Any = chosen.make()
    partial(chosen.run, made)(int(sys.argv[2]))
