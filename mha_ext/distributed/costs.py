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


def ring_memory(shape: Shape, ranks: int, *, backward: bool) -> float:
    """Bytes beyond inputs and what is kept for backward (out and lse), at most; a mask or bias with rows aside.

    Up to four shards of keys and values are alive: one that is used, one that arrives, and what is still being sent; in
    backward as many of the sums of their gradients; and sums of this rank's rows.
    """
    pairs, queries, outs = (
        numbers / ranks for numbers in (shape.pair_numbers, shape.query_numbers, shape.out_numbers)
    )
    lse = 32 * shape.batch * shape.heads * shape.queries / ranks
    if not backward:
        return 4 * pairs * shape.item + outs * (shape.item + 3 * shape.sums) + lse
    rows = (queries + outs) * (shape.item + shape.sums)
    return 4 * pairs * (shape.item + shape.sums) + rows + lse


def all_to_all_memory(shape: Shape, ranks: int, *, backward: bool) -> float:
    """Bytes beyond inputs, at most: four copies of query, key, value and out in forward, of which two are kept for
    backward; three more of them there. One of these is what a transport lets go of late."""
    numbers = (shape.query_numbers + shape.pair_numbers + shape.out_numbers) / ranks
    lse = 32 * shape.batch * shape.heads * shape.queries / ranks
    return (3 if backward else 4) * numbers * shape.item + lse


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


def ring_seconds(
    shape: Shape, ranks: int, bandwidth: float, speed: float, *, causal: bool, backward: bool
) -> float:
    """The larger of computing and sending, because they overlap: bytes / s and FLOP / s of one rank."""
    sending = ring_bytes(shape, ranks, backward=backward) / bandwidth
    return max(flops(shape, causal=causal, backward=backward) / ranks / speed, sending)


def all_to_all_seconds(
    shape: Shape, ranks: int, bandwidth: float, speed: float, *, causal: bool, backward: bool
) -> float:
    """The sum of computing and sending: attention waits for its rows, and the output projection for attention."""
    computing = flops(shape, causal=causal, backward=backward) / ranks / speed
    return computing + all_to_all_bytes(shape, ranks) / bandwidth


def tensor_parallel_seconds(
    shape: Shape, ranks: int, bandwidth: float, speed: float, *, causal: bool, backward: bool
) -> float:
    """Attention of a share of the heads, and one all-reduce of [B, L, H · V]."""
    computing = flops(shape, causal=causal, backward=backward) / ranks / speed
    width = shape.heads * shape.value_dim
    sent = tensor_parallel_bytes(shape.batch, shape.queries, width, shape.item, ranks)
    return computing + sent / bandwidth


def tensor_parallel_memory(shape: Shape, ranks: int) -> float:
    """Bytes of the layer's input and output, whole on every rank, and of query, key, value and out of its heads."""
    whole = shape.batch * shape.queries * shape.heads * (shape.head_dim + shape.value_dim)
    shards = (shape.query_numbers + shape.pair_numbers + shape.out_numbers) / ranks
    return (whole + shards) * shape.item
