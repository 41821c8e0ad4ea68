"""How many rows the batch of a workload has."""

from __future__ import annotations

from ckplan.errors import CkplanError
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.training.loading import WorkloadSpec
from ckplan.training.workload import rows_of, with_rows


def spec_rows(spec: WorkloadSpec) -> int:
    """Rows of the batch that a workload makes, which is built without bytes.

    Raises:
        WorkloadError: The rows cannot be found, or the workload cannot be built.
    """
    make = spec.load()
    try:
        with fake_tensors():
            workload = make()
    except CkplanError:  # it needs real values
        workload = make()
    return rows_of(with_rows(workload, max(rows_of(workload), 1)))
