"""attention() and attention_weights(): defaults, the seed; then one operator call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from mha_ext.arguments import (
    Causal,
    EmptyRows,
    Window,
    changed_options,
    check_dropout,
    check_tensors,
    describe,
    diagonal,
    indices,
    is_uniform,
    not_a_tensor,
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
        query: [B, H, Lq, D], float64, float32, bfloat16 or float16. Any strides with a unit last stride are read
            in place (here and below).
        key: [B, Hkv, Lk, D], query's dtype. H must be a multiple of Hkv (grouped-query attention: query head h
            reads key head h // (H / Hkv)).
        value: [B, Hkv, Lk, Dv], query's dtype. Dv may differ from D.
        mask: bool or integer, broadcastable to [B, H, Lq, Lk]; nonzero = attend. Read through its strides, never
            expanded. A floating mask is refused: ``mask.bool()`` keeps nonzero positions, ``bias=mask`` adds it.
        bias: query's dtype or float32, broadcastable to [B, H, Lq, Lk]; added to the scaled scores. -inf masks.
            Its gradient has its own shape and dtype, so pass the broadcastable tensor, not ``bias.expand(...)``,
            whose gradient would have the expanded, quadratic shape.
        key_lengths: integer [B]; keys at or past the length are masked, and their tiles skipped. On CPU a length
            outside [0, Lk] is refused, on CUDA it is clamped.
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
    out, lse, _ = attention_with_lse(
        query,
        key,
        value,
        mask,
        bias=bias,
        key_lengths=key_lengths,
        causal=causal,
        window=window,
        dropout_p=dropout_p,
        seed=seed,
        scale=scale,
        empty_rows=empty_rows,
    )
    return (out, lse) if return_lse else out


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
    sharded = type(query) is not Tensor and hasattr(query, "device_mesh")  # a DTensor
    drawn, options = operator_options(
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
        draw=not sharded,
    )
    if any(origin):
        options["origin"] = origin
    if sharded:
        from mha_ext.distributed.sharding import attention_of_dtensors

        return attention_of_dtensors(query, key, value, mask, bias, key_lengths, drawn, options)
    out, lse, lse_low = _forward(query, key, value, mask, bias, key_lengths, drawn, **options)
    return out, lse, lse_low


def operator_options(
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
    *,
    draw: bool = True,
) -> tuple[Tensor | None, dict[str, Any]]:
    """The checks of `attention`; the seed, drawn where it is needed, and the operator's keyword arguments."""
    check_tensors(query, key, mask, bias, key_lengths)
    if not isinstance(value, Tensor):
        raise TypeError(not_a_tensor("value", value))
    corner, left, right = diagonal(query, key, key_lengths, causal, window)
    if type(dropout_p) is not float or not 0.0 <= dropout_p < 1.0:
        check_dropout("dropout_p", dropout_p)
    if seed is None:
        if dropout_p > 0.0 and draw:
            seed = torch.randint(0, 2**32, (2,), device=query.device)
    elif not isinstance(seed, Tensor):
        raise TypeError(
            "seed must be an int64 tensor of shape [2] on query's device, "
            f"not {describe(seed)}; pass torch.tensor([seed, 0], device=query.device)"
        )
    options = changed_options(corner, left, right, is_uniform(empty_rows))
    if dropout_p:
        options["dropout_p"] = dropout_p
    options["scale"] = scale_of(query, scale)
    return seed, options


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
    options = changed_options(corner, left, right, is_uniform(empty_rows))
    options |= {"scale": scale_of(query, scale), "heads": heads, "rows": rows}
    tensors = (query, key, lse, lse_low, mask, bias, key_lengths)
    if type(query) is not Tensor and hasattr(query, "device_mesh"):  # a DTensor
        from mha_ext.distributed.sharding import weights_of_dtensors

        return weights_of_dtensors(*tensors, **options)
    weights: Tensor = _weights(*tensors, **options)
    return weights
