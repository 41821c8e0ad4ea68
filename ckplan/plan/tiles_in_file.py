"""Tiles of a region, as plan files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckplan.plan.numbers import count, fraction
from ckplan.plan.strict_yaml import YamlNode
from ckplan.plan.tiles import RowTiles, Tiles, check_bits

_OF_HEADS, _OF_ROWS = ("tokens", "vocabulary"), ("rows", "columns")


def tiles_content(tiles: Tiles | RowTiles) -> dict[str, object]:
    """The keys of a region by tiles, as plan files and JSON have them."""
    names = _OF_ROWS if isinstance(tiles, RowTiles) else _OF_HEADS
    content: dict[str, object] = {
        "tiles": dict(zip(names, tiles.counts, strict=True)),
        "bits": tiles.bits,
    }
    return content | ({"difference": tiles.difference} if tiles.difference else {})


def read_tiles(entries: Mapping[str, YamlNode]) -> Tiles | RowTiles | None:
    """Tiles of a region's entries, if it has any; their keys tell which they are."""
    given: dict[str, Any] = {}
    if "bits" in entries:
        given["bits"] = entries["bits"].read(check_bits)
    if "difference" in entries:
        given["difference"] = entries["difference"].read(fraction)
    part = entries.get("tiles") or entries.get("bits") or entries.get("difference")
    if part is None:
        return None
    kind: type[Tiles | RowTiles] = Tiles
    if "tiles" in entries:
        of_rows = any(name in part.entries() for name in _OF_ROWS)
        kind = RowTiles if of_rows else Tiles
        names = _OF_ROWS if of_rows else (*_OF_HEADS, *_OF_ROWS)
        counts = part.record(names)
        given |= {name: number.read(count) for name, number in counts.items()}
    made: Callable[[], Tiles | RowTiles] = partial(kind, **given)
    return part.locate(made)
