"""Add a gradient to ``.grad`` of a leaf as autograd's engine does."""

from __future__ import annotations

import sys
from typing import Any

import torch


def accumulate(node: Any, grads: list[Any]) -> None:
    """Set or add to ``.grad`` of a leaf; an unshared first gradient is not copied."""
    leaf = node.variable
    first = leaf.grad is None and not torch.is_grad_enabled()
    if first and _is_unshared(grads) and _is_laid_out_like(grads[0], leaf):
        leaf.grad = grads[0]
        hooks = leaf._post_accumulate_grad_hooks
        for hook in list(hooks.values()) if hooks else ():
            hook(leaf)
    else:
        node(grads[0])


def _is_unshared(grads: list[Any]) -> bool:
    """Whether nothing but the list holds its only gradient."""
    return _references(grads) == _OF_ITS_LIST and grads[0]._use_count() == 1


def _references(held: list[Any]) -> int:
    return sys.getrefcount(held[0])


_OF_ITS_LIST = _references([object()])


def _is_laid_out_like(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether a gradient meets torch's "gradient layout contract"."""
    reach = 1 + sum(
        (n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True)
    )
    if reach != leaf.numel():  # a view with gaps, or elements that share memory
        return grad.is_contiguous()
    steps = zip(grad.shape, grad.stride(), leaf.stride(), strict=True)
    return all(one == two for size, one, two in steps if size > 1)
