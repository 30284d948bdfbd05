"""AttentionBlock: attention with its residual sum and normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from mha_ext.arguments import Causal, EmptyRows, Window, check_dropout
from mha_ext.cache import KVCache
from mha_ext.modules import MultiHeadAttention

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionOptions(TypedDict, total=False):
    """The keyword options of `MultiHeadAttention`."""

    query_dim: int | None
    key_dim: int | None
    value_dim: int | None
    head_dim: int | None
    value_head_dim: int | None
    out_dim: int | None
    num_kv_heads: int | None
    bias: bool
    causal: Causal
    window: Window | None
    empty_rows: EmptyRows
    fast_linear: bool
    rotary_base: float | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class AttentionBlock(nn.Module):
    """The post-norm residual attention layer of BERT: LayerNorm(x + Dropout(Attention(x))).

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`.
        dropout: of the attention probabilities.
        hidden_dropout: of the attention's result, before the residual sum.
        layer_norm_eps: added to the variance under the root.
        options: the other options of `MultiHeadAttention`; out_dim must equal query_dim, for the
            residual sum.

    The children are ``attention``, ``dropout`` and ``norm``.

    Raises:
        ValueError: where out_dim is not query_dim, or hidden_dropout not in [0, 1).
        ValueError, TypeError: as `MultiHeadAttention`.

    Source: Devlin et al., "BERT" (2019); its layer is the encoder layer of Vaswani et al. (2017).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        layer_norm_eps: float = 1e-12,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        check_dropout("hidden_dropout", hidden_dropout)
        self.attention = MultiHeadAttention(embed_dim, num_heads, dropout=dropout, **options)
        width, out_dim = self.attention.query_dim, self.attention.out_dim
        if width != out_dim:
            raise ValueError(
                f"out_dim must equal query_dim for the residual sum, not {out_dim} and {width}; "
                f"pass out_dim={width}"
            )
        self.dropout = nn.Dropout(hidden_dropout)
        self.norm = nn.LayerNorm(
            out_dim, eps=layer_norm_eps, device=options.get("device"), dtype=options.get("dtype")
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
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
        """x [B, L, query_dim] to the same shape; the other arguments and the weights are `MultiHeadAttention`'s."""
        out, *weights = _as_tuple(
            self.attention(
                x,
                key=key,
                value=value,
                mask=mask,
                bias=bias,
                key_padding_mask=key_padding_mask,
                key_lengths=key_lengths,
                causal=causal,
                positions=positions,
                cache=cache,
                new_lengths=new_lengths,
                need_weights=need_weights,
                average_weights=average_weights,
            )
        )
        out = self.norm(x + self.dropout(out))
        return (out, weights[0]) if weights else out


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
