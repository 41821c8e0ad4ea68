"""Every combination of the options of a chain, against the recurrence.

A combination is valued moment by moment, as the docstring of ``chain.py`` says what a
need, a gap and what is freed are; the recurrence itself is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from ckplan.plan.region import Region
from ckplan.solving.chain import Link, solve_chain
from ckplan.solving.menu import Option


def is_best(rng: Random) -> bool:
    """Whether the recurrence finds the best at every budget, and the least need."""
    links = [_link(rng) for _ in range(rng.randint(1, 5))]
    top_bytes = rng.randint(0, 99)
    menus = [link.options for link in links]
    tried = [_value(links, top_bytes, mix) for mix in product(*menus)]
    frontier = solve_chain(links, top_bytes)
    needs = {need for need, _ in tried}
    least = min(needs)
    for budget in sorted(needs):
        plan = next(frontier.cheapest_first(budget))
        mix = [
            next(option for option in link.options if option.region == choice.region)
            for link, choice in zip(links, plan, strict=True)
        ]
        need, seconds = _value(links, top_bytes, mix)
        best = min(cost for other, cost in tried if other <= budget)
        if need > budget or seconds != best:
            return False
    return frontier.least_bytes == least


def _link(rng: Random) -> Link:
    options = [Option(None, rng.randint(0, 99), 0, 0.0)]
    for number in range(rng.randint(0, 3)):
        region = Region(0, save=frozenset({(number, 0)}))
        sizes = rng.randint(0, 99), rng.randint(1, 40)
        options.append(Option(region, *sizes, float(rng.randint(0, 9))))
    options.sort(key=lambda option: option.seconds)
    return Link((0, None), options, rng.randint(0, 99))


def _value(
    links: Sequence[Link], top_bytes: int, mix: Sequence[Option]
) -> tuple[int, float]:
    """Bytes that a combination needs and what it costs, moment by moment."""
    freed = need = 0
    for link, option in zip(links, mix, strict=True):
        need = max(need, link.between_bytes - freed, option.need_bytes - freed)
        freed += option.freed_bytes
    return max(need, top_bytes - freed), sum(option.seconds for option in mix)
