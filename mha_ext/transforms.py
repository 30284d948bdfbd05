"""What PyTorch's transforms must know of the operators: vmap rules, and FLOP formulas.

vmap puts the mapped dimension in front as a *group* dimension, which the kernels know: [*G, B, H, L, D]. Nothing
is looped over or copied; what is shared is expanded with stride 0. Dropout counts positions within a group, and no
sum runs across groups. Nested vmaps add a dimension each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.mha_ext

# vmap. These arguments broadcast to [B, H, Lq, Lk]; these are [B] and [2]; the rest has query's leading dimensions.
_PAIRS = {"mask", "bias", "bias_tangent"}
_RANKS = {"key_lengths": 1, "seed": 1}


def _register_vmap(name: str, *, masked: bool) -> None:
    """The rule of one operator. ``masked``: its last result is the gradient of the bias, and it has an output_mask."""
    op = getattr(_ops, name)
    names = [argument.name for argument in op.default._schema.arguments]
    results = len(op.default._schema.returns)

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any, **kwargs: Any) -> Any:
        size = info.batch_size
        tensors = dict(zip(names, args, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        query, bias = tensors["query"], tensors["bias"]
        rank = query.dim() - (dims["query"] is not None)  # of the problem without this dimension
        groups = [n for d, n in enumerate(query.shape) if d != dims["query"]][: rank - 4]

        def fold(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dim = dims[name]
            if dim is not None:
                value = value.movedim(dim, 0)
            if name in _PAIRS:
                return _fold_pairs(value, dim is not None, size, groups, name != "mask")
            shared = name in _RANKS and value.dim() - (dim is not None) == _RANKS[name]
            if shared and dim is None:
                return value
            if dim is None:
                return value.expand(size, *value.shape)
            if shared and groups:  # [*G, B] or [*G, 2]
                inner = value.shape[1:]
                value = value.view(size, *[1] * len(groups), *inner)
                return value.expand(size, *groups, *inner)
            return value

        if "with_lse" in kwargs:
            kwargs["with_lse"] = True  # so that every result has this dimension
        found = op(*(fold(name, value) for name, value in zip(names, args, strict=False)), **kwargs)
        if results == 1:
            return found, 0
        found, made = list(found), [True] * results
        if masked:
            made = [*kwargs["output_mask"]]
            made[-1] = made[-1] and bias is not None
        if masked and made[-1]:  # [size, *G, b, h, q, k] -> [size, *(the shape of the bias)]
            shape = [n for d, n in enumerate(bias.shape) if d != dims["bias"]]
            found[-1] = found[-1].reshape(size, *shape)
        return tuple(found), tuple(0 if is_made else None for is_made in made)

    torch.library.register_vmap(f"mha_ext::{name}", rule)


def _fold_pairs(pairs: Tensor, mapped: bool, size: int, groups: list[int], whole: bool) -> Tensor:
    """Mask or bias, whose mapped dimension is in front: shared by all groups, or [size, *G, b, h, q, k].

    ``whole``: expanded to all groups, as a bias must be, since each group makes a gradient of its own.
    """
    lead = [size] if mapped else []
    inner = list(pairs.shape[len(lead) :])
    if len(inner) > 4:  # it has the groups already
        pairs = pairs if mapped else pairs[None]
    elif mapped or whole:
        inner = [1] * (4 - len(inner)) + inner
        pairs = pairs.reshape(*(lead or [1]), *[1] * len(groups), *inner)
    return pairs.expand(size, *groups, *pairs.shape[-4:]) if whole else pairs


for _name in ("attention_forward", "attention_forward_tangent", "attention_weights"):
    _register_vmap(_name, masked=False)
for _name in ("attention_backward", "attention_backward_tangent", "attention_weights_backward"):
    _register_vmap(_name, masked=True)


# FLOP formulas: two for each multiply-add of the matrix products in the definition (docs/derivatives.md), whatever a
# mask hides. The arguments are shapes, or None where a tensor was None.

Shape = Sequence[int]
MaybeShape = Shape | None


def _count(query: Shape, key: Shape, products: int) -> int:
    """2 · pairs · the sum of the products' widths."""
    return 2 * math.prod(query[:-1]) * key[-2] * products


@register_flop_formula(_ops.attention_forward)
def forward_flops(query: Shape, key: Shape, value: Shape, *rest: Any, **options: Any) -> int:
    """S = Q Kᵀ and O = Z V."""
    return _count(query, key, key[-1] + value[-1])


@register_flop_formula(_ops.attention_backward)
def backward_flops(
    grad_out: Shape,
    grad_lse: MaybeShape,
    query: Shape,
    key: Shape,
    value: Shape,
    *rest: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    """S again, dP = dO Vᵀ, and dQ, dK, dV where they are wanted."""
    dim, value_dim = key[-1], value[-1]
    for_query, for_key, for_value, for_bias = output_mask
    scores = for_query or for_key or for_bias
    width = dim * (1 + for_query + for_key) + value_dim * (scores + for_value)
    return _count(query, key, width)


@register_flop_formula(_ops.attention_forward_tangent)
def forward_tangent_flops(
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    lse: Shape,
    lse_low: MaybeShape,
    query_tangent: MaybeShape,
    key_tangent: MaybeShape,
    value_tangent: MaybeShape,
    bias_tangent: MaybeShape,
    *rest: Any,
    **options: Any,
) -> int:
    """S again, S' = Q' Kᵀ + Q K'ᵀ, and O' = P' V + Z V'; a tangent that is None costs nothing."""
    moved = [tangent is not None for tangent in (query_tangent, key_tangent, bias_tangent)]
    scores = 1 + moved[0] + moved[1]
    values = any(moved) + (value_tangent is not None)
    return _count(query, key, key[-1] * scores + value[-1] * values)


@register_flop_formula(_ops.attention_backward_tangent)
def backward_tangent_flops(
    grad_out: Shape,
    grad_lse: MaybeShape,
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    lse: Shape,
    lse_low: MaybeShape,
    out_tangent: MaybeShape,
    lse_tangent: MaybeShape,
    query_tangent: MaybeShape,
    key_tangent: MaybeShape,
    value_tangent: MaybeShape,
    bias_tangent: MaybeShape,
    grad_out_tangent: MaybeShape,
    *rest: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    """S and dP again, S' and dP', and both terms of dQ', dK', dV' where they are wanted."""
    by_query, by_key, by_value, by_bias, by_grad = (
        tangent is not None
        for tangent in (query_tangent, key_tangent, value_tangent, bias_tangent, grad_out_tangent)
    )
    for_query, for_key, for_value, for_bias = output_mask
    scores = 1 + by_query + by_key + for_query * (1 + by_key) + for_key * (1 + by_query)
    values = for_value * ((by_query or by_key or by_bias) + by_grad)
    if for_query or for_key or for_bias:
        values += 1 + by_value + by_grad
    return _count(query, key, key[-1] * scores + value[-1] * values)


@register_flop_formula(_ops.attention_weights)
def weights_flops(query: Shape, *rest: Any, out_shape: Shape, **options: Any) -> int:
    """S of the heads and rows that were asked for."""
    return 2 * math.prod(out_shape) * query[-1]


@register_flop_formula(_ops.attention_weights_backward)
def weights_backward_flops(
    grad_weights: Shape,
    weights: Shape,
    query: Shape,
    *rest: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    """dQ = dS K and dK = dSᵀ Q where they are wanted; P is given."""
    return 2 * math.prod(weights) * query[-1] * (output_mask[0] + output_mask[1])
