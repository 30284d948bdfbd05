"""Multi-head attention for PyTorch, fused and hand-written: forward, backward, every option on one path.

    out = mha_ext.attention(query, key, value, mask)
    layer = mha_ext.MultiHeadAttention(embed_dim=300, num_heads=6, dropout=0.1)

``mask`` is bool or integer, nonzero = attend. `mha_ext.reference` is the definition in plain PyTorch.
"""

import importlib

import torch  # noqa: F401  (its libraries must be loaded before _C)

from mha_ext._build_check import check_torch_version

check_torch_version()

from mha_ext import _C, reference, transforms  # noqa: E402, F401  (these register the operators and their rules)
from mha_ext.block import AttentionBlock  # noqa: E402
from mha_ext.cache import KVCache, rotate  # noqa: E402
from mha_ext.explanation import explain  # noqa: E402
from mha_ext.functional import attention, attention_weights  # noqa: E402
from mha_ext.linear import FastLinear  # noqa: E402
from mha_ext.modules import MultiHeadAttention  # noqa: E402
from mha_ext.summaries import (  # noqa: E402
    attention_entropy,
    attention_received,
    attention_topk,
)

__version__: str = _C.build_info()["version"]


def __getattr__(name: str) -> object:
    """The packages that few need, when they are asked for."""
    if name in ("compat", "distributed", "integrations", "visualize"):
        return importlib.import_module(f"mha_ext.{name}")
    raise AttributeError(f"module 'mha_ext' has no attribute {name!r}")


__all__ = [
    "AttentionBlock",
    "FastLinear",
    "KVCache",
    "MultiHeadAttention",
    "__version__",
    "attention",
    "attention_entropy",
    "attention_received",
    "attention_topk",
    "attention_weights",
    "explain",
    "reference",
    "rotate",
]
