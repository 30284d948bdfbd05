"""PyTorch's own names and conventions, computed by mha_ext.

In a module of its own, because the conventions differ where one does not look: here, as in torch.nn, a mask of
`MultiheadAttention` says True = ignore, where `mha_ext.MultiHeadAttention` says nonzero = attend.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from mha_ext import reference
from mha_ext.functional import attention, attention_with_lse, weights_from_lse
from mha_ext.modules import MultiHeadAttention

_CORNERS = {CausalVariant.UPPER_LEFT: "upper_left", CausalVariant.LOWER_RIGHT: "lower_right"}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 1024
_DEVICES = ("meta",) + tuple(
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("mha_ext::attention_forward", device.upper())
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
        is_causal: query i sees keys 0 .. i (the upper left corner); not together with ``attn_mask``.
        scale: 1 / sqrt(E) when omitted.
        enable_gqa: query's heads, dimension -3, may be a multiple of those of key and value.

    Returns:
        [..., L, Ev]. A query that may attend to nothing gives 0.

    Raises:
        ValueError, TypeError, RuntimeError: before any work, in one line that names the argument and the fix.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "is_causal must be False where attn_mask is given, but is True; put the causal mask into attn_mask"
        )
    causal: Any = "upper_left" if is_causal else False
    if isinstance(attn_mask, CausalBias):
        causal, attn_mask = _CORNERS[attn_mask.variant], None
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, [..., length, width], but has shape "
                f"{list(tensor.shape)}; add the missing ones with unsqueeze"
            )
    lead = _leading(query, key, value, enable_gqa)
    query = _four_dims(query.expand(*lead, -1, -1), lead)
    key, value = (_four_dims(tensor, lead, keep_heads=True) for tensor in (key, value))
    if key.shape[1] != value.shape[1]:
        heads = math.lcm(key.shape[1], value.shape[1])
        key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    if dropout_p == 1.0:  # nothing is left, and nothing gets a gradient: as behind a mask
        attn_mask, causal, dropout_p = query.new_zeros((1, 1), dtype=torch.bool), False, 0.0
    pairs = None if attn_mask is None else _four_dims(attn_mask, lead, keep_ones=True)
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
            if shape[-1] == 0 or heads % shape[-1]:
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

    Calls that mha_ext has no kernel for (another device or dtype, nested or sparse tensors, heads wider than 1024)
    go to PyTorch as before. Works in eager mode and around or inside a `torch.compile`d function.
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
        return func(*args, **kwargs)


def _where_there_is_a_kernel(*args: Any, **kwargs: Any) -> Tensor:
    if _has_kernel(*args[:3], **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)
    return F.scaled_dot_product_attention(*args, **kwargs)


def _has_kernel(query: Any = None, key: Any = None, value: Any = None, **_: Any) -> bool:
    tensors = (query, key, value)
    return all(
        isinstance(tensor, Tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and tensor.device.type in _DEVICES
        and tensor.dtype in _DTYPES
        and tensor.dim() >= 2
        and tensor.shape[-1] <= _MOST_HEAD_DIM
        for tensor in tensors
    )


# What nn.MultiheadAttention calls. A mode sees it as one function and nothing inside it; so here it is once more,
# with another name bound inside.
_multi_head_attention_forward = FunctionType(
    F.multi_head_attention_forward.__code__,
    {
        **vars(F),
        "scaled_dot_product_attention": _where_there_is_a_kernel,
        "has_torch_function": lambda _: False,
    },
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with its attention computed by mha_ext: the same constructor, parameters,
    state_dict, defaults, masks (**True = ignore**) and results.

    Also inside `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer` and `nn.Transformer`, which then never
    leave for a fused kernel of PyTorch's own. What differs: memory is linear in the lengths also with dropout, with a
    mask that has a gradient and with ``need_weights`` (but for the weights themselves); ``out_proj`` is called as a
    module, so hooks and LoRA on it work; a query that may attend to nothing gives 0, where PyTorch gives NaN on some
    paths; nested tensors are not taken.

    Args: as of `torch.nn.MultiheadAttention`.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_stacked"] = None  # while PyTorch's constructor asks
        super().__init__(*args, **kwargs)
        self._stacked = self.in_proj_weight is not None

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """PyTorch's encoder layers ask this before they pass by `forward` for a kernel of their own."""
        return bool(self.__dict__["_same_width"]) if self._stacked is None else False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_same_width"] = value

    def _reset_parameters(self) -> None:
        stacked, self.__dict__["_stacked"] = self._stacked, None
        super()._reset_parameters()
        self.__dict__["_stacked"] = stacked

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from ``query`` to ``key`` and ``value``.

        Args:
            query: [L, N, embed_dim], or [N, L, embed_dim] with ``batch_first``, or unbatched [L, embed_dim].
            key: [S, N, kdim], and value: [S, N, vdim], in the same convention.
            key_padding_mask: [N, S] ([S] unbatched): bool, True = ignore, or floating, added to the scores.
            need_weights: also return the weights; as in PyTorch after dropout, which matters in training only.
            attn_mask: [L, S] or [N · num_heads, L, S]: bool, True = ignore, or floating, added to the scores.
            average_attn_weights: average the weights over the heads.
            is_causal: a hint that ``attn_mask``, which must be there, is the causal one.

        Returns:
            The output in query's convention, and the weights [N, L, S] ([N, num_heads, L, S] without averaging; without
            N unbatched), or None.

        Raises:
            AssertionError, RuntimeError: where PyTorch raises them.
        """
        batched = _is_batched(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "attn_mask must be given where is_causal is True, but is None: is_causal is a hint that it is the "
                "causal mask; make it with torch.nn.Transformer.generate_square_subsequent_mask"
            )
        same = query is key and key is value
        # [batch, length, width]: strides only.
        query, key, value = (
            x.transpose(0, 1) if batched and not self.batch_first else x if batched else x[None]
            for x in (query, key, value)
        )
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        self._check(query, key, value, key_padding_mask, attn_mask)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x in self._project(query, key, value, same)
        )
        hint = is_causal and key_padding_mask is None and not need_weights
        mask, bias = self._masks(None if hint else attn_mask, key_padding_mask, q, k)
        dropout_p = self.dropout if self.training else 0.0
        drop_all = (
            dropout_p == 1.0
        )  # nothing is left, and nothing gets a gradient: as behind a mask
        options: dict[str, Any] = {
            "bias": bias,
            "causal": "upper_left" if hint else False,
        }
        seed = None
        if 0.0 < dropout_p < 1.0:
            seed = torch.randint(0, 2**32, (2,), device=q.device)
        out, lse, lse_low = attention_with_lse(
            q,
            k,
            v,
            q.new_zeros((1, 1), dtype=torch.bool) if drop_all else mask,
            **options,
            dropout_p=0.0 if drop_all else dropout_p,
            seed=seed,
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out[0] if not batched else out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        if drop_all:
            weights = q.new_zeros((*q.shape[:3], k.shape[2]))
        else:
            weights = weights_from_lse(q, k, lse, lse_low, mask, **options)
        if seed is not None:
            kept = reference.keep(seed, dropout_p, weights.shape)
            weights = weights * kept * reference.keep_scale(dropout_p)
        if average_attn_weights:
            weights = weights.mean(1)
        return out, weights if batched else weights[0]

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(
                f"query must have the width embed_dim = {self.embed_dim}, but has {query.shape[-1]}; "
                "project it first, or build the layer with that embed_dim"
            )
        same_width = self._stacked and key.shape != value.shape
        if same_width or key.shape[:2] != value.shape[:2]:
            raise AssertionError(
                f"value must have key's shape {list(key.shape)}, but has {list(value.shape)}; "
                "pass one value for each key (kdim and vdim of the layer allow other widths)"
            )
        batch, keys = key.shape[:2]
        if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
            raise AssertionError(
                f"key_padding_mask must be [N, S] = {[batch, keys]}, but is "
                f"{list(key_padding_mask.shape)}; it has one entry for each key"
            )
        if attn_mask is not None:
            shape = [query.shape[1], keys]
            if attn_mask.dim() == 3:
                shape.insert(0, batch * self.num_heads)
            if list(attn_mask.shape) != shape:
                raise RuntimeError(
                    f"attn_mask must be [L, S] or [N · num_heads, L, S], here {shape}, but is "
                    f"{list(attn_mask.shape)}; repeat a mask of each sequence for its heads"
                )
        for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None and given.dtype != torch.bool and not given.is_floating_point():
                raise AssertionError(
                    f"{name} must be bool (True = ignore) or floating (added to the scores), but is {given.dtype}; "
                    f"pass {name}.bool()"
                )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, same: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[N, L, embed_dim], with the keys and values that the layer adds of its own."""
        if same and self.in_proj_weight is not None:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = map(F.linear, (query, key, value), weights, biases)
        batch = q.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(batch, -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """mask (nonzero = attend) and bias of `mha_ext.attention`; nothing is expanded."""
        mask = bias = None
        added = k.shape[2] - (0 if attn_mask is None else attn_mask.shape[-1])
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, added)) if added else attn_mask
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (q.shape[0], self.num_heads))
            if attn_mask.dtype == torch.bool:
                mask = attn_mask.logical_not()
            else:
                bias = attn_mask.to(q.dtype)
        if key_padding_mask is not None:
            added = k.shape[2] - key_padding_mask.shape[-1]
            padding = F.pad(key_padding_mask, (0, added)) if added else key_padding_mask
            padding = padding[:, None, None]
            if padding.dtype == torch.bool and mask is None:
                mask = padding.logical_not()
            else:
                if padding.dtype == torch.bool:
                    padding = q.new_zeros(padding.shape).masked_fill(padding, float("-inf"))
                padding = padding.to(q.dtype)
                bias = padding if bias is None else bias + padding
        return mask, bias


def _is_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
) -> bool:
    """Whether [.., batch, ..] or a single sequence; ranks must agree (AssertionError, as PyTorch raises it)."""
    rank = query.dim()
    wanted = {"query": (2, 3), "key": (rank,), "value": (rank,)}
    wanted |= {"key_padding_mask": (rank - 1,), "attn_mask": (2, 3)}
    given = (query, key, value, key_padding_mask, attn_mask)
    for (name, ranks), tensor in zip(wanted.items(), given, strict=True):
        if tensor is not None and tensor.dim() not in ranks:
            raise AssertionError(
                f"{name} must have {' or '.join(map(str, ranks))} dimensions, but has shape "
                f"{list(tensor.shape)}; a batch is [L, N, width] ([N, L, width] with batch_first), a single sequence "
                "[L, width], masks [N, S] or [S], [L, S] or [N · num_heads, L, S]"
            )
    if rank == 2 and attn_mask is not None and attn_mask.dim() == 3:
        shape = [num_heads, query.shape[0], key.shape[0]]
        if list(attn_mask.shape) != shape:
            raise AssertionError(
                f"attn_mask must be [num_heads, L, S] = {shape} for a single sequence, but is "
                f"{list(attn_mask.shape)}; pass [L, S] for all heads"
            )
    return rank == 3


def _shallow(module: nn.Module) -> dict[str, Any]:
    """The state of a module: its own tables, the same parameters and children."""
    tables = (dict, set, list)
    return {k: copy.copy(v) if isinstance(v, tables) else v for k, v in vars(module).items()}


class Swap(NamedTuple):
    """What `replace_attention` did with one module."""

    name: str  # in model.named_modules(), "" for the model itself
    swapped: bool
    reason: str  # why not; "" where it was swapped


def replace_attention(model: nn.Module) -> list[Swap]:
    """Swaps every `nn.MultiheadAttention` in ``model``, in place, for ours with the same parameters.

    The parameters are shared, not copied: optimizers, state_dict, tied weights, hooks and the training mode stay as
    they are. PyTorch's encoders stop making nested tensors, which only its own fused layer can read.

    Returns:
        One entry for each attention module that was found, with the reason where it was left alone.

    Raises:
        ValueError: where ``model`` itself is an `nn.MultiheadAttention`: use `from_torch`, which returns ours.
    """
    if type(model) is nn.MultiheadAttention:
        raise ValueError(
            "model must hold attention modules, but is one itself and cannot be swapped in place; use "
            "mha_ext.compat.from_torch(model)"
        )
    report: list[Swap] = []
    new: dict[nn.Module, MultiheadAttention] = {}
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        if isinstance(module, MultiheadAttention):
            if module not in new.values():
                report.append(Swap(name, False, "it is mha_ext's already"))
        elif type(module) is nn.MultiheadAttention:
            parent_name, _, child = name.rpartition(".")
            if module not in new:
                new[module] = from_torch(module)
            setattr(model.get_submodule(parent_name), child, new[module])
            report.append(Swap(name, True, ""))
        elif isinstance(module, nn.MultiheadAttention):
            reason = f"it is a {type(module).__qualname__}, which may compute something else"
            report.append(Swap(name, False, reason))
    return report


def from_torch(module: nn.MultiheadAttention) -> MultiheadAttention:
    """Ours in place of PyTorch's: the same parameters (shared), hooks, mode and results."""
    if type(module) is not nn.MultiheadAttention:
        raise TypeError(
            f"module must be an nn.MultiheadAttention itself, not {type(module).__qualname__}; what a subclass "
            "computes is not known here"
        )
    new = MultiheadAttention.__new__(MultiheadAttention)
    new.__dict__.update(_shallow(module))
    same = new.__dict__.pop("_qkv_same_embed_dim")
    new.__dict__["_same_width"], new.__dict__["_stacked"] = same, same
    return new


def to_torch(module: MultiheadAttention | MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's in place of ours, with copies of the parameters of a `mha_ext.MultiHeadAttention`, or sharing those of
    a `MultiheadAttention`; batch first in the former case.

    Raises:
        ValueError: where PyTorch's module cannot express the layer.
    """
    if isinstance(module, MultiheadAttention):
        new = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        new.__dict__.update(_shallow(module))
        del new.__dict__["_same_width"], new.__dict__["_stacked"]
        new._qkv_same_embed_dim = module.in_proj_weight is not None
        return new
    refused = {
        "num_kv_heads": (module.num_kv_heads, module.num_heads),
        "query_dim": (module.query_dim, module.embed_dim),
        "head_dim": (module.num_heads * module.head_dim, module.embed_dim),
        "value_head_dim": (module.value_head_dim, module.head_dim),
        "out_dim": (module.out_dim, module.embed_dim),
        "causal": (module.causal, False),
        "window": (module.window, None),
    }
    for name, (value, only) in refused.items():
        if value != only:
            raise ValueError(
                f"module must be one that nn.MultiheadAttention can express, but its {name} is "
                f"{getattr(module, name)}; keep mha_ext.MultiHeadAttention"
            )
    weight = module.out_proj.weight
    new = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=module.q_proj.bias is not None,
        kdim=module.key_dim,
        vdim=module.value_dim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    ).train(module.training)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    with torch.no_grad():
        if new.in_proj_weight is not None:
            new.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, projection in zip("qkv", projections, strict=True):
                getattr(new, f"{name}_proj_weight").copy_(projection.weight)
        if new.in_proj_bias is not None:
            new.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        new.out_proj.load_state_dict(module.out_proj.state_dict())
    return new


def to_multi_head_attention(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """`mha_ext.MultiHeadAttention`, batch first and with masks that say nonzero = attend, with copies of the
    parameters of PyTorch's module or of `MultiheadAttention`.

    Raises:
        ValueError: where the module adds keys of its own (add_bias_kv, add_zero_attn).
    """
    for name, present in (
        ("add_bias_kv", module.bias_k is not None),
        ("add_zero_attn", module.add_zero_attn),
    ):
        if present:
            raise ValueError(
                f"module must be one that mha_ext.MultiHeadAttention can express, but it has {name}; use "
                "mha_ext.compat.from_torch"
            )
    weight = module.out_proj.weight
    new = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        device=weight.device,
        dtype=weight.dtype,
    ).train(module.training)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    with torch.no_grad():
        for projection, weight in zip((new.q_proj, new.k_proj, new.v_proj), weights, strict=True):
            projection.weight.copy_(weight)
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
            for projection, bias in zip((new.q_proj, new.k_proj, new.v_proj), biases, strict=True):
                projection.bias.copy_(bias)
        new.out_proj.load_state_dict(module.out_proj.state_dict())
    return new
