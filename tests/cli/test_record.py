"""`ckplan record`: scripts run as under python, and leave a trace."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from commands import Run

from ckplan.graph import file as trace_file
from ckplan.plan import file as plan_file
from ckplan.plan.plan import plan_fingerprint
from ckplan.simulating.simulate import simulate

TRAIN = """
import sys
import torch
import beside
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return torch.tanh(self.layers(x))

def main(kind="plain", steps=4):
    print("begins", __name__, sys.argv[1:], beside.VALUE)
    if kind == "exits":
        sys.exit("no data")
    torch.manual_seed(0)
    net, head = Net(), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])
    workers = 2 if kind == "workers" else 0
    rows = 32 if kind == "many" else 4
    data = DataLoader(
        TensorDataset(torch.randn(rows * int(steps), 8)), rows, num_workers=workers
    )
    for step, (x,) in zip(range(int(steps)), data):
        if kind == "raises" or (kind == "late" and step > 2):
            raise KeyError("label")
        loss = head(net(x)).square().mean()
        loss.backward()
        if kind == "never":
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
            continue
        optimizer.step()
        optimizer.zero_grad()
    print("ends", loss.item())
    if kind == "code":
        sys.exit(7)

if __name__ == "__main__":
    if sys.argv[1:2] in (["forks"], ["launches"]):
        from multiprocessing import get_context
        child = get_context("fork").Process(target=main)
        child.start()
        child.join()
        if sys.argv[1] == "launches":
            sys.exit(0)
    else:
        main(*sys.argv[1:])
"""


@pytest.fixture
def script(folder: Path) -> str:
    (folder / "code").mkdir()
    (folder / "code" / "beside.py").write_text("VALUE = 3")
    (folder / "code" / "train.py").write_text(TRAIN)
    return "code/train.py"


def test_a_script_is_recorded_and_ends_after_its_second_step(
    run: Run, script: str
) -> None:
    ended = run("record", "-o", "t.json.gz", script, "plain", "4")
    assert ended.out == "begins __main__ ['plain', '4'] 3\n"
    assert ended.code == 0, ended.err
    assert "recorded Net, stepped by Adam" in ended.err
    assert "its batch: 0 float32[4,8]" in ended.err
    graph = trace_file.load(Path("t.json.gz"))
    assert graph.model == "Net"
    assert [str(call) for call in graph.calls if call.parent < 0] == [".#0"]
    assert plan_fingerprint(graph.fingerprint)["batch"] == {"0": "float32[4,8]"}
    again = run("record", "-o", "t.json.gz", script)
    assert (again.code, again.out) == (1, "")
    assert "t.json.gz" in again.err.splitlines()[0]
    solved = run("solve", "t.json.gz", "--min-memory", "-o", "plan.yaml")
    assert solved.code == 0
    workload = plan_file.load(Path("plan.yaml")).workload
    assert workload["script"] == [script, "plain", "4"]
    assert f"{script} plain 4" in run("show", "plan.yaml").out
    assert run("eject", "plan.yaml").code == 0  # of the trace beside it
    Path("t.json.gz").rename("elsewhere")
    told = run("eject", "plan.yaml")
    Path("elsewhere").rename("t.json.gz")
    assert told.code == 1
    lines = [line for line in told.err.splitlines() if line.strip()][-3:]
    assert f"this command does not run: {script} plain 4" in lines[0]
    assert [line.split()[0] for line in lines] == ["error:", "needed:", "try:"]
    assert "ckplan eject TRACE PLAN" in lines[2]  # no name that is not there
    assert run("eject", "t.json.gz", "plan.yaml").code == 0


PACKAGE = """
import sys
import torch
from .net import Net

net = Net()
optimizer = torch.optim.Adam(net.parameters())
print("begins", __name__, sys.argv[1:])
for _ in range(4):
    net(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_package_runs_as_a_module(run: Run, folder: Path) -> None:
    (folder / "recipes_of_net").mkdir()
    (folder / "recipes_of_net" / "__init__.py").touch()
    (folder / "recipes_of_net" / "__main__.py").write_text(PACKAGE)
    (folder / "recipes_of_net" / "net.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))\n"
    )
    ended = run("record", "-o", "t.json.gz", "-m", "recipes_of_net", "plain")
    assert ended.code == 0, ended.err
    assert "begins __main__ ['plain']" in ended.out
    assert run("solve", "t.json.gz", "--min-memory", "-o", "plan.yaml").code == 0
    plan = plan_file.load(Path("plan.yaml"))
    assert plan.workload["script"] == ["-m", "recipes_of_net", "plain"]
    verified = run("verify", "plan.yaml", "--steps", "0")
    assert verified.code == 0, verified.err
    assert "runs -m recipes_of_net plain, without the plan and with it" in verified.err
    for other in ("recipes_of_net", "recipes_of_net/__main__.py"):
        ended = run("record", "-o", "o.json.gz", other)
        assert ended.code == 1
        assert "ckplan record -m recipes_of_net ..." in ended.err
    ended = run("record", "-m", "recipes_of_net.nothing")
    assert ended.code == 1
    assert "no module recipes_of_net.nothing can be run from" in ended.err


def test_a_script_that_goes_on_prints_and_returns_what_it_does_alone(
    run: Run,
    folder: Path,
    script: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exits:
        patch.setattr(sys, "argv", [script, "code"])
        patch.syspath_prepend(folder / "code")
        runpy.run_path(script, run_name="__main__")
    assert exits.value.code == 7
    alone = capfd.readouterr().out
    assert "ends" in alone
    ended = run("record", "--continue", script, "code")
    assert (ended.code, ended.out) == (7, alone)
    assert (folder / "traces" / "train-code.json.gz").is_file()


def test_one_of_several_models_is_recorded(run: Run, script: str) -> None:
    ended = run("record", "--model", "Linear", "-o", "t.json.gz", script)
    assert ended.code == 0, ended.err
    assert trace_file.load(Path("t.json.gz")).model == "Linear"
    ended = run("record", "--model", "Nett", "-o", "other.json.gz", script)
    assert ended.code == 1
    assert "--model Linear or Net" in ended.err
    assert not Path("other.json.gz").exists()


GAN = """
import torch
from torch import nn

class Maker(nn.Linear): pass
class Judge(nn.Linear): pass

maker, judge = Maker(8, 8), Judge(8, 1)
steps = [torch.optim.Adam(one.parameters()) for one in (maker, judge)]
for _ in range(4):
    made = maker(torch.randn(4, 8))
    for given, optimizer in ((made.detach(), steps[1]), (made, steps[0])):
        optimizer.zero_grad()
        judge(given).mean().backward()
        optimizer.step()
"""


def test_a_model_may_be_stepped_after_another_one(run: Run, folder: Path) -> None:
    (folder / "gan.py").write_text(GAN)
    for name in ("Maker", "Judge"):
        ended = run("record", "--model", name, "-o", f"{name}.json.gz", "gan.py")
        assert ended.code == 0, ended.err
        assert trace_file.load(Path(f"{name}.json.gz")).model == name
    for steps in ("range(4)", "range(1)"):  # one that ends before it is clear, too
        (folder / "gan.py").write_text(GAN.replace("range(4)", steps))
        ended = run("record", "--model", "Make", "-o", "other.json.gz", "gan.py")
        assert ended.code == 1
        assert "--model Judge or Maker" in ended.err


def test_a_lazy_module_elsewhere_in_the_process_has_no_bytes(
    run: Run, script: str
) -> None:
    unused = torch.nn.LazyLinear(4)
    ended = run("record", "-o", "t.json.gz", script)
    assert (ended.code, type(unused).__name__) == (0, "LazyLinear"), ended.err


COMPILED = """
import torch
from torch import nn

calls = []

def backend(graph, inputs):
    calls.append(graph)
    return graph

model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
model = torch.compile(model, backend=backend)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
print("compiled", len(calls))
"""


def test_what_a_script_compiles_is_recorded_op_by_op(
    run: Run, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (folder / "compiles.py").write_text(COMPILED)
    ended = run("record", "-o", "t.json.gz", "compiles.py")
    assert ended.code == 0, ended.err
    graph = trace_file.load(Path("t.json.gz"))
    assert graph.model == "Sequential"
    assert graph.notes[-1].startswith("what the script compiles ran op by op")
    assert [call.fqn for call in graph.calls] == ["", "0", "1", "2"]
    ended = run("record", "--continue", "--force", "-o", "t.json.gz", "compiles.py")
    assert (ended.code, ended.out) == (0, "compiled 1\n")  # when that is done
    assert not list(recwarn)


def test_force_stands_before_the_script(run: Run, script: str) -> None:
    Path("t.json.gz").write_text("kept")
    ended = run("record", "-o", "t.json.gz", script)
    assert ended.code == 1
    assert f"ckplan record --force {script} ..." in ended.err
    assert Path("t.json.gz").read_text() == "kept"


def test_an_output_after_the_script_is_said_to_be_the_scripts(
    run: Run, script: str
) -> None:
    said = f"-o is given to {script}: options of ckplan stand before it"
    ended = run("record", script, "plain", "4", "-o", "t.json.gz")
    assert (ended.code, said in ended.err) == (1, True)  # it takes no such argument
    assert not Path("t.json.gz").exists()
    ended = run("record", "-o", "t.json.gz", script, "plain", "4")
    assert ended.code == 0 and said not in ended.err


def test_an_option_of_the_script_before_it_is_told(run: Run, script: str) -> None:
    ended = run("record", "--batch", "8", script)
    assert ended.code == 1
    assert "--batch is no option of `ckplan record`" in ended.err
    assert "ckplan record train.py --batch" in ended.err


@pytest.mark.parametrize("width", [8, 9])
def test_models_that_look_alike_are_named(run: Run, folder: Path, width: int) -> None:
    (folder / "two.py").write_text(f"""
import torch
from torch import nn

one, other = nn.Linear(8, 8), nn.Linear({width}, 8)
optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()])
for _ in range(3):
    (one(torch.ones(4, 8)) + other(torch.ones(4, {width}))).sum().backward()
    optimizer.step()
""")
    ended = run("record", "-o", "t.json.gz", "two.py")
    assert ended.code == 0, ended.err
    notes = " ".join(trace_file.load(Path("t.json.gz")).notes)
    assert "runs 2 models of type Linear: recorded is that with most" in notes
    assert f"its batch: 0 float32[4,{width}]" in ended.err


def test_a_script_that_does_not_fit_is_recorded_at_cut_batches(
    run: Run, script: str
) -> None:
    options = ("record", "--reduce", "4", "-o", "t.json.gz")
    ended = run(*options, script, "many", "9")
    assert ended.code == 0, ended.err
    assert ended.out == "begins __main__ ['many', '9'] 3\n"
    assert "its batch: 0 float32[32,8]" in ended.err
    assert run("record", "-o", "whole.json.gz", script, "many", "9").code == 0
    small, whole = (trace_file.load(Path(f"{n}.json.gz")) for n in ("t", "whole"))
    assert simulate(small).peak_bytes == simulate(whole).peak_bytes
    bad = {
        ("--reduce", "16"): "cannot cut a batch of 32 rows",
        ("--reduce", "4", "--continue"): "cannot go on with the script",
    }
    for more, said in bad.items():
        ended = run("record", *more, "-o", "other.json.gz", script, "many", "9")
        assert ended.code == 1
        assert said in ended.err.splitlines()[0]
    ended = run("record", "--reduce", "4", "-o", "other.json.gz", script, "many", "6")
    assert "before its 7th step was over" in ended.err
    ended = run("record", "--reduce", "4", "-o", "other.json.gz", script, "exits")
    assert "needed: a script that trains for 7 steps" in ended.err
    assert not Path("other.json.gz").exists()


def test_workers_of_a_data_loader_are_left_alone(run: Run, script: str) -> None:
    ended = run("record", "-o", "t.json.gz", script, "workers")
    assert ended.code == 0, ended.err
    assert trace_file.load(Path("t.json.gz")).num_backward


BAD = {
    "never": "no optimizer stepped in its process",
    "forks": "no optimizer stepped in its process",
    "launches": "no optimizer stepped in its process",
    "exits": "called sys.exit('no data') before its second step was over",
    "raises": "raised KeyError: 'label', before its second step was over",
    "plain 1": "it ended after one step",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_script_that_takes_no_two_steps_is_told(
    run: Run, script: str, kind: str
) -> None:
    ended = run("record", "-o", "t.json.gz", script, *kind.split())
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if line.strip()][-3:]
    assert BAD[kind] in lines[0]
    assert [line.split()[0] for line in lines] == ["error:", "needed:", "try:"]
    assert not Path("t.json.gz").exists()


def test_a_script_that_fails_later_has_left_its_trace(run: Run, script: str) -> None:
    ended = run("record", "--continue", "-o", "t.json.gz", script, "late")
    assert ended.code == 1
    assert "after its second step, which is recorded" in ended.err
    assert trace_file.load(Path("t.json.gz")).model == "Net"


def test_a_script_that_is_not_there_or_no_python_is_told(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").write_text("def")
    assert "is not valid Python" in run("record", "train.py").err
    ended = run("record", "trains.py")
    assert (ended.code, "did you mean 'train.py'" in ended.err) == (1, True)
