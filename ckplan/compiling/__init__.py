"""Plans inside ``torch.compile``: which values of the joint graph are saved."""

from ckplan.compiling.planned_backend import Backend, backend, compile

__all__ = ["Backend", "backend", "compile"]
