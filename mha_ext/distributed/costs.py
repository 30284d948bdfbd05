"""What each way of splitting attention sends, keeps and computes: formulas, per rank.

B batch, H query heads, G key heads, L queries, K keys, D and V widths of a head, R ranks. A number of `bytes` is what
one rank sends; sums of the gradients of keys and values travel in float32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One attention, whole: the sizes of query, key and value, and bytes of an element."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    item: int = 2

    @property
    def sums(self) -> int:
        """Bytes of an element of a sum."""
        return 8 if self.item == 8 else 4

    @property
    def query_numbers(self) -> int:
        return self.batch * self.heads * self.queries * self.head_dim

    @property
    def out_numbers(self) -> int:
        return self.batch * self.heads * self.queries * self.value_dim

    @property
    def pair_numbers(self) -> int:
        """Of keys and values together."""
        return self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim)


def ring_bytes(shape: Shape, ranks: int, steps: int | None = None, *, backward: bool) -> float:
    """Forward: keys and values, steps - 1 times. Backward: those again, and their gradients steps times."""
    steps = ranks if steps is None else steps
    shard = shape.pair_numbers / ranks
    if steps < 2:
        return 0.0
    return shard * ((steps - 1) * shape.item + (steps * shape.sums if backward else 0))


def all_to_all_bytes(shape: Shape, ranks: int) -> float:
    """Forward: query, key, value out and the result back, each but the share that stays. Backward: their gradients."""
    numbers = shape.query_numbers + shape.pair_numbers + shape.out_numbers
    return numbers / ranks * (ranks - 1) / ranks * shape.item


def tensor_parallel_bytes(batch: int, length: int, width: int, item: int, ranks: int) -> float:
    """Of one all-reduce of [B, L, width] as a ring: one in forward (out), one in backward (the input's gradient)."""
    return 2 * (ranks - 1) / ranks * batch * length * width * item


def ring_memory(shape: Shape, ranks: int) -> float:
    """Bytes beyond inputs, results and their gradients, at most: buffers of keys and values, and sums in backward."""
    shard = shape.pair_numbers / ranks
    rows = (shape.query_numbers + shape.out_numbers) / ranks
    return 2 * shard * shape.item + 3 * shard * shape.sums + rows * shape.sums


def all_to_all_memory(shape: Shape, ranks: int) -> float:
    """Bytes kept for backward: query, key, value, out of this rank's heads; and a packed copy while they travel."""
    numbers = (shape.query_numbers + shape.pair_numbers + shape.out_numbers) / ranks
    return 2 * numbers * shape.item


def flops(shape: Shape, *, causal: bool, backward: bool) -> float:
    """Of the whole: two for each multiply-add; two products forward, five backward."""
    pairs = shape.batch * shape.heads * shape.queries * shape.keys / (2 if causal else 1)
    forward = 2 * pairs * (shape.head_dim + shape.value_dim)
    return 2.5 * forward if backward else forward


def cheapest(shape: Shape, ranks: int, steps: int, *, backward: bool) -> str:
    """ "ring" or "all_to_all": whichever sends fewer bytes, forward and (where it is wanted) backward.

    "ring" at a tie, because it sends while it computes; and where the heads cannot be divided.
    """
    if shape.heads % ranks or shape.kv_heads % ranks:
        return "ring"
    ring = ring_bytes(shape, ranks, steps, backward=False)
    exchange = all_to_all_bytes(shape, ranks)
    if backward:
        ring += ring_bytes(shape, ranks, steps, backward=True)
        exchange *= 2
    return "all_to_all" if exchange < ring else "ring"
