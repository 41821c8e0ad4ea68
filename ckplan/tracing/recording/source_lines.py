"""The lines of a model's source that run the ops of a step.

An op's line is that of the innermost frame that belongs to neither torch, ckplan nor
the standard library. In backward, such a frame exists where the model has code of its
own there, as in the backward of an autograd function. Other ops of backward have the
line of the forward op that their autograd node differentiates.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from pathlib import PurePath
from types import CodeType, FrameType

import torch

UNKNOWN = ""
_STEP = "ckplan.training.step"  # calls the model, the loss and the optimizer
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_ABOVE = frozenset({"torch", "ckplan", *sys.stdlib_module_names})


class SourceLines:
    """Finds the line of each op of a recorded step."""

    def __init__(self) -> None:
        # By id, as to hash code takes longer; None: no code of the model.
        self._files: dict[int, str | None] = {}
        self._codes: list[CodeType] = []  # whose ids are known, alive
        self._lines: dict[tuple[int, int], str] = {}  # by instruction
        self._sequences: list[int] = []  # of autograd's next node, when an op ran
        self._ran: list[str] = []  # the line of that op

    def current(self, *, in_backward: bool = False) -> str:
        """The line of the model that runs now; UNKNOWN if none does.

        Args:
            in_backward: Leave out the line that called backward.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if in_backward and frame.f_code is _RUNS_BACKWARD:
                return UNKNOWN
            code = id(frame.f_code)
            if code not in self._files:
                self._files[code] = _file_of(frame)
                self._codes.append(frame.f_code)
            file = self._files[code]
            if file == UNKNOWN:
                return UNKNOWN
            if file is not None:
                return self._line(frame, file)
            frame = frame.f_back
        return UNKNOWN

    def mark_op(self) -> str | None:
        """Remember the line for the nodes that autograd has made for an op.

        Returns:
            The line; None if it was not looked up.
        """
        sequence = torch.autograd._get_sequence_nr()
        if self._sequences and self._sequences[-1] == sequence:
            return None
        line = self.current()
        self._sequences.append(sequence)
        self._ran.append(line)
        return line

    def of_node(self, node: torch.autograd.graph.Node) -> str:
        """The line of the forward op that a node differentiates."""
        # Autograd makes a node just before its op runs, but the node of a view that
        # changes in place just after it.
        place = bisect_right(self._sequences, node._sequence_nr())
        if node.name() == "CopySlices":
            place -= 1
        return self._ran[place] if 0 <= place < len(self._ran) else UNKNOWN

    def _line(self, frame: FrameType, file: str) -> str:
        key = id(frame.f_code), frame.f_lasti
        if key not in self._lines:
            self._lines[key] = f"{file}:{frame.f_lineno}"
        return self._lines[key]


def _file_of(frame: FrameType) -> str | None:
    """The name of a frame's file.

    None where it is not the model's, UNKNOWN where no frame further out is.
    """
    module = str(frame.f_globals.get("__name__", ""))
    if module == _STEP:
        return UNKNOWN
    file = frame.f_code.co_filename
    if module.partition(".")[0] in _ABOVE or file.startswith("<frozen"):
        return None
    return short_name(file, module)


def short_name(file: str, module: str) -> str:
    """A file's path from where its package is; its name, if it has no package.

    >>> short_name("/lib/site-packages/timm/layers/mlp.py", "timm.layers.mlp")
    'timm/layers/mlp.py'
    >>> short_name("/home/me/model.py", "ckplan_workload_model_0a1b2c3d")
    'model.py'
    """
    path, packages = PurePath(file), module.split(".")[:-1]
    if path.stem == "__init__":
        packages = module.split(".")
    folders = path.parts[-len(packages) - 1 : -1] if packages else ()
    same = list(folders) == packages
    return "/".join((*folders, path.name)) if same else path.name
