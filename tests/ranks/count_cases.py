"""What ring, all-to-all and tensor parallel send, counted, against the formulas of `mha_ext.distributed.costs`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mha_ext.distributed import costs, ring_attention, sequence_parallel_attention
from ranks.tensor_cases import layer, numbers, split


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to c10d's operators, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._overloadpacket._qualified_op_name
        ranks = dist.get_world_size()
        share = {  # of what is handed over: how much leaves this rank
            "c10d::send": 1.0,
            "c10d::alltoall_base_": (ranks - 1) / ranks,
            "_c10d_functional::all_reduce": 2 * (ranks - 1) / ranks,  # as a ring of sums
        }
        if name in share:
            given = args[1] if name == "c10d::alltoall_base_" else args[0]
            tensors = given if isinstance(given, list) else [given]
            size = sum(t.numel() * t.element_size() for t in tensors) * share[name]
            self.bytes[name] = self.bytes.get(name, 0.0) + size
        return op(*args, **(kwargs or {}))


def equal(found: dict[str, float], name: str, wanted: float) -> None:
    assert found == ({name: wanted} if wanted else {}), (found, wanted)


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], costs.Shape]:
    ranks, rows = dist.get_world_size(), 16
    sizes = ((8, 6), (4, 6), (4, 5))
    found = [torch.randn(2, h, rows, d).to(dtype).requires_grad_() for h, d in sizes]
    shape = costs.Shape(2, 8, 4, rows * ranks, rows * ranks, 6, 5, found[0].element_size())
    return found, shape


def ring(dtype: torch.dtype, **options: Any) -> None:
    leaves, shape = inputs(dtype)
    ranks, steps = dist.get_world_size(), options.pop("steps", None)
    with Sent() as sent:
        out = ring_attention(*leaves, check=False, **options)
    equal(sent.bytes, "c10d::send", costs.ring_bytes(shape, ranks, steps, backward=False))
    with Sent() as sent:
        out.sum().backward()
    equal(sent.bytes, "c10d::send", costs.ring_bytes(shape, ranks, steps, backward=True))


def all_to_all(dtype: torch.dtype) -> None:
    leaves, shape = inputs(dtype)
    wanted = costs.all_to_all_bytes(shape, dist.get_world_size())
    with Sent() as sent:
        out = sequence_parallel_attention(*leaves, check=False, method="all_to_all")
    equal(sent.bytes, "c10d::alltoall_base_", wanted)
    with Sent() as sent:
        out.sum().backward()
    equal(sent.bytes, "c10d::alltoall_base_", wanted)


def tensor() -> None:
    many, x = split(layer()), numbers(2, 12, 32).requires_grad_()
    wanted = costs.tensor_parallel_bytes(2, 12, 32, 8, dist.get_world_size())
    with Sent() as sent:
        out = many(x)
    equal(sent.bytes, "_c10d_functional::all_reduce", wanted)
    with Sent() as sent:
        out.sum().backward()
    equal(sent.bytes, "_c10d_functional::all_reduce", wanted)


def chosen() -> None:
    """ "auto" sends what the cheaper of the two sends: with few key heads the ring, with many the exchange."""
    ranks = dist.get_world_size()
    for heads, kv_heads in ((8, 8), (32, ranks), (8, 1)):
        leaves = [torch.randn(1, h, 4, 8) for h in (heads, kv_heads, kv_heads)]
        shape = costs.Shape(1, heads, kv_heads, 4 * ranks, 4 * ranks, 8, 8, 4)
        method = costs.cheapest(shape, ranks, ranks, backward=False)
        with Sent() as sent:
            sequence_parallel_attention(*leaves, check=False)
        assert [*sent.bytes] == [{"ring": "c10d::send"}.get(method, "c10d::alltoall_base_")]


class Live(TorchDispatchMode):
    """Bytes of the tensors that were made under it and still live, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())

    def gone(self, identity: int, size: int) -> None:
        self.known.discard(identity)
        self.now -= size


def memory(method: Any, dtype: torch.dtype, kv_heads: int) -> None:
    """The peaks lie below the formulas, but not far: when a transport lets go of a buffer is a matter of threads."""
    ranks, rows = dist.get_world_size(), 256
    leaves = [torch.randn(1, h, rows, 16).to(dtype) for h in (8, kv_heads, kv_heads)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    whole = rows * ranks
    shape = costs.Shape(1, 8, kv_heads, whole, whole, 16, 16, dtype.itemsize)
    formula = costs.ring_memory if method == "ring" else costs.all_to_all_memory
    with Live() as live:
        out = sequence_parallel_attention(*leaves, check=False, method=method)
    bound = formula(shape, ranks, backward=False)
    assert 0.4 * bound <= live.peak <= bound, (live.peak, bound)
    grad = torch.ones_like(out)
    with Live() as live:
        torch.autograd.grad(out, leaves, grad)
    bound = formula(shape, ranks, backward=True)
    assert 0.4 * bound <= live.peak <= bound, (live.peak, bound)


CASES: dict[str, Callable[[], None]] = {
    "ring": partial(ring, torch.float32),
    "ring, float64": partial(ring, torch.float64),
    "ring, bfloat16": partial(ring, torch.bfloat16),
    "ring, short window": partial(
        ring, torch.float32, order="contiguous", causal=True, window=(9, None), steps=2
    ),
    "ring, window of one": partial(ring, torch.float32, order="contiguous", window=(0, 0), steps=1),
    "all-to-all": partial(all_to_all, torch.float32),
    "all-to-all, bfloat16": partial(all_to_all, torch.bfloat16),
    "tensor parallel": tensor,
    "chosen by what it costs": chosen,
}
for _dtype in (torch.float32, torch.bfloat16):
    for _method in ("ring", "all_to_all"):
        for _kv_heads in (4, 8):
            CASES[f"memory, {_method}, {_dtype}, {_kv_heads}"] = partial(
                memory, _method, _dtype, _kv_heads
            )
