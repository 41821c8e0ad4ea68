"""Which ops make bytes without content, and which give them some.

Kernels that no op stands for, of Triton or of an extension, write what ``empty`` made
for them. Whoever runs the ops again gets what happens to be there.
"""

from __future__ import annotations

from typing import Any

from ckplan.training.randomness import may_draw

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


def makes_empty(func: Any) -> bool:
    """Whether an op's output waits for somebody to fill it."""
    return str(func.overloadpacket.__name__).startswith(("empty", "new_empty"))


def fills(func: Any) -> bool:
    """Whether what an op writes does not depend on what was there."""
    name = str(func.overloadpacket.__name__)
    return name in _IN_PLACE or not name.endswith("_") or may_draw(func)
