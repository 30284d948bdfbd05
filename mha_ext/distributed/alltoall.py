"""The all-to-all variant of sequence parallelism: for attention, a rank has all rows of its share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mha_ext.distributed.order import natural, rank_by_rank
from mha_ext.distributed.problem import Problem

_forward = torch.ops.mha_ext.attention_forward.default


def all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    problem: Problem,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out and (where it is wanted) lse of this rank's queries."""
    p = problem
    q, k, v = _to_heads([query, key, value], p)
    heads = q.shape[1]
    corner = {"corner": "lower_right"} if p.lower_right else {}
    out, lse, _ = _forward(
        q,
        k,
        v,
        _pairs_of_heads(p.mask, heads, p),
        _pairs_of_heads(bias, heads, p),
        p.key_lengths,
        p.seed,
        **corner,
        window_left=p.left,
        window_right=p.right,
        dropout_p=p.dropout_p,
        scale=p.scale,
        uniform_empty_rows=p.uniform,
        origin=[p.first[0], p.first[1] + p.rank * heads, 0, 0],
    )
    return _to_rows(out, p), _to_rows(lse[..., None], p)[..., 0] if return_lse else None


class _Exchange(torch.autograd.Function):
    """[ranks, n]: part r goes to rank r, and what rank r sent comes back as part r. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


def _to_heads(tensors: list[Tensor], p: Problem) -> list[Tensor]:
    """[B, H, L / R, D] of all heads to [B, H / R, L, D] of all rows, for each tensor, in one message."""
    parts = [t.unflatten(1, (p.size, -1)).movedim(1, 0) for t in tensors]  # [R, B, H / R, L / R, D]
    received = _Exchange.apply(torch.cat([part.flatten(1) for part in parts], 1), p.group)
    found = []
    for part, flat in zip(parts, received.split([part[0].numel() for part in parts], 1)):
        rows = flat.view(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
        found.append(natural(rows, 2, p.order, p.size))
    return found


def _to_rows(tensor: Tensor, p: Problem) -> Tensor:
    """The inverse of `_to_heads`, in memory of [B, L / R, H, D]."""
    rows = rank_by_rank(tensor, 2, p.order, p.size).unflatten(2, (p.size, -1))
    parts = rows.permute(2, 0, 3, 1, 4)  # [R, B, L / R, H / R, D]
    received = _Exchange.apply(parts.flatten(1), p.group).view(parts.shape)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _pairs_of_heads(pairs: Tensor | None, heads: int, p: Problem) -> Tensor | None:
    """Mask or bias of this rank's heads and all rows. Rows of its own come from every rank: quadratic, as they are."""
    if pairs is None or not pairs.dim():
        return pairs
    many = pairs.dim() > 2 and pairs.shape[-3] != 1
    if pairs.dim() < 2 or pairs.shape[-2] == 1 and p.queries != p.size:
        return pairs.narrow(-3, p.rank * heads, heads) if many else pairs
    if many:
        parts = pairs.unflatten(-3, (p.size, heads)).movedim(-4, 0)
    else:
        parts = pairs.expand(p.size, *pairs.shape)
    received = _Exchange.apply(parts.flatten(1), p.group).view(parts.shape)
    return natural(received.movedim(0, -3).flatten(-3, -2), -2, p.order, p.size)
