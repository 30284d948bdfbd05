"""How much of one core's arithmetic peak the attention kernels reach.

Forward and backward GFLOP/s of mha_ext on every instruction set this machine has, beside
torch.nn.functional.scaled_dot_product_attention and, where onnxruntime is installed, its
MultiHeadAttention operator (float32 forward): one thread, one process, in turns (A B C A B C ...),
medians. The peak is the multiply-add that mha_ext uses for the dtype on that instruction set, alone
in registers, measured before and after each shape; the larger figure counts. The peers are held
against the highest peak of all. A library that uses another unit (AMX) can exceed it.

    python benchmarks/cpu_share_of_peak.py --json results.json
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext
from mha_ext import _C
from mha_ext.peers import DTYPES
from mha_ext.report import Row, print_table

LENGTHS = (128, 512, 1024, 2048, 4096)
HEAD_DIMS = (64, 128)
SDPA, ONNXRUNTIME = "SDPA", "onnxruntime"


@dataclass
class Measurement:
    """One implementation on one shape."""

    implementation: str  # "mha_ext <isa>", "SDPA" or "onnxruntime"
    dtype: str
    length: int
    head_dim: int
    heads: int
    forward_gflops: float
    backward_gflops: float | None  # backward alone: forward and backward minus forward
    peak_gflops: float
    rounds: int

    @property
    def forward_share(self) -> float:
        """Of the peak, between 0 and 1."""
        return self.forward_gflops / self.peak_gflops

    @property
    def backward_share(self) -> float | None:
        """Of the peak, between 0 and 1."""
        return None if self.backward_gflops is None else self.backward_gflops / self.peak_gflops


def heads_for(length: int) -> int:
    """Twelve heads where that is quick, fewer for long sequences: 1 at 4096."""
    return max(1, min(12, 4096 // length))


def onnx_forward(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object] | None:
    """com.microsoft.MultiHeadAttention on [1, H, L, D] float32, or None without onnxruntime.

    It takes [B, L, H * D], the layout the tensors have in memory; nothing is copied.
    """
    try:
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    heads = query.shape[1]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        _onnx_model(heads), options, providers=["CPUExecutionProvider"]
    )
    feeds = {
        name: tensor.detach().transpose(1, 2).flatten(2).numpy()
        for name, tensor in (("query", query), ("key", key), ("value", value))
    }
    return lambda: session.run(None, feeds)


def _onnx_model(heads: int) -> bytes:
    """A model of one node. Written as protobuf by hand: the package onnx is not needed for that."""

    def number(value: int) -> bytes:
        parts = []
        while True:
            value, low = value >> 7, value & 127
            parts.append(low | (128 if value else 0))
            if not value:
                return bytes(parts)

    def integer(tag: int, value: int) -> bytes:
        return number(tag << 3) + number(value)

    def block(tag: int, content: bytes | str) -> bytes:
        data = content.encode() if isinstance(content, str) else content
        return number(tag << 3 | 2) + number(len(data)) + data

    def tensor_info(name: str) -> bytes:  # ValueInfoProto: float, three free dimensions
        shape = b"".join(block(1, block(2, f"{name}_{axis}")) for axis in range(3))
        return block(1, name) + block(2, block(1, integer(1, 1) + block(2, shape)))

    inputs = ("query", "key", "value")
    num_heads = block(1, "num_heads") + integer(3, heads) + integer(20, 2)  # type INT
    node = b"".join(block(1, name) for name in inputs) + block(2, "out")
    node += block(4, "MultiHeadAttention") + block(5, num_heads) + block(7, "com.microsoft")
    graph = block(1, node) + block(2, "attention")
    graph += b"".join(block(11, tensor_info(name)) for name in inputs)
    graph += block(12, tensor_info("out"))
    opsets = block(8, block(1, "") + integer(2, 17))
    opsets += block(8, block(1, "com.microsoft") + integer(2, 1))
    return integer(1, 8) + block(7, graph) + opsets  # ir_version 8


def _on(isa: str | None, call: Callable[[], object]) -> Callable[[], object]:
    """`call`, on an instruction set of ours (setting it costs well below a microsecond)."""
    if isa is None:
        return call

    def switched() -> object:
        _C.set_isa(isa)
        return call()

    return switched


def _seconds(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def alternate(
    calls: dict[str, Callable[[], object]], seconds: float
) -> tuple[dict[str, float], int]:
    """Median seconds of each call, in turns for about `seconds`, and the number of rounds."""
    times = {}
    for name, call in calls.items():
        call()
        times[name] = max(1, round(2e-3 / max(_seconds(call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for done in itertools.count(1):
        for name, call in calls.items():
            samples[name].append(_seconds(call, times[name]))
        if done >= 5 and time.perf_counter() > end:
            return {name: statistics.median(found) for name, found in samples.items()}, done
    raise AssertionError("unreachable")


def measure(
    dtype_name: str, length: int, head_dim: int, isas: Sequence[str], seconds: float
) -> list[Measurement]:
    """All implementations on one shape, forward and forward with backward."""
    dtype, heads = DTYPES[dtype_name], heads_for(length)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(1, length, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(4)
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]

    def forward(attention: Callable[..., Tensor]) -> Callable[[], object]:
        def call() -> Tensor:
            with torch.no_grad():
                return attention(query, key, value)

        return call

    def training(attention: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(query, key, value), leaves, grad_out)

    candidates: dict[str, tuple[str | None, Callable[..., Tensor]]] = {
        SDPA: (None, F.scaled_dot_product_attention)
    }
    candidates |= {f"mha_ext {isa}": (isa, mha_ext.attention) for isa in isas}
    forwards = {name: _on(isa, forward(f)) for name, (isa, f) in candidates.items()}
    trainings = {name: _on(isa, training(f)) for name, (isa, f) in candidates.items()}
    onnx = onnx_forward(query, key, value) if dtype == torch.float32 else None
    if onnx is not None:
        forwards[ONNXRUNTIME] = onnx
    _verify(forwards, query, key, value)

    peaks = _peaks(dtype_name, isas)
    forward_seconds, rounds = alternate(forwards, seconds)
    training_seconds, _ = alternate(trainings, seconds)
    peaks = {isa: max(peaks[isa], again) for isa, again in _peaks(dtype_name, isas).items()}
    flops = 4 * heads * length * length * head_dim
    found = []
    for name, taken in forward_seconds.items():
        backward = training_seconds[name] - taken if name in training_seconds else None
        isa = candidates[name][0] if name in candidates else None
        peak = max(peaks.values()) if isa is None else peaks[isa]
        found.append(
            Measurement(
                name,
                dtype_name,
                length,
                head_dim,
                heads,
                flops / taken * 1e-9,
                None if backward is None else 2.5 * flops / max(backward, 1e-9) * 1e-9,
                peak * 1e-9,
                rounds,
            )
        )
    return found


def _peaks(dtype: str, isas: Sequence[str]) -> dict[str, float]:
    """FLOP/s of one thread on each instruction set."""
    peaks = {}
    for isa in isas:
        _C.set_isa(isa)
        peaks[isa] = _C.fma_peak(dtype, 0.05)
    return peaks


def _verify(
    forwards: dict[str, Callable[[], object]], query: Tensor, key: Tensor, value: Tensor
) -> None:
    """Stops where a result is not attention: compares 16 rows with float64."""
    rows = torch.linspace(0, query.shape[2] - 1, 16).long()
    q, k, v = (tensor.detach().double() for tensor in (query, key, value))
    exact = (q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    allowed = 32 * torch.finfo(query.dtype).eps * float(exact.abs().max())
    for name, call in forwards.items():
        found: Any = call()
        if isinstance(found, list):  # onnxruntime: [1, L, H * D]
            found = torch.from_numpy(found[0]).view(1, -1, q.shape[1], q.shape[3]).transpose(1, 2)
        error = float((found[:, :, rows].double() - exact).abs().max())
        if not error <= allowed:
            raise SystemExit(f"{name} is wrong: off by {error:.1e}, allowed are {allowed:.1e}")


def show(dtype: str, measurements: Sequence[Measurement]) -> None:
    """One table: a row for each shape and implementation."""
    rows: list[Row] = []
    for _, group in itertools.groupby(measurements, key=lambda m: (m.length, m.head_dim)):
        if rows:
            rows.append(None)
        for m in group:
            rows.append(
                [
                    f"{m.heads} x {m.length} x {m.head_dim}  {m.implementation}",
                    f"{m.forward_gflops:.0f}",
                    f"{m.forward_share:.0%}",
                    "-" if m.backward_gflops is None else f"{m.backward_gflops:.0f}",
                    "-" if m.backward_share is None else f"{m.backward_share:.0%}",
                ]
            )
    headers = ["heads x length x head_dim", "forward\nGFLOP/s", "% of\npeak"]
    headers += ["backward\nGFLOP/s", "% of\npeak"]
    print_table(f"{dtype}, one thread", headers, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--length", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--isa", nargs="+", default=_C.supported_isas(), help="default: all")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape and pass")
    parser.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.isa) - set(_C.supported_isas()))
    if unknown:
        parser.error(f"not supported here: {', '.join(unknown)}")

    torch.set_num_threads(1)
    before = _C.active_isa()
    found: list[Measurement] = []
    try:
        for dtype in arguments.dtype:
            of_dtype: list[Measurement] = []
            for length, head_dim in itertools.product(arguments.length, arguments.head_dim):
                print(f"{dtype}, length {length}, head_dim {head_dim}", file=sys.stderr, flush=True)
                of_dtype += measure(dtype, length, head_dim, arguments.isa, arguments.seconds)
            show(dtype, of_dtype)
            found += of_dtype
    finally:
        _C.set_isa(before)
    if arguments.json:
        content = {
            "mha_ext": mha_ext.__version__,
            "build": _C.build_info(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": processor(),
            "measurements": [asdict(measurement) for measurement in found],
        }
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def processor() -> str:
    """The processor's name where Linux tells it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
