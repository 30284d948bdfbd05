"""torch.nn.MultiheadAttention, its attention computed here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_ext import reference
from mha_ext.functional import attention_with_lse, weights_from_lse


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
