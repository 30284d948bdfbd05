"""attention() and attention_weights(): defaults, the seed; then one operator call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from mha_ext import _C
from mha_ext.arguments import (
    Causal,
    EmptyRows,
    Window,
    changed_options,
    check_all_tensors,
    check_tensors,
    diagonal,
    indices,
    is_uniform,
    resolved,
    scale_of,
)

_forward = torch.ops.mha_ext.attention_forward.default
_weights = torch.ops.mha_ext.attention_weights.default


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention: softmax(scale · query keyᵀ + bias) value over the keys that may be seen.

    One fused path for every combination of options, forward and backward; memory is linear in the sequence
    length. A pair that is masked contributes nothing to any result or gradient, whatever the tensors hold there.

    Args:
        query: [B, H, Lq, D], float64, float32, bfloat16 or float16; D from 1 to 1024 (256 on CUDA). Any strides
            with a unit last stride are read in place (here and below).
        key: [B, Hkv, Lk, D], query's dtype. H must be a multiple of Hkv (grouped-query attention: query head h
            reads key head h // (H / Hkv)).
        value: [B, Hkv, Lk, Dv], query's dtype. Dv may differ from D, within the same limits.
        mask: bool or integer, broadcastable to [B, H, Lq, Lk]; nonzero = attend. Read through its strides, never
            expanded. A floating mask is refused: ``mask.bool()`` keeps nonzero positions, ``bias=mask`` adds it.
        bias: query's dtype or float32, broadcastable to [B, H, Lq, Lk]; added to the scaled scores. -inf masks.
            Its gradient has its own shape and dtype, so pass the broadcastable tensor, not ``bias.expand(...)``,
            whose gradient would have the expanded, quadratic shape.
        key_lengths: integer [B]; keys at or past the length are masked: on CPU they cost nothing, on CUDA their tiles
            are skipped. On CPU a length outside [0, Lk] is refused, on CUDA it is clamped.
        causal: which keys lie in the future of a query. ``"upper_left"``: query i sees keys 0 .. i.
            ``"lower_right"``: the last query sees the last key, that is, query i sees keys
            0 .. (key_lengths[b] or Lk) - Lq + i. ``True`` needs no corner: only for Lq == Lk without key_lengths.
        window: (left, right), inclusive, None = unbounded: how many keys a query sees before and after its own
            position on that diagonal. Where ``causal`` names no corner it needs Lq == Lk.
        dropout_p: probability in [0, 1) with which a pair is dropped after the softmax, in steps of 1/65536; the
            rest are scaled by 1 / (1 - p).
        seed: int64 [2] on query's device; the same seed drops the same positions on every device. Drawn by
            ``torch.randint(0, 2**32, (2,))`` when omitted and ``dropout_p > 0``.
        scale: finite, any sign; 1 / sqrt(D) when omitted.
        empty_rows: what a query with nothing to attend to gives. ``"zero"``: 0, with zero gradients.
            ``"uniform"``: the mean over all Lk keys, as a finite fill value in the scores would give.
        return_lse: also return the logarithm of the softmax' denominator.

    Returns:
        out [B, H, Lq, Dv] in query's dtype, a view of a contiguous [B, Lq, H, Dv] buffer, so that
        ``out.transpose(1, 2).flatten(2)`` merges the heads without a copy. With ``return_lse`` also lse
        [B, H, Lq], float32 (float64 for float64), -inf for a query with nothing to attend to; both differentiable.

    Raises:
        ValueError, TypeError: before any work, in one line that names the argument and the fix.

    Sources: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Dao et al., "FlashAttention" (2022) and
    Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
    """
    found = _attend(
        query,
        key,
        value,
        mask,
        bias,
        key_lengths,
        causal,
        window,
        dropout_p,
        seed,
        scale,
        empty_rows,
        None,
        not return_lse,
    )
    return (found[0], found[1]) if return_lse else found


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` for whoever calls `weights_from_lse` next: out, lse, and lse_low, the rounding error of lse.

    ``origin``: the global position (batch, head, query, key) of the first element, where the tensors are shards.
    """
    return _attend(
        query,
        key,
        value,
        mask,
        bias,
        key_lengths,
        causal,
        window,
        dropout_p,
        seed,
        scale,
        empty_rows,
        origin if any(origin) else None,
        False,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    causal: Causal,
    window: Window | None,
    dropout_p: float,
    seed: Tensor | None,
    scale: float | None,
    empty_rows: EmptyRows,
    origin: tuple[int, int, int, int] | None,
    only_out: bool,
) -> Any:
    """The call of the operator; ``only_out``: out alone, not (out, lse, lse_low)."""
    # A compiler is shown the operator, which _C.attention_direct calls without torch.ops (csrc/direct.cpp).
    direct = not is_dynamo_compiling() and _C.is_direct(
        4, query, key, value, mask, bias, key_lengths, seed
    )
    if not direct:
        check_all_tensors(query, key, value, mask, bias, key_lengths, seed)
    sharded = (
        not direct and type(query) is not Tensor and hasattr(query, "device_mesh")
    )  # a DTensor
    seed, corner, left, right, scale, uniform = resolved(
        query, key, key_lengths, causal, window, dropout_p, seed, scale, empty_rows, not sharded
    )
    if direct:
        return _C.attention_direct(
            query,
            key,
            value,
            mask,
            bias,
            key_lengths,
            seed,
            corner,
            left,
            right,
            dropout_p,
            scale,
            uniform,
            origin,
            only_out,
        )
    options = changed_options(corner, left, right, uniform, dropout_p, scale_of(query, scale))
    if origin is not None:
        options["origin"] = origin
    tensors = (query, key, value, mask, bias, key_lengths, seed)
    if sharded:
        from mha_ext.distributed.sharding import attention_of_dtensors

        found = attention_of_dtensors(*tensors, options)
    else:
        found = _forward(*tensors, **options, with_lse=not only_out)
    return found[0] if only_out else found


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    causal: Causal,
    window: Window | None,
    dropout_p: float,
    empty_rows: EmptyRows,
    head_dim: int,
    value_head_dim: int,
) -> Tensor:
    """`attention` on heads side by side, [B, L, heads · width]: what projections give, and what the last one takes."""
    if not is_dynamo_compiling() and _C.is_direct(3, query, key, value, mask, bias, key_lengths):
        seed, corner, left, right, _, uniform = resolved(
            query, key, key_lengths, causal, window, dropout_p, None, None, empty_rows, True
        )
        merged: Tensor = _C.merged_attention_direct(
            query,
            key,
            value,
            mask,
            bias,
            key_lengths,
            seed,
            corner,
            left,
            right,
            dropout_p,
            None,
            uniform,
            head_dim,
            value_head_dim,
        )
        return merged
    out = attention(
        split_heads(query, head_dim),
        split_heads(key, head_dim),
        split_heads(value, value_head_dim),
        mask,
        bias=bias,
        key_lengths=key_lengths,
        causal=causal,
        window=window,
        dropout_p=dropout_p,
        empty_rows=empty_rows,
    )
    return out.transpose(1, 2).flatten(2)


def split_heads(tensor: Tensor, head_dim: int) -> Tensor:
    """[B, L, heads · head_dim] as [B, heads, L, head_dim]: strides only."""
    return tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """The probabilities P = softmax(scale · query keyᵀ + bias), before dropout; differentiable.

    Args:
        query, key, mask, bias, key_lengths, causal, window, scale, empty_rows: as in `attention`.
        heads: the query heads wanted, each in [0, H), in any order; all of them when omitted.
        rows: the queries wanted, each in [0, Lq), in any order; all of them when omitted.

    Returns:
        [B, H, Lq, Lk] (or [B, len(heads), len(rows), Lk]) in query's dtype. This is the one quadratic result: ask for
        the heads and rows that are looked at.

    Raises:
        ValueError, TypeError: before any work, in one line that names the argument and the fix.

    Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1.
    """
    check_tensors(query, key, mask, bias, key_lengths)
    return weights_from_lse(
        query,
        key,
        None,
        None,
        mask,
        bias=bias,
        key_lengths=key_lengths,
        causal=causal,
        window=window,
        scale=scale,
        empty_rows=empty_rows,
        heads=None if heads is None else indices("heads", heads, query, 1),
        rows=None if rows is None else indices("rows", rows, query, 2),
    )


def weights_from_lse(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    lse_low: Tensor | None,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    heads: list[int] | None = None,
    rows: list[int] | None = None,
) -> Tensor:
    """`attention_weights` for whoever has the results of `attention_with_lse`: one pass over the keys less."""
    corner, left, right = diagonal(query, key, key_lengths, causal, window)
    uniform, scale = is_uniform(empty_rows), scale_of(query, scale)
    options = changed_options(corner, left, right, uniform, 0.0, scale)
    options |= {"heads": heads, "rows": rows}
    tensors = (query, key, lse, lse_low, mask, bias, key_lengths)
    if type(query) is not Tensor and hasattr(query, "device_mesh"):  # a DTensor
        from mha_ext.distributed.sharding import weights_of_dtensors

        return weights_of_dtensors(*tensors, **options)
    weights: Tensor = _weights(*tensors, **options)
    return weights
