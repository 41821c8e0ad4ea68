"""Tiles of a region, as plan files have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckplan.plan.numbers import count, fraction
from ckplan.plan.strict_yaml import YamlNode
from ckplan.plan.tiles import Tiles, check_bits


def tiles_content(tiles: Tiles) -> dict[str, object]:
    """The keys of a region by tiles, as plan files and JSON have them."""
    content: dict[str, object] = {
        "tiles": {"tokens": tiles.tokens, "vocabulary": tiles.vocabulary},
        "bits": tiles.bits,
    }
    return content | ({"difference": tiles.difference} if tiles.difference else {})


def read_tiles(entries: Mapping[str, YamlNode]) -> Tiles | None:
    """Tiles of a region's entries, if it has any."""
    given: dict[str, Any] = {}
    if "bits" in entries:
        given["bits"] = entries["bits"].read(check_bits)
    if "difference" in entries:
        given["difference"] = entries["difference"].read(fraction)
    part = entries.get("tiles") or entries.get("bits") or entries.get("difference")
    if part is None:
        return None
    if "tiles" in entries:
        counts = part.record(("tokens", "vocabulary"))
        given |= {name: number.read(count) for name, number in counts.items()}
    return part.locate(partial(Tiles, **given))
