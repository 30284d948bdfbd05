"""The three products of a linear layer, in mha_ext's kernel and in PyTorch's: GFLOP/s beside the peak.

    python benchmarks/linear.py
    MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/linear.py    # MKL's path for other vendors, on Intel

float32, rows x in_features x out_features. The kernel and `F.linear`'s library are called in turns, on one thread
and on all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mha_ext import _C
from mha_ext.linear import kernel_is_faster
from mha_ext.report import Row, print_table
from mha_ext.timing import alternate

SHAPES = ((1024, 768, 768), (1024, 768, 3072), (128, 768, 768), (4096, 300, 300))


def products(rows: int, inputs: int, outputs: int) -> dict[str, Callable[[bool], Tensor]]:
    """Each product of a training step, as a function of whether the kernel does it."""
    x, weight, grad = (
        torch.randn(rows, inputs),
        torch.randn(outputs, inputs),
        torch.randn(rows, outputs),
    )

    def product(a: Tensor, b: Tensor) -> Callable[[bool], Tensor]:
        ours = torch.ops.mha_ext.linear.default
        return lambda own: ours(a, b) if own else torch.nn.functional.linear(a, b)

    return {
        "forward": product(x, weight),
        "gradient of the input": product(grad, weight.t()),
        "gradient of the weight": product(grad.t(), x.t()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each product")
    seconds = parser.parse_args().seconds
    rows: list[Row] = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            flops = 2.0 * shape[0] * shape[1] * shape[2]
            for step, product in products(*shape).items():
                torch.testing.assert_close(product(True), product(False), rtol=1e-4, atol=1e-3)
                peak = _C.fma_peak("float32") * threads
                calls = {"own": partial(product, True), "other": partial(product, False)}
                taken = alternate(calls, torch.device("cpu"), seconds)
                own, other = (flops / taken[name].median for name in calls)
                rows.append(
                    [
                        f"{' x '.join(map(str, shape))}, {step}",
                        str(threads),
                        f"{own * 1e-9:.0f}",
                        f"{own / peak:.0%}",
                        f"{other * 1e-9:.0f}",
                        f"{other / peak:.0%}",
                        f"{own / other:.2f}x",
                    ]
                )
        rows.append(None)
    headers = [
        "product",
        "threads",
        "mha_ext\nGFLOP/s",
        "of the\npeak",
        "F.linear\nGFLOP/s",
        "of the\npeak",
        "speed-up",
    ]
    print_table("linear, float32", headers, rows[:-1])
    print(f"FastLinear takes the kernel here: {kernel_is_faster()}")


if __name__ == "__main__":
    main()
