"""Plans inside ``torch.compile``: which values of the joint graph are saved."""

from ckplan.compiling.compiled_model import compile
from ckplan.compiling.planned_backend import Backend, backend

__all__ = ["Backend", "backend", "compile"]
