"""The page of ``ckplan report`` in headless Chromium: offline, no errors, it fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ckplan
from ckplan.graph.file import load

MLP = Path(__file__).parents[2] / "traces" / "mlp.json.gz"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=6000",
)
# Appended to the page: it measures itself, clicks, and logs what it saw.
PROBE = """<script>
const seen = performance.getEntriesByType("resource").map((one) => one.name);
const before = document.getElementById("alive-title").textContent;
const chart = charts[0];
const trace = chart.data.findIndex((one) => one.meta && one.customdata);
chart.emit("plotly_click", {points: [
  {data: chart.data[trace], customdata: chart.data[trace].customdata[0]}]});
const after = document.getElementById("alive-title").textContent;
const over = [...document.body.children].filter(
  (one) => one.getBoundingClientRect().right > innerWidth + 1);
console.log("PROBE" + JSON.stringify({
  loaded: seen, width: innerWidth, over: over.length, charts: charts.length,
  drawn: document.querySelectorAll(".main-svg").length, changed: before !== after,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  color: getComputedStyle(document.body).color,
  font: getComputedStyle(document.querySelector(".xtick text")).fill}) + "PROBE");
</script>"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = load(MLP)
    path = tmp_path_factory.mktemp("browser") / "page.html"
    ckplan.save_report(graph, {"plan": ckplan.solve(graph, budget="80%")}, path)
    path.write_text(path.read_text().replace("</body>", f"{PROBE}</body>"))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_opens_without_network_or_errors(
    page: Path, scheme: str, width: int, tmp_path: Path
) -> None:
    assert BROWSER is not None
    # A headless window is at least 500 wide, a frame is not.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="{page.as_uri()}" '
        f'style="width:{width}px;height:900px;border:0"></iframe>'
    )
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    found = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            *dark,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width + 40},1000",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not re.findall(r"CONSOLE.*(?:[Ee]rror|Refused|warning)", found.stderr)
    probe = re.search(r"PROBE(\{.*?\})PROBE", found.stderr)
    assert probe, found.stderr[-2000:]
    said = json.loads(probe[1])
    assert said["width"] == width
    assert said["loaded"] == []
    assert (said["charts"], said["over"]) == (2, 0)
    assert said["drawn"] >= said["charts"]
    assert said["changed"], "a click shows nothing"
    assert said["dark"] == (scheme == "dark")
    assert said["font"] == said["color"]
