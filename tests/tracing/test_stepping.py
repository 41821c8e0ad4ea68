"""Backward from Python does what torch's engine does: bits, hooks, lives of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ckplan.tracing.faking.python_engine import use_python_engine
from ckplan.tracing.recording.recording import Recording
from ckplan.tracing.target import find_target
from ckplan.tracing.trace import trace
from ckplan.training.step import Training
from ckplan.training.workload import Workload

Run = Callable[[nn.Module, torch.Tensor], Any]


class Scaled(torch.autograd.Function):
    """Two outputs; arguments that are no tensors; uses what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, k: int, w: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.k = k
        return x * k * w, x + w

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return g * ctx.k * w + h, None, (g * ctx.k * x + h).sum(0)


class TakesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> torch.Tensor:
        return (0 if g is None else 2 * g) + (0 if h is None else 3 * h)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Any) -> torch.Tensor:
        return g


class Around(torch.autograd.Function):
    """Makes nodes of others before it saves, and runs them before it asks for that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Exp.apply(ctx.x).sin()
        y = ctx.y.detach() * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> torch.Tensor:
        torch.autograd.backward(ctx.y, g)
        (y,) = ctx.saved_tensors
        return ctx.x.grad + y


class Net(nn.Module):
    """Gradients that meet, broadcasting, views, custom functions, a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.p, self.q = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.conv, self.lstm = nn.Conv2d(2, 8, 3), nn.LSTM(8, 8)
        self.table = nn.Embedding(10, 8)
        self.ends = self.b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.p + self.q
        u, v = Scaled.apply(y, 2, self.q)
        z = self.batch_norm(self.norm(F.dropout(F.gelu(self.b(u)), 0.1)))
        z = z + TakesNone.apply(z)[1]
        z = self.lstm(z)[0] + v.relu_()
        images = torch.ones(1, 2, 5, 5).to(memory_format=torch.channels_last)
        z = z * self.conv(images).mean() + self.table(torch.tensor([1, 2, 3, 3]))
        return self.ends(z.view(2, 2, 8).transpose(0, 1).reshape(4, 8)) + self.a(z)


def mean(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    y = model(x)
    y.register_hook(lambda grad: grad * 2)
    y.register_hook(lambda grad: grad + 1)
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad


def retained(model: nn.Module, x: torch.Tensor) -> tuple[Any, ...]:
    """As it is at last, and copied."""
    y = model(x)
    y.retain_grad()
    y.mul_(3)
    z, changed, unused = y * 2, y * 5, y * 7
    for one in (z, unused):
        one.retain_grad()
    z.register_hook(lambda grad: grad * 2)
    loss = z.square().sum() + changed.sum()
    loss.backward(retain_graph=True)
    first = z.grad
    loss.backward(inputs=[z, changed])
    return y.grad, z.grad, changed.grad, first, unused.grad


def watched(model: Any, x: torch.Tensor) -> tuple[Any, ...]:
    y, seen = model(x), list[Any]()
    first, other = TakesNone.apply(y)
    other.register_hook(lambda grad: seen.append(torch.tensor(grad is None)))
    model.q.register_hook(lambda grad: seen.append(grad))
    hook: Any = torch.autograd.graph.register_multi_grad_hook
    hook((x, y, nn.Parameter(x.detach())), seen.extend)
    hook((x, y), seen.append, mode="any")
    done = torch.tensor(2.0)
    later: Any = Variable._execution_engine
    y.register_hook(lambda grad: later.queue_callback(lambda: seen.append(done)))
    first.square().sum().backward(retain_graph=True)
    first.sum().backward(inputs=[model.p])  # past the hooks on the others
    return tuple(seen)


def on_nodes(model: Any, x: torch.Tensor) -> tuple[Any, ...]:
    y, seen = model(x), list[Any]()
    z = y.sin()
    node, leaf = z.grad_fn, torch.autograd.graph.get_gradient_edge(model.p).node
    node.register_prehook(lambda grads: (grads[0] * 3,))
    node.register_prehook(lambda grads: seen.extend(grads))
    node.register_hook(lambda outs, grads: (outs[0] + 1,))
    leaf.register_prehook(lambda grads: (grads[0] * 2,))
    leaf.register_hook(lambda outs, grads: seen.extend((*outs, *grads)))
    removed = node.register_hook(lambda outs, grads: (outs[0] * 9,))
    removed.remove()
    z.sum().backward(retain_graph=True)
    node.register_hook(lambda outs, grads: seen.extend(outs))
    z.sum().backward()
    return tuple(seen)


def transformed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    def total(x: torch.Tensor) -> torch.Tensor:
        return (x @ model.a.weight).sin().sum()  # type: ignore[operator, union-attr]

    value, pull = torch.func.vjp(total, x)
    (grad,) = pull(torch.ones_like(value))
    hessian = torch.func.hessian(total)(x[0].detach())
    (hessian.sum() + torch.func.grad(total)(x).square().sum()).backward()
    rows = torch.autograd.grad(x.sin()[0], x, torch.eye(8), is_grads_batched=True)
    return grad.detach(), hessian.detach(), *rows


def jagged(model: Any, x: torch.Tensor) -> None:
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
    F.layer_norm(model.a(rows), (8,)).values().square().sum().backward()


def nested(model: Any, x: torch.Tensor) -> None:
    rows = torch.nested.as_nested_tensor([x[:1], x[1:]])
    torch.nested.to_padded_tensor(model.a(rows), 0.0).square().sum().backward()


def packed(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        y = model(x)
        z = checkpoint(model, Around.apply(y), use_reentrant=False)
    y.sum().backward(retain_graph=True)
    z.square().sum().backward()


def penalised(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y + grad * grad).mean().backward()


def twice(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


def two_losses(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    torch.autograd.backward([y.sum(), y.square().mean()])


def some_inputs(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward(inputs=[model.a.weight, model.p])


def asked(model: Any, x: torch.Tensor) -> Any:
    y = model(x)
    unused = nn.Parameter(torch.ones(2))
    wanted = [model.a.weight, x, y, unused]
    return torch.autograd.grad(y.sum(), wanted, allow_unused=True)


def on_leaves(model: Any, x: torch.Tensor) -> None:
    def doubled(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    hooks = (
        model.p.register_hook(lambda grad: grad * 3),
        model.a.weight.register_post_accumulate_grad_hook(doubled),
    )
    mean(model, x)
    for hook in hooks:
        hook.remove()


def on_modules(model: Any, x: torch.Tensor) -> None:
    hooks = (
        model.a.register_full_backward_hook(lambda module, i, o: (i[0] * 2,)),
        model.norm.register_full_backward_pre_hook(lambda module, o: (o[0] * 3,)),
    )
    mean(model, x)
    for hook in hooks:
        hook.remove()


def checkpointed(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


def checkpointed_the_old_way(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=True).square().mean().backward()


RUNS = (
    mean,
    hooked,
    retained,
    watched,
    on_nodes,
    transformed,
    jagged,
    nested,
    packed,
    penalised,
    twice,
    two_losses,
    some_inputs,
    asked,
    on_leaves,
    on_modules,
    checkpointed,
    checkpointed_the_old_way,
)


def gradients(run: Run) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model, found = Net(), []
    for _ in range(2):  # the second time gradients are added to those of the first
        x = torch.randn(4, 8, requires_grad=True)
        made = run(model, x)
        found += [x.grad, *(made if isinstance(made, tuple) else [made])]
    return [*found, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("run", RUNS)
def test_gradients_are_the_engines_bit_for_bit(run: Run) -> None:
    expected = gradients(run)
    with use_python_engine():
        found = gradients(run)
    assert sum(one is not None for one in expected) >= 2
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def recorded(make: Callable[[], Workload], training: Training) -> Recording:
    torch.manual_seed(0)
    target = find_target("cpu", None)
    return trace(lambda scope: make(), training, target).recording


class Recurrent(nn.Module):
    """Cells in a loop: gradients meet again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outs = torch.zeros_like(x[0]), []
        for row in x:
            state = self.cell(row, state)
            outs.append(self.out(state) * state)
        return torch.stack(outs)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.first, self.layer = nn.Linear(16, 16), layer
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return out + x


class Nesting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Around.apply(Around.apply(self.first(x)).tanh()))


def transformer() -> Workload:
    layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
    return Workload(nn.Sequential(*layers), torch.randn(2, 8, 16), None)


MAKES: dict[str, Callable[[], Workload]] = {
    "everything": lambda: Workload(Net(), torch.randn(4, 8), None),
    "transformer": transformer,
    "recurrent": lambda: Workload(Recurrent(), torch.randn(5, 3, 8), None),
    "checkpointed": lambda: Workload(Checkpointed(False), torch.randn(2, 8, 16), None),
    "functions in one": lambda: Workload(Nesting(), torch.randn(4, 8), None),
    "the old way": lambda: Workload(Checkpointed(True), torch.randn(2, 8, 16), None),
}


TRAININGS = (Training("adamw"), Training("sgd", amp="bf16", accumulate=2, clip=1.0))


@pytest.mark.parametrize(
    ("name", "training"),
    [
        (name, training)
        for name in MAKES
        for training in TRAININGS
        # Torch before 2.13 casts a weight into a graph of its own there, so that what
        # the checkpoint saves is let go with its graph.
        if not (name == "the old way" and training.amp)
    ],
)
def test_a_step_is_recorded_as_the_engine_runs_it(
    name: str, training: Training
) -> None:
    ways = []
    for scope in (nullcontext(), use_python_engine()):
        with scope:
            ways.append(recorded(MAKES[name], training))
    engine, stepped = ways
    assert engine.num_backward > 10
    for one, other in zip(engine.ops, stepped.ops, strict=True):
        assert one == other
    assert engine.storages == stepped.storages
    assert engine.saved == stepped.saved


def test_what_was_saved_goes_with_its_node() -> None:
    lives: list[ref[torch.Tensor]] = []
    seen: list[bool] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        lives.append(ref(copy := x.clone()))
        return copy

    x = torch.randn(8, requires_grad=True)
    with use_python_engine():
        y = x * 1
        y.register_hook(lambda grad: seen.extend(one() is None for one in lives))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            z = Around.apply(y).exp()
        z.sum().backward()
    assert seen == [True] * 3


def replaced() -> dict[str, object]:
    names = ("register_hook", "retain_grad")
    return {
        "engine": Variable._execution_engine,
        "task": torch._C._current_graph_task_id,
        **{name: getattr(torch.Tensor, name) for name in names},
    }


def test_nothing_is_left_behind() -> None:
    before = replaced()
    with pytest.raises(ZeroDivisionError), use_python_engine():
        raise ZeroDivisionError
    assert replaced() == before
    x = torch.ones(2, requires_grad=True)
    x.exp().sum().backward()
    assert x.grad is not None


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]


class Keeps(Saves):
    """What it needs by itself, which the engine does not know of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x + 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.x


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, returned: object) -> torch.Tensor:
        ctx.returned = returned
        return x + 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.returned


def again(x: torch.Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = x.exp().sum()
    y.backward()
    y.backward()


def run_again(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    def run(x: torch.Tensor) -> None:
        y = make(x)
        y.sum().backward()
        assert x.grad is not None
        y.sum().backward()

    return run


def hook_of(found: object) -> Callable[[torch.Tensor], None]:
    def run(x: torch.Tensor) -> None:
        y = x * 2
        y.register_hook(lambda grad: found)
        y.sum().backward()

    return run


def old_checkpoint(x: torch.Tensor) -> None:
    torch.autograd.grad(checkpoint(torch.exp, x, use_reentrant=True).sum(), x)


ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "again": again,
    "again, an output": run_again(torch.exp),
    "again, a number": run_again(lambda x: x * 2),
    "again, some of it": run_again(lambda x: (x.detach() * x) + x),
    "again, a list": run_again(lambda x: torch.linalg.multi_dot([x, x[None].T * x])),
    "again, a function": run_again(Saves.apply),
    "no graph": lambda x: x.detach().sum().backward(),
    "old checkpoint": old_checkpoint,
    "callback": lambda x: Variable._execution_engine.queue_callback(print),  # type: ignore[attr-defined]
    "too few": lambda x: Wrong.apply(x, x.detach()).sum().backward(),
    "too many": lambda x: Wrong.apply(x, (x.detach(),) * 3).sum().backward(),
    "number": lambda x: Wrong.apply(x, (1.0, None)).sum().backward(),
    "hook, number": hook_of(1.0),
    "hook, type": hook_of(torch.ones(2).double()),
    "hook, size": hook_of(torch.ones(3)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_engine_refuses_is_refused_in_its_words(name: str) -> None:
    said = []
    for scope in (nullcontext(), use_python_engine()):
        with scope, pytest.raises((RuntimeError, TypeError)) as error:
            ERRORS[name](torch.ones(2, requires_grad=True))
        said.append((error.type, str(error.value).splitlines()[0]))
    assert said[0] == said[1]


def test_what_is_not_used_is_refused() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    with use_python_engine(), pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(x.sum(), [x, y])


@pytest.mark.parametrize("make", [lambda x: x + x, torch.relu_, Keeps.apply])
def test_graphs_that_nothing_was_saved_for_may_run_again(make: Any) -> None:
    found = []
    for scope in (nullcontext(), use_python_engine()):
        x = torch.ones(2, requires_grad=True)
        with scope:
            try:
                run_again(make)(x)
            except RuntimeError as error:
                found.append(str(error))
            else:
                found.append(x.grad)
    assert str(found[0]) == str(found[1])
