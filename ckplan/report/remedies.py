"""Rows of what else would make a step fit, with their prices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from ckplan import units
from ckplan.report.tables import add_row, make_table
from ckplan.solving.remedies import CHANGES, CLOSE, SAME, Remedy

_RESULTS = {SAME: "same bits", CLOSE: "close", CHANGES: "other training"}


def remedies_table(found: Iterable[Remedy]) -> Table:
    """One row for each: the bytes needed then, time, results, and whether it fits.

    Bytes that are estimated have a tilde.
    """
    table = make_table("", "needs", "time", "results", "fits", texts=1)
    for one in found:
        overhead = one.overhead
        add_row(
            table,
            one.how,
            ("~" if one.about else "") + units.format_bytes(one.peak_bytes),
            "-" if overhead is None else units.format_percent(overhead, sign=True),
            _RESULTS[one.bits],
            {True: "yes", False: "no", None: "-"}[one.fits],
        )
    return table


def remedy_json(one: Remedy) -> dict[str, Any]:
    """One row as JSON; what is not known is null."""
    return {
        "name": one.name,
        "how": one.how,
        "bits": one.bits,
        "needed_bytes": one.peak_bytes,
        "estimated": one.about,
        "overhead": one.overhead,
        "fits": one.fits,
    }
