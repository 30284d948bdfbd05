"""PyTorch's own names and conventions, computed by mha_ext.

In a module of its own, because the conventions differ where one does not look: here, as in torch.nn, a mask of
`MultiheadAttention` says True = ignore, where `mha_ext.MultiHeadAttention` says nonzero = attend.
"""

from mha_ext.compat.multihead import MultiheadAttention
from mha_ext.compat.replace import (
    Swap,
    from_torch,
    replace_attention,
    to_multi_head_attention,
    to_torch,
)
from mha_ext.compat.sdpa import scaled_dot_product_attention, sdpa_override

__all__ = [
    "MultiheadAttention",
    "Swap",
    "from_torch",
    "replace_attention",
    "scaled_dot_product_attention",
    "sdpa_override",
    "to_multi_head_attention",
    "to_torch",
]
