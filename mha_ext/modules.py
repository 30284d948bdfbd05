"""nn.Modules: parameters and projections. The attention itself is `mha_ext.attention`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mha_ext.arguments import (
    Causal,
    EmptyRows,
    Window,
    check_causal,
    check_dropout,
    check_empty_rows,
    check_flag,
    check_window,
)
from mha_ext.cache import KVCache, check_incremental, rotate
from mha_ext.functional import (
    attention_with_lse,
    merged_attention,
    split_heads,
    weights_from_lse,
)
from mha_ext.layer_arguments import (
    check_dtype,
    check_pairs,
    check_parameter_dtype,
    check_rotary,
    checked_shape,
    first_keys,
    join_masks,
    positive,
)
from mha_ext.linear import FastLinear

if TYPE_CHECKING:
    from mha_ext.distributed.layout import Layout


class MultiHeadAttention(nn.Module):
    """Multi-head attention with its projections, batch first; works on [B, L, width] tensors.

        q_proj, k_proj, v_proj -> split into heads -> attention -> merge the heads -> out_proj

    The four projections are `nn.Linear` children, called as modules: hooks, LoRA, quantization and
    tensor parallelism see them. `load_state_dict` takes that of an `nn.MultiheadAttention`, too.
    The number of heads is read off what they return, so a projection that holds a shard of the
    heads works too. Splitting and merging the heads copies nothing.

    Args:
        embed_dim: width of the model: query_dim and out_dim by default, and, without head_dim, width of all heads
            together, a multiple of num_heads.
        num_heads: number of query heads.
        query_dim: width of ``query``; embed_dim by default.
        key_dim: width of ``key``; query_dim by default.
        value_dim: width of ``value``; key_dim by default.
        head_dim: width of a head in query and key; embed_dim // num_heads by default.
        value_head_dim: width of a head in value; head_dim by default.
        out_dim: width of the result; embed_dim by default.
        num_kv_heads: number of key and value heads, a divisor of num_heads (grouped-query
            attention); num_heads by default.
        bias: whether the projections have biases.
        dropout: probability with which a pair is dropped after the softmax, in training only.
        causal, window, empty_rows: as in `mha_ext.attention`.
        fast_linear: make the projections `mha_ext.FastLinear`, an `nn.Linear` that is faster in
            float32 on some CPUs, with other rounding errors.
        rotary_base: turn queries and keys by their positions (`mha_ext.rotate`) with this base, usually
            10000.0; None for no rotary embedding.
        device, dtype: of the parameters.

    Raises:
        ValueError: where embed_dim is not a multiple of num_heads (and head_dim is not given), num_heads is
            not one of num_kv_heads, head_dim is odd with rotary_base, or an option is out of range.
        TypeError: where an argument is of another type.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2.
    """

    parallel: Layout | None = None  # how it is split over ranks: mha_ext.distributed

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        query_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        out_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: Causal = False,
        window: Window | None = None,
        empty_rows: EmptyRows = "zero",
        fast_linear: bool = False,
        rotary_base: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = positive("embed_dim", embed_dim), positive("num_heads", num_heads)
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim must be a multiple of num_heads, not {embed_dim} over {num_heads}; "
                    "pass head_dim to choose the width of a head freely"
                )
            head_dim = embed_dim // num_heads
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.query_dim = embed_dim if query_dim is None else query_dim
        self.key_dim = self.query_dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.head_dim = head_dim
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.out_dim = embed_dim if out_dim is None else out_dim
        for name in _WIDTHS:
            setattr(self, name, positive(name, getattr(self, name)))
        if num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"not {num_heads} over {self.num_kv_heads}"
            )
        check_flag("bias", bias)
        check_flag("fast_linear", fast_linear)
        check_parameter_dtype(dtype)
        check_dropout("dropout", dropout)
        check_causal(causal)
        check_window(window)
        check_empty_rows(empty_rows)
        self.dropout = dropout
        self.causal = causal
        self.window = window
        self.empty_rows = empty_rows
        self.fast_linear = fast_linear
        if rotary_base is not None:
            check_rotary(rotary_base, self.head_dim)
        self.rotary_base = rotary_base

        def linear(width: int, out_width: int) -> nn.Linear:
            kind = FastLinear if fast_linear else nn.Linear
            return kind(width, out_width, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(self.query_dim, num_heads * self.head_dim)
        self.k_proj = linear(self.key_dim, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(self.value_dim, self.num_kv_heads * self.value_head_dim)
        self.out_proj = linear(num_heads * self.value_head_dim, self.out_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as `nn.MultiheadAttention` does.

        Xavier-uniform weights for query, key and value (as one stacked matrix where their inputs
        have the same width), `nn.Linear`'s own for the output, and zero biases.
        """
        inputs = (self.q_proj, self.k_proj, self.v_proj)
        stacked = self.query_dim == self.key_dim == self.value_dim
        rows = sum(projection.weight.shape[0] for projection in inputs)
        for projection in inputs:
            fan_out, fan_in = projection.weight.shape
            bound = math.sqrt(6 / (fan_in + (rows if stacked else fan_out)))
            nn.init.uniform_(projection.weight, -bound, bound)
        self.out_proj.reset_parameters()
        for projection in (*inputs, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def _heads(self) -> tuple[tuple[int, int], ...]:
        """Of query, key and value: how many heads, and how wide."""
        key = (self.num_kv_heads, self.head_dim)
        return (self.num_heads, self.head_dim), key, (self.num_kv_heads, self.value_head_dim)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the parameters of an `nn.MultiheadAttention`, too."""
        given = {name: state_dict.get(f"{prefix}{name}") for name in _STACKED}
        found: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            stacked = given[f"in_proj_{kind}"]
            if stacked is None:
                continue
            rows = [heads * width for heads, width in self._heads()]
            if stacked.shape[:1] != (sum(rows),):
                error_messages: list[str] = args[-1]
                error_messages.append(
                    f"{prefix}in_proj_{kind} must have {sum(rows)} rows ({' + '.join(map(str, rows))} of query, key "
                    f"and value), but is {list(stacked.shape)}; load it into a layer of the sizes that it comes from"
                )
                continue
            parts = stacked.split(rows)
            found |= {f"{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
        for name in "qkv":
            weight = given[f"{name}_proj_weight"]
            if weight is not None:
                found[f"{name}_proj.weight"] = weight
        if any(part is not None for part in given.values()):
            for name in _STACKED:
                state_dict.pop(f"{prefix}{name}", None)
            state_dict.update({f"{prefix}{name}": part for name, part in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        causal: Causal | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        new_lengths: Tensor | None = None,
        need_weights: bool = False,
        average_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends from ``query`` to ``key`` and ``value``.

        Args:
            query: [B, Lq, query_dim].
            key: [B, Lk, key_dim]; query by default.
            value: [B, Lk, value_dim]; key by default.
            mask: bool or integer, nonzero = attend: [Lk], [Lq, Lk], or four dimensions broadcastable to
                [B, H, Lq, Lk].
            bias: added to the scaled scores, broadcastable to [B, H, Lq, Lk], with a gradient.
            key_padding_mask: bool or integer [B, Lk], nonzero = attend; combined with ``mask``. With ``cache``, Lk
                of mask, bias and padding counts what is there already: cache.longest + Lq.
            key_lengths: integer [B]; keys at or past the length are masked, and skipped.
            causal: overrides the layer's own.
            positions: integer [Lq] or [B, Lq], for rotary embedding in self-attention; 0, 1, 2 … by
                default, after what is cached.
            cache: the keys and values of the past (`mha_ext.KVCache`), to which those of ``query`` are
                appended; each query sees what stands before it, and itself. Self-attention only.
            new_lengths: integer [B], with ``cache``: how many of the last tokens of each sequence are
                real, where prompts of different lengths are padded on the left.
            need_weights: also return the probabilities, before dropout.
            average_weights: with ``need_weights``, average them over the heads.

        Returns:
            [B, Lq, out_dim], or with ``need_weights`` a pair of it and the weights [B, H, Lq, Lk]
            ([B, Lq, Lk] when averaged).

        Raises:
            ValueError, TypeError: in one line that names the argument and the fix.
            RuntimeError: with ``cache``, where a gradient would be needed.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        if need_weights or average_weights:
            check_flag("need_weights", need_weights)
            check_flag("average_weights", average_weights)
        if cache is not None or new_lengths is not None or positions is not None:
            check_incremental(
                query,
                key is query,
                key_lengths,
                causal,
                self.rotary_base,
                positions,
                cache,
                new_lengths,
            )
        past = 0 if cache is None else cache.longest
        if cache is not None:
            for name, pairs in (("mask", mask), ("bias", bias)):
                if pairs is not None:
                    check_pairs(
                        name, pairs, query, past + query.shape[1], "Lk = cache.longest + Lq"
                    )
        if mask is not None or key_padding_mask is not None:
            mask = join_masks(mask, key_padding_mask, query, key, past)
        causal = self.causal if causal is None else causal

        projections: Any = self._modules  # what self.q_proj finds, sooner
        q, k = projections["q_proj"](query), projections["k_proj"](key)
        v = projections["v_proj"](value)
        dropout = self.dropout if self.training else 0.0
        split = need_weights or cache is not None or self.rotary_base is not None
        if not split and self.parallel is None:
            merged = merged_attention(
                q,
                k,
                v,
                mask,
                bias,
                key_lengths,
                causal,
                self.window,
                dropout,
                self.empty_rows,
                self.head_dim,
                self.value_head_dim,
            )
            result: Tensor = projections["out_proj"](merged)
            return result
        q, k = split_heads(q, self.head_dim), split_heads(k, self.head_dim)
        v = split_heads(v, self.value_head_dim)
        if self.rotary_base is not None:
            if positions is None and cache is not None:
                positions = cache.positions(query.shape[1], new_lengths)
            q = rotate(q, _positions(positions, q), self.rotary_base)
            k = rotate(k, _positions(positions if key is query else None, k), self.rotary_base)
        extension = None
        if cache is not None:
            if cache.key.dtype != k.dtype and not torch.is_autocast_enabled(k.device.type):
                raise TypeError(
                    f"cache must have the layer's dtype {k.dtype}, but has {cache.key.dtype}; make one with "
                    "KVCache.of(layer, batch, max_length)"
                )
            extension = cache.extension(k, v, new_lengths)
            k, v, key_lengths = extension[:3]
            mask, bias = first_keys(mask, k.shape[2]), first_keys(bias, k.shape[2])
            causal = "lower_right"
        attend: Any = attention_with_lse
        weigh: Any = weights_from_lse
        if self.parallel is not None:
            attend, weigh = self.parallel.attention_with_lse, self.parallel.weights_from_lse
        out, lse, lse_low = attend(
            q,
            k,
            v,
            mask,
            bias=bias,
            key_lengths=key_lengths,
            causal=causal,
            window=self.window,
            dropout_p=dropout,
            empty_rows=self.empty_rows,
        )
        out = projections["out_proj"](out.transpose(1, 2).flatten(2))  # [B, Lq, H·Dv]: a view
        weights = None
        if need_weights:
            weights = weigh(
                q,
                k,
                lse,
                lse_low,
                mask,
                bias=bias,
                key_lengths=key_lengths,
                causal=causal,
                window=self.window,
                empty_rows=self.empty_rows,
            )
            weights = weights.mean(1) if average_weights else weights
        if extension is not None and cache is not None:
            cache.commit(extension)  # last: a call that raises leaves no tokens
        return out if weights is None else (out, weights)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        width = self.query_dim
        query_shape = checked_shape("query", "Lq", query, width)
        check_dtype("query", query, self.q_proj)
        if key is not query:
            check_dtype("key", key, self.k_proj)
        if value is not key:
            check_dtype("value", value, self.v_proj)
        key_shape = value_shape = query_shape
        if key is not query or self.key_dim != width:
            key_shape = value_shape = checked_shape("key", "Lk", key, self.key_dim)
        if value is not key or self.value_dim != self.key_dim:
            value_shape = checked_shape("value", "Lk", value, self.value_dim)
        if query_shape[0] != key_shape[0]:
            raise ValueError(
                f"key must have query's batch size {query_shape[0]}, not {key_shape[0]}; "
                "expand the one that is shared"
            )
        if key_shape[:2] != value_shape[:2]:
            raise ValueError(
                f"value must have key's batch size and length {list(key_shape[:2])}, "
                f"not {list(value_shape[:2])}; pass one value for each key"
            )

    def extra_repr(self) -> str:
        shown = {"embed_dim": self.embed_dim, "num_heads": self.num_heads}
        defaults = {
            "num_kv_heads": self.num_heads,
            "query_dim": self.embed_dim,
            "key_dim": self.query_dim,
            "value_dim": self.key_dim,
            "value_head_dim": self.head_dim,
            "out_dim": self.embed_dim,
            "dropout": 0.0,
            "causal": False,
            "window": None,
            "empty_rows": "zero",
            "fast_linear": False,
            "rotary_base": None,
        }
        if self.num_heads * self.head_dim != self.embed_dim:
            shown["head_dim"] = self.head_dim
        shown |= {n: v for n in defaults if (v := getattr(self, n)) != defaults[n]}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


# What nn.MultiheadAttention calls its parameters.
_STACKED = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_WIDTHS = (
    "query_dim",
    "key_dim",
    "value_dim",
    "head_dim",
    "value_head_dim",
    "out_dim",
    "num_kv_heads",
)


def _positions(positions: Tensor | None, heads: Tensor) -> Tensor:
    return torch.arange(heads.shape[2], device=heads.device) if positions is None else positions
