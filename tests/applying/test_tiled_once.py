"""A second derivative through tiles is an error, never a zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gated import Gated
from normed_mlps import WrittenRms
from torch import Tensor, nn

import ckplan
from ckplan.errors import ApplyError

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


class Attention(nn.Module):
    """Of two heads, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        made = self.project(rows).view(*rows.shape[:2], 3, 4, -1)
        first, second, values = made.permute(2, 0, 3, 1, 4)
        scores = (first @ second.transpose(2, 3)).softmax(-1)
        return (scores @ values).transpose(1, 2).reshape(rows.shape)


CALLS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Gated(WIDTH, 128),
    "attention": Attention,
    "norm": lambda: WrittenRms(WIDTH),
}


def rows_of() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 64, WIDTH, generator=generator).requires_grad_()


def check(run: Callable[[Tensor], Tensor]) -> None:
    rows = rows_of()
    (first,) = torch.autograd.grad(run(rows).sum(), rows)
    rows = rows_of()
    loss = run(rows).sum()
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    assert torch.equal(gradient, first)
    with pytest.raises(ApplyError, match="cannot differentiate the gradients of"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.parametrize("kind", CALLS)
def test_a_penalty_on_a_gradient_is_an_error(kind: str) -> None:
    torch.manual_seed(0)
    model = CALLS[kind]()
    with ckplan.tile_rows(model, "", tiles=(4, 2)) as handle:
        check(model)
    assert (handle.tiled, handle.whole) == (2, 0)


def test_of_a_head_it_is_an_error_too() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 512))
    labels = torch.arange(256) % 512

    def run(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(rows).view(-1, 512), labels, reduction="sum")

    with ckplan.tile_head(model, "1") as head:
        check(run)
    assert head.tiled == 2


def test_logits_that_are_read_whole_are_plain_and_may_be_differentiated() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 512))

    def penalty() -> list[Tensor | None]:
        rows = rows_of()
        model.zero_grad()
        loss = model(rows).square().sum()
        (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return [one.grad for one in model.parameters()]

    plain = [one.clone() for one in penalty() if one is not None]
    with ckplan.tile_head(model, "1"), pytest.warns(UserWarning, match="whole"):
        tiled = penalty()
    assert len(plain) == 4
    assert all(
        other is not None and torch.equal(one, other)
        for one, other in zip(plain, tiled, strict=True)
    )
