"""The whole problem as a rank sees it: options in global coordinates, and what they mean for a part of the pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mha_ext.distributed.order import Chunk, Order

ROWS = 64  # of a mask that is written out because the operators' band cannot say it


@dataclass
class Problem:
    """What `sequence_parallel_attention` was asked for. Lengths are those of the whole sequence."""

    group: dist.ProcessGroup
    rank: int
    size: int
    order: Order
    queries: int
    keys: int
    mask: Tensor | None  # [.., this rank's queries or 1, all keys or 1], as is the bias
    key_lengths: Tensor | None  # int64 [B]
    seed: Tensor | None
    lower_right: bool
    left: int | None
    right: int | None
    dropout_p: float
    scale: float
    uniform: bool
    first: tuple[int, int]  # the global positions of the first batch entry and head

    @property
    def banded(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def shift(self) -> int | Tensor:
        """Query i stands at key position i + shift: a number, or one for each sequence [B]."""
        if not self.lower_right or not self.banded:
            return 0
        if self.key_lengths is None:
            return self.keys - self.queries
        return self.key_lengths - self.queries

    def sees(self, query: Chunk, key: Chunk) -> bool:
        """False where the band hides every pair of two chunks."""
        shift = self.shift
        if not query.length or not key.length:
            return False
        if isinstance(shift, Tensor):
            return True
        first, last = query.start + shift, query.start + query.length - 1 + shift
        after = self.left is None or first - self.left < key.start + key.length
        return after and (self.right is None or last + self.right >= key.start)

    def parts(self, query: Chunk, key: Chunk) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        """The rows of ``query`` with the operators' arguments for them and ``key``: one part, or few rows at a time.

        The band of an operator begins where `origin` says, and dropout counts from there too. Where a shifted band and
        dropout disagree, or each sequence has a band of its own, the band is written out as a mask of `ROWS` rows.
        """
        if not self.sees(query, key):
            return
        options = self.options(query, key)
        shift = self.shift
        if isinstance(shift, int):
            left = self.left
            right = self.right
            if not self.dropout_p:  # origin is free: it says the diagonal
                distance = query.start + shift - key.start
                options["origin"] = [*self.first, max(distance, 0), max(-distance, 0)]
            else:
                left = None if left is None else left - shift
                right = None if right is None else right + shift
            if (left is None or left >= 0) and (right is None or right >= 0):
                yield (
                    query,
                    {
                        **options,
                        "mask": self.pairs(self.mask, query, key),
                        "window_left": left,
                        "window_right": right,
                    },
                )
                return
        for begin in range(0, query.length, ROWS):
            count = min(ROWS, query.length - begin)
            few = Chunk(query.local + begin, query.start + begin, count)
            yield few, {**self.options(few, key), "mask": self._written_out(few, key)}

    def options(self, query: Chunk, key: Chunk) -> dict[str, Any]:
        """What does not depend on the band."""
        lengths = self.key_lengths
        return {
            "key_lengths": None if lengths is None else (lengths - key.start).clamp(0, key.length),
            "seed": self.seed,
            "dropout_p": self.dropout_p,
            "scale": self.scale,
            "origin": [*self.first, query.start, key.start],
        }

    def every_key(self, query: Chunk, key: Chunk, rows: Tensor) -> dict[str, Any]:
        """The arguments for ``rows`` that attend to nothing, and therefore to all keys alike."""
        none = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
        return {**self.options(query, key), "uniform_empty_rows": True, "key_lengths": none}

    @staticmethod
    def pairs(tensor: Tensor | None, query: Chunk, key: Chunk) -> Tensor | None:
        """Mask or bias of two chunks, a view."""
        if tensor is None:
            return None
        if tensor.dim() > 1 and tensor.shape[-2] != 1:
            tensor = tensor[..., query.rows, :]
        if tensor.dim() > 0 and tensor.shape[-1] != 1:
            tensor = tensor[..., key.place]
        return tensor

    def _written_out(self, query: Chunk, key: Chunk) -> Tensor:
        shift, lengths = self.shift, self.key_lengths
        device = self.mask.device if self.mask is not None else None
        if lengths is not None:
            device = lengths.device
        elif self.seed is not None:
            device = self.seed.device
        position = torch.arange(query.start, query.start + query.length, device=device)[:, None]
        position = position + (shift[:, None, None, None] if isinstance(shift, Tensor) else shift)
        place = torch.arange(key.start, key.start + key.length, device=device)
        seen = torch.ones((), dtype=torch.bool, device=device)
        if self.left is not None:
            seen = seen & (place >= position - self.left)
        if self.right is not None:
            seen = seen & (place <= position + self.right)
        mask = self.pairs(self.mask, query, key)
        return seen if mask is None else seen & (mask != 0)
