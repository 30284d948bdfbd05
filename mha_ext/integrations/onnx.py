"""ONNX: what `torch.onnx.export` must know of the operators, in operators of ONNX.

    program = torch.onnx.export(
        model, inputs, dynamo=True, custom_translation_table=mha_ext.integrations.onnx.custom_translation_table()
    )

Exported attention is quadratic in memory, as ONNX's own operators are; its numbers are those of the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

try:
    import onnx_ir
    from onnxscript import opset18
except ImportError as error:
    raise ImportError(
        "mha_ext.integrations.onnx needs onnxscript, and the exporter onnx: pip install onnx onnxscript"
    ) from error

op: Any = opset18
Type = onnx_ir.DataType
Value: TypeAlias = Any  # of the graph that is built


def custom_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The operators of mha_ext as functions of ONNX's, for ``torch.onnx.export(..., dynamo=True)``.

    They take every option of inference: mask, bias, key_lengths, both causal corners, window, scale, grouped heads,
    empty_rows, lse, and attention_weights with heads and rows. The numbers of heads are fixed; batch and lengths may
    be dynamic. float16 and bfloat16 are computed in float32. What is hidden must be finite: a NaN in a hidden value
    reaches the output.

    Raises (while exporting):
        torch.onnx.OnnxExporterError: which says why: dropout is on (call ``model.eval()`` before), or a number of
            heads or a window is dynamic.
    """
    ops = torch.ops.mha_ext
    return {
        ops.attention_forward.default: _attention_forward,
        ops.attention_weights.default: _attention_weights,
        ops.linear.default: _linear,
    }


def _attention_forward(
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None = None,
    bias: Value | None = None,
    key_lengths: Value | None = None,
    seed: Value | None = None,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float = 1.0,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    with_lse: bool = True,
) -> tuple[Value, Value, Value]:
    """(out, lse, lse_low); what is not used is left out of the graph by the exporter."""
    if dropout_p:
        raise ValueError(
            f"dropout_p must be 0 to export, not {dropout_p}: call model.eval() before torch.onnx.export"
        )
    scores = _scores(
        query, key, mask, bias, key_lengths, corner, window_left, window_right, scale, origin
    )
    p, lse = _softmax(scores, query, key, uniform_empty_rows)
    heads, kv_heads = _count("query", query), _count("key", key)
    value = op.Cast(value, to=_wide(query))
    if heads == kv_heads:
        out = op.MatMul(p, value)
    else:
        out = _split(op.MatMul(_merge(p, kv_heads), value), heads)
    low = op.Expand(_number(0.0, query), op.Shape(lse))
    return op.Cast(out, to=query.dtype), lse, low


def _attention_weights(
    query: Value,
    key: Value,
    lse: Value | None = None,
    lse_low: Value | None = None,
    mask: Value | None = None,
    bias: Value | None = None,
    key_lengths: Value | None = None,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float = 1.0,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Value:
    scores = _scores(
        query, key, mask, bias, key_lengths, corner, window_left, window_right, scale, origin
    )
    p, _ = _softmax(scores, query, key, uniform_empty_rows)
    for axis, chosen in ((1, heads), (2, rows)):
        if chosen is not None:
            p = op.Gather(p, _integers(list(chosen)), axis=axis)
    return op.Cast(p, to=query.dtype)


def _linear(input: Value, weight: Value, bias: Value | None = None) -> Value:
    out = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
    return out if bias is None else op.Add(out, bias)


# The pieces. Merged rows are those of the heads that share a key: [B, H, Lq, n] -> [B, Hkv, H / Hkv * Lq, n]. In a
# shape for Reshape, 0 copies the dimension.


def _merge(x: Value, kv_heads: int) -> Value:
    return op.Reshape(x, _integers([0, kv_heads, -1, 0]))


def _split(x: Value, heads: int) -> Value:
    return op.Reshape(x, _integers([0, heads, -1, 0]))


def _scores(
    query: Value,
    key: Value,
    mask: Value | None,
    bias: Value | None,
    key_lengths: Value | None,
    corner: str | None,
    left: int | None,
    right: int | None,
    scale: float,
    origin: Sequence[int],
) -> tuple[Value, bool]:
    """scale · query keyᵀ + bias, -inf where a pair is hidden; and whether a row may see nothing."""
    heads, kv_heads, wide = _count("query", query), _count("key", key), _wide(query)
    scaled = op.Mul(op.Cast(query, to=wide), _number(scale, query))
    columns = op.Transpose(op.Cast(key, to=wide), perm=[0, 1, 3, 2])
    if heads == kv_heads:
        scores = op.MatMul(scaled, columns)
    else:
        scores = _split(op.MatMul(_merge(scaled, kv_heads), columns), heads)
    if bias is not None:
        scores = op.Add(scores, op.Cast(bias, to=wide))
    visible = _band(query, key, key_lengths, corner, left, right, origin)
    if mask is not None:
        seen = op.Cast(mask, to=Type.BOOL)
        visible = seen if visible is None else op.And(visible, seen)
    if visible is not None:
        scores = op.Where(visible, scores, _number(-math.inf, query))
    return scores, visible is not None or bias is not None


def _band(
    query: Value,
    key: Value,
    key_lengths: Value | None,
    corner: str | None,
    left: int | None,
    right: int | None,
    origin: Sequence[int],
) -> Value | None:
    """Which keys lie inside the lengths and the band, [B or 1, 1, Lq or 1, Lk]; None where all do."""
    for name, side in (("left", left), ("right", right)):
        if side is not None and not isinstance(side, int):
            raise ValueError(f"window {name} must be a number to export, not one that is computed")
    zero, one = _integers(0), _integers(1)
    queries, keys = (op.Squeeze(op.Shape(x, start=2, end=3)) for x in (query, key))
    columns = op.Range(zero, keys, one)
    count = keys
    visible = None
    if key_lengths is not None:
        count = op.Reshape(op.Cast(key_lengths, to=Type.INT64), _integers([-1, 1, 1, 1]))
        visible = op.Less(op.Reshape(columns, _integers([1, 1, 1, -1])), count)
    if left is None and right is None:
        return visible
    rows = op.Reshape(op.Range(zero, queries, one), _integers([-1, 1]))
    diagonal = (
        op.Sub(count, queries) if corner == "lower_right" else _integers(origin[2] - origin[3])
    )
    offset = op.Sub(columns, op.Add(rows, diagonal))
    for inside in (
        None if left is None else op.GreaterOrEqual(offset, _integers(-left)),
        None if right is None else op.LessOrEqual(offset, _integers(right)),
    ):
        if inside is not None:
            visible = inside if visible is None else op.And(visible, inside)
    return visible


def _softmax(
    scores: tuple[Value, bool], query: Value, key: Value, uniform: bool
) -> tuple[Value, Value]:
    """P, and lse without its last dimension."""
    s, may_be_empty = scores
    last = _integers([-1])
    if not may_be_empty:
        return op.Softmax(s, axis=-1), op.ReduceLogSumExp(s, last, keepdims=0)
    zero, one, lowest = (_number(x, query) for x in (0.0, 1.0, -math.inf))
    top = op.ReduceMax(s, last, keepdims=1)
    level = op.Where(op.Equal(top, lowest), zero, top)  # not -inf - -inf
    e = op.Exp(op.Sub(s, level))
    total = op.ReduceSum(e, last, keepdims=1)
    empty = op.Equal(total, zero)
    p = op.Div(e, op.Where(empty, one, total))
    if uniform:
        keys = op.Cast(op.Shape(key, start=2, end=3), to=_wide(query))
        p = op.Where(empty, op.Div(one, keys), p)
    return p, op.Squeeze(op.Add(level, op.Log(total)), last)


def _count(name: str, tensor: Value) -> int:
    heads = tensor.shape[1]
    if not isinstance(heads, int):
        raise ValueError(
            f"{name} must have a fixed number of heads to export, not {heads}; leave dimension 1 out of dynamic_shapes"
        )
    return heads


def _wide(query: Value) -> onnx_ir.DataType:
    """What scores are computed in."""
    return Type.DOUBLE if query.dtype == Type.DOUBLE else Type.FLOAT


def _number(value: float, query: Value) -> Value:
    return op.Constant(value=onnx_ir.tensor(value, dtype=_wide(query)))


def _integers(values: int | list[int]) -> Value:
    return op.Constant(value=onnx_ir.tensor(values, dtype=Type.INT64))
