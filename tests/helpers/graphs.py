"""Small synthetic training steps, for tests of code that reads graphs.

``chain`` is a stack of blocks, like a transformer's. ``Forward`` makes any other step:

>>> forward = Forward()
>>> x, weight = forward.given(8), forward.given(4, "parameter")
>>> with forward.call("fc"):
...     (y,) = forward.op("addmm", [x, weight], makes=[8], saves=[x])
>>> [op.name for op in forward.graph().ops]
['addmm', 'addmm_backward', 'sgd']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from random import Random

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    BEFORE_STEP,
    NO_WORKSPACE,
    OUTSIDE_CALLS,
    Call,
    Encoding,
    EngineCosts,
    Hazard,
    Op,
    Saved,
    Storage,
    Workspace,
)
from ckplan.plan.region import PROGRAM, RERUN, Region
from ckplan.simulating.simulate import Simulator, Timeline

FINGERPRINT = {
    "torch": "2.13.0",
    "device": "cpu",
    "batch": {"input_ids": "int64[8,256]"},
    "parameters": {"h.0.mlp.fc.weight": "float32[4,4]"},
}


def chain(
    num_blocks: int = 3,
    *,
    block: str = "h.{}",
    width_bytes: int = 100,
    hidden_bytes: int = 400,
    stats_bytes: int = 4,
    weight_bytes: int = 50,
    workspace_bytes: int = 0,
    seconds: float = 1.0,
) -> Graph:
    """Blocks of a norm, two linear layers with GELU between, dropout and a residual.

    Args:
        num_blocks: How many.
        block: FQN of a block, ``{}`` being its number; without, one that runs again.
        width_bytes: Of the tensors between blocks, and of all that have their size.
        hidden_bytes: Of the tensors between the two linear layers.
        stats_bytes: Of the mean and of the deviation that a norm saves.
        weight_bytes: Of every parameter.
        workspace_bytes: Of the linear layers.
        seconds: Of every op.
    """
    forward = Forward(seconds)

    def linear(x: int, out_bytes: int) -> int:
        weight = forward.given(weight_bytes, "parameter")
        (y,) = forward.op(
            "addmm",
            [x, weight],
            makes=[out_bytes],
            saves=[x, weight],
            workspace=Workspace(after=(workspace_bytes,) if workspace_bytes else ()),
        )
        return y

    def norm(x: int) -> int:
        weight = forward.given(weight_bytes, "parameter")
        makes = [width_bytes, stats_bytes, stats_bytes]
        y, mean, deviation = forward.op("native_layer_norm", [x, weight], makes=makes)
        forward.save(x, weight, mean, deviation)
        return y

    x = forward.given(width_bytes)
    with forward.call("", module="Chain"):
        for name in map(block.format, range(num_blocks)):
            with forward.call(name, module="Block"):
                with forward.call(f"{name}.norm", module="LayerNorm"):
                    y = norm(x)
                with forward.call(f"{name}.mlp", module="MLP"):
                    z = linear(y, hidden_bytes)
                    (a,) = forward.op("gelu", [z], makes=[hidden_bytes], saves=[z])
                    o = linear(a, width_bytes)
                makes = [width_bytes, width_bytes // 4]
                d, mask = forward.op("native_dropout", [o], makes=makes, random=True)
                forward.save(mask)
                (x,) = forward.op("add", [x, d], makes=[width_bytes])
    forward.op("mean", [x], makes=[4])
    graph = forward.graph("Chain")
    masks = (
        Encoding(number, 1, "bits", width_bytes // 32, 0, 0, seconds / 8, seconds / 8)
        for number, op in enumerate(graph.ops)
        if op.name == "native_dropout"
    )
    return replace(graph, encodings=tuple(masks))


class Forward:
    """A builder of a forward, from which backward and optimizer are derived.

    In backward, every op reads what it saved and makes gradients for the activations
    and parameters that it read. Gradients that meet are added in place. The optimizer
    is one op.

    Args:
        seconds: Of every op.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._ops: list[Op] = []
        self._storages: list[Storage] = []
        self._saved: list[tuple[int, Saved]] = []  # (forward op, what it saves)
        self._calls: list[Call] = []
        self._hazards: list[Hazard] = []
        self._stack = [OUTSIDE_CALLS]

    def given(self, num_bytes: int, kind: str = "input") -> int:
        """Return a storage that exists before the step."""
        return self._storage(num_bytes, kind, BEFORE_STEP)

    @contextmanager
    def call(
        self,
        fqn: str,
        *,
        module: str = "Module",
        hazard: str = "",
        given: Iterable[int] = (),
    ) -> Iterator[None]:
        """Put a module call around the ops that run inside.

        Args:
            fqn: Of the module.
            module: Its type.
            hazard: Why it must not run again, if so.
            given: Storages, of which those count that the step made.
        """
        index, at = len(self._calls), len(self._ops)
        number = sum(call.fqn == fqn for call in self._calls)
        made = tuple(s for s in given if self._storages[s].maker != BEFORE_STEP)
        call = Call(fqn, number, self._stack[-1], at, at, module, made)
        if hazard:
            self._hazards.append(Hazard(index, "chance", hazard, ()))
        self._calls.append(call)
        self._stack.append(index)
        yield
        self._stack.pop()
        self._calls[index] = replace(call, stop=len(self._ops))

    def op(
        self,
        name: str,
        reads: Sequence[int],
        *,
        makes: Sequence[int] = (),
        writes: Sequence[int] = (),
        saves: Sequence[int] = (),
        workspace: Workspace = NO_WORKSPACE,
        random: bool = False,
        seconds: float | None = None,
    ) -> tuple[int, ...]:
        """Run an op.

        Args:
            name: Aten name.
            reads: Storages.
            makes: Bytes of every new output.
            writes: Storages changed in place; they are outputs too.
            saves: Storages that autograd keeps as they were before the op.
            workspace: Allocated inside the kernel.
            random: Whether it draws random numbers.
            seconds: If not those of every op.

        Returns:
            The storages of its outputs: those written, then those made.
        """
        at, call = len(self._ops), self._stack[-1]
        self._saved += ((at, Saved(s, call, at, -1, -1, -1)) for s in saves)
        made = [self._storage(size, "activation", at) for size in makes]
        outputs = (*writes, *made)
        self._run(name, call, reads, writes, outputs)
        self._ops[at] = replace(
            self._ops[at],
            workspace=workspace,
            random=random,
            seconds=self._seconds if seconds is None else seconds,
        )
        return outputs

    def save(self, *storages: int) -> None:
        """Let autograd keep storages for the last op, as they are after it."""
        at, call = len(self._ops), self._stack[-1]
        self._saved += ((at - 1, Saved(s, call, at, -1, -1, -1)) for s in storages)

    def graph(self, model: str = "Model") -> Graph:
        """Return the whole step; call this last."""
        num_forward = len(self._ops)
        done = self._backward()
        num_backward = len(self._ops) - num_forward
        self._optimize()
        return Graph(
            model=model,
            fingerprint=FINGERPRINT,
            ops=tuple(self._ops),
            storages=self._storages_with_last(num_forward),
            saved=tuple(
                replace(
                    saved,
                    unpacked_at=done.get(op, -1),
                    last_held=until,
                    last_used=until,
                )
                for op, saved in self._saved
                for until in [done.get(op, num_forward)]
            ),
            calls=tuple(self._calls),
            num_forward=num_forward,
            num_backward=num_backward,
            hazards=tuple(sorted(self._hazards, key=lambda hazard: hazard.call)),
        )

    def _backward(self) -> dict[int, int]:
        """Append the backward ops; returns forward op -> its backward op."""
        done: dict[int, int] = {}
        self._gradients: dict[int, int] = {}  # storage -> storage of its gradient
        last = len(self._ops) - 1
        for number in range(last, -1, -1):
            op = self._ops[number]
            known = [
                self._gradients.pop(s)
                for s in dict.fromkeys(op.outputs)
                if s in self._gradients
            ]
            wanted = [s for s in (*op.reads, *op.writes) if self._is_trained(s)]
            if wanted and (known or number == last):
                done[number] = at = len(self._ops)
                saved = [saved.storage for o, saved in self._saved if o == number]
                new = {s: self._gradient(s, at) for s in dict.fromkeys(wanted)}
                reads = dict.fromkeys((*known, *saved))
                self._run(f"{op.name}_backward", op.call, [*reads], (), [*new.values()])
                for storage, gradient in new.items():
                    self._accumulate(storage, gradient, op.call)
        return done

    def _accumulate(self, storage: int, gradient: int, call: int) -> None:
        first = self._gradients.setdefault(storage, gradient)
        if first != gradient:
            self._run("add_", call, [gradient], [first], [first])

    def _optimize(self) -> None:
        trained = {
            parameter: gradient
            for parameter, gradient in self._gradients.items()
            if self._storages[parameter].kind == "parameter"
        }
        if trained:
            self._run("sgd", OUTSIDE_CALLS, [*trained.values()], [*trained], [])

    def _is_trained(self, storage: int) -> bool:
        return self._storages[storage].kind in ("parameter", "activation")

    def _gradient(self, storage: int, maker: int) -> int:
        of = self._storages[storage]
        kind = "gradient" if of.kind == "parameter" else "temporary"
        return self._storage(of.bytes, kind, maker)

    def _storage(self, num_bytes: int, kind: str, maker: int) -> int:
        self._storages.append(Storage(num_bytes, kind, maker, maker))
        return len(self._storages) - 1

    def _run(
        self,
        name: str,
        call: int,
        reads: Sequence[int],
        writes: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        used = {*reads, *writes, *outputs}
        moved_bytes = sum(self._storages[s].bytes for s in used)
        self._ops.append(
            Op(
                name=name,
                call=call,
                reads=tuple(reads),
                writes=tuple(writes),
                outputs=tuple(outputs),
                workspace=NO_WORKSPACE,
                flops=2 * moved_bytes,
                moved_bytes=moved_bytes,
                seconds=self._seconds,
                random=False,
            )
        )

    def _storages_with_last(self, num_forward: int) -> tuple[Storage, ...]:
        """Let what backward makes live to its last use, activations as in forward."""
        last = [storage.maker for storage in self._storages]
        for moment, op in enumerate(self._ops):
            for s in (*op.reads, *op.writes, *op.outputs):
                made_in_forward = self._storages[s].maker < num_forward
                if moment < num_forward or not made_in_forward:
                    last[s] = moment
        for call in self._calls:
            for s in call.arguments:
                last[s] = max(last[s], call.start)
        return tuple(
            replace(storage, last=last[i])
            if storage.kind in ("activation", "temporary")
            else replace(storage, last=len(self._ops))
            for i, storage in enumerate(self._storages)
        )


# -- steps at random -------------------------------------------------------------------


def random_step(rng: Random, *, num_blocks: int = 3, num_ops: int = 3) -> Graph:
    """Make up a step: blocks, some inside others, with skips, shared inputs and glue.

    Ops read anything made before, make up to two storages or change one in place, and
    save some of both; some cast a weight. Calls are given what they may not read. Some
    saved tensors are never unpacked, among them all that an op changed afterwards
    (autograd would refuse those). Some activations outlive forward.

    Args:
        rng: Where chance comes from.
        num_blocks: Most calls at the outer level.
        num_ops: Most ops of a call.
    """
    forward = Forward()
    visible = [forward.given(rng.randint(0, 9))]
    weights = [forward.given(rng.randint(1, 4), "parameter")]
    casts: list[int] = []

    def cast() -> None:
        casts.extend(forward.op("_to_copy", weights, makes=[rng.randint(1, 4)]))
        visible.append(casts[-1])

    def given() -> list[int]:
        return [s for s in visible if rng.random() < 0.2]

    def run(name: str) -> None:
        if rng.random() < 0.1:
            cast()
        reads = _some_reads(rng, visible, weights, casts)
        made = [s for s in visible[1:] if s not in reads]
        writes = [rng.choice(made)] if made and rng.random() < 0.2 else []
        makes = [rng.randint(0, 9) for _ in range(rng.randint(not writes, 2))]
        outputs = forward.op(
            name,
            reads,
            makes=makes,
            writes=writes,
            saves=[s for s in reads if rng.random() < 0.5],
            workspace=Workspace(*rng.choice(((), (), (), ((2,), (3,))))),
            seconds=rng.randint(1, 9),
        )
        forward.save(*(s for s in outputs if rng.random() < 0.3))
        visible.extend(s for s in outputs if s not in visible)

    with forward.call("", module="Root"):
        cast()
        for block in range(rng.randint(1, num_blocks)):
            with forward.call(f"{block}", module="Block", given=given()):
                for place in range(rng.randint(1, num_ops)):
                    if rng.random() < 0.3:
                        name = f"{block}.{place}"
                        with forward.call(name, module="Inner", given=given()):
                            for _ in range(rng.randint(1, 2)):
                                run("inner")
                    else:
                        run("own")
            if rng.random() < 0.3:
                run("glue")
    forward.op("mean", [visible[-1]], makes=[4])
    graph = _disturbed(forward.graph(), rng)
    return replace(graph, encodings=tuple(_encodings(graph, rng)))


def _some_reads(
    rng: Random, visible: list[int], weights: list[int], casts: list[int]
) -> list[int]:
    near = visible[-4:] if rng.random() < 0.8 else visible
    reads = rng.sample(near, rng.randint(1, min(2, len(near))))
    if rng.random() < 0.5:
        reads.append(rng.choice(weights))
    if casts and rng.random() < 0.3:
        reads.append(rng.choice(casts))
    return list(dict.fromkeys(reads))


def _encodings(graph: Graph, rng: Random) -> Iterator[Encoding]:
    for number, op in enumerate(graph.ops[: graph.num_forward]):
        for output in range(len(op.outputs)):
            if op.call != OUTSIDE_CALLS and rng.random() < 0.2:
                size = rng.randint(0, graph.storages[op.outputs[output]].bytes)
                costs = [rng.randint(0, 4) for _ in range(4)]
                yield Encoding(number, output, "bits", size, *costs)


def _disturbed(graph: Graph, rng: Random) -> Graph:
    """Let tensors live longer, and some saved ones for nothing."""
    last = graph.backward_stop - 1

    def saved_again(saved: Saved) -> Saved:
        later = graph.ops[saved.packed_at : graph.num_forward]
        changed = any(saved.storage in op.writes for op in later)
        if saved.unpacked_at < 0 or changed or rng.random() < 0.1:
            done = min(graph.num_forward + rng.randint(0, 3), last)
            done = max(done, graph.num_forward)
            return replace(saved, unpacked_at=-1, last_held=done, last_used=done)
        used = min(saved.unpacked_at + rng.choice((0, 0, 1)), last)
        done = min(used + rng.choice((0, 0, 1)), last)
        return replace(saved, last_held=done, last_used=used)

    def storage_again(storage: Storage) -> Storage:
        if storage.kind == "activation" and rng.random() < 0.1:
            return replace(storage, last=rng.randint(storage.last, last))
        return storage

    return replace(
        graph,
        saved=tuple(map(saved_again, graph.saved)),
        storages=tuple(map(storage_again, graph.storages)),
    )


def with_engine(graph: Graph, rng: Random) -> Graph:
    """The same step with time of the autograd engine."""
    costs = EngineCosts(
        rng.choice((0.5, 3.0)),
        rng.choice((0.0, 2.0)),
        rng.choice((0.0, 1.0)),
        rng.choice((0.0, 4.0)),
        rng.choice((0.5, 1.0, 1.5)),
        record_seconds=rng.choice((0.0, 2.0)),
    )
    return replace(graph, engine=costs)


def with_even_seconds(graph: Graph) -> Graph:
    """A recorded step with the same seconds on every machine, loaded or not.

    Those of ops are of flops alone, and the engine's are about those of a quiet one.
    """
    even = [replace(op, seconds=2e-5 + op.flops / 4e10) for op in graph.ops]
    codes = [
        replace(one, encode_seconds=2e-5, decode_seconds=2e-5)
        for one in graph.encodings
    ]
    engine = EngineCosts(2e-5, 5e-6, 4e-5, 7e-5, 1.0, 5e-5, 5e-5)
    return replace(graph, ops=tuple(even), encodings=tuple(codes), engine=engine)


def random_regions(graph: Graph, rng: Random) -> list[Region]:
    """Choose regions that do not overlap, runs of siblings among them."""
    found: list[Region] = []
    stack = graph.children[OUTSIDE_CALLS][::-1]
    while stack:
        call = stack.pop()
        choice = rng.random()
        if choice < 0.3:
            stack += graph.children[call][::-1]
        elif choice < 0.9:
            by = PROGRAM if choice < 0.7 else RERUN
            last = call
            siblings = graph.children[graph.calls[call].parent]
            while stack and stack[-1] in siblings and rng.random() < 0.2:
                last = stack.pop()
            outputs = [
                (op, m)
                for op in range(graph.calls[call].start, graph.calls[last].stop)
                for m in range(len(graph.ops[op].outputs))
            ]
            save = [o for o in outputs if by == PROGRAM and rng.random() < 0.3]
            encode = [
                o
                for o in outputs
                if by == PROGRAM and o in graph.encoding_of and rng.random() < 0.5
            ]
            run = None if last == call else last
            kept, coded = frozenset(save), frozenset(encode)
            found.append(Region(call, by, kept, run, coded - kept))
    return found


def random_programs(simulator: Simulator, rng: Random, num: int) -> Iterator[Timeline]:
    """Timelines of random regions run by programs, without those that cannot run."""
    for _ in range(num):
        regions = random_regions(simulator.graph, rng)
        with suppress(PlanError):
            yield simulator.run([r for r in regions if r.by == PROGRAM])


def nested(graph: Graph, regions: Sequence[Region], rng: Random) -> list[Region]:
    """Put regions into some of those that rebuild, and into these again."""

    def nest(region: Region, depth: int) -> Region:
        last = region.call if region.last is None else region.last
        stop = graph.calls[last].stop
        at = graph.calls[region.call].start
        inner: list[Region] = []
        for call, found in enumerate(graph.calls):
            inside = graph.is_inside(call, region.call, region.last)
            free = inside and at <= found.start and found.stop <= stop
            if (
                free
                and (call, None) != (region.call, region.last)
                and rng.random() < 0.6
            ):
                outputs = [
                    (op, m)
                    for op in range(found.start, found.stop)
                    for m in range(len(graph.ops[op].outputs))
                    if rng.random() < 0.25
                ]
                one = Region(call, save=frozenset(outputs))
                inner.append(nest(one, depth + 1) if depth < 2 else one)
                at = found.stop
        return replace(region, inner=tuple(inner))

    return [nest(r, 0) if r.by == PROGRAM else r for r in regions]
