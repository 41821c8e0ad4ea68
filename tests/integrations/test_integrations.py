"""Inside what people use: planned models do bit for bit what unplanned ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from small_models import build
from tiny_gpt2 import LAYERS, gpt2, ids
from torch import nn
from two_ranks import run_two

import ckplan
from ckplan import applying
from ckplan.integrations.loop import LoopPlanner
from ckplan.plan.plan import Plan, PlannedRegion

transformers = pytest.importorskip("transformers")

BLOCKS = Plan(regions=(PlannedRegion("[0..2]"),))


def both(
    make: Callable[[], nn.Module],
    plan: Plan,
    train: Callable[[nn.Module], Any],
    steps: int = 3,
) -> nn.Module:
    """Train a model and its planned twin; all that is left of them must be equal."""
    plain, planned = make(), make()
    ckplan.apply(planned, plan)
    for step in range(steps):
        found = []
        for model in (plain, planned):
            torch.manual_seed(step)
            model.zero_grad()
            train(model)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            state = [*model.parameters(), *model.buffers(), *grads]
            found.append([t.detach().clone() for t in (*state, torch.get_rng_state())])
        assert len(found[0]) == len(found[1]) > 1
        assert all(map(torch.equal, *found)), step
    for region in ckplan.status(planned).regions:
        assert region.runs >= steps
        assert region.dropped_bytes > 0
    return planned


def test_gradients_accumulate() -> None:
    def train(model: nn.Module) -> None:
        for rows in (4, 4, 2):
            (model(**ids(rows)).loss / 3).backward()

    both(gpt2, LAYERS, train)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    scalers = {}

    def train(model: nn.Module) -> None:
        scaler, optimizer = scalers.setdefault(
            id(model),
            (torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1)),
        )
        with torch.autocast("cpu", dtype):
            loss = model(**ids()).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    both(gpt2, LAYERS, train)


def test_a_frozen_prefix() -> None:
    def make() -> nn.Module:
        model = build("residual").model
        model[:2].requires_grad_(False)
        return model

    batch = build("residual").batch
    plain, planned = make(), make()
    ckplan.apply(planned, BLOCKS)
    for model in (plain, planned):
        torch.manual_seed(0)
        model(batch).square().mean().backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_fine_tune_by_lora() -> None:
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True
        )
        return peft.get_peft_model(gpt2(), config)

    calls = "base_model.model.transformer.h.[0..1]"
    plan = Plan(regions=(PlannedRegion(calls),))
    both(make, plan, lambda model: model(**ids()).loss.backward())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tied_weights_and_a_switch_of_the_library_itself() -> None:
    def make() -> nn.Module:
        model = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.lm_head.weight is model.transformer.wte.weight
        return model

    planned = both(make, LAYERS, lambda model: model(**ids()).loss.backward())
    # One forward and one recomputation would be two runs a step.
    assert [region.runs for region in ckplan.status(planned).regions] == [3, 3]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from ckplan.integrations.transformers import PlanCallback

    data = [{key: value[0] for key, value in ids(n).items()} for n in range(1, 9)]
    seen: list[int] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if any(m._forward_pre_hooks for m in kw["model"].modules()):
                seen.extend(r.runs for r in ckplan.status(kw["model"]).regions)

    losses = []
    for callbacks in ([], [PlanCallback(LAYERS), Look()]):
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        model = gpt2()
        trainer = transformers.Trainer(
            model, args, train_dataset=data, callbacks=callbacks
        )
        trainer.train()
        losses.append([p.detach().clone() for p in model.parameters()])
        assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(map(torch.equal, *losses))
    assert seen == [2, 2, 4, 4, 6, 6]


def test_the_trainer_plans_for_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from ckplan.integrations.transformers import PlanCallback

    data = [{key: value[0] for key, value in ids(n).items()} for n in range(1, 9)]
    seen: list[tuple[int, int]] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step >= 2:
                regions = ckplan.status(kw["model"]).regions
                assert all(r.dropped_bytes for r in regions if r.runs)
                seen.append((state.global_step, sum(r.runs for r in regions)))

    found = []
    for callbacks in ([], [PlanCallback(budget="80%"), Look()]):
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        model = gpt2()
        transformers.Trainer(
            model, args, train_dataset=data, callbacks=callbacks
        ).train()
        found.append([p.detach().clone() for p in model.parameters()])
        assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(map(torch.equal, *found))
    steps = [step for step, runs in seen if runs]
    assert steps == [3, 4]  # the first two are recorded


def test_a_callback_needs_a_plan_or_a_budget() -> None:
    from ckplan.integrations.transformers import PlanCallback

    for given in ({}, {"plan": LAYERS, "budget": "1GiB"}):
        with pytest.raises(ckplan.CkplanError, match="cannot plan in a loop"):
            PlanCallback(**given)  # type: ignore[arg-type]


def test_a_loop_updates_in_the_groups_of_its_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loop = LoopPlanner(Plan(workload={"optimizer": "adamw:foreach=256B"}), None)
    loop.begin(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    with mock.patch("torch._foreach_sqrt", wraps=torch._foreach_sqrt) as roots:
        optimizer.step()
    assert [len(call.args[0]) for call in roots.call_args_list] == [1] * 6
    loop.end(model)
    with pytest.warns(UserWarning, match="cannot update LBFGS in groups"):
        loop.begin(model, torch.optim.LBFGS(model.parameters()))
    loop.end(model)


def test_accelerate_is_recorded() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    found = []
    plan = None
    for step in range(3):
        model = gpt2()
        if plan:
            ckplan.apply(model, plan)
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-3)
        )

        def train() -> None:
            torch.manual_seed(0)
            for _ in range(3):
                optimizer.zero_grad()  # noqa: B023
                accelerator.backward(model(**ids()).loss)  # noqa: B023
                optimizer.step()  # noqa: B023

        if step == 1:
            with ckplan.record(model, optimizer) as recorder:
                train()
            plan = ckplan.solve(recorder.graph, "80%")
            assert plan.regions
        else:
            train()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = []
    for planned in (False, True):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = gpt2()
        if planned:
            ckplan.apply(model, LAYERS)
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-3)
        )
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(**ids()).loss)
            optimizer.step()
        model = accelerator.unwrap_model(model)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert [region.runs for region in ckplan.status(model).regions] == [3, 3]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:lightning")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from ckplan.integrations.lightning import PlanCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            del index
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Look(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.extend(r.runs for r in ckplan.status(pl_module.model).regions)

    seen: list[int] = []
    found = []
    data = torch.utils.data.DataLoader(
        [{key: value[0] for key, value in ids(n).items()} for n in range(1, 9)], 4
    )
    in_loop = PlanCallback(module="model", budget="85%")
    given = PlanCallback(LAYERS, module="model")
    for callbacks in ([], [given, Look()], [in_loop, Look()]):
        module = Module()
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data)
        found.append([p.detach().clone() for p in module.parameters()])
        assert not any(m._forward_pre_hooks for m in module.model.modules())
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    assert seen[:2] == [4, 4]
    assert set(seen[2:]) == {2}  # after the two steps that were recorded


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",  # dynamo looks at it
)
def test_compiled_by_torch(backend: str, run: bool) -> None:
    torch._dynamo.reset()
    region = PlannedRegion("", run=("0", "1")) if run else PlannedRegion("[0..1]")
    found = []
    for planned in (False, True):
        workload = build("residual")
        workload.model.eval()  # compiled dropout draws other numbers
        if planned:
            ckplan.apply(workload.model, Plan(regions=(region,)))
        model = torch.compile(workload.model, backend=backend)
        for _ in range(4):
            model.zero_grad()
            model(workload.batch).square().mean().backward()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            found.append((planned, graphs, [p.grad for p in model.parameters()]))
        torch._dynamo.reset()
    for region in ckplan.status(workload.model).regions:
        assert region.runs == 4
        assert region.dropped_bytes > 0
    for planned, graphs, gradients in found:
        for one, other in zip(gradients, found[0][2], strict=True):
            torch.testing.assert_close(one, other)
        if planned:
            assert graphs == found[-1][1], "compiled again"


PARALLEL = """
from torch import nn
import ckplan
from tiny_gpt2 import LAYERS, gpt2, ids

def wrapped(model):
    if sys.argv[2] == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.transformer.h:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return nn.parallel.DistributedDataParallel(model)

found = []
for planned in (False, True):
    model = gpt2()
    if planned:
        ckplan.apply(model, LAYERS)
    whole = wrapped(model)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    torch.manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        whole(**ids(2 + rank)).loss.backward()
        optimizer.step()
    local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    found.append([p.detach().clone() for p in local])
assert all(map(torch.equal, *found)), "parameters differ"
print([region.runs for region in ckplan.status(model).regions])
"""


@pytest.mark.parametrize(
    "scheme", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"]
)
def test_two_processes(scheme: str, tmp_path: Path) -> None:
    for out in run_two(tmp_path, PARALLEL, scheme):
        assert out.splitlines()[-1] == "[3, 3]"


@pytest.mark.slow
def test_a_thousand_steps_are_bitwise_the_same_and_memory_does_not_grow() -> None:
    def losses(model: nn.Module) -> tuple[list[float], list[int]]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(0)
        found, held = [], []
        for step in range(1000):
            optimizer.zero_grad()
            loss = model(**ids(1 + step % 4)).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            held.append(_resident_bytes())
        return found, held

    planned = copy.deepcopy(gpt2())
    applying.apply(planned, LAYERS)
    expected, _ = losses(gpt2())
    actual, held = losses(planned)
    assert actual == expected
    assert held[-1] - held[200] < 8 * 2**20


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
