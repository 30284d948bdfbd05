"""Attention past one device, on torch.distributed: PyTorch's own process groups, meshes and DTensors.

Every shard computes in global coordinates, so results equal those of one process, dropout included.
"""

from mha_ext.distributed import sharding  # noqa: F401  (registers the operators' rules)
from mha_ext.distributed.layout import parallelize_attention
from mha_ext.distributed.order import positions, shard_sequence, unshard_sequence
from mha_ext.distributed.sequence import (
    all_to_all_attention,
    ring_attention,
    sequence_parallel_attention,
)
from mha_ext.distributed.tensor_parallel import tensor_parallel_plan

__all__ = [
    "all_to_all_attention",
    "parallelize_attention",
    "positions",
    "ring_attention",
    "sequence_parallel_attention",
    "shard_sequence",
    "tensor_parallel_plan",
    "unshard_sequence",
]
