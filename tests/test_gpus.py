"""The table of cards: figures that follow from others, names, strict reading."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckplan import gpus
from ckplan.cli import app
from ckplan.errors import CkplanError, PlanError
from ckplan.tracing.target import find_target

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "configs" / "gpus.yaml").read_text()
CARDS = gpus.load()
WANTED = [
    "RTX 3060 12GB",
    "RTX 3090",
    "RTX 4060 Ti 16GB",
    "RTX 4070",
    "RTX 4080",
    "RTX 4090 Laptop",
    "RTX 4090",
    "RTX 5070 Ti",
    "RTX 5080",
    "RTX 5090",
    "RTX A6000",
    "RTX 6000 Ada",
    "T4",
    "V100 16GB",
    "A10",
    "A10G",
    "L4",
    "L40S",
    "A100 40GB",
    "A100 80GB",
    "A100 40GB MIG 1g.5gb",
    "A100 40GB MIG 2g.10gb",
    "A100 40GB MIG 3g.20gb",
    "A100 80GB MIG 1g.10gb",
    "A100 80GB MIG 2g.20gb",
    "A100 80GB MIG 3g.40gb",
    "H100",
    "H200",
    "B200",
    "MI300X",
]

# What a card is made of: FP32 cores, boost clock in GHz, bits of the memory's bus and
# Gbps of each. Peak rate and bandwidth follow: two operations a core and clock.
MADE_OF = {
    "RTX 3060 12GB": (3584, 1.777, 192, 15),
    "RTX 3090": (10496, 1.695, 384, 19.5),
    "RTX 4060 Ti 16GB": (4352, 2.535, 128, 18),
    "RTX 4070": (5888, 2.475, 192, 21),
    "RTX 4080": (9728, 2.505, 256, 22.4),
    "RTX 4090 Laptop": (9728, 1.950, 256, 18),
    "RTX 5070 Ti": (8960, 2.452, 256, 28),
    "RTX 5080": (10752, 2.617, 256, 30),
    "RTX A6000": (10752, 1.800, 384, 16),
    "RTX 6000 Ada": (18176, 2.505, 384, 20),
    "L40S": (18176, 2.520, 384, 18),
    "A100 40GB MIG 1g.5gb": (896, 1.410, 640, 2.430),
    "A100 40GB MIG 2g.10gb": (1792, 1.410, 1280, 2.430),
    "A100 40GB MIG 3g.20gb": (2688, 1.410, 2560, 2.430),
    "A100 80GB MIG 1g.10gb": (896, 1.410, 640, 3.186),
    "A100 80GB MIG 2g.20gb": (1792, 1.410, 1280, 3.186),
    "A100 80GB MIG 3g.40gb": (2688, 1.410, 2560, 3.186),
    "RTX 4090": (16384, 2.520, 384, 21),
    "RTX 5090": (21760, 2.407, 512, 28),
    "T4": (2560, 1.590, 256, 10),
    "V100 16GB": (5120, 1.530, 4096, 1.754),
    "A10": (9216, 1.695, 384, 12.5),
    "A10G": (10240, 1.710, 384, 12.5),
    "L4": (7424, 2.040, 192, 12.5),
    "A100 40GB": (6912, 1.410, 5120, 2.430),
    "A100 80GB": (6912, 1.410, 5120, 3.186),
    "H100": (16896, 1.980, 5120, 5.234),
    "H200": (16896, 1.980, 6144, 6.25),
}

JOINED = {"V100 16GB", "A100 40GB", "A100 80GB", "H100", "H200", "B200", "MI300X"}
SMALL = {
    "T4",
    "V100 16GB",
    *(name for name in WANTED if "A100" in name),
}  # of 64 cores a multiprocessor


def test_every_card_that_was_asked_for_is_there() -> None:
    assert list(CARDS) == WANTED


@pytest.mark.parametrize("name", MADE_OF)
def test_rate_and_bandwidth_follow_from_what_a_card_is_made_of(name: str) -> None:
    cores, clock, bits, speed = MADE_OF[name]
    card = CARDS[name]
    assert card.flop_rates["fp32"] == pytest.approx(2e9 * cores * clock, rel=0.01)
    assert card.bandwidth == pytest.approx(1e9 * bits * speed / 8, rel=0.01)
    assert cores == card.multiprocessors * (64 if name in SMALL else 128)


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_figures_are_sound_and_every_one_has_a_source(card: gpus.Gpu) -> None:
    assert 0.85 * card.memory_bytes < card.usable_bytes < card.memory_bytes
    assert set(card.sources) == set(gpus.FIGURES)
    assert all(len(source) > 10 for source in card.sources.values())
    assert 3e9 < card.link <= 63e9
    assert card.link <= card.peer <= 900e9
    assert (card.peer > 100e9) == (card.name in JOINED), "NVLink, Infinity Fabric"
    rates = card.flop_rates
    assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) < rates["fp16"]
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]


def test_an_op_takes_as_long_as_the_slower_of_computing_and_moving() -> None:
    card = CARDS["A100 80GB"]
    matmul = card.device_seconds(312 * 10**12, 10**9, "bf16")
    assert matmul == pytest.approx(1.0)
    assert card.device_seconds(0, 2039 * 10**9, "fp32") == pytest.approx(1.0)
    t4 = CARDS["T4"]
    assert t4.device_seconds(10**12, 0, "bf16") == t4.device_seconds(10**12, 0, "fp32")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("v100", "V100 16GB"),
        ("a100-80gb", "A100 80GB"),
        ("RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_cards_go_by_the_names_that_people_write(said: str, meant: str) -> None:
    assert gpus.find(said).name == meant


@pytest.mark.parametrize(
    ("said", "needed", "hint"),
    [
        ("A100", "one of A100 40GB, A100 80GB", "--gpu 'A100 40GB'"),
        ("RXT 4090", "RTX 4090", "--gpu 'RTX 4090'"),
        ("RTX", "RTX 4090", "--gpu-memory SIZE"),  # which one?
        ("RTX 4060", "RTX 4060 Ti 16GB", "--gpu-memory SIZE"),  # of 8 GB
        ("RTX 3080", "RTX 3090", "--gpu-memory SIZE"),  # of 10 GB
        ("RTX 5070", "RTX 5070 Ti", "--gpu-memory SIZE"),  # of 12 GB
        ("RTX 4091", "RTX 4090", "--gpu-memory SIZE"),
        ("", "H200", "ckplan gpus"),
    ],
)
def test_another_name_is_answered_with_those_there_are(
    said: str, needed: str, hint: str
) -> None:
    with pytest.raises(CkplanError) as caught:
        gpus.find(said)
    assert needed in caught.value.needed
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("ckplan_gpus: 1", "ckplan_gpus: 2", "format '2'"),
        ("capacity: 11.63GiB", "capazity: 11.63GiB", "unknown key 'capazity'"),
        ("    capacity: 11.63GiB\n", "", "missing key 'capacity'"),
        ("capacity: 11.63GiB", "capacity: 13GiB", "RTX 3060 12GB offers 13.00 GiB"),
        ("bandwidth: 360GB", "bandwidth: fast", "cannot read the size 'fast'"),
        ("launch_us: 5", "launch_us: -5", "'launch_us' is '-5'"),
        ("capability: 8.6", "capability: sm86", "'capability' is 'sm86'"),
        ("{fp32: 12.7", "{fp64: 12.7", "unknown key 'fp64'"),
        ("{fp32: 12.7, ", "{", "missing key 'fp32'"),
        ("tflops: rtx3060}", "tflops: hearsay}", "the source of 'tflops' is 'hearsay'"),
        ("tflops: rtx3060}", "}", "missing key 'tflops'"),
    ],
)
def test_the_table_is_read_strictly(old: str, new: str, found: str) -> None:
    assert old in TABLE
    with pytest.raises(PlanError, match=r"gpus.yaml, line \d+: ") as caught:
        gpus.parse(TABLE.replace(old, new, 1), "gpus.yaml")
    assert found in caught.value.what


OWN = """\
ckplan_gpus: 1
gpus:
  Mine 20GB: {memory: 20GB, bandwidth: 500GB, tflops: {fp32: 30}, price: 0.4}
  RTX 4090: {memory: 48GiB, bandwidth: 1008GB, tflops: {fp32: 82.6}}
"""


def test_cards_of_ones_own_by_size_and_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    monkeypatch.setenv("CKPLAN_GPUS", str(tmp_path / "mine.yaml"))
    card = gpus.find("mine")
    assert card.usable_bytes == int(0.975 * 20e9) - 600 * 2**20
    assert card.assumed == (
        *("capacity", "context", "link", "peer", "launch_us"),
        *("capability", "multiprocessors"),
    )
    assert card.price == 0.4
    assert gpus.find("RTX 4090").memory_bytes == 48 * 2**30  # it replaces the other
    assert [*gpus.load()] == [*WANTED, "Mine 20GB"]
    monkeypatch.setenv("CKPLAN_GPUS", "nope.yaml")
    with pytest.raises(CkplanError, match=r"table of cards 'nope\.yaml': no such file"):
        gpus.load()


def test_no_step_is_traced_for_kernels_that_are_not_known() -> None:
    with pytest.raises(CkplanError, match="kernels of rocm") as caught:
        find_target("cuda", "MI300X")
    assert "--gpu-memory" in caught.value.hint


def test_the_command_lists_cards_and_says_where_a_figure_is_from() -> None:
    listed = CliRunner().invoke(app, ["gpus", "--json"])
    assert [card["name"] for card in json.loads(listed.stdout)["gpus"]] == WANTED
    table = CliRunner().invoke(app, ["gpus"], env={"COLUMNS": "80"}).stdout
    assert all(
        any(line.startswith(f"  {n} ") for line in table.splitlines()) for n in WANTED
    )
    one = CliRunner().invoke(app, ["gpus", "a10g"], env={"COLUMNS": "200"}).stdout
    assert "NVIDIA A10G for AWS data sheet" in one


def test_an_installed_wheel_brings_the_table(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "-q"]
    options = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, "wheel", *options, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from ckplan import gpus; print(gpus._table(), len(gpus.load()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert found.split() == [str(tmp_path / "site/ckplan/gpus.yaml"), str(len(WANTED))]
