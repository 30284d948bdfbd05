"""How much of one core's arithmetic peak the attention kernels reach, on every instruction set.

The shapes of run.py's topic "peak" on one thread, with mha_ext on each instruction set that this
machine has, beside torch.nn.functional.scaled_dot_product_attention and, where onnxruntime is
installed, its MultiHeadAttention operator (float32 forward). The peak is the multiply-add that
mha_ext uses for the dtype on that instruction set, alone in registers, measured in the same rounds.
The peers are held against the highest peak of all. A library that uses another unit (AMX) can
exceed it.

    python benchmarks/cpu_share_of_peak.py --json results.json
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import run
from measure import OWN, Bench
from onnxruntime_peer import NAME as ONNXRUNTIME
from suite import BOTH, DTYPES, LENGTHS, Group, heads_for, square

from mha_ext import _C
from mha_ext.report import Row, print_table, progress

HEAD_DIMS = (64, 128)
SDPA = "SDPA"


@dataclass
class Measurement:
    """One implementation on one shape."""

    implementation: str  # "mha_ext <isa>", "SDPA" or "onnxruntime"
    dtype: str
    length: int
    head_dim: int
    heads: int
    forward_gflops: float
    backward_gflops: float | None
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


def measure(
    bench: Bench, dtype: str, length: int, head_dim: int, isas: Sequence[str]
) -> list[Measurement]:
    """All implementations on one shape. Raises RuntimeError where a result is not attention."""
    _C.set_isa(isas[0])
    group = Group("peak", dtype, (square(length, head_dim),), BOTH, isas=tuple(isas[1:]))
    records = bench.measure(group, 1)
    highest = max(record.peak.median for record in records if record.peak)
    found = {}
    for record in records:
        name = record.implementation if record.isa is None else f"{OWN} {record.isa}"
        if record.wrong:
            raise RuntimeError(f"{name} is wrong: {', '.join(record.wrong)}")
        assert record.peak and record.seconds and record.flops
        peak = highest if record.isa is None else record.peak.median
        rate = record.flops / record.seconds.median * 1e-9
        if record.what == "forward":
            found[name] = Measurement(
                name,
                dtype,
                length,
                head_dim,
                heads_for(length),
                rate,
                None,
                peak * 1e-9,
                record.seconds.count,
            )
        elif record.what == "backward":
            found[name].backward_gflops = rate
    return list(found.values())


def show(dtype: str, measurements: Sequence[Measurement]) -> None:
    """One table: a row for each shape and implementation."""
    rows: list[Row] = []
    for _, group in itertools.groupby(measurements, key=lambda m: (m.length, m.head_dim)):
        rows += [None] if rows else []
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
    parser = run.Parser(prog="cpu_share_of_peak.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--length", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--isa", nargs="+", default=_C.supported_isas(), help="default: all")
    parser.add_argument("--seconds", type=run.positive, default=2.0, help="for each shape")
    parser.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.isa) - set(_C.supported_isas()))
    if unknown:
        parser.error(f"not supported here: {', '.join(unknown)}")
    for name in ("length", "head_dim"):
        if min(getattr(arguments, name)) < 1:
            parser.error(f"{name} must be at least 1, got {min(getattr(arguments, name))}")

    bench = Bench([SDPA, ONNXRUNTIME], arguments.seconds, None)
    before = _C.active_isa()
    found: list[Measurement] = []
    shapes = list(itertools.product(arguments.dtype, arguments.length, arguments.head_dim))
    try:
        with progress(len(shapes)) as advance:
            for dtype, length, head_dim in shapes:
                advance(f"{dtype}, length {length}, head_dim {head_dim}")
                found += measure(bench, dtype, length, head_dim, arguments.isa)
    except RuntimeError as error:
        print(f"cpu_share_of_peak.py: error: {error}", file=sys.stderr)
        return 1
    finally:
        _C.set_isa(before)
    for dtype in arguments.dtype:
        show(dtype, [measurement for measurement in found if measurement.dtype == dtype])
    if arguments.json:
        content = {
            "machine": run.machine(),
            "versions": run.versions(),
            "measurements": [asdict(measurement) for measurement in found],
        }
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
