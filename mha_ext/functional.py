"""attention() and attention_weights(): defaults, the seed, checks of Python values; then one operator call.

Tensors (rank, shape, dtype, device) are checked by the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

Causal: TypeAlias = bool | Literal["upper_left", "lower_right"]
Window: TypeAlias = tuple[int | None, int | None]
EmptyRows: TypeAlias = Literal["zero", "uniform"]

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
    _check_tensors(query, key, mask, bias, key_lengths)
    if not isinstance(value, Tensor):
        raise TypeError(_not_a_tensor("value", value))
    corner, left, right = _diagonal(query, key, key_lengths, causal, window)
    if type(dropout_p) is not float or not 0.0 <= dropout_p < 1.0:
        check_dropout("dropout_p", dropout_p)
    if seed is None:
        if dropout_p > 0.0 and draw:
            seed = torch.randint(0, 2**32, (2,), device=query.device)
    elif not isinstance(seed, Tensor):
        raise TypeError(
            "seed must be an int64 tensor of shape [2] on query's device, "
            f"not {_describe(seed)}; pass torch.tensor([seed, 0], device=query.device)"
        )
    options = _options(corner, left, right, _is_uniform(empty_rows))
    if dropout_p:
        options["dropout_p"] = dropout_p
    options["scale"] = _scale(query, scale)
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
    _check_tensors(query, key, mask, bias, key_lengths)
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
        heads=None if heads is None else _indices("heads", heads, query, 1),
        rows=None if rows is None else _indices("rows", rows, query, 2),
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
    corner, left, right = _diagonal(query, key, key_lengths, causal, window)
    options = _options(corner, left, right, _is_uniform(empty_rows))
    options |= {"scale": _scale(query, scale), "heads": heads, "rows": rows}
    tensors = (query, key, lse, lse_low, mask, bias, key_lengths)
    if type(query) is not Tensor and hasattr(query, "device_mesh"):  # a DTensor
        from mha_ext.distributed.sharding import weights_of_dtensors

        return weights_of_dtensors(*tensors, **options)
    weights: Tensor = _weights(*tensors, **options)
    return weights


def check_causal(causal: object) -> None:
    """Raises unless ``causal`` is one of the values that `attention` takes."""
    if not isinstance(causal, bool | str):
        raise TypeError(
            f'causal must be False, True, "upper_left" or "lower_right", not {_describe(causal)}'
        )
    if isinstance(causal, str) and causal not in ("upper_left", "lower_right"):
        raise ValueError(
            f'causal must be False, True, "upper_left" or "lower_right", not {causal!r}'
        )


def check_window(window: object) -> None:
    """Raises unless ``window`` is None or a pair of counts of keys."""
    if window is None:
        return
    if not isinstance(window, tuple | list):
        raise TypeError(
            f"window must be (left, right) or None, not {_describe(window)}; "
            "pass (n, n) for n keys on either side"
        )
    if len(window) != 2:
        raise ValueError(
            f"window must be (left, right), not {len(window)} values; None means unbounded"
        )
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(
                f"window {name} must be an int or None (unbounded), not {_describe(side)}"
            )
        if side < 0:
            raise ValueError(
                f"window {name} must be at least 0, not {side}; pass None for an unbounded side"
            )


def check_dropout(name: str, dropout_p: object) -> None:
    """Raises unless ``dropout_p`` is a probability below 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"{name} must be a float in [0, 1), not {_describe(dropout_p)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), not {dropout_p}")


def check_empty_rows(empty_rows: object) -> None:
    """Raises unless ``empty_rows`` is one of the values that `attention` takes."""
    if not isinstance(empty_rows, str):
        raise TypeError(f'empty_rows must be "zero" or "uniform", not {_describe(empty_rows)}')
    if empty_rows not in ("zero", "uniform"):
        raise ValueError(f'empty_rows must be "zero" or "uniform", not {empty_rows!r}')


def _check_tensors(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, key_lengths: Tensor | None
) -> None:
    if not isinstance(query, Tensor):
        raise TypeError(_not_a_tensor("query", query))
    if query.dim() != 4:  # the operators take more, and under vmap they are given one more
        raise ValueError(
            "query must have 4 dimensions [batch, heads, length, head_dim], but has shape "
            f"{list(query.shape)}; "
            + (
                "flatten the leading ones into the batch, or use torch.func.vmap"
                if query.dim() > 4
                else "split the heads with query.unflatten(-1, (heads, head_dim)).transpose(1, 2)"
            )
        )
    if not isinstance(key, Tensor):
        raise TypeError(_not_a_tensor("key", key))
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(_not_a_tensor("mask", mask))
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(_not_a_tensor("bias", bias))
    if key_lengths is not None and not isinstance(key_lengths, Tensor):
        raise TypeError(_not_a_tensor("key_lengths", key_lengths))


def _diagonal(
    query: Tensor, key: Tensor, key_lengths: Tensor | None, causal: Causal, window: Window | None
) -> tuple[str | None, int | None, int | None]:
    """(corner, window_left, window_right) as the operators take them."""
    if causal is False and window is None:
        return None, None, None
    check_causal(causal)
    check_window(window)
    left, right = window or (None, None)
    if causal is not False:
        right = 0
    if isinstance(causal, str):
        return causal, left, right
    if causal and key_lengths is not None:
        raise ValueError(
            "causal=True must name its corner where key_lengths is given: "
            'pass "upper_left" (query i sees keys 0 .. i) or "lower_right" (the last query sees the last key)'
        )
    if left is None and right is None or query.dim() < 4 or key.dim() < 4:
        return None, left, right
    queries, keys = query.shape[2], key.shape[2]
    if queries != keys and causal:
        raise ValueError(
            f"causal=True must have as many queries as keys, not Lq = {queries} and Lk = {keys}: "
            'pass "upper_left" (query i sees keys 0 .. i) or "lower_right" (the last query sees the last key)'
        )
    if queries != keys:
        raise ValueError(
            "window without a corner must have as many queries as keys, "
            f'not Lq = {queries} and Lk = {keys}: pass causal="upper_left" or "lower_right" with it'
        )
    return None, left, right


def _options(
    corner: str | None, left: int | None, right: int | None, uniform_empty_rows: bool
) -> dict[str, Any]:
    """Those that are not the operators' own defaults: each that is passed costs time, even as None."""
    options: dict[str, Any] = {}
    if corner is not None:
        options["corner"] = corner
    if left is not None:
        options["window_left"] = left
    if right is not None:
        options["window_right"] = right
    if uniform_empty_rows:
        options["uniform_empty_rows"] = True
    return options


def _scale(query: Tensor, scale: float | None) -> float:
    if scale is None:
        head_dim = query.shape[-1] if query.dim() else 0
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0  # no head_dim: the operator refuses
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(
            f"scale must be a float or None (1 / sqrt(D)), not {_describe(scale)}; "
            "to learn it, multiply query by it"
        )
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, not {scale}")
    return scale


def _is_uniform(empty_rows: EmptyRows) -> bool:
    if empty_rows == "zero":
        return False
    check_empty_rows(empty_rows)
    return True


def _indices(name: str, values: Sequence[int], query: Tensor, dim: int) -> list[int]:
    if isinstance(values, Tensor | str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of ints, not {_describe(values)}; pass a list")
    for index in values:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"{name} must be a sequence of ints, not of {_describe(index)}")
    if query.dim() == 4:
        size = query.shape[dim]
        for index in values:
            if not 0 <= index < size:
                raise ValueError(
                    f"{name} must lie in [0, {size}), not {index}; count from the start"
                )
    return list(values)


def _not_a_tensor(name: str, value: object) -> str:
    return f"{name} must be a tensor, not {_describe(value)}; pass torch.as_tensor({name})"


def _describe(value: object) -> str:
    """A value for an error message: its type and, where short, what it is."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__
