"""The exact reference: the cheapest schedule of ops, by integer programming.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020, over the values of this graph. A stage ``s`` is a gap before
an op of backward that unpacks saved tensors. Binary variables:

    S[s, v]     value v is alive when stage s begins       (S[0, v]: kept by forward)
    R[s, o]     op o is recomputed in stage s
    E[s, v]     v's encoded form is alive when stage s begins
    D[s, v]     v is decoded in stage s
    G[s, o]     the random state that op o began with is retained
    F[s, v, o]  v is freed right after op o ran in stage s
    W[f]        one-time cost f is paid (``engine_costs.py``)

    min  sum seconds_o R[s, o] + encode_v E[0, v] + decode_v D[s, v] + seconds_f W[f]
    s.t. 1 <= S[s, v] + R[s, w] + D[s, v]          v needed in stage s, w its maker
         R[s, o] <= S[s, v] + R[s, w] + D[s, v]    v read by o
         S[s+1, v] <= S[s, v] + R[s, w] + D[s, v]
         D[s, v] + E[s+1, v] <= E[s, v]
         R[s, o] <= G[s, o],  G[s+1, o] <= G[s, o]
         F[s, v, o] <= R[s, o],  1 - S[s+1, v],  1 - R[s, q] for readers q after o
         1 <= S[s, v] + W[f],  W[f] <= W[g]        v needed from s on, f due, g with it
         live bytes <= budget                      at every half moment

Live bytes are those of the unplanned step, less those that only saved tensors retain,
plus those of the variables. Within a stage, ops run in the order of forward, each at
most once. No op is recomputed before forward ends. The program grows with the square of
the ops: it checks the bound and the plans of other methods on small graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Saved
from ckplan.simulating.ledger import random_state_bytes
from ckplan.simulating.program import EXTERNAL, Flow
from ckplan.simulating.simulate import Simulator
from ckplan.solving.binary_program import BinaryProgram, check_solver
from ckplan.solving.bound import forward_encodings, forward_values
from ckplan.solving.closure_problem import NANOSECOND
from ckplan.solving.engine_costs import MinEngineCosts
from ckplan.solving.solution import ExactResult


def solve_exactly(
    simulator: Simulator, budget_bytes: int, time_limit_seconds: float
) -> ExactResult:
    """Find the cheapest schedule under a budget, or the best within a time limit.

    Args:
        simulator: The simulator of the graph; it says which unplanned bytes are fixed.
        budget_bytes: Limit on the total allocated peak of the step.
        time_limit_seconds: Seconds after which the search stops.

    Raises:
        CkplanError: No solver is installed, or a backward keeps the graph.
    """
    check_solver()
    if simulator.graph.kept_backwards:
        raise CkplanError(
            "cannot solve exactly: a backward of the step keeps the graph",
            needed="a step without retain_graph=True",
            hint="solve without --method milp",
        )
    model = _Model(simulator, budget_bytes)
    graph = simulator.graph
    one_batch = graph.step_seconds / graph.num_batches  # its costs are of one
    waiting = graph.waiting_seconds / graph.num_batches
    return model.program.solve(time_limit_seconds, one_batch, waiting)


class _Model:
    """The program, row by row."""

    def __init__(self, simulator: Simulator, budget_bytes: int) -> None:
        self._graph: Graph = simulator.graph
        self._live = simulator.unplanned_bytes
        self._budget = budget_bytes
        self.program = BinaryProgram()
        self._one_time_costs = MinEngineCosts(self._graph)
        self._due: list[tuple[int, int, int]] = []  # op, value that it needs, cost
        self._flow, values_of = forward_values(self._graph)
        flow = self._flow
        self._unpacked: dict[int, set[int]] = defaultdict(set)  # op -> values
        self._in_use: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for saved, value in zip(self._graph.saved, values_of, strict=True):
            if saved.unpacked_at >= 0 and flow.maker_of[value] != EXTERNAL:
                self._unpacked[saved.unpacked_at].add(value)
                self._in_use[value].append((saved.unpacked_at, saved.last_held))
                number = (
                    self._one_time_costs.cost_of_dropping(saved)
                    if flow.is_current(value)
                    else None
                )
                if number is not None:
                    self._due.append((saved.unpacked_at, value, number))
        self._stages = sorted(self._unpacked)
        self._values = _needed(flow, set().union(*self._unpacked.values()))
        self._ops = sorted({flow.maker_of[value] for value in self._values})
        self._readers: dict[int, list[int]] = defaultdict(list)
        for op in self._ops:
            for value in flow.inputs[op]:
                self._readers[value].append(op)
        self._encoding = forward_encodings(self._graph, flow)
        self._saves: dict[int, list[Saved]] = defaultdict(list)
        for saved in self._graph.saved:
            self._saves[saved.storage].append(saved)
        self._hold_forward()
        for stage, moment in enumerate(self._stages):
            self._rebuild(stage, moment)
            later = [*self._stages[stage + 1 :], len(self._graph.ops)]
            self._hold(stage + 1, range(2 * moment + 1, 2 * later[0]))

    # -- rows ------------------------------------------------------------------------

    def _hold_forward(self) -> None:
        """Add rows for forward and for the moments before the first stage."""
        first = self._stages[0] if self._stages else len(self._graph.ops)
        for value in self._values:
            if not self._flow.is_current(value):
                self._row({self._var("S", 0, value): 1}, 0)
        self._hold(0, range(2 * first))

    def _hold(self, stage: int, moments: range) -> None:
        """Add rows: live bytes between two stages are within the budget."""
        worst: dict[tuple[tuple[int, float], ...], int] = {}
        for moment in moments:
            terms, fixed = self._at(stage, moment, in_gap=False)
            key = tuple(sorted(terms.items()))
            worst[key] = max(worst.get(key, 0), fixed)
        for live, most in worst.items():
            self._row(dict(live), self._budget - most)

    def _at(
        self, stage: int, moment: int, *, in_gap: bool
    ) -> tuple[dict[int, float], int]:
        """Bytes by variable, and fixed bytes, alive at a half moment."""
        fixed = self._live[moment]
        terms: dict[int, float] = {}
        current = self._flow.current
        for storage, found in enumerate(self._graph.storages):
            if self._only_saved(storage, moment, in_gap):
                fixed -= found.bytes
                value = current.get(storage)
                if value in self._values:
                    terms[self._var("S", stage, value)] = found.bytes
        for value in self._values:
            if not self._flow.is_current(value) and not self._used(
                value, moment, in_gap
            ):
                terms[self._var("S", stage, value)] = self._bytes(value)
            one = self._encoding.get(value)
            if one is not None and moment >= 2 * one.op + 1:
                form = self._var("E", stage, value)
                terms[form] = terms.get(form, 0) + one.bytes
                if moment == 2 * one.op + 1:
                    workspace = self._graph.ops[one.op].workspace.bytes
                    beyond = max(one.encode_workspace_bytes - workspace, 0)
                    terms[form] += beyond
        for op in self._ops:
            if self._graph.ops[op].random and moment >= 2 * op + 1:
                terms[self._var("G", stage, op)] = random_state_bytes(self._graph)
        return terms, fixed

    def _only_saved(self, storage: int, moment: int, in_gap: bool) -> bool:
        """Whether only saved tensors that are not in use now retain a storage."""
        found = self._graph.storages[storage]
        start = 2 * found.maker + 1
        if found.maker == BEFORE_STEP or not start <= moment:
            return False
        if moment <= max(start, 2 * found.last + 1):
            return False
        saves = self._saves.get(storage, ())
        if not any(2 * s.last_held + 1 >= moment for s in saves):
            return False  # dead
        return not any(
            _in_use(s.unpacked_at, s.last_held, moment, in_gap) for s in saves
        )

    def _used(self, value: int, moment: int, in_gap: bool) -> bool:
        return any(
            _in_use(unpacked_at, last_held, moment, in_gap)
            for unpacked_at, last_held in self._in_use.get(value, ())
        )

    def _rebuild(self, stage: int, moment: int) -> None:
        """Add rows for recomputation before an op, and for live bytes during it."""
        needed = self._unpacked[moment]
        terms, fixed = self._at(stage, 2 * moment, in_gap=True)
        level = dict(terms)  # live bytes by variable, as ops run
        for value in self._values:
            sources = self._sources(stage, value)
            if value in needed:
                self._row(dict.fromkeys(sources, -1), -1)
            self._row(
                {self._var("S", stage + 1, value): 1, **dict.fromkeys(sources, -1)}, 0
            )
        for last, value, number in self._due:
            if last >= moment:
                self._row(
                    {self._var("S", stage, value): -1, self._paid(number): -1}, -1
                )
        self._decode(stage, level, fixed)
        for op in self._ops:
            self._run(stage, op, needed, level, fixed, terms)

    def _decode(self, stage: int, level: dict[int, float], fixed: float) -> None:
        """Add rows for decoding before ops run; each decoding is a small peak."""
        for value, one in self._encoding.items():
            if value not in self._values:
                continue
            decoded = self._var("D", stage, value, cost=one.decode_seconds)
            now = self._var("E", stage, value)
            later = self._var("E", stage + 1, value)
            self._row({decoded: 1, later: 1, now: -1}, 0)
            _add(level, decoded, self._bytes(value))
            peak = dict(level)
            _add(peak, decoded, one.decode_workspace_bytes)
            self._row(peak, self._budget - fixed)
            _add(level, decoded, -one.bytes)

    def _run(
        self,
        stage: int,
        op: int,
        needed: set[int],
        level: dict[int, float],
        fixed: float,
        alive: Mapping[int, float],
    ) -> None:
        found = self._graph.ops[op]
        reruns = self._var("R", stage, op, cost=self._graph.recompute_op_seconds[op])
        for value in self._flow.inputs[op]:
            if self._flow.maker_of[value] != EXTERNAL:
                self._row(
                    {reruns: 1, **dict.fromkeys(self._sources(stage, value), -1)}, 0
                )
        if found.random:
            state = self._var("G", stage, op)
            self._row({reruns: 1, state: -1}, 0)
            self._row({self._var("G", stage + 1, op): 1, state: -1}, 0)
        overwritten = self._flow.overwrites[op]
        outputs = self._flow.outputs[op]
        freed: dict[int, float] = {}
        for value in (*self._flow.inputs[op], *outputs):
            if self._flow.maker_of[value] == EXTERNAL or value in needed:
                continue
            frees = self._freeing(stage, value, op, reruns, alive)
            size = -self._bytes(value)
            _add(level if value in overwritten else freed, frees, size)
        _add(level, reruns, sum(map(self._bytes, outputs)))
        peak = dict(level)
        _add(peak, reruns, found.workspace.bytes)
        self._row(peak, self._budget - fixed)
        for var, gone_bytes in freed.items():
            _add(level, var, gone_bytes)

    def _freeing(
        self, stage: int, value: int, op: int, reruns: int, alive: Mapping[int, float]
    ) -> int:
        """The variable of freeing a value right after an op."""
        frees = self._var("F", stage, value, op)
        self._row({frees: 1, reruns: -1}, 0)
        if value in self._values:
            self._row({frees: 1, self._var("S", stage + 1, value): 1}, 1)
            if self._var("S", stage, value) not in alive:  # it takes no bytes here
                made = self._sources(stage, value)[1:]
                self._row({frees: 1, **dict.fromkeys(made, -1)}, 0)
        for reader in self._readers.get(value, ()):
            if reader > op:
                self._row({frees: 1, self._var("R", stage, reader): 1}, 1)
        return frees

    def _sources(self, stage: int, value: int) -> list[int]:
        """The variables that make a value available in a stage."""
        maker = self._flow.maker_of[value]
        seconds = self._graph.recompute_op_seconds[maker]
        found = [
            self._var("S", stage, value),
            self._var("R", stage, maker, cost=seconds),
        ]
        one = self._encoding.get(value)
        if one is not None:
            found.append(self._var("D", stage, value, cost=one.decode_seconds))
        return found

    def _paid(self, number: int) -> int:
        """The variable of a one-time cost, with rows for all costs due with it."""
        seconds, others = self._one_time_costs.known[number]
        new = not self.program.knows("W", number)
        paid = self._var("W", number, cost=seconds * NANOSECOND)
        for other in others if new else ():
            self._row({paid: 1, self._paid(other): -1}, 0)
        return paid

    def _bytes(self, value: int) -> int:
        return self._graph.storages[self._flow.storage_of[value]].bytes

    def _var(self, *key: Any, cost: float = 0.0) -> int:
        if key[:2] == ("E", 0):
            cost = self._encoding[key[2]].encode_seconds
        return self.program.var(*key, cost=cost)

    def _row(self, terms: Mapping[int, float], limit: float) -> None:
        self.program.row(terms, limit)


def _add(terms: dict[int, float], var: int, size: float) -> None:
    terms[var] = terms.get(var, 0.0) + size


def _in_use(unpacked_at: int, last_held: int, moment: int, in_gap: bool) -> bool:
    """Whether backward has unpacked a saved tensor and not yet freed it."""
    begins = 2 * unpacked_at + 1 if in_gap else 2 * unpacked_at
    return unpacked_at >= 0 and begins <= moment <= 2 * last_held + 1


def _needed(flow: Flow, needed: set[int]) -> dict[int, None]:
    """Values of forward that rebuilding the needed ones can need, in order."""
    found = set(needed)
    stack = list(needed)
    while stack:
        maker = flow.maker_of[stack.pop()]
        for value in flow.inputs[maker]:
            if flow.maker_of[value] != EXTERNAL and value not in found:
                found.add(value)
                stack.append(value)
    return dict.fromkeys(sorted(found))
