"""Proves the solver by brute force: every plan of thousands of small steps.

Four tables. "Plans": random small steps of several kinds and every plan of each:
regions on calls at any depth and on runs of calls, every set of values kept or encoded,
for one kind regions inside regions. An oracle that shares no code with the solver steps
them storage by storage (`tests/helpers/every_plan.py`). Beside it stands the planner,
at every budget at which the best plan changes. "Best": steps where it is never behind.
"Nested": only regions inside regions are as good. "Cheaper": the planner nests where
the enumeration does not. "None found": some plan fits, and the planner says that none
does. "Wrong": below the least peak a plan is found, a larger budget costs more, bytes
times 1000 or the graph read from its file give another plan, or the oracle sees other
bytes or seconds. "Search alone" is what larger steps get: small ones the planner
enumerates, too. "Recurrence": `solve_chain` alone on random menus against every
combination. "Exact schedules": the planner against the integer program of
`--method milp`.

    python scripts/brute_force.py
    python scripts/brute_force.py --instances 600 --alone 1000 --exact 6

Exit code 1 if a plan does not fit, is not what the oracle sees or is not the same the
second time, if the planner is anywhere behind the best plan, or beyond 1 % of the best
schedule, or if the recurrence is not the best in every instance.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from multiprocessing.pool import Pool as PoolOfWorkers
from random import Random
from typing import TypeAlias

import _measuring as measuring

sys.path.insert(0, str(measuring.ROOT / "tests" / "helpers"))

import every_mix
import every_plan
from every_plan import TOLERANCE, Outcome
from small_steps import KINDS, small_step

from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import Simulator
from ckplan.solving.milp import solve_exactly
from ckplan.solving.planner import Planner
from ckplan.units import format_percent

INSTANCES, EXACT = 10_000, 48
ALONE = 10  # of so many steps, one is also solved by the search alone
NESTING_SHARE = 0.04  # of the steps: they take the longest
LEAST_EQUAL = 1.0  # of the budgets
WITHIN = 0.01  # of the optimum of the integer program, where it finds it
SECONDS = 60.0  # of one integer program
_BATCH = 32

SolveOne: TypeAlias = Callable[[tuple[str, str]], "Outcome | None"]


def main() -> int:
    """Enumerate everything, print the tables, write them."""
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--instances", type=int, default=INSTANCES, help="random steps")
    parser.add_argument(
        "--alone", type=int, help="steps of the search alone (a tenth of them)"
    )
    parser.add_argument("--exact", type=int, default=EXACT, help="steps solved exactly")
    parser.add_argument("--seed", type=int, default=measuring.SEED)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    with Pool(max(args.jobs, 1)) as pool:
        rows = solve_kinds(pool, _solve_one, args.seed, args.instances)
        num_alone = args.instances // ALONE if args.alone is None else args.alone
        alone = solve_kinds(pool, _search_one, args.seed, num_alone)
    chains = (Random(f"{args.seed} {n}") for n in range(args.instances))
    num_chains = sum(map(every_mix.is_best, chains))
    exact = [Exactly(kind, args.seed, args.exact // len(KINDS)) for kind in KINDS]
    parts = [
        measuring.make_table(HEADERS, [row.cells() for row in rows]),
        "Search alone, as for larger steps:",
        measuring.make_table(HEADERS, [row.cells() for row in alone]),
        f"Recurrence: {num_chains} of {args.instances} random chains are solved as well"
        " as by every combination, at every budget.",
        measuring.make_table(EXACT_HEADERS, [row.cells() for row in exact]),
        "\n".join(reason for row in exact for reason in row.reasons),
    ]
    report = measuring.Report(
        "brute_force",
        "Plans against brute force",
        __doc__,
        parts,
        list(broken(rows[-1], alone[-1], num_chains, args.instances, exact)),
    )
    return measuring.finish(report, args, whole=args.instances >= INSTANCES)


def counts(instances: int) -> dict[str, int]:
    """Steps of every kind."""
    nesting = round(NESTING_SHARE * instances)
    others = KINDS[:-1]
    return {
        **{
            kind: (instances - nesting + place) // len(others)
            for place, kind in enumerate(others)
        },
        KINDS[-1]: nesting,
    }


def broken(
    together: Row,
    alone: Row,
    num_chains: int,
    instances: int,
    exact: Sequence[Exactly],
) -> Iterator[str]:
    """Where the claim does not hold."""
    if together.share_equal < LEAST_EQUAL:
        behind = 1 - together.share_equal
        yield f"at {format_percent(behind)} of the budgets, the planner is behind"
    outcomes = [*together.outcomes, *alone.outcomes]
    yield from (wrong for one in outcomes for wrong in one.wrong)
    if num_chains < instances:
        yield f"{instances - num_chains} random chains are not solved as well as can be"
    beyond = sum(row.num_beyond for row in exact)
    if beyond:
        yield f"at {beyond} budgets, the plan is beyond {format_percent(WITHIN)}"


# -- plans -----------------------------------------------------------------------------

HEADERS = (
    "kind",
    "steps",
    "plans",
    "best",
    "budgets",
    "nested",
    "equal",
    "cheaper",
    "dearer",
    "by median",
    "by worst",
    "none found",
    "wrong",
)


@dataclass
class Row:
    """All steps of one kind."""

    kind: str
    outcomes: list[Outcome] = field(default_factory=list)

    def total(self, count: Callable[[Outcome], int]) -> int:
        """A sum over the steps."""
        return sum(map(count, self.outcomes))

    @property
    def num_best(self) -> int:
        """Steps at which the planner is never behind."""
        return self.total(lambda one: one.is_best)

    @property
    def share_equal(self) -> float:
        """Of the budgets, those at which the planner is not behind."""
        fine = self.total(lambda one: one.equal + one.cheaper)
        return fine / max(self.total(lambda one: one.num_budgets), 1)

    def cells(self) -> list[str]:
        """A row of the table."""
        dearer = [more for one in self.outcomes for more in one.dearer]
        return [
            self.kind,
            str(len(self.outcomes)),
            str(self.total(lambda one: one.num_plans)),
            str(self.num_best),
            str(self.total(lambda one: one.num_budgets)),
            str(self.total(lambda one: one.nested)),
            str(self.total(lambda one: one.equal)),
            str(self.total(lambda one: one.cheaper)),
            str(len(dearer)),
            format_percent(statistics.median(dearer)) if dearer else "",
            format_percent(max(dearer)) if dearer else "",
            str(self.total(lambda one: one.missed)),
            str(self.total(lambda one: len(one.wrong))),
        ]


def solve_kinds(
    pool: PoolOfWorkers, solve_one: SolveOne, seed: int, instances: int
) -> list[Row]:
    """A row for every kind, and one for all together."""
    rows: list[Row] = []
    for kind, count in counts(instances).items():
        rows.append(Row(kind, solve_all(pool, solve_one, kind, seed, count)))
        measuring.say(f"{kind}: best in {rows[-1].num_best} of {count} steps")
    return [*rows, Row("together", [one for row in rows for one in row.outcomes])]


def solve_all(
    pool: PoolOfWorkers, solve_one: SolveOne, kind: str, seed: int, count: int
) -> list[Outcome]:
    """The first so many steps of a kind that are small enough."""
    found: list[Outcome] = []
    for batch in itertools.count():
        if len(found) >= count:
            break
        numbers = range(batch * _BATCH, (batch + 1) * _BATCH)
        seeds = [(kind, f"{seed} {kind} {number}") for number in numbers]
        found += filter(None, pool.imap(solve_one, seeds, chunksize=4))
    return found[:count]


def _solve_one(
    what: tuple[str, str], planner_of: Callable[[Graph], Planner] = Planner
) -> Outcome | None:
    kind, seed = what
    rng = Random(seed)
    try:
        graph = small_step(rng, kind)
        nesting = kind == "nesting"
        return every_plan.compare(graph, rng, nesting=nesting, planner_of=planner_of)
    except every_plan.TooManyError:
        return None


def _search_one(what: tuple[str, str]) -> Outcome | None:
    return _solve_one(what, every_plan.search_alone)


# -- exact schedules -------------------------------------------------------------------

EXACT_HEADERS = (
    "kind",
    "steps",
    "budgets",
    "closed",
    "equal",
    "within 1 %",
    "beyond",
    "of them no plan is within",
    "worst",
)


class Exactly:
    """The planner against the integer program, over steps of one kind."""

    def __init__(self, kind: str, seed: int, count: int) -> None:
        self.kind = kind
        self.num_steps = count
        self.num_budgets = self.num_closed = self.num_beyond = self.num_apart = 0
        self.gaps: list[float] = []
        self.reasons: list[str] = []
        number = 0
        for _ in range(count):
            found: every_plan.EveryPlan | None = None
            while found is None:
                name = f"{seed} {kind} {number}"
                number += 1
                found = _every_plan(small_step(Random(name), kind), kind)
            self._ask(name, found)

    def _ask(self, name: str, every: every_plan.EveryPlan) -> None:
        graph = every.graph
        planner, simulator = Planner(graph), Simulator(graph)
        for plan in every.best():
            budget = int(every.peaks[plan])
            self.num_budgets += 1
            exact = solve_exactly(simulator, budget, SECONDS)
            if not exact.optimal or exact.overhead is None:
                continue
            self.num_closed += 1
            found = planner.within(budget)
            least = 1 + exact.overhead
            gap = (1 + found[0].overhead) / least - 1 if found else math.inf
            best = (1 + every.seconds[plan] / graph.step_seconds) / least - 1
            self.gaps.append(gap)
            if gap > WITHIN:
                self._explain(f"{name}, {budget} B", gap, float(best))

    def _explain(self, where: str, gap: float, best: float) -> None:
        self.num_beyond += 1
        self.num_apart += best > WITHIN
        plan = "no plan is found" if math.isinf(gap) else f"+{format_percent(gap)}"
        why = (
            f"so is the best of every plan, +{format_percent(best)}"
            if best > WITHIN
            else "the planner is behind the best plan"
        )
        self.reasons.append(f"- {where}: {plan} over the best schedule; {why}")

    def cells(self) -> list[str]:
        """A row of the table."""
        worst = max(self.gaps, default=0.0)
        return [
            self.kind,
            str(self.num_steps),
            str(self.num_budgets),
            str(self.num_closed),
            str(sum(gap < TOLERANCE for gap in self.gaps)),
            str(self.num_closed - self.num_beyond),
            str(self.num_beyond),
            str(self.num_apart),
            "no plan" if math.isinf(worst) else format_percent(worst),
        ]


def _every_plan(graph: Graph, kind: str) -> every_plan.EveryPlan | None:
    try:
        found = every_plan.EveryPlan(graph, nesting=kind == "nesting")
    except every_plan.TooManyError:
        return None
    return found if graph.step_seconds else None


if __name__ == "__main__":
    measuring.run(main)
