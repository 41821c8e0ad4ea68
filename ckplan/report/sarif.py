"""The answer of ``fit`` in SARIF 2.1.0, which code hosts show beside the code.

OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckplan import units
from ckplan.fitting.fit import AS_IT_IS, CardFit, Fit
from ckplan.report.fit import verdict

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    "does-not-fit": "The training step does not fit on the card at its batch",
    "needs-a-plan": "The training step fits on the card with a plan alone",
    "uncertain": "The answer for the card rests on an estimate",
}


def fit_sarif(found: Fit, source: str, version: str) -> dict[str, Any]:
    """One run with a result for every card that is not plainly fine.

    Args:
        found: The answer.
        source: The file that the results are shown at.
        version: Of ckplan.
    """
    rules = [
        {"id": name, "shortDescription": {"text": text}}
        for name, text in _RULES.items()
    ]
    driver = {"name": "ckplan", "version": version, "rules": rules}
    place = {"physicalLocation": {"artifactLocation": {"uri": source}}}
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "results": [
                    {
                        "ruleId": rule,
                        "level": level,
                        "message": {
                            "text": f"{found.graph.model} on {card.name}: {text}"
                        },
                        "locations": [place],
                    }
                    for card in found.cards
                    for rule, level, text in _results(card)
                ],
            }
        ],
    }


def _results(card: CardFit) -> Iterator[tuple[str, str, str]]:
    needs, usable, least = map(
        units.format_bytes, (card.needed_bytes, card.limit_bytes, card.least_bytes)
    )
    if not card.fits:
        hints = "; ".join(str(one) for one in card.remedies[:3])
        text = f"fits {verdict(card)}: needs {needs}, {least} at least, of {usable}"
        yield "does-not-fit", "error", f"{text}. {hints}" if hints else text
    elif card.how != AS_IT_IS:
        text = f"fits {verdict(card)}: needs {needs} without, of {usable}"
        yield "needs-a-plan", "warning", text
    for what in card.uncertain:
        yield "uncertain", "note", f"UNCERTAIN {what}"
