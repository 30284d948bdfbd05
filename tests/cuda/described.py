"""The struct of a problem, from the tensors of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from structs import (
    Attention,
    AttentionGrad,
    AttentionTangent,
    Band,
    Dropout,
    Origin,
    Pairs,
    Rows,
)
from torch import Tensor

DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # DType

Directions = Mapping[str, Tensor | None]  # by the names of AttentionTangent


class Described:
    """The struct of a problem, and the tensors that it points to."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        key_lengths: Tensor | None,
        seed: Tensor | None,
        options: Mapping[str, Any],
    ) -> None:
        query, key, value = map(_with_rows, (query, key, value))
        if key_lengths is not None:
            key_lengths = key_lengths.to(torch.int64).contiguous()
        self.keep = [query, key, value, mask, bias, key_lengths, seed]
        self.query, self.leaves = query, (query, key, value, bias)
        batch, heads, queries, head_dim = query.shape
        self.struct = a = Attention(
            DTYPES[query.dtype], batch, heads, key.shape[1], queries, key.shape[2], head_dim
        )
        a.value_dim, a.scale = value.shape[3], options["scale"]
        a.uniform_empty_rows = options.get("uniform_empty_rows", False)
        a.query, a.key, a.value = rows(query), rows(key), rows(value)
        if mask is not None:
            a.mask = pairs(mask)
        if bias is not None:
            a.bias, a.bias_is_float32 = pairs(bias), bias.dtype == torch.float32
        if key_lengths is not None:
            a.key_lengths = address(key_lengths)
        left, right = options.get("window_left"), options.get("window_right")
        a.band = Band(options.get("corner") == "lower_right", left is not None, right is not None)
        a.band.left, a.band.right = left or 0, right or 0
        a.dropout.keep_scale = 1.0
        threshold = min(round(65536 * options.get("dropout_p", 0.0)), 65535)
        if threshold:
            assert seed is not None
            a.dropout = Dropout(address(seed), threshold, 65536 / (65536 - threshold))
        a.origin = Origin(*options.get("origin", (0, 0, 0, 0)))

    def saved(
        self, grad_out: Tensor, grad_lse: Tensor | None, saved: Sequence[Tensor | None]
    ) -> AttentionGrad:
        """What backward reads: the cotangents, out, lse and lse_low; delta has room of its own."""
        g = AttentionGrad()
        out, lse, lse_low = saved
        assert out is not None and lse is not None
        tensors = [_with_rows(out), _with_rows(grad_out), lse.contiguous()]
        numbers = [None if t is None else t.contiguous() for t in (lse_low, grad_lse)]
        delta = torch.full_like(tensors[2], torch.nan)
        self.keep += [*tensors, *numbers, delta]
        self.struct.out, g.grad_out = rows(tensors[0]), rows(tensors[1])
        self.struct.lse, g.delta = address(tensors[2]), address(delta)
        self.struct.lse_low, g.grad_lse = (None if t is None else address(t) for t in numbers)
        return g

    def directions(self, directions: Directions) -> AttentionTangent:
        """The direction of a derivative; None = zero."""
        t = AttentionTangent()
        for name, direction in directions.items():
            if direction is None:
                continue
            if name in ("lse", "grad_lse"):
                direction = direction.contiguous()
                setattr(t, name, address(direction))
            elif name == "bias":
                t.bias = pairs(direction)
            else:
                direction = _with_rows(direction)
                setattr(t, name, rows(direction))
            self.keep.append(direction)
        return t

    def gradients(self, g: AttentionGrad, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Room for the gradients that are wanted: what is not written stays NaN."""
        grads: list[Tensor | None] = []
        for name, leaf, want in zip(("query", "key", "value", "bias"), self.leaves, wanted):
            if not want or leaf is None:
                grads.append(None)
            elif name == "bias":
                grads.append(torch.zeros(leaf.shape, dtype=leaf.dtype))
                g.grad_bias = pairs(grads[-1])
            else:
                sizes = (leaf.shape[0], leaf.shape[2], leaf.shape[1], leaf.shape[3])
                grads.append(torch.full(sizes, torch.nan, dtype=leaf.dtype).transpose(1, 2))
                setattr(g, f"grad_{name}", rows(grads[-1]))
        return grads


def address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def rows(tensor: Tensor) -> Rows:
    return Rows(address(tensor), *tensor.stride()[:3])


def pairs(tensor: Tensor) -> Pairs:
    strides = [0] * (4 - tensor.dim())
    strides += [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
    row_bits = reduce(or_, tensor.stride()[:-1], 0) & 0xFF
    return Pairs(address(tensor), *strides, tensor.element_size(), row_bits)
