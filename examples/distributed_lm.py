"""One small language model, trained past one device in every way: the losses of all layouts lie on one line.

    torchrun --nproc-per-node 2 examples/distributed_lm.py

It trains on English that ships with Python, with dropout in the attention, once in a process of its own and once with
each layout: DDP, FSDP2, tensor parallel, ring attention, all-to-all attention; on 4 ranks and more FSDP x tensor
parallel too. Every layout starts from the same parameters, sees the same text and drops the same pairs. It prints the
losses, draws the curves (with matplotlib: distributed_lm.png), and exits with 1 where a layout disagrees with the one
process or nothing was learnt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from small import Block, Text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mha_ext.distributed import parallelize_attention, shard_sequence, tensor_parallel_plan

BATCH, LENGTH, WIDTH, HEADS = 8, 128, 64, 4

Cut = Callable[[Tensor], Tensor]  # a batch of text [B, L] to this rank's share of it
Layout = Callable[["LanguageModel"], tuple[nn.Module, Cut]]


class LanguageModel(nn.Module):
    """A causal language model over characters: [B, L] to [B, L, characters]."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        options = {"causal": True, "dropout": 0.1, "rotary_base": 10000.0}
        self.token = nn.Embedding(characters, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def one_process(model: LanguageModel) -> tuple[nn.Module, Cut]:
    return model, lambda text: text


def rows_of_the_batch(text: Tensor) -> Tensor:
    return text.chunk(dist.get_world_size())[dist.get_rank()]


def data_parallel(model: LanguageModel) -> tuple[nn.Module, Cut]:
    parallelize_attention(model, batch=dist.group.WORLD)
    return DistributedDataParallel(model), rows_of_the_batch


def fully_sharded(model: LanguageModel) -> tuple[nn.Module, Cut]:
    parallelize_attention(model, batch=dist.group.WORLD)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    ), rows_of_the_batch


def split_heads(model: LanguageModel, mesh: dist.DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block.attention, mesh, tensor_parallel_plan(block.attention))
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel(model: LanguageModel) -> tuple[nn.Module, Cut]:
    split_heads(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, lambda text: text


def two_dimensions(model: LanguageModel) -> tuple[nn.Module, Cut]:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "heads")
    )
    group = mesh["data"].get_group()
    split_heads(model, mesh["heads"])
    parallelize_attention(model, batch=group)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, lambda text: text.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def ring(model: LanguageModel) -> tuple[nn.Module, Cut]:
    parallelize_attention(model, sequence=dist.group.WORLD, method="ring")
    return DistributedDataParallel(model), shard_sequence


def all_to_all(model: LanguageModel) -> tuple[nn.Module, Cut]:
    parallelize_attention(model, sequence=dist.group.WORLD, method="all_to_all")
    return DistributedDataParallel(model), shard_sequence


LAYOUTS: dict[str, Layout] = {
    "one process": one_process,
    "DDP": data_parallel,
    "FSDP2": fully_sharded,
    "tensor": tensor_parallel,
    "ring": ring,
    "all-to-all": all_to_all,
    "FSDP2 x tensor": two_dimensions,
}


def train(layout: Layout, text: Text, steps: int) -> list[float]:
    """The loss of each step, the mean over the whole batch."""
    torch.manual_seed(0)
    model, cut = layout(LanguageModel(text.characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    sample = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        batch = text.sample(BATCH, LENGTH + 1, sample)
        seen, wanted = cut(batch[:, :-1]), cut(batch[:, 1:])
        loss = nn.functional.cross_entropy(model(seen).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for i, (name, values) in enumerate(losses.items()):
        axes.plot(values, label=name, linewidth=8 - i, alpha=0.7)  # each over the ones before it
    axes.set(xlabel="step", ylabel="loss", title=f"One model, {dist.get_world_size()} ranks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"curves: {path}")


def report(losses: dict[str, list[float]], steps: int, picture: Path) -> bool:
    """Prints the losses; whether all layouts agree over the first ten steps, and the model learns."""
    print("  step  " + "  ".join(f"{name:>14}" for name in losses))
    for step in sorted(
        {0, 1, 2, *range(0, steps, max(1, steps // 8)), steps - 1} & {*range(steps)}
    ):
        print(f"{step:6}  " + "  ".join(f"{values[step]:14.5f}" for values in losses.values()))
    one = losses["one process"]
    off = max(abs(a - b) for values in losses.values() for a, b in zip(values[:10], one))
    print(f"largest difference from the one process over the first ten steps: {off:.1e}")
    try:
        draw(losses, picture)
    except ImportError:
        print("no picture: matplotlib is not installed")
    return off < 1e-3 and one[-1] < one[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path, default=Path("distributed_lm.png"))
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run it as: torchrun --nproc-per-node 2 examples/distributed_lm.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, size = Text(), dist.get_world_size()
    losses = {}
    for name, layout in LAYOUTS.items():
        if layout is two_dimensions and (size < 4 or size % 2):
            continue
        losses[name] = train(layout, text, arguments.steps)
        if dist.get_rank() == 0:
            print(f"{name}: {losses[name][-1]:.5f} after {arguments.steps} steps", flush=True)
    fine = report(losses, arguments.steps, arguments.picture) if dist.get_rank() == 0 else True
    dist.destroy_process_group()
    return 0 if fine else 1


if __name__ == "__main__":
    status = main()
    # Caches of DTensor's keep the groups, and so Gloo's threads outlive Python: one that lets go of a tensor only
    # then aborts the process. So Python ends here, at once.
    sys.stdout.flush()
    os._exit(status)
