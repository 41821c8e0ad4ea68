"""What moves to a disk cost, measured beside kernels: with a disk made of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckplan
from ckplan.applying.moving.spill_file import SpillFile, wait
from ckplan.report.moving import link_words
from ckplan.simulating.moving import Link
from ckplan.tracing.costs import spill_rate as measuring
from ckplan.tracing.costs.spill_rate import (
    PROBE_BYTES,
    ROUNDS,
    Price,
    link_of,
    lost_seconds,
)


class Kernels:
    """Kernels of 1 s, or of 1.5 s while copies are under way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0

    def run(self, count: int) -> float:
        start = self.now
        for _ in range(count):
            self.now += 1.5 if self.now < self.busy_until else 1.0
        return self.now - start


class Job:
    """A copy that is over at some second of the kernels."""

    def __init__(self, kernels: Kernels, over: float) -> None:
        self._kernels, self._over = kernels, over

    def done(self) -> bool:
        return self._kernels.now >= self._over

    def exception(self) -> None:
        assert self.done(), "the probe waits while no kernel runs"


class Disk:
    """A slow disk, whose threads take a quarter of a copy's seconds."""

    def __init__(self, kernels: Kernels, out: float, back: float) -> None:
        self._kernels, self._seconds = kernels, {"out": out, "back": back}
        self.processor_seconds = 0.0

    def write(self, tensor: torch.Tensor, offset: int) -> list[Job]:
        return self._copy("out")

    def read(self, tensor: torch.Tensor, offset: int) -> list[Job]:
        return self._copy("back")

    def _copy(self, way: str) -> list[Job]:
        self.processor_seconds += self._seconds[way] / 4
        self._kernels.busy_until = over = self._kernels.now + self._seconds[way]
        return [Job(self._kernels, over / 2), Job(self._kernels, over)]


@pytest.mark.parametrize(("threads", "lost"), [(1, 3 + 6 + 4 + 8), (4, 3 + 6), (2, 0)])
def test_a_slow_disk_is_timed_by_the_kernels_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, lost: int
) -> None:
    monkeypatch.setattr(measuring, "_move_seconds", lambda folder: 0.25)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(measuring, "num_cores", lambda: 4)
    kernels = Kernels()
    disk = Disk(kernels, out=12.0, back=24.0)
    found = measuring._round(tmp_path, disk, kernels, torch.zeros(1), 0)  # type: ignore[arg-type]
    # 8 kernels of 1.5 s hide the copy out, 16 the copy back; they lose 4 and 8 s to
    # shared memory, and the copying threads take 3 and 6 s.
    assert found == pytest.approx((24.0, lost / 2, 0.25))


def test_a_file_counts_what_its_threads_take(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    tensor = torch.ones(2**18)
    offset = file.allocate(tensor.nbytes)
    taken = [file.processor_seconds]
    for copy in (file.write, file.read):
        wait(copy(tensor, offset))
        taken.append(file.processor_seconds)
    assert 0.0 == taken[0] < taken[1] < taken[2]


def test_the_processor_is_taken_where_kernels_need_all_of_it() -> None:
    def lost(threads: int, longer: float) -> float:
        return lost_seconds(threads=threads, cores=4, longer=longer, copies=3.0)

    assert [lost(threads, 2.0) for threads in (1, 2, 4, 8)] == [5.0, 0.0, 3.0, 3.0]
    assert [lost(threads, -2.0) for threads in (1, 2, 4)] == [3.0, 0.0, 3.0]


def test_a_link_is_as_in_most_rounds_and_knows_its_slower_ones() -> None:
    copying, losing, moving = (1.0, 2.0, 9.0), (0.5, 0.25, 1.0), (1e-3, 1e-3, 3e-3)
    found = link_of(copying, losing, moving)
    per_byte = 0.5 / PROBE_BYTES
    slowest = Link(PROBE_BYTES / 5.5, False, 0.75 / PROBE_BYTES, 2e-3)
    assert found == Link(PROBE_BYTES / 2.0, False, per_byte, 1e-3, slowest)
    words = link_words(found)
    assert words.startswith("16.00 MiB per second beside kernels (5.82 MiB at its slow")
    assert "1.00 ms to every tensor" in words


def test_a_folder_is_measured_once_for_each_place_with_its_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path / "cache"))
    speeds = iter([1.0, 2.0, 4.0])
    measured: list[Path] = []

    def measure(folder: Path, file: object) -> list[Price]:
        measured.append(folder)
        second = next(speeds)
        return [Price(second * n, 0.5 * second, 1e-3) for n in range(1, ROUNDS + 1)]

    monkeypatch.setattr(measuring, "_measure", measure)
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    first = ckplan.spill_link(one)
    assert first.bytes_per_second == PROBE_BYTES / 3.0
    assert first.slowest and first.slowest.bytes_per_second == PROBE_BYTES / 4.0
    assert first.busy_seconds_per_byte == 0.5 / PROBE_BYTES
    assert ckplan.spill_link(one) == first
    assert ckplan.spill_rate(one) == first.bytes_per_second
    assert measured == [one]
    assert ckplan.spill_rate(other) == first.bytes_per_second / 2
    assert ckplan.spill_rate(one, fresh=True) == first.bytes_per_second / 4
    assert ckplan.spill_link(one).bytes_per_second == first.bytes_per_second / 4
    assert measured == [one, other, one]
