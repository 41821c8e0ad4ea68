"""What a plan adds to the work of a step: operations, and bytes that move.

Joules follow from these, and from hardware that nobody can predict from its power
limit; so only the work itself is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.simulating.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ExtraWork:
    """Of the ops that run again, and of values that move, per sample or per batch."""

    flops: int
    device_bytes: int  # read and written in the memory of the device
    link_bytes: int  # to a disk or the host, out and back


NO_EXTRA_WORK = ExtraWork(0, 0, 0)


def extra_work(timeline: Timeline, rows: int = 1) -> ExtraWork:
    """What a plan adds to the work of a micro-batch, divided by its rows.

    Encodings and digests are not counted.

    Args:
        timeline: The step under the plan.
        rows: Rows of a micro-batch.
    """
    ops = timeline.graph.ops
    again = [ops[step] for effect in timeline.effects for step in effect.steps]
    return ExtraWork(
        sum(op.flops for op in again) // rows,
        sum(op.moved_bytes for op in again) // rows,
        2 * timeline.moves.moved_bytes // rows,
    )
