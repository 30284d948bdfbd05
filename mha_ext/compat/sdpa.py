"""torch.nn.functional.scaled_dot_product_attention, and a mode that routes to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from mha_ext.arguments import check_dense, not_a_tensor
from mha_ext.functional import attention

_CORNERS = {CausalVariant.UPPER_LEFT: "upper_left", CausalVariant.LOWER_RIGHT: "lower_right"}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = {"cuda": 256}  # and elsewhere 1024
_DEVICES = ("meta",) + tuple(
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("mha_ext::attention_backward", device.upper())
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by `mha_ext.attention`.

    Args:
        query: [..., L, E]; key: [..., S, E]; value: [..., S, Ev]. The leading dimensions broadcast.
        attn_mask: broadcastable to [..., L, S]: bool, True = attend, or of query's dtype (or float32), added to the
            scaled scores, with a gradient of its own. A `torch.nn.attention.bias.CausalBias` names a corner.
        dropout_p: probability in [0, 1] with which a pair is dropped, also outside of training, as PyTorch does.
        is_causal: query i sees keys 0 .. i (the upper left corner), of those that ``attn_mask`` leaves.
        scale: 1 / sqrt(E) when omitted.
        enable_gqa: query's heads, dimension -3, may be a multiple of those of key and value.

    Returns:
        [..., L, Ev]: 0 where a query may attend to nothing. Its heads lie side by side in memory, as
        ``out.transpose(1, 2).flatten(2)`` wants them: where ``out.view`` fails, use ``out.reshape``.

    Raises:
        ValueError, TypeError, RuntimeError: before any work, in one line that names the argument and the fix.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    causal: Any = "upper_left" if is_causal else False
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise ValueError(
                "is_causal must be False where attn_mask is a CausalBias, which names its corner, but is True"
            )
        causal, attn_mask = _CORNERS[attn_mask.variant], None
    for name, tensor in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("attn_mask", attn_mask),
    ):
        if tensor is None and name == "attn_mask":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(not_a_tensor(name, tensor))
        if name == "attn_mask":
            check_dense(name, tensor)
            device = query.device.type
            if tensor.dtype not in (torch.bool, torch.float32, query.dtype) and not (
                torch.is_autocast_enabled(device)
                and tensor.dtype == torch.get_autocast_dtype(device)
            ):
                own = "" if query.dtype == torch.float32 else f"{query.dtype} or "
                raise TypeError(
                    f"attn_mask must be bool, {own}torch.float32, but is {tensor.dtype}; pass "
                    "attn_mask.bool() if nonzero means attend, or attn_mask.to(query.dtype) to add it"
                )
        elif tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, [..., length, width], but has shape "
                f"{list(tensor.shape)}; add the missing ones with unsqueeze"
            )
    lead = _leading(query, key, value, enable_gqa)
    query = _four_dims(query.expand(*lead, -1, -1), lead)
    key, value = (_four_dims(tensor, lead, keep_heads=True) for tensor in (key, value))
    if key.shape[1] != value.shape[1]:
        heads = math.lcm(key.shape[1], value.shape[1])
        key, value = (t.repeat_interleave(heads // max(1, t.shape[1]), 1) for t in (key, value))
    if dropout_p == 1.0:  # nothing is left, and nothing gets a gradient: as behind a mask
        attn_mask, causal, dropout_p = query.new_zeros((1, 1), dtype=torch.bool), False, 0.0
    pairs = None
    if attn_mask is not None:
        whole = (*lead, query.shape[2], key.shape[2])
        if attn_mask.dim() > len(whole) or any(
            size not in (1, of)
            for size, of in zip(attn_mask.shape, whole[len(whole) - attn_mask.dim() :], strict=True)
        ):
            raise ValueError(
                f"attn_mask must broadcast to [..., L, S] = {list(whole)}, but has shape {list(attn_mask.shape)}"
            )
        pairs = _four_dims(attn_mask, lead, keep_ones=True)
    is_mask = pairs is not None and pairs.dtype == torch.bool
    out = attention(
        query,
        key,
        value,
        pairs if is_mask else None,
        bias=None if is_mask else pairs,
        causal=causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    if len(lead) > 2:
        return out.unflatten(0, lead[:-1])
    return out[(0,) * (2 - len(lead))]


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """What the leading dimensions broadcast to; with grouped queries the heads of key and value may be fewer."""
    shapes = [tuple(tensor.shape[:-2]) for tensor in (query, key, value)]
    if enable_gqa and all(shapes):
        heads = shapes[0][-1]
        for name, shape in (("key", shapes[1]), ("value", shapes[2])):
            if shape[-1] != heads and (shape[-1] == 0 or heads % shape[-1]):
                raise ValueError(
                    f"{name} must have a number of heads that divides query's {heads}, but has {shape[-1]}; "
                    "each of its heads serves equally many of query's"
                )
        shapes = [shapes[0], *((*shape[:-1], heads) for shape in shapes[1:])]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(
            "query, key and value must have leading dimensions that broadcast, but have shapes "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}; with fewer heads in key and value "
            "pass enable_gqa=True"
        ) from None


def _four_dims(
    tensor: Tensor, lead: tuple[int, ...], keep_heads: bool = False, keep_ones: bool = False
) -> Tensor:
    """[..., rows, columns] as [B, H, rows, columns]: leading dimensions beyond the heads become the batch.

    keep_heads: the last leading dimension is not expanded; keep_ones: nor is any other, unless it must be.
    """
    tensor = tensor[(None,) * (len(lead) + 2 - tensor.dim())]
    if not keep_ones:
        heads = tensor.shape[-3] if keep_heads and lead else None
        shape = lead if heads is None else (*lead[:-1], heads)
        tensor = tensor.expand(*shape, -1, -1)
    elif any(size != 1 for size in tensor.shape[:-3]):
        tensor = tensor.expand(*lead[:-1], -1, -1, -1)
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 5 else tensor.flatten(0, -4)


class sdpa_override(TorchFunctionMode):
    """``with sdpa_override():`` every `F.scaled_dot_product_attention` inside is ours: of unmodified models too.

    Calls that mha_ext has no kernel for (another device or dtype, nested or sparse tensors, heads of width 0 or wider
    than 1024, on CUDA 256) go to PyTorch as before. Works in eager mode, and around or inside a function under
    `torch.compile`; in the thread that entered it.

    Activation checkpointing computes a part of forward again in backward, so backward belongs inside as well. Where it
    is outside, ``checkpoint(..., use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), sdpa_override()))``
    says that what is computed again is ours, too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _where_there_is_a_kernel(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head_attention_forward(*args, **kwargs)
        if (
            func is Tensor.backward
            or func is torch.autograd.backward
            or func is torch.autograd.grad
        ):
            # A mode is off in what it handles, and a checkpoint calls attention in there.
            with self:
                return _DERIVATIVES[func](*args, **kwargs)
        return func(*args, **kwargs)


def _where_there_is_a_kernel(*args: Any, **kwargs: Any) -> Tensor:
    if _has_kernel(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)
    return F.scaled_dot_product_attention(*args, **kwargs)


def _has_kernel(
    query: Any = None, key: Any = None, value: Any = None, attn_mask: Any = None, *_: Any, **__: Any
) -> bool:
    tensors = (query, key, value)
    if isinstance(attn_mask, Tensor) and (attn_mask.is_nested or attn_mask.layout != torch.strided):
        return False
    return all(
        isinstance(tensor, Tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and tensor.device.type in _DEVICES
        and tensor.dtype in _DTYPES
        and tensor.dim() >= 2
        and 0 < tensor.shape[-1] <= _MOST_HEAD_DIM.get(tensor.device.type, 1024)
        for tensor in tensors
    )


def _seen_inside(function: Any, **names: Any) -> Any:
    """The same function, whose inside a mode sees; it would see one call, and nothing of what that does."""
    blind = {"has_torch_function": lambda _: False, "has_torch_function_unary": lambda _: False}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **blind, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# What nn.MultiheadAttention calls, with another name bound inside.
_multi_head_attention_forward = _seen_inside(
    F.multi_head_attention_forward, scaled_dot_product_attention=_where_there_is_a_kernel
)
_DERIVATIVES = {
    function: _seen_inside(function)
    for function in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
