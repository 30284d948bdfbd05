"""Tensor parallelism: each rank has a share of the heads, and the parameters that belong to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from mha_ext.distributed.layout import Layout
from mha_ext.modules import MultiHeadAttention


def tensor_parallel_plan(layer: MultiHeadAttention) -> dict[str, ParallelStyle]:
    """What `torch.distributed.tensor.parallel.parallelize_module(layer, mesh, plan)` takes.

    The projections of query, key and value are split by columns, that is, by heads; the output projection by rows. The
    layer then takes and returns whole tensors [B, L, width], the same on every rank, with one all-reduce in forward and
    one in backward; mask and bias are given whole. Dropout drops what one process would, from one seed (drawn, and that
    of the mesh' first rank is taken). A `KVCache.of(layer, ...)` holds this rank's heads.

    Raises:
        TypeError: where ``layer`` is no `MultiHeadAttention`.
        ValueError: from `parallelize_module`, where the ranks do not divide num_heads and num_kv_heads.

    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(
            f"layer must be a mha_ext.MultiHeadAttention, not {type(layer).__name__}; pass each attention layer of a "
            "model by itself"
        )
    return {
        "": _SplitHeads(),
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "out_proj": RowwiseParallel(),
    }


class _SplitHeads(ParallelStyle):
    """Of the layer itself: it learns which heads it has, and the three projections share one copy of their input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MultiHeadAttention)
        ranks = device_mesh.size()
        for name in ("num_heads", "num_kv_heads"):
            heads = getattr(module, name)
            if heads % ranks:
                raise ValueError(
                    f"{name} must be a multiple of the {ranks} ranks of the mesh, not {heads}; use a mesh of fewer "
                    "ranks, or repeat the rows of k_proj and v_proj so that each rank has a key head of its own"
                )
        module.parallel = replace(module.parallel or Layout(), heads=device_mesh)

        def share(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = ("query", "key", "value")
            same: dict[int, DTensor] = {}

            def spread(tensor: Any) -> Any:
                """One DTensor for each tensor: its gradient is reduced once, whoever reads it."""
                if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                    return tensor
                if id(tensor) not in same:
                    same[id(tensor)] = DTensor.from_local(
                        tensor, device_mesh, [Replicate()], run_check=False
                    )
                return same[id(tensor)]

            named = {k: spread(v) if k in inputs else v for k, v in kwargs.items()}
            return (*(spread(x) for x in args[:3]), *args[3:]), named

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module
