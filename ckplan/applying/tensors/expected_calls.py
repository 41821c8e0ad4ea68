"""Compare the calls of a forward with those that are expected, one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from ckplan.applying.tensors.arguments import are_switched, version_of
from ckplan.applying.tensors.matchers import Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCall:
    """A call of a torch function that is expected."""

    func: Callable[..., Any]
    matches: Matcher  # checks the arguments
    switches: tuple[Any, ...]
    grad_mode: bool = field(init=False)  # the first two of these
    default_dtype: torch.dtype = field(init=False)
    simple: bool = field(init=False)  # without autocast; other switches do not count
    numbers: tuple[int, ...]  # of the tensors that it returned
    returns_new: bool  # one tensor, which no call had returned or taken before
    packed_before: int = 0  # how many tensors autograd had saved
    packed_after: int = 0
    is_plain: bool = True  # nothing is to be done before and after it

    def __post_init__(self) -> None:
        """Take the switches apart once: each forward compares them."""
        grad_mode, default_dtype, *others = self.switches
        object.__setattr__(self, "grad_mode", grad_mode)
        object.__setattr__(self, "default_dtype", default_dtype)
        object.__setattr__(self, "simple", others == [False, False])


Call = TypeVar("Call", bound=ExpectedCall)


class ExpectedCalls(TorchFunctionMode, ABC, Generic[Call]):
    """Calls that a forward is expected to make.

    What a call may differ in is compared before it runs, and nothing else. The methods
    say what is done about those that differ, and those that are not plain.
    """

    next: Call | None  # None: no more, or one differed
    current: Call | None = None  # the call that runs now
    num_packed = 0  # tensors that autograd saved

    def __init__(self, calls: Iterable[Call]) -> None:
        """Begin a forward, with the calls in their order."""
        super().__init__()
        self._calls = iter(calls)
        self.next = next(self._calls, None)
        self.made: list[ref[torch.Tensor]] = []  # tensors that calls returned
        self.versions: list[int] = []  # of these, when they were returned
        self.met: list[ref[torch.Tensor]] = []  # tensors from outside

    @abstractmethod
    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether the next tensor from outside is as expected."""

    @abstractmethod
    def other(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Handle a call that is not the next one."""

    @abstractmethod
    def number(self, call: Call, out: Any) -> bool:
        """Number what a call returned, if not one new tensor; whether to go on."""

    def begin(self, call: Call) -> bool:
        """Whether a call that is not plain may run, as expected."""
        return True

    def fail(self, call: Call) -> None:
        """Handle a call that raised an error."""

    def end(self, call: Call, out: Any) -> None:
        """Handle what a call that is not plain returned."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, and compare it with the next call before."""
        call = self.next
        if not (
            call is not None
            and (call.func is func or call.func == func)
            and self.num_packed == call.packed_before
            and _is_grad_enabled() is call.grad_mode
            and _get_default_dtype() is call.default_dtype
            and call.matches(args, kwargs, self.made, self.versions, self.met, self)
            and (
                not _is_autocast_enabled()
                if call.simple
                else are_switched(call.switches, func)
            )
            and (call.is_plain or self.begin(call))
        ):
            return self.other(func, types, args, kwargs or {})
        self.current = call
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self.current = None
            self.fail(call)
            raise
        self.current = None
        if self.next is not call:  # what it saved differed
            return out
        same = self.num_packed == call.packed_after
        if same and call.returns_new and type(out) is _Tensor:
            self.made.append(ref(out))
            self.versions.append(version_of(out))
        elif not self.number(call, out):
            return out
        self.next = next(self._calls, None)
        if not call.is_plain:
            self.end(call, out)
        return out


_Tensor = torch.Tensor  # saves looking up
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_get_default_dtype = torch.get_default_dtype
