"""Peak memory of forward mode and of a Hessian-vector product over the length, each in a process of its own.

    python benchmarks/second_order_memory.py [LENGTH ...]

One head of width 64, float32, one thread; megabytes of resident memory beyond what a small problem took.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext


def quadratic(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


FUNCTIONS = {"mha_ext": mha_ext.attention, "SDPA math": quadratic}


def run(name: str, what: str, length: int) -> None:
    inputs = tuple(torch.randn(1, 1, length, 64) for _ in range(3))
    direction = tuple(torch.randn(1, 1, length, 64) for _ in range(3))
    if what == "jvp":
        torch.func.jvp(FUNCTIONS[name], inputs, direction)
        return
    leaves = [x.requires_grad_() for x in inputs]
    out = FUNCTIONS[name](*leaves)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    torch.autograd.grad(grads, leaves, direction)


def peak(name: str, what: str, length: int) -> float:
    """Megabytes."""
    torch.set_num_threads(1)
    run(name, what, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(name, what, length)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(lengths: list[int]) -> None:
    print(
        f"{'length':>8}"
        + "".join(f"{f'{what}: {name}':>18}" for what in ("jvp", "hvp") for name in FUNCTIONS)
    )
    for length in lengths:
        found = []
        for what in ("jvp", "hvp"):
            for name in FUNCTIONS:
                command = [sys.executable, __file__, name, what, str(length)]
                answer = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(float(answer.stdout))
        print(f"{length:8}" + "".join(f"{value:18.0f}" for value in found), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in FUNCTIONS:
        print(peak(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    else:
        main([int(length) for length in sys.argv[1:]] or [1024, 2048, 4096, 8192])
