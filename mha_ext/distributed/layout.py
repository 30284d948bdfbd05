"""How a `MultiHeadAttention` is split over ranks: what the layer asks instead of `mha_ext.functional`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mha_ext.distributed.agree import agree, check_member, shared_seed
from mha_ext.distributed.order import Order, check_order, positions
from mha_ext.distributed.sequence import (
    Method,
    check_method,
    is_of_own_keys,
    sequence_parallel_attention,
    whole_keys,
)
from mha_ext.functional import attention_with_lse, weights_from_lse
from mha_ext.layer_arguments import check_device, join_masks
from mha_ext.modules import MultiHeadAttention


@dataclass(frozen=True)
class Layout:
    """Over which ranks the batch, the heads and the sequence of a layer are spread; None: they are whole."""

    batch: dist.ProcessGroup | None = None
    heads: DeviceMesh | None = None
    sequence: dist.ProcessGroup | None = None
    order: Order = "zigzag"
    method: Method = "auto"

    @property
    def head_ranks(self) -> int:
        return 1 if self.heads is None else self.heads.size()

    def attention_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As in `mha_ext.functional`, on this rank's shard of query, key and value, in global coordinates."""
        groups = self._groups()
        if self.sequence is not None and len(groups) > 1:  # before a seed is drawn, or not
            agree(self.sequence, lambda: {"dropout_p": dropout_p})
        if dropout_p > 0 and seed is None and groups != [self.sequence]:
            seed = shared_seed(query.device, groups)
        options |= {"bias": self._of_heads(bias), "dropout_p": dropout_p, "seed": seed}
        origin = (_first(self.batch, query.shape[0]), self._head_rank() * query.shape[1])
        mask = self._of_heads(mask)
        if self.sequence is None:
            return attention_with_lse(query, key, value, mask, origin=(*origin, 0, 0), **options)
        out, lse = sequence_parallel_attention(
            query,
            key,
            value,
            mask,
            group=self.sequence,
            method=self.method,
            order=self.order,
            origin=origin,
            return_lse=True,
            **options,
        )
        return out, lse, None

    def weights_from_lse(
        self,
        query: Tensor,
        key: Tensor,
        lse: Tensor | None,
        lse_low: Tensor | None,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As in `mha_ext.functional`, of all heads."""
        if self.sequence is not None:
            raise ValueError(
                "need_weights must be False where the sequence is spread over ranks, but is True; ask a layer that "
                "sees the whole sequence"
            )
        weights = weights_from_lse(
            query,
            key,
            lse,
            lse_low,
            self._of_heads(mask),
            bias=self._of_heads(bias),
            **options,
        )
        if self.heads is None:
            return weights
        return DTensor.from_local(weights, self.heads, [Shard(1)], run_check=False).full_tensor()

    def _groups(self) -> list[dist.ProcessGroup]:
        """One after another they give all ranks what the first rank has."""
        heads = None if self.heads is None else self.heads.get_group()
        return [group for group in (self.sequence, heads, self.batch) if group is not None]

    def _head_rank(self) -> int:
        return 0 if self.heads is None else self.heads.get_local_rank()

    def _of_heads(self, pairs: Tensor | None) -> Tensor | None:
        """This rank's heads of mask or bias; every rank gets the whole gradient of a bias."""
        if pairs is None or self.heads is None:
            return pairs
        if pairs.requires_grad:
            pairs = _SumGradients.apply(pairs, self.heads.get_group())
        if pairs.dim() < 3 or pairs.shape[-3] == 1:
            return pairs
        count = pairs.shape[-3] // self.head_ranks
        return pairs.narrow(-3, self._head_rank() * count, count)


class _SumGradients(torch.autograd.Function):
    """The identity; its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return functional.wait_tensor(functional.all_reduce(grad, "sum", ctx.group)), None


def parallelize_attention(
    model: nn.Module,
    *,
    batch: dist.ProcessGroup | None = None,
    sequence: dist.ProcessGroup | None = None,
    order: Order = "zigzag",
    method: Method = "auto",
) -> nn.Module:
    """Tells every `MultiHeadAttention` in a model that its inputs are shards; changes no parameter.

    Args:
        batch: ranks that hold parts of one batch, of equal size (data parallel). Dropout then drops the positions that
            one process would, from one seed. Without dropout it changes nothing. These ranks are not compared: where
            some call ``train()`` and others ``eval()``, they wait for each other until the group's timeout.
        sequence: ranks that hold [B, L / ranks, width] of the sequence, in ``order`` (`shard_sequence`). Attention is
            then `sequence_parallel_attention`, with ``method``; rotary positions are the global ones. The layer takes
            ``mask`` and ``bias`` as that function does, and ``key_padding_mask`` of this rank's keys. Called again
            without it, the layers see whole sequences again.
        order, method: of `sequence_parallel_attention`.

    Returns:
        The model itself. Groups cannot be pickled: save its state_dict.

    Raises:
        ValueError: where order or method is none of theirs; in the layer's call, for a cache, ``need_weights``, or
            rotary cross-attention with ``sequence``.
    """
    check_order(order)
    check_method(method)
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            known = layer.parallel or Layout()
            layer.parallel = replace(
                known, batch=batch, sequence=sequence, order=order, method=method
            )
            if (
                sequence is not None
                and _sequence_arguments not in layer._forward_pre_hooks.values()
            ):
                layer.register_forward_pre_hook(_sequence_arguments, with_kwargs=True)
    return model


def _sequence_arguments(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Refuses what a shard of a sequence cannot have, and gives rotary embedding the global positions."""
    assert isinstance(layer, MultiHeadAttention) and layer.parallel is not None
    group, order = layer.parallel.sequence, layer.parallel.order
    if group is None:  # it was, and is no more
        return args, kwargs
    check_member(group)
    if kwargs.get("cache") is not None:
        raise ValueError(
            "cache must be None where the sequence is spread over ranks, but is a KVCache; decode on whole sequences"
        )
    args, kwargs = _padding_in_mask(args, kwargs, group, order)
    if layer.rotary_base is None or kwargs.get("positions") is not None:
        return args, kwargs
    if (args[1] if len(args) > 1 else kwargs.get("key")) is not None:
        raise ValueError(
            "key must be None with rotary embedding where the sequence is spread over ranks, but is a tensor; turn "
            "queries and keys with mha_ext.rotate, and call ring_attention"
        )
    query = args[0] if args else kwargs["query"]
    length = query.shape[1] * dist.get_world_size(group)
    return args, {**kwargs, "positions": positions(length, group, order=order, device=query.device)}


def _padding_in_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, order: Order
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Joins the padding of this rank's keys with a mask that has those of all ranks."""
    given = dict(zip(("query", "key", "value", "mask"), args, strict=False)) | kwargs
    mask, padding = given.get("mask"), given.get("key_padding_mask")
    if not (isinstance(mask, Tensor) and isinstance(padding, Tensor)) or len(args) > 4:
        return args, kwargs
    query = given["query"]
    key = query if given.get("key") is None else given["key"]
    batch, own = key.shape[0], key.shape[1]
    ranks = dist.get_world_size(group)
    keys = own * ranks
    if ranks == 1 or is_of_own_keys(mask, own, ranks):
        return args, kwargs  # the layer joins them

    def describe() -> dict[str, Any]:
        if list(padding.shape) != [batch, own]:
            raise ValueError(
                f"key_padding_mask must be [B, Lk / ranks] = {[batch, own]}, not {list(padding.shape)}"
            )
        nothing = torch.empty(batch, keys, dtype=padding.dtype, device="meta")
        for name, tensor in (("mask", mask), ("key_padding_mask", padding)):
            check_device(name, tensor, query)
        join_masks(mask.to("meta"), nothing, query.to("meta"), key, keys - own)
        return {"key_padding_mask": [batch, own]}

    agree(group, describe)
    whole = whole_keys(padding, group, order)
    given |= {
        "mask": join_masks(mask, whole, query, key, keys - own),
        "key_padding_mask": None,
    }
    return (), given


def _first(group: dist.ProcessGroup | None, count: int) -> int:
    return 0 if group is None else dist.get_rank(group) * count
