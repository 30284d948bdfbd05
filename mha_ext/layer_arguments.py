"""What the layers are given: checks of sizes, inputs and masks, and one mask out of two.

What the functions take is checked in `mha_ext.arguments`.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, nn

from mha_ext.arguments import (
    check_dense,
    check_holds_values,
    describe,
    is_integer,
    not_a_tensor,
)
from mha_ext.linear import FastLinear

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def checked_shape(name: str, length: str, tensor: Tensor, width: int) -> torch.Size:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor [B, {length}, {width}], not {type(tensor).__name__}"
        )
    check_dense(name, tensor)
    shape = tensor.shape
    if len(shape) != 3 or shape[2] != width:
        raise ValueError(
            f"{name} must be [B, {length}, {width}], not {list(shape)}; "
            f"set {name}_dim for another width, pass {name}[None] for a single sequence"
        )
    return shape


def check_dtype(name: str, tensor: Tensor, projection: nn.Module) -> None:
    """What nn.Linear refuses without a name. What wraps one, or a hook before it, may change dtypes."""
    if type(projection) not in (nn.Linear, FastLinear) or projection._forward_pre_hooks:
        return
    weight = projection.weight
    if not isinstance(tensor, Tensor):
        return
    if tensor.device != weight.device:
        raise ValueError(
            f"{name} must be on the layer's device {weight.device}, not {tensor.device}; pass "
            f'{name}.to("{weight.device}"), or move the layer with layer.to("{tensor.device}")'
        )
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        other = f", or make it layer.to({tensor.dtype})"
        if not tensor.is_floating_point():
            other = ", or embed the tokens first if they are such"
        raise TypeError(
            f"{name} must have the layer's dtype {weight.dtype}, not {tensor.dtype}; pass {name}.to({weight.dtype})"
            f"{other}"
        )


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(
            f"{name} must be on query's device {query.device}, not {tensor.device}; pass "
            f'{name}.to("{query.device}")'
        )


def check_rotary(rotary_base: object, head_dim: int) -> None:
    if isinstance(rotary_base, bool) or not isinstance(rotary_base, int | float):
        raise TypeError(
            f"rotary_base must be a float or None, not {type(rotary_base).__name__} {rotary_base!r}; "
            "pass 10000.0, the usual one"
        )
    if not 0 < rotary_base <= sys.float_info.max:
        wanted = "finite" if rotary_base > 0 else "positive"
        raise ValueError(f"rotary_base must be {wanted}, not {rotary_base}; pass 10000.0")
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even with rotary_base, not {head_dim}; pass another head_dim"
        )


def positive(name: str, value: Any) -> int:
    """A size, as an int where another library's was given."""
    if not is_integer(value):
        raise TypeError(f"{name} must be a positive int, not {describe(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return operator.index(value)


def check_parameter_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(
            f"dtype must be {', '.join(map(str, _DTYPES[:-1]))} or {_DTYPES[-1]}, not {dtype!r}"
        )


def check_pairs(name: str, pairs: Tensor, query: Tensor, keys: int, which: str = "Lk") -> None:
    """Raises unless a mask or bias broadcasts to [B, H, Lq, keys]; who has how many heads is seen later."""
    if not isinstance(pairs, Tensor):
        raise TypeError(not_a_tensor(name, pairs))
    check_dense(name, pairs)
    batch, queries = query.shape[:2]
    wanted = (batch, None, queries, keys)
    if pairs.dim() > 4 or any(
        size != 1 and whole is not None and size != whole
        for size, whole in zip(pairs.shape, wanted[4 - pairs.dim() :], strict=True)
    ):
        raise ValueError(
            f"{name} must be [Lq, Lk] or broadcast to [B, H, Lq, Lk], with B = {batch}, Lq = {queries} and "
            f"{which} = {keys}, but is {list(pairs.shape)}"
        )


def first_keys(pairs: Tensor | None, keys: int) -> Tensor | None:
    """The part of a mask or bias that is of so many keys; the rest is of none, where ``new_lengths`` leaves room."""
    return pairs if pairs is None or not pairs.dim() or pairs.shape[-1] == 1 else pairs[..., :keys]


def join_masks(
    mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor, past: int
) -> Tensor | None:
    """One mask for the operator: broadcastable to [B, H, Lq, Lk], expanded nowhere; ``past`` keys are cached."""
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a bool or integer tensor, not {type(mask).__name__}")
        _check_not_floating("mask", mask)
        if mask.dim() == 3:
            raise ValueError(
                f"mask must be [Lq, Lk] or 4-D, not {list(mask.shape)}: pass mask[:, None] "
                "if it is [B, Lq, Lk], mask[None] if it is [H, Lq, Lk]"
            )
    if padding is None:
        return mask
    if not isinstance(padding, Tensor):
        raise TypeError(
            f"key_padding_mask must be a bool or integer tensor, not {type(padding).__name__}"
        )
    _check_not_floating("key_padding_mask", padding)
    check_device("key_padding_mask", padding, query)
    if mask is not None:
        check_device("mask", mask, query)
    batch, keys = key.shape[0], past + key.shape[1]
    if padding.shape != (batch, keys):
        raise ValueError(
            f"key_padding_mask must be [B, Lk] = {[batch, keys]}, "
            f"not {list(padding.shape)}; pass a mask of another shape as mask"
        )
    padding = padding[:, None, None, :]
    if mask is None:
        return padding
    check_pairs("mask", mask, query, keys)
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)  # an expanded dimension need not be written out
    return _nonzero(mask) & _nonzero(padding)


def _nonzero(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def _check_not_floating(name: str, mask: Tensor) -> None:
    check_dense(name, mask)
    check_holds_values(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name} must be bool or integer, not {mask.dtype}; pass {name}.bool() to keep nonzero "
            f"positions, or bias={'mask' if name == 'mask' else name + '[:, None, None]'} to add it"
        )
