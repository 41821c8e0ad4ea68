"""Ops that return uninitialized memory, and ops that overwrite it.

Kernels outside the dispatcher, of Triton or an extension, write to tensors of
``empty``. Recomputing the ops alone leaves such tensors uninitialized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckplan.training.randomness import says_it_draws

_IN_PLACE = frozenset(
    (
        "copy_",
        "fill_",
        "zero_",
        "index_put_",
        "_index_put_impl_",
        "index_copy_",
        "index_fill_",
        "scatter_",
        "masked_fill_",
        "masked_scatter_",
    )
)


_WITH_BETA = ("addbmm", "addmm", "addmv", "addr", "baddbmm")


def returns_uninitialized(func: Any) -> bool:
    """Whether an op's output is uninitialized."""
    return str(func.overloadpacket.__name__).startswith(("empty", "new_empty"))


def reads_only_metadata(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op reads only metadata of its first tensor, such as its shape."""
    name = str(func.overloadpacket.__name__)
    like = name.endswith("_like") or name.startswith("new_")
    return like or has_zero_beta(func, kwargs)


def has_zero_beta(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a product ignores its summand; Megatron-LM passes an empty one."""
    return func.overloadpacket.__name__ in _WITH_BETA and kwargs.get("beta", 1) == 0


def ignores_old_content(func: Any) -> bool:
    """Whether an op's written values do not depend on the old content."""
    name = str(func.overloadpacket.__name__)
    return name in _IN_PLACE or not name.endswith("_") or says_it_draws(func)
