"""Measures mha_ext on a GPU beside each backend of scaled_dot_product_attention, by its name.

    python benchmarks/gpu.py --list                      # what would run; needs no GPU
    python benchmarks/gpu.py --output gpu.json          # all of it
    python benchmarks/gpu.py --topics peak --dtype bfloat16 --minutes 2

Each result is compared with float64 before it is timed. benchmarks/README.md says how.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import run
import torch
from measure import Failures
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_ext.cases import DTYPES, Case, Inputs, make_inputs
from mha_ext.exact import exact_results, random_like, verify, wrong_text
from mha_ext.peers import CORES, Run, attention_run
from mha_ext.profile import rotation
from mha_ext.report import Row, print_table, progress
from mha_ext.timing import Samples, calls_per_sample, clock, in_turns, summary

GPU = torch.device("cuda")
OWN = "mha_ext"
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
TOPICS = {
    "peak": "long sequences, 16384 tokens and 2048 columns in all: share of the matrix peak",
    "models": "attention of real models",
    "width": "head widths",
    "masks": "padding, arbitrary masks, biases",
    "decode": "one query over a cache: share of the bandwidth",
    "dtype": "float32 and float64",
}
COPIED = 2**30  # bytes
FACTORS = {2: 8192, 4: 4096, 8: 4096}  # bytes of an element -> rows of the matrices of the peak
MATH_SCORES = 2**30  # beyond, MATH would write more than a GPU has


@dataclass(frozen=True)
class Group:
    """One case in one dtype; all implementations are timed in the same rounds."""

    topic: str
    dtype: str
    case: Case

    @property
    def title(self) -> str:
        return f"{self.topic}: {self.case.name}, {self.dtype}"


@dataclass
class Record:
    """One figure: an implementation and a pass."""

    topic: str
    case: str
    dtype: str
    implementation: str
    what: str  # forward, backward (from the result to its gradients), training (both)
    seconds: Samples
    flops: float  # useful ones
    bytes: int  # inputs and output, once each
    peak: Samples  # FLOP/s of a large torch.matmul in the same rounds
    bandwidth: Samples | None  # bytes/s of a large copy, read and written
    error: float | None
    memory: int | None = None  # extra bytes at the peak of the pass

    @property
    def share(self) -> float:
        """Of the matrix peak."""
        return self.flops / self.seconds.median / self.peak.median

    @property
    def share_of_bandwidth(self) -> float | None:
        """Of the bandwidth of copying."""
        if self.bandwidth is None:
            return None
        return self.bytes / self.seconds.median / self.bandwidth.median


# ------------------------------------------------------------------------------ what is measured


def square(length: int, head_dim: int, **options: Any) -> Case:
    """16384 tokens and 2048 columns, however they are cut."""
    causal = ", causal" if options.get("mask") == "causal" else ""
    name = f"{length} x {head_dim}{causal}"
    return Case(name, 16384 // length, 2048 // head_dim, length, length, head_dim, **options)


def groups() -> list[Group]:
    """All of them, those that matter most first within each topic."""
    found = []
    for length, mask in itertools.product((4096, 1024, 16384, 2048, 8192), ("none", "causal")):
        found.append(Group("peak", "bfloat16", square(length, 128, mask=mask)))
    for length in (4096, 1024):
        found.append(Group("peak", "bfloat16", square(length, 64)))
        found.append(Group("peak", "float16", square(length, 128)))
    models = [
        Case("GPT 4096, causal", 4, 12, 4096, 4096, 64, mask="causal"),
        Case("GPT 1024, causal", 8, 12, 1024, 1024, 64, mask="causal"),
        Case("Llama 4096, 32:8, causal", 1, 32, 4096, 4096, 128, 8, mask="causal"),
        Case("BERT-base 512", 16, 12, 512, 512, 64),
        Case("BERT-base 128", 64, 12, 128, 128, 64),
        Case("MiniLM 64, padded", 128, 12, 64, 64, 32, mask="padding"),
        Case("ViT-base 197", 64, 12, 197, 197, 64),
        Case("cross attention 64x(12|10)x300", 64, 6, 12, 10, 50),
    ]
    found += [Group("models", "bfloat16", case) for case in models]
    for width in (32, 50, 64, 80, 96, 128, 256):
        case = Case(f"2048 x {width}", 8, 16, 2048, 2048, width)
        found.append(Group("width", "bfloat16", case))
    masked = Case("2048 x 64", 8, 16, 2048, 2048, 64)
    for mask in ("none", "padding", "random", "bias", "blocks", "window"):
        found.append(
            Group("masks", "bfloat16", replace(masked, name=f"2048 x 64, {mask}", mask=mask))
        )
    for width in (64, 128):
        case = Case(f"2048 x {width}, dropout", 8, 16, 2048, 2048, width, dropout=0.1)
        found.append(Group("masks", "bfloat16", case))
    for keys, batch in ((4096, 16), (32768, 4), (2048, 1), (32768, 1)):
        name = f"{batch} x 1 over {keys}, 32:8"
        case = Case(name, batch, 32, 1, keys, 128, 8, training=False, layer=False)
        found.append(Group("decode", "bfloat16", case))
    for dtype, length in (("float32", 2048), ("float32", 512), ("float64", 1024)):
        case = Case(f"{length} x 64", 8, 8, length, length, 64)
        found.append(Group("dtype", dtype, case))
    return found


# ------------------------------------------------------------------------------ who runs it


@dataclass
class Work:
    """One implementation, ready to be timed."""

    run: Run
    backend: SDPBackend | None
    trains: bool = False
    error: float | None = None

    def chosen(self) -> AbstractContextManager[None]:
        """Within it SDPA has this backend alone. Entered once for a sample: it costs time."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)


def implementations(inputs: Inputs, names: Sequence[str]) -> list[Work]:
    """Ours and the backends that are named."""
    found = [Work(attention_run(OWN, CORES[OWN](inputs)), None)]
    for name in names:
        if name == "MATH" and inputs.case.scores > MATH_SCORES:
            continue
        core = CORES["SDPA"](inputs)
        found.append(Work(attention_run(name, core), getattr(SDPBackend, name)))
    return found


def usable(work: Sequence[Work], inputs: Inputs, title: str, failures: Failures) -> list[Work]:
    """Those that run and are right; what they fail with, or what is wrong, goes to `failures`."""
    found, exact, grad_out = [], None, None
    for w in work:
        name = f"{w.run.name}, {title}"
        with w.chosen():
            try:
                out = w.run.call(inputs)
                if grad_out is None:
                    grad_out = random_like(out)
                    exact = exact_results(inputs, "attention", grad_out)
            except RuntimeError as error:
                failures.add(name, error)
                continue
            if inputs.case.training:
                try:
                    w.run.gradients(inputs, grad_out)
                    w.trains = True
                except RuntimeError as error:
                    failures.add(f"backward of {name}", error)
            checked = replace(w.run, differentiable=w.trains)
            result = verify([checked], inputs, "attention", exact)[w.run.name]
        w.error = result.out_error
        if result.wrong:
            failures.add(name, f"wrong: {wrong_text(result.wrong, result.excess)}")
        else:
            found.append(w)
    return found


# ------------------------------------------------------------------------------ timing


def matmul_rate(dtype: torch.dtype) -> Callable[[], float]:
    """FLOP/s of a large product; float32 in float32, not in TF32."""
    size = FACTORS[dtype.itemsize]
    a, b = (torch.randn(size, size, device=GPU).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = calls_per_sample(lambda: torch.matmul(a, b, out=out), GPU)
    return lambda: 2.0 * size**3 / clock(lambda: torch.matmul(a, b, out=out), times, GPU)


def copy_rate() -> Callable[[], float]:
    """Bytes per second, read and written."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=GPU).zero_()
    target = torch.empty_like(source)
    return lambda: 2.0 * COPIED / clock(lambda: target.copy_(source), 4, GPU)


def clock_training(w: Work, inputs: Inputs, grad_out: Tensor, times: int) -> dict[str, float]:
    """Seconds of forward and backward, and of backward alone."""
    leaves = list(w.run.leaves(inputs).values())
    event: Any = torch.cuda.Event
    marks = [[event(enable_timing=True) for _ in range(3)] for _ in range(times)]
    for start, middle, end in marks:
        start.record()
        out = w.run.forward(inputs)
        middle.record()
        torch.autograd.grad(out, leaves, grad_out)
        end.record()
    torch.cuda.synchronize()
    training = sum(start.elapsed_time(end) for start, _, end in marks)
    backward = sum(middle.elapsed_time(end) for _, middle, end in marks)
    return {"training": training * 1e-3 / times, "backward": backward * 1e-3 / times}


def visit(w: Work, inputs: Inputs, copies: Sequence[Inputs]) -> Callable[[], dict[str, float]]:
    """Times all passes of one implementation."""
    turn = itertools.cycle(copies)

    def forward() -> Tensor:
        return w.run.call(next(turn))

    with w.chosen():
        times = calls_per_sample(forward, GPU)
    grad_out = random_like(forward())

    def once() -> dict[str, float]:
        with w.chosen():
            found = {"forward": clock(forward, times, GPU)}
            if w.trains:
                found |= clock_training(w, inputs, grad_out, max(1, times // 3))
        return found

    return once


def extra_memory(w: Work, inputs: Inputs) -> int:
    """Bytes at the peak beyond what is there before: of training, or of forward."""
    with w.chosen():
        out = w.run.call(inputs)
        grad_out = torch.ones_like(out)
        del out
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if w.trains:
            w.run.gradients(inputs, grad_out)
        else:
            w.run.call(inputs)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(group: Group, names: Sequence[str], seconds: float, failures: Failures) -> list[Record]:
    """All figures of one group."""
    case, dtype = group.case, DTYPES[group.dtype]
    # Dropout is off while results are compared: every implementation draws its own.
    inputs = make_inputs(replace(case, dropout=0.0), "attention", dtype, GPU)
    works = usable(implementations(inputs, names), inputs, group.title, failures)
    if case.dropout:
        inputs = make_inputs(case, "attention", dtype, GPU)
        right = {w.run.name: w for w in works}
        works = [w for w in implementations(inputs, names) if w.run.name in right]
        for w in works:
            w.trains, w.error = right[w.run.name].trains, right[w.run.name].error
    copies = rotation(inputs)
    visits: dict[str, Callable[[], Any]] = {}
    for w in works:
        try:
            visits[w.run.name] = visit(w, inputs, copies)
        except RuntimeError as error:
            failures.add(f"{w.run.name}, {group.title}", error)
    works = [w for w in works if w.run.name in visits]
    visits["matmul"] = matmul_rate(dtype)
    if group.topic == "decode":
        visits["copy"] = copy_rate()
    found = in_turns(visits, seconds)
    peak = summary(found["matmul"])
    bandwidth = summary(found["copy"]) if "copy" in found else None
    forward, both = case.flops("attention", False), case.flops("attention", True)
    flops = {"forward": forward, "training": both, "backward": both - forward}
    moved = sum(t.numel() for t in inputs.tensors.values())
    moved += case.batch * case.queries * case.heads * case.value_width
    records = []
    for w in works:
        memory = extra_memory(w, inputs)
        for what in found[w.run.name][0]:
            samples = summary([sample[what] for sample in found[w.run.name]])
            kept = memory if what == ("training" if w.trains else "forward") else None
            records.append(
                Record(
                    group.topic,
                    case.name,
                    group.dtype,
                    w.run.name,
                    what,
                    samples,
                    flops[what],
                    moved * dtype.itemsize,
                    peak,
                    bandwidth,
                    w.error,
                    kept,
                )
            )
    return records


# ------------------------------------------------------------------------------ the command line


@dataclass
class Shown:
    """One row of a table: an implementation's passes, by name."""

    passes: dict[str, Record] = field(default_factory=dict)

    def cells(self, what: str) -> list[str]:
        record = self.passes.get(what)
        if record is None:
            return ["-", "-", "-"]
        rate = record.flops / record.seconds.median
        return [f"{record.seconds.median * 1e3:.3f}", f"{rate * 1e-12:.0f}", f"{record.share:.0%}"]


def show(topic: str, records: Sequence[Record]) -> None:
    """One table for a topic."""
    rows: list[Row] = []
    for (case, dtype), part in itertools.groupby(records, key=lambda r: (r.case, r.dtype)):
        lines: dict[str, Shown] = {}
        for record in part:
            lines.setdefault(record.implementation, Shown()).passes[record.what] = record
        rows += [None] if rows else []
        for name, line in lines.items():
            share = line.passes["forward"].share_of_bandwidth
            cells = [*line.cells("forward"), "-" if share is None else f"{share:.0%}"]
            cells += line.cells("backward")
            memory = next((r.memory for r in line.passes.values() if r.memory is not None), None)
            cells.append("-" if memory is None else f"{memory / 2**20:.0f}")
            rows.append([f"{case}, {dtype}  {name}", *cells])
    headers = ["", "forward\nms", "\nTFLOP/s", "% of\nmatmul", "% of\ncopy"]
    headers += ["backward\nms", "\nTFLOP/s", "% of\nmatmul", "extra\nMiB"]
    print_table(f"{topic}: {TOPICS[topic]}", headers, rows)


def content(records: Sequence[Record], failures: Failures, left: Sequence[Group]) -> dict[str, Any]:
    """What is written as JSON."""
    shares = [{"share": r.share, "share_of_bandwidth": r.share_of_bandwidth} for r in records]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "versions": {**run.versions(), "cuda": torch.version.cuda, "cudnn": _cudnn()},
        "records": [{**asdict(r), **s} for r, s in zip(records, shares, strict=True)],
        "failures": failures.found,
        "not_measured": [group.title for group in left],
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def _cudnn() -> int | None:
    found: int | None = torch.backends.cudnn.version()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = run.Parser(prog="gpu.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--seconds", type=run.positive, default=1.5, help="for each group")
    parser.add_argument("--minutes", type=run.positive, help="begin no group after so long")
    parser.add_argument("--output", metavar="FILE", help="the JSON file")
    parser.add_argument("--list", action="store_true", help="print the groups and stop")
    arguments = parser.parse_args(argv)
    wanted = [
        group
        for group in groups()
        if group.topic in arguments.topics and group.dtype in arguments.dtype
    ]
    if not wanted:
        parser.error("nothing is left to measure: --list without options shows all groups")
    if arguments.list:
        for group in wanted:
            print(group.title)
        print(f"{len(wanted)} groups; {OWN}, {', '.join(arguments.peers) or 'no peers'}")
        return 0
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    # In turns over the topics, so that a limit of time leaves something of each.
    by_topic = [[g for g in wanted if g.topic == topic] for topic in arguments.topics]
    ordered = [g for turn in itertools.zip_longest(*by_topic) for g in turn if g is not None]
    warnings.simplefilter("ignore")  # SDPA says at length why a backend does not take a problem
    begin, failures = time.perf_counter(), Failures()
    records: list[Record] = []
    left: list[Group] = []

    def write() -> None:
        if arguments.output:
            text = json.dumps(content(records, failures, left), indent=1)
            Path(arguments.output).write_text(text + "\n")

    with progress(len(ordered)) as advance:
        for group in ordered:
            advance(group.title)
            if arguments.minutes and time.perf_counter() - begin > 60 * arguments.minutes:
                left.append(group)
                continue
            try:
                records += measure(group, arguments.peers, arguments.seconds, failures)
            except RuntimeError as error:
                failures.add(group.title, error)
            torch.cuda.empty_cache()
            write()
    write()
    for topic in arguments.topics:
        chosen = [record for record in records if record.topic == topic]
        if chosen:
            show(topic, chosen)
    for group in left:
        print(f"not measured, no time left: {group.title}", file=sys.stderr)
    return 0 if records else 1


if __name__ == "__main__":
    sys.exit(main())
