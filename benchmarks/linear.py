"""The three products of a linear layer, in mha_ext's kernel and in PyTorch's, and whole layers with fast_linear.

    python benchmarks/linear.py
    MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/linear.py    # MKL's path for other vendors, on Intel

float32, rows x in_features x out_features, GFLOP/s beside the peak of multiply-adds. The kernel and `F.linear`'s
library are called in turns, on one thread and on all; errors are the largest, to float64. Then attention layers with
fast_linear=True, which take that kernel where `kernel_is_faster()` (MHA_EXT_FAST_LINEAR=1: in any case), beside those
of PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mha_ext import _C
from mha_ext.cases import CASES, Inputs, make_inputs
from mha_ext.linear import kernel_is_faster
from mha_ext.peers import Run, layer_runs
from mha_ext.report import Row, print_table
from mha_ext.timing import alternate

CPU = torch.device("cpu")
OWN, PEERS = "mha_ext", ("eager", "SDPA", "nn.MultiheadAttention")
SHAPES = ((1024, 768, 768), (1024, 768, 3072), (128, 768, 768), (4096, 300, 300))


def products(rows: int, inputs: int, outputs: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and weight of each product of a training step."""
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    grad = torch.randn(rows, outputs)
    return {
        "forward": (x, weight),
        "gradient of the input": (grad, weight.t()),
        "gradient of the weight": (grad.t(), x.t()),
    }


def compare_products(threads: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for shape in SHAPES:
        flops = 2.0 * shape[0] * shape[1] * shape[2]
        for step, (a, b) in products(*shape).items():
            calls = {
                "own": partial(torch.ops.mha_ext.linear.default, a, b),
                "other": partial(torch.nn.functional.linear, a, b),
            }
            exact = torch.nn.functional.linear(a.double(), b.double())
            own_error, other_error = (float((f() - exact).abs().max()) for f in calls.values())
            assert own_error <= 2 * other_error
            peak = _C.fma_peak("float32") * threads
            taken = alternate(calls, CPU, seconds)
            own, other = (flops / taken[name].median for name in calls)
            row = [f"{own * 1e-9:.0f}", f"{own / peak:.0%}"]
            row += [f"{other * 1e-9:.0f}", f"{other / peak:.0%}", f"{own / other:.2f}x"]
            name = f"{' x '.join(map(str, shape))}, {step}"
            rows.append([name, str(threads), *row, f"{own_error / other_error:.2f}x"])
    return rows


STEPS: dict[str, Callable[[Run, Inputs, Tensor], object]] = {
    "forward": lambda run, inputs, _: run.call(inputs),
    "training": lambda run, inputs, grad_out: run.gradients(inputs, grad_out),
}


def compare_layers(threads: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for case in (case for case in CASES if case.layer):
        inputs = make_inputs(case, "layer", torch.float32, CPU)
        runs = {run.name: run for run in layer_runs(inputs, torch.float32, CPU, fast_linear=True)}
        grad_out = torch.randn_like(runs[OWN].call(inputs))
        found, wanted = (runs[name].gradients(inputs, grad_out) for name in (OWN, "eager"))
        scale = max(float(gradient.abs().max()) for gradient in wanted.values())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * scale)
        torch.testing.assert_close(
            runs[OWN].call(inputs), runs["eager"].call(inputs), rtol=1e-4, atol=1e-4
        )
        for step, call in STEPS.items():
            taken = alternate(
                {name: partial(call, run, inputs, grad_out) for name, run in runs.items()},
                CPU,
                2 * seconds,
            )
            own = taken[OWN].median
            times = [f"{taken[name].median * 1e3:.2f}" for name in (OWN, *PEERS)]
            ratios = [f"{taken[name].median / own:.2f}x" for name in PEERS]
            rows.append([f"{case.name}, {step}", str(threads), *times, *ratios])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each product")
    parser.add_argument("--only", choices=("products", "layers"), help="one of the two tables")
    arguments = parser.parse_args()
    counts = sorted({1, torch.get_num_threads()})
    found: dict[str, list[Row]] = {"products": [], "layers": []}
    for what, compare in (("products", compare_products), ("layers", compare_layers)):
        if arguments.only in (None, what):
            for threads in counts:
                torch.set_num_threads(threads)
                found[what] += [*compare(threads, arguments.seconds), None]
    if found["products"]:
        rates = [
            f"{name}\n{what}" for name in ("mha_ext", "F.linear") for what in ("GFLOP/s", "of peak")
        ]
        rates += ["speed-up", "its error\nover that"]
        print_table("linear, float32", ["product", "threads", *rates], found["products"][:-1])
    if found["layers"]:
        times = [f"{name}\nms" for name in ("fast_linear", *PEERS)]
        ratios = [f"{name}\nover it" for name in PEERS]
        print_table("layers, float32", ["layer", "threads", *times, *ratios], found["layers"][:-1])
    print(f"FastLinear takes the kernel here: {kernel_is_faster()}")


if __name__ == "__main__":
    main()
