"""A small model on every layout (DDP, FSDP2, meshes of two dimensions, checkpointing) against one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext.distributed import parallelize_attention, shard_sequence, tensor_parallel_plan
from ranks.tensor_cases import TIGHT, numbers, whole

BATCH, LENGTH, WIDTH = 4, 16, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = mha_ext.MultiHeadAttention(
            WIDTH, 4, dropout=dropout, causal=True, rotary_base=100.0
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """[B, L, width] to the mean of the result, weighted by what it is given; with checkpointing or without."""

    def __init__(self, dropout: float = 0.3, saves: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.saves = saves

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return (x * weight).mean()


def model(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(**options).double()


def batch() -> tuple[Tensor, Tensor]:
    return numbers(BATCH, LENGTH, WIDTH, seed=1), numbers(BATCH, LENGTH, WIDTH, seed=2)


def gradients(module: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(4)
    module(*tensors).backward()
    return {name.removeprefix("module."): whole(p.grad) for name, p in module.named_parameters()}


def mine(tensors: tuple[Tensor, Tensor], group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """This rank's part of the batch."""
    return tuple(x.chunk(dist.get_world_size(group))[dist.get_rank(group)] for x in tensors)


def rows(tensors: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    return tuple(shard_sequence(x, group) for x in tensors)


def shard(module: Model, mesh: DeviceMesh) -> Model:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def split_heads(module: Model, mesh: DeviceMesh) -> Model:
    for block in module.blocks:
        assert isinstance(block, Block)
        parallelize_module(block.attention, mesh, tensor_parallel_plan(block.attention))
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module


def two_dimensions(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def ddp(one: Model, twin: Model) -> dict[str, Tensor]:
    parallelize_attention(twin, batch=dist.group.WORLD)
    return gradients(nn.parallel.DistributedDataParallel(twin), *mine(batch(), None))


def fsdp(one: Model, twin: Model) -> dict[str, Tensor]:
    parallelize_attention(shard(twin, line()), batch=dist.group.WORLD)
    return gradients(twin, *mine(batch(), None))


def fsdp_tensor(one: Model, twin: Model) -> dict[str, Tensor]:
    mesh = two_dimensions("data", "heads")
    group = mesh["data"].get_group()
    parallelize_attention(shard(split_heads(twin, mesh["heads"]), mesh["data"]), batch=group)
    return gradients(twin, *mine(batch(), group))


def fsdp_sequence(one: Model, twin: Model, method: Any) -> dict[str, Tensor]:
    mesh = two_dimensions("data", "sequence")
    data, sequence = mesh["data"].get_group(), mesh["sequence"].get_group()
    parallelize_attention(shard(twin, line()), batch=data, sequence=sequence, method=method)
    return gradients(twin, *rows(mine(batch(), data), sequence))


def sequence_tensor(one: Model, twin: Model, method: Any) -> dict[str, Tensor]:
    mesh = two_dimensions("sequence", "heads")
    group = mesh["sequence"].get_group()
    parallelize_attention(split_heads(twin, mesh["heads"]), sequence=group, method=method)
    found = gradients(twin, *rows(batch(), group))
    for (
        grad
    ) in found.values():  # a whole tensor on each rank: the mean over the ranks of the sequence
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)
    return found


def same(layout: Callable[..., dict[str, Tensor]], saves: bool = False, **options: Any) -> None:
    one = model(saves=saves)
    wanted = gradients(one, *batch())
    torch.testing.assert_close(layout(one, copy.deepcopy(one), **options), wanted, **TIGHT)


@contextmanager
def folder() -> Iterator[Path]:
    """One that all ranks see."""
    path = Path(os.environ["RENDEZVOUS"], "checkpoint")
    dist.barrier()
    yield path
    dist.barrier()


def saved() -> None:
    """Saved as FSDP x tensor parallel, loaded as FSDP alone, as tensor parallel alone, and into a plain module."""
    mesh, one = two_dimensions("data", "heads"), model()
    first = shard(split_heads(copy.deepcopy(one), mesh["heads"]), mesh["data"])
    with folder() as path:
        dcp.save({"model": get_model_state_dict(first)}, checkpoint_id=path)
        torch.manual_seed(9)
        other = Model().double()
        targets = [
            shard(copy.deepcopy(other), line()),
            split_heads(copy.deepcopy(other), mesh["heads"]),
            copy.deepcopy(other),
        ]
        for target in targets:
            state = {"model": get_model_state_dict(target)}
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(target, state["model"])
            for (name, loaded), (_, wanted) in zip(
                target.named_parameters(), one.named_parameters(), strict=True
            ):
                loaded = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
                assert torch.equal(loaded, wanted), name


LAYOUTS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "DDP": ddp,
    "FSDP": fsdp,
    "FSDP x tensor": fsdp_tensor,
    "FSDP x ring": partial(fsdp_sequence, method="ring"),
    "FSDP x all-to-all": partial(fsdp_sequence, method="all_to_all"),
    "ring x tensor": partial(sequence_tensor, method="ring"),
    "all-to-all x tensor": partial(sequence_tensor, method="all_to_all"),
}
CASES: dict[str, Callable[[], Any]] = {"saved and loaded": saved}
for _name, _layout in LAYOUTS.items():
    CASES[_name] = partial(same, _layout)
    CASES[f"{_name}, checkpointing"] = partial(same, _layout, saves=True)
