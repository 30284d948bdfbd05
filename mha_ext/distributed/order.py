"""Which rows of a sequence a rank holds, and helpers that cut a sequence up and put it together again."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Order: TypeAlias = Literal["zigzag", "contiguous"]


class Chunk(NamedTuple):
    """Rows that follow each other: where they begin in the rank's shard and in the sequence, and how many."""

    local: int
    start: int
    length: int

    @property
    def rows(self) -> slice:
        """In the rank's shard."""
        return slice(self.local, self.local + self.length)

    @property
    def place(self) -> slice:
        """In the sequence."""
        return slice(self.start, self.start + self.length)


def check_order(order: object) -> None:
    """Raises unless ``order`` is one of the two."""
    if order not in ("zigzag", "contiguous"):
        raise ValueError(
            f'order must be "zigzag" or "contiguous", not {order!r}; "zigzag" balances a causal mask'
        )


def chunks(order: Order, rank: int, size: int, length: int) -> list[Chunk]:
    """The chunks of a rank's shard of ``length`` rows.

    "contiguous": rank r holds the r-th of ``size`` parts. "zigzag": the sequence is cut into 2 · size chunks, and rank
    r holds chunks r and 2 · size - 1 - r, so that under a causal mask each rank has the same number of visible pairs.
    """
    if order == "contiguous":
        return [Chunk(0, rank * length, length)]
    half = length // 2
    return [Chunk(0, rank * half, half), Chunk(half, (2 * size - 1 - rank) * half, half)]


def positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    *,
    order: Order = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """int64 [length / ranks]: the global positions of the rows that this rank holds of ``length``.

    Raises:
        ValueError: where ``length`` does not divide evenly (2 · ranks chunks for "zigzag").
    """
    check_order(order)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = 2 * size if order == "zigzag" else size
    if length % parts:
        raise ValueError(
            f"length must be a multiple of {parts} for {size} ranks in {order} order, not {length}; pad the sequence, "
            "and hide the padding by key_lengths"
        )
    return torch.cat(
        [
            torch.arange(chunk.start, chunk.start + chunk.length, device=device)
            for chunk in chunks(order, rank, size, length // size)
        ]
    )


def shard_sequence(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 1,
    order: Order = "zigzag",
) -> Tensor:
    """This rank's rows of the whole sequence, along ``dim``: length to length / ranks. Differentiable.

    Raises:
        ValueError: where the length does not divide evenly (2 · ranks chunks for "zigzag").
    """
    place = positions(tensor.shape[dim], group, order=order, device=tensor.device)
    return tensor.index_select(dim, place)


def unshard_sequence(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 1,
    order: Order = "zigzag",
) -> Tensor:
    """The whole sequence, on every rank, from the rows that each holds: `shard_sequence` undone. No gradient."""
    check_order(order)
    size = dist.get_world_size(group)
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine, group=group)
    return natural(torch.cat(parts, dim), dim, order, size)


def natural(tensor: Tensor, dim: int, order: Order, size: int) -> Tensor:
    """Rows in the order of the sequence, from the ranks' shards one after another."""
    if order == "contiguous" or size == 1:
        return tensor
    return tensor.index_select(dim, _places(tensor, dim, size).argsort())


def rank_by_rank(tensor: Tensor, dim: int, order: Order, size: int) -> Tensor:
    """The inverse of `natural`."""
    if order == "contiguous" or size == 1:
        return tensor
    return tensor.index_select(dim, _places(tensor, dim, size))


def _places(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The global position of each row, for the shards of all ranks one after another."""
    half = tensor.shape[dim] // (2 * size)
    starts = [
        chunk.start for rank in range(size) for chunk in chunks("zigzag", rank, size, 2 * half)
    ]
    first = torch.tensor(starts, device=tensor.device)
    return (first[:, None] + torch.arange(half, device=tensor.device)).flatten()
