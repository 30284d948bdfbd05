"""No kernel reads past the end of a tensor: behind each of these is a page that nobody may read."""

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mha_ext

SHAPES = (  # queries, keys, width, width of values
    (1, 7, 5, 5),
    (3, 70, 40, 24),
    (12, 10, 50, 50),
    (20, 33, 17, 8),
    (64, 300, 64, 24),
    (70, 300, 40, 40),
    (100, 333, 72, 72),
    (65, 520, 33, 41),
    (130, 257, 24, 8),
)


def fenced(tensor: Tensor) -> Tensor:
    """A copy that ends where a page begins which is not readable; its memory is never freed."""
    size = tensor.numel() * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, room + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(begin + room, mmap.PAGESIZE, 0) == 0
    data = (ctypes.c_char * size).from_address(begin + room - size)
    data.area = area  # type: ignore[attr-defined]
    copy = torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def problems(dtype: torch.dtype) -> Iterator[tuple[list[Tensor], Tensor, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    for queries, keys, width, value_width in SHAPES:
        for options in ("", "causal", "mask", "bias", "mask and bias", "turned bias"):
            sizes = ((queries, width), (keys, width), (keys, value_width), (queries, value_width))
            *inputs, grad = (
                fenced(torch.randn(1, 2, *size, generator=generator).to(dtype)) for size in sizes
            )
            given: dict[str, Any] = {"causal": "lower_right"} if options == "causal" else {}
            if "mask" in options:
                given["mask"] = fenced(torch.rand(queries, keys, generator=generator) > 0.3)
            if "bias" in options:
                turned = "turned" in options
                shape = (1, 2, keys, queries) if turned else (1, 2, queries, keys)
                bias = fenced(torch.randn(shape, generator=generator).to(dtype))
                given["bias"] = bias.mT if turned else bias
            yield inputs, grad, given


def attend(dtype: torch.dtype) -> None:
    for inputs, grad, given in problems(dtype):
        leaves = [tensor.requires_grad_() for tensor in inputs]
        torch.autograd.grad(mha_ext.attention(*leaves, **given), leaves, grad)
        tensors = tuple(tensor.detach() for tensor in inputs)
        mha_ext.attention_weights(*tensors[:2], **given)
        directions = tuple(fenced(torch.ones_like(tensor)) for tensor in tensors)
        torch.func.jvp(lambda *x, g=given: mha_ext.attention(*x, **g), tensors, directions)


def multiply() -> None:
    """The products of a linear layer, forward and backward, of either layout; one number of x is not usual in limbs."""
    for rows, inputs, outputs in ((1, 40, 17), (33, 300, 70), (70, 45, 130), (20, 513, 33)):
        for turned in (False, True):
            x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
            x[-1, -1] = 1e20
            x, weight = (fenced(t.T).T if turned else fenced(t) for t in (x, weight))
            leaves = [t.requires_grad_() for t in (x, weight, fenced(torch.randn(outputs)))]
            out = torch.ops.mha_ext.linear(*leaves)
            grad = fenced(torch.randn(rows, outputs))
            torch.autograd.grad(out, leaves, grad)


@pytest.mark.isa
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
@pytest.mark.parametrize("what", ["float64", "float32", "bfloat16", "float16", "linear"])
def test_nothing_is_read_past_the_end(what: str) -> None:
    """In forward, backward, weights and forward mode. A fault ends the process, so that is another one."""
    done = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"


if __name__ == "__main__":
    multiply() if sys.argv[1] == "linear" else attend(getattr(torch, sys.argv[1]))
