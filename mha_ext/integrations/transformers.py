"""Hugging Face transformers: ``attn_implementation="mha_ext"``.

from mha_ext.integrations import transformers as mha_ext_transformers

mha_ext_transformers.register()
model = AutoModel.from_pretrained(..., attn_implementation="mha_ext")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mha_ext.functional import attention_with_lse, weights_from_lse


def register(name: str = "mha_ext") -> None:
    """Makes ``attn_implementation=name`` (of from_pretrained, from_config, set_attn_implementation) mean mha_ext.

    Every model of transformers that dispatches its attention takes it, for inference, generate() and training: with
    caches, grouped queries, position biases (T5), cross attention, padding on either side, dropout, attention sinks and
    ``output_attentions=True``. Calling it again changes nothing.

    Raises:
        ImportError: where transformers is missing or older than 4.53, the first with both interfaces.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(
            "mha_ext.integrations.transformers needs transformers 4.53 or later; pip install -U transformers"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query [B, H, Lq, D], key and value [B, Hkv, Lk, D], to [B, Lq, H, D] and weights.

    Args:
        module: the attention layer, whose ``is_causal`` counts where the argument is None.
        attention_mask: bool (True = attend) or floating (added to the scores), broadcastable to [B, H, Lq, Lk], or
            None: then a causal layer with more than one query is causal.
        position_bias: added to the scores, with a gradient (T5).
        s_aux: [H]: attention sinks (gpt-oss): one more key for each head, with this score and no value.
        kwargs: ``output_attentions=True`` asks for the weights (GPT-2 keeps it to itself: there are none with any
            implementation but eager); ``softcap`` is refused; others have no meaning here.

    Raises:
        ValueError: where the model asks for a softcap of the scores.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError(
            f"softcap must be None with mha_ext, but is {kwargs['softcap']}; pass attn_implementation='eager'"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = "upper_left" if is_causal and attention_mask is None and query.shape[2] > 1 else False
    mask, bias = None, position_bias
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            attention_mask = attention_mask.to(query.dtype)
            bias = attention_mask if bias is None else bias + attention_mask
    if query.shape[0] != key.shape[0]:  # learned queries, shared by the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    options: dict[str, Any] = {"bias": bias, "causal": causal, "scale": scaling}
    out, lse, lse_low = attention_with_lse(query, key, value, mask, dropout_p=dropout, **options)
    if s_aux is not None:  # the sink's share of the softmax is taken from all keys alike
        kept = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None])
        out = out * kept[..., None].to(out.dtype)
    weights = None
    if kwargs.get("output_attentions"):
        weights = weights_from_lse(query, key, lse, lse_low, mask, **options)
        if s_aux is not None:
            weights = weights * kept[..., None].to(weights.dtype)
    return out.transpose(1, 2), weights
