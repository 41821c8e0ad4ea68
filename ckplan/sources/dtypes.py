"""Names of the dtypes that parameters may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import WorkloadError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


def parse_dtype(text: object) -> torch.dtype | None:
    """The dtype that ``--dtype`` names; None if it is not given.

    Raises:
        WorkloadError: There is no such dtype.
    """
    if text is None:
        return None
    if str(text) not in DTYPES:
        raise WorkloadError(
            f"cannot use --dtype {text}",
            needed="one of " + ", ".join(DTYPES),
            hint="--dtype bf16",
        )
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[str(text)])
    return dtype
