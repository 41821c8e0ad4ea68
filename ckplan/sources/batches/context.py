"""What every batch is made from: the model, its configuration, the sizes asked for."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckplan.errors import WorkloadError
from ckplan.sources.batches.sizes import Sizes

DEFAULT_LENGTH = 1024
_MULTIPLE = 8  # default lengths are multiples of it
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "max_target_positions",
    "max_source_positions",
)
_TABLES = ("position", "wpe")  # in names of tables of positions


@dataclass
class Context:
    """A built model, its configuration, and the sizes of the batch."""

    model: nn.Module
    config: Any
    sizes: Sizes
    task: str
    processor: Mapping[str, Any] = field(default_factory=dict)  # of its own file

    @cached_property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """Arguments of the model's forward, by name."""
        return inspect.signature(self.model.forward).parameters

    def takes(self, *names: str) -> bool:
        """Whether forward has all of these arguments."""
        return all(name in self.arguments for name in names)

    def takes_one(self, *names: str) -> bool:
        """Whether forward has any of these arguments."""
        return any(name in self.arguments for name in names)

    @property
    def main_input(self) -> str:
        """Name of the argument that carries the data."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return name if isinstance(name, str) else str(name[0])

    @cached_property
    def text(self) -> Any:
        """The configuration of the part that reads tokens."""
        return text_part(self.config)

    @cached_property
    def configs(self) -> list[Any]:
        """The configuration and all that it contains, from outside to inside."""
        return list(_nested(self.config))

    def number(self, *names: str, default: int | None = None) -> int:
        """The first whole number among fields of these names, in any part.

        Raises:
            WorkloadError: There is none, and no default.
        """
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        if default is None:
            raise WorkloadError(
                f"cannot make a batch for a {type(self.model).__name__}: its "
                f"configuration has no {' or '.join(names)}",
                needed="a number there",
                hint=f"--set {names[0]}=N, or a factory in a file of yours",
            )
        return default

    def rows_only(self) -> Context:
        """The same context, with all sizes but the rows left to assume."""
        return replace(self, sizes=self.sizes.rows_only())

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.sizes.rows

    @property
    def length(self) -> int:
        """Tokens of every row."""
        limit = min(self.position_limits, default=DEFAULT_LENGTH)
        most = min(DEFAULT_LENGTH, limit)
        default = most - most % _MULTIPLE if most > _MULTIPLE else most
        axes = getattr(self.text, "axial_pos_shape", None)
        if axes:  # positions in a grid, as of Reformer, take rows of one length only
            default = math.prod(axes)
        length = self.sizes.take(1, default, "tokens per row")
        self._check_positions(length)
        return length

    @cached_property
    def position_limits(self) -> list[int]:
        """Lengths that the configuration names."""
        found = (getattr(self.text, name, None) for name in _POSITIONS)
        return [n for n in found if isinstance(n, int) and n > 0]

    @cached_property
    def vocab(self) -> int:
        """Number of token ids: those that the embedding and the configuration have."""
        named = getattr(self.text, "vocab_size", None)
        sizes = [named] if isinstance(named, int) else []
        try:
            table = self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            table = None
        if isinstance(table, nn.Embedding) and self.text is self.config:
            sizes.append(table.num_embeddings)
        if not sizes:
            return self.number("vocab_size", "num_tokens", "num_hash_buckets")
        return min(sizes)

    def ids(self, *shape: int, config: Any = None) -> torch.Tensor:
        """Random token ids, none of which has a special meaning."""
        vocab = self.vocab
        if config is not None and isinstance(config.vocab_size, int):
            vocab = config.vocab_size
        low, high = _widest_gap(vocab, _special_ids(self.configs))
        return torch.randint(low, high, shape)

    def classes(self, *shape: int) -> torch.Tensor:
        """Random labels of classes."""
        return torch.randint(max(1, self.number("num_labels")), shape)

    def row_labels(self) -> torch.Tensor:
        """A label for every row, of the kind that the configuration names.

        A class; or one number, or whether it has each of the classes.
        """
        kind, count = getattr(self.config, "problem_type", None), self.rows
        if kind == "multi_label_classification":
            return torch.randint(2, (count, self.number("num_labels"))).float()
        if kind == "regression":
            several = self.number("num_labels")
            return torch.rand((count, several) if several > 1 else (count,))
        return self.classes(count)

    def _check_positions(self, length: int) -> None:
        """Refuse more tokens than a table of positions has rows."""
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Embedding):
                continue
            if not any(part in name for part in _TABLES):
                continue
            in_text = not any(part in name for part in ("vision", "visual", "audio"))
            rows = module.num_embeddings
            if in_text and rows in self.position_limits and rows < length:
                raise WorkloadError(
                    f"cannot use {length} tokens per row: '{name}' has {rows} rows",
                    needed=f"at most {rows} tokens",
                    hint=f"--batch {self.rows}x{rows - rows % _MULTIPLE or rows}",
                )


def text_part(config: Any) -> Any:
    """The part of a configuration that reads tokens; of two, the decoder."""
    getter = getattr(config, "get_text_config", None)
    if getter is None:
        return config
    try:
        return getter()
    except ValueError:  # an encoder and a decoder, both of text
        return getter(decoder=True)


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for value in list(getattr(config, "__dict__", {}).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _nested(value)


def _special_ids(configs: list[Any]) -> set[int]:
    """Ids with a meaning: fields such as ``pad_token_id`` and ``image_token_index``."""
    found: set[int] = set()
    for config in configs:
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                values = value if isinstance(value, (list, tuple)) else (value,)
                found.update(v for v in values if type(v) is int)
    return found


def _widest_gap(vocab: int, special: set[int]) -> tuple[int, int]:
    """The widest range of ids below ``vocab`` without a special one.

    >>> _widest_gap(10, {0, 3})
    (4, 10)
    """
    edges = [-1, *sorted(i for i in special if 0 <= i < vocab), vocab]
    low, high = max(itertools.pairwise(edges), key=lambda edge: edge[1] - edge[0])
    return (low + 1, high) if high - low > 1 else (0, max(1, vocab))
