"""FastLinear: an `nn.Linear` that takes a kernel of its own where that is faster than PyTorch's."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mha_ext import _C

_linear = torch.ops.mha_ext.linear.default

WORTH_IT = 1.2  # how many times faster than PyTorch's own the kernel must be


class FastLinear(nn.Linear):
    """`nn.Linear` with a float32 kernel of its own on the CPU, where that is faster than PyTorch's.

    It has the parameters, the state_dict and the initialisation of `nn.Linear`, and is called as a module: hooks,
    LoRA, pruning, parametrisation and quantization by replacement work as with `nn.Linear`.

    The kernel is taken for float32 tensors on the CPU with at least 16 rows and 32 columns on either side, where
    `kernel_is_faster()`; with AMX at least 128 and 192, unless MHA_EXT_FAST_LINEAR=1 asks for it. Everything else is
    `F.linear`: other dtypes and devices, tensor subclasses, autocast, torch.compile and export, fewer rows.

    With the kernel, a row of the result, and of the gradient of the input, has the same bits for any number of
    threads and any other rows in the batch; the gradient of the weight has the same bits for any number of threads.
    `F.linear` promises neither. Which of the two runs on a machine is measured once a process; set
    MHA_EXT_FAST_LINEAR=1 or =0 to fix it where results are compared bit by bit.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.

    Raises:
        ValueError: in the first call that the kernel could take, where MHA_EXT_FAST_LINEAR is neither 0 nor 1.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] to [..., out_features]."""
        weight, bias = (
            self.weight,
            self.bias,
        )  # once: a parametrisation computes them at each access
        if (
            torch.compiler.is_compiling()
            or _decision is False
            or not _eligible(input, weight, bias)
            or not kernel_is_faster()
        ):
            return nn.functional.linear(input, weight, bias)
        out: Tensor = _linear(input, weight, bias)
        return out


def kernel_is_faster() -> bool:
    """Whether this machine runs float32 products clearly faster in the kernel than in PyTorch.

    MHA_EXT_FAST_LINEAR=1 or =0 decides it. Otherwise it is measured, once, in about 40 milliseconds, where the
    kernel can be faster: with AMX, which multiplies float32 numbers in parts of 8 bits, and on other processors than
    Intel's, where PyTorch's library (MKL) may leave AVX-512 unused. On Intel without AMX it is no.
    """
    global _decision
    if _decision is None:
        asked = os.environ.get("MHA_EXT_FAST_LINEAR", "")
        _decision = _decide(asked, _cpu_vendor(), _C.active_isa(), _speed_up)
    return _decision


_decision: bool | None = None


def _decide(asked: str, vendor: str, isa: str, speed_up: Callable[[], float]) -> bool:
    if asked in ("0", "1"):
        return asked == "1"
    if asked:
        raise ValueError(
            f"MHA_EXT_FAST_LINEAR must be 0, 1 or unset, not {asked!r}; unset it to have it measured"
        )
    return (vendor != "GenuineIntel" or isa == "amx") and speed_up() >= WORTH_IT


def _cpu_vendor() -> str:
    """As the processor spells it; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def _speed_up(size: int = 512, rounds: int = 5) -> float:
    """Time of PyTorch's three products of a layer's training step over the kernel's: best of a few, in turns."""
    with torch.no_grad():
        x, weight, grad = (torch.ones(size, size, dtype=torch.float32) for _ in range(3))
        calls: tuple[Callable[[], object], ...] = (
            lambda: (nn.functional.linear(x, weight), grad @ weight, grad.t() @ x),
            lambda: (_linear(x, weight), _linear(grad, weight.t()), _linear(grad.t(), x.t())),
        )
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for i, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                best[i] = min(best[i], time.perf_counter() - begin)
    return best[0] / best[1]


def _eligible(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Plain float32 CPU tensors of a size that pays, outside of everything that traces or casts."""
    for tensor in (input, weight) if bias is None else (input, weight, bias):
        if type(tensor) not in _PLAIN or tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
        if tensor.layout is not torch.strided:
            return False
    if torch.is_autocast_enabled("cpu") or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if weight.dim() != 2 or not input.dim() or input.shape[-1] != weight.shape[1]:
        return False  # PyTorch's own message
    out_features, in_features = weight.shape
    rows, columns = _least_sizes()
    return min(out_features, in_features) >= columns and input.numel() >= rows * in_features


_PLAIN = (Tensor, nn.Parameter)


@functools.cache
def _least_sizes() -> tuple[int, int]:
    """Rows of input, and columns of input and output.

    With fewer, reading the weight takes the time, with AMX cutting it. But where the kernel is asked for, a row has the
    same bits in smaller batches, too.
    """
    asked = os.environ.get("MHA_EXT_FAST_LINEAR") == "1"
    return (128, 192) if _C.active_isa() == "amx" and not asked else (16, 32)


def _linear_vmap(
    info: object,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Mapped inputs are more rows; a mapped weight is a batch of products."""
    input_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
    if weight_dim is None and bias_dim is None:
        assert input_dim is not None
        return _linear(input.movedim(input_dim, 0), weight, bias), 0
    rank = input.dim() - (input_dim is not None)
    size = weight.shape[weight_dim] if weight_dim is not None else bias.shape[bias_dim]  # type: ignore[union-attr, index]
    weight = weight.mT if weight_dim is None else weight.movedim(weight_dim, 0).mT
    x = input.expand(size, *input.shape) if input_dim is None else input.movedim(input_dim, 0)
    out = x.reshape(size, -1, x.shape[-1]) @ weight
    if bias is not None:
        out = out + (bias if bias_dim is None else bias.movedim(bias_dim, 0)[:, None])
    return out.reshape(*x.shape[:rank], out.shape[-1]), 0


torch.library.register_vmap("mha_ext::linear", _linear_vmap)
