"""What a factory returns, and which loss it trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from commands import Run
from torch import nn

import ckplan
from ckplan.errors import WorkloadError
from ckplan.training import losses
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload, as_workload, first_rows, on_device
from ckplan.verifying.verify import verify

cross_entropy = nn.functional.cross_entropy


class Classifier(nn.Module):
    """Ten classes of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.body(image)


def parts(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    labels = torch.randint(10, (4,))
    found = {"model": Classifier(), "batch": torch.randn(4, 8), "target": labels}
    return {**found, "loss_fn": cross_entropy, **more}


def by_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["image"]), batch["label"])


def step_parts(**more: Any) -> dict[str, Any]:
    found = parts()
    batch = {"image": found["batch"], "label": found["target"]}
    return {"model": found["model"], "batch": batch, "step": by_step, **more}


def gradients(workload: Workload) -> list[torch.Tensor]:
    make_step(workload, Training("none")).run()
    return [p.grad for p in workload.model.parameters() if p.grad is not None]


def test_target_step_and_closure_train_the_same() -> None:
    found = parts()
    labels = found["target"]
    closure = found["model"], found["batch"], lambda out, _: cross_entropy(out, labels)
    expected = gradients(as_workload(closure, "f"))
    for made in (parts(), step_parts(), parts(loss_fn=nn.CrossEntropyLoss())):
        assert all(map(torch.equal, expected, gradients(as_workload(made, "f"))))


def test_all_forms_have_the_same_graph_and_labels_are_inputs() -> None:
    ways = []
    for made in (parts(), step_parts()):
        model, batch = made.pop("model"), made.pop("batch")
        ways.append(ckplan.profile(model, batch, **made))
    target, step = ways
    assert [op.name for op in target.ops] == [op.name for op in step.ops]
    for graph in ways:
        assert graph.bytes_by_kind["input"] == 4 * 8 * 4 + 4 * 8
    held, dropped = (graph.bytes_by_kind["activation"] for graph in ways)
    assert held - dropped == 4 * 10 * 4  # the output, which `step` drops itself
    assert losses.LOSS_IS_GIVEN in target.notes
    assert losses.LOSS_IS_OF_STEP in step.notes


def test_a_target_follows_its_batch() -> None:
    workload = as_workload(parts(), "f")
    halved = first_rows(workload, 2)
    assert halved.target.shape == (2,) == halved.batch.shape[:1]
    moved = on_device(workload, torch.device("meta"))
    assert moved.target.device.type == "meta"


FORMS = """
import torch
from torch import nn

def parts():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 10))
    return model, torch.randn(4, 8), torch.randint(10, (4,))

def target():
    model, images, labels = parts()
    loss_fn = nn.functional.cross_entropy
    return {"model": model, "batch": images, "target": labels, "loss_fn": loss_fn}

def step():
    model, *batch = parts()
    def loss(model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)
    return {"model": model, "batch": batch, "step": loss}

def labels_too():
    model, images, labels = parts()
    return model, {"input": images, "label": labels}

def no_loss():
    return parts()[:2]
"""


@pytest.mark.parametrize("form", ["target", "step"])
def test_commands_take_every_form(run: Run, folder: Any, form: str) -> None:
    (folder / "forms.py").write_text(FORMS)
    assert run("profile", f"forms.py:{form}", "-o", "t.json.gz").code == 0
    solved = run("solve", "t.json.gz", "--min-memory", "-o", "plan.yaml", "--force")
    assert solved.code == 0
    found = verify(f"{folder}/forms.py:{form}", "plan.yaml", steps=0)
    assert found.passed
    assert found.other == ()


def test_labels_in_the_batch_are_explained(run: Run, folder: Any) -> None:
    (folder / "forms.py").write_text(FORMS)
    for device in ("cpu", "cuda"):
        found = run("profile", "forms.py:labels_too", "--device", device)
        assert found.code == 1
        assert "got an unexpected keyword argument 'label'" in found.err
        assert "'target'" in found.err
        assert "CUDA" not in found.err


def test_a_summed_output_is_said_before_the_report(run: Run, folder: Any) -> None:
    (folder / "forms.py").write_text(FORMS)
    found = run("profile", "forms.py:no_loss", "-o", "t.json.gz")
    assert f"warning: {losses.LOSS_IS_SUM}" in found.err
    with_loss = run("profile", "forms.py:target", "-o", "u.json.gz")
    assert "warning" not in with_loss.err
    made = parts()
    with pytest.warns(UserWarning, match="none was given"):
        ckplan.auto(made["model"], made["batch"], "200%")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (parts(loss_fn=None), "has a 'target' and no 'loss_fn'"),
        (parts(step=by_step), "has both 'step' and 'target'"),
        (step_parts(loss_fn=cross_entropy), "has both 'step' and 'loss_fn'"),
        (parts(loss=cross_entropy), "has both 'loss' and 'loss_fn'"),
        (parts(loss_fn="mean"), "has a loss_fn of type str"),
        (parts(targets=1), "did you mean 'target'?"),
        (parts(labels=1), "an unknown key 'labels'"),
    ],
)
def test_wrong_combinations_are_refused(made: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match="cannot build the workload") as raised:
        as_workload(made, "model.py:build")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (step_parts(step=None), "unexpected keyword argument 'image'|'label'"),
        (parts(loss_fn=lambda out: out.mean()), "loss_fn cannot be called: too many"),
        (step_parts(step=lambda m, b: None), "the loss is not a scalar: a NoneType"),
        (parts(loss_fn=lambda out, _: out), "the loss is not a scalar: a tensor"),
    ],
)
def test_a_step_that_cannot_run_says_why(made: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        make_step(as_workload(made, "f"), Training("none")).run()


def test_a_type_error_inside_the_model_stays_what_it_is() -> None:
    class Wrong(Classifier):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.body(image, 1)

    with pytest.raises(TypeError, match="positional"):
        make_step(as_workload(parts(model=Wrong()), "f"), Training("none")).run()


class Output(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("wrap", "rule"),
    [
        (lambda out, loss: (out, loss), losses.LOSS_IS_SCALAR),
        (lambda out, loss: (loss, [out, out * 2]), losses.LOSS_IS_SCALAR),
        (lambda out, loss: (out, loss, loss.detach()), losses.LOSS_IS_SCALAR),
        (lambda out, loss: {"logits": out, "nll": loss}, losses.LOSS_IS_SCALAR),
        (lambda out, loss: Output(out, loss), losses.LOSS_IS_OUTPUT_LOSS),
        (lambda out, loss: loss, losses.LOSS_IS_OUTPUT),
        (lambda out, loss: (out, None), losses.LOSS_IS_SUM),
    ],
)
def test_the_lone_scalar_of_an_output_is_its_loss(wrap: Any, rule: str) -> None:
    made = parts()
    out = made["model"](made["batch"])
    loss = out.square().mean()
    workload = as_workload((made["model"], made["batch"]), "f")
    found, said = losses.loss_of(workload, wrap(out, loss))
    assert said == rule
    assert torch.equal(found, out.sum() if rule == losses.LOSS_IS_SUM else loss)


def test_two_scalars_are_asked_about() -> None:
    workload = as_workload((Classifier(), torch.randn(4, 8)), "f")
    one = torch.ones((), requires_grad=True)
    with pytest.raises(WorkloadError, match=r"which is the loss\? .* has 2 scalars"):
        losses.loss_of(workload, (one, one * 2))
