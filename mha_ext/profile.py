"""How fast, how much memory, how exact: `mha-ext profile`.

Every implementation computes the same thing from the same values, is compared with float64 first
and timed afterwards, in turns (A B C A B C ...); medians are shown.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import mha_ext
from mha_ext import _C
from mha_ext.cases import CASES, DTYPES, Case, Inputs, Level, levels
from mha_ext.exact import Result, verify, wrong_text
from mha_ext.peers import Run, prepare
from mha_ext.report import Row, check_output, print_table, progress
from mha_ext.timing import alternate

# Inputs that a decoding step would find in a cache are rotated through this many bytes.
ROTATED_BYTES = 2**28


def rotation(inputs: Inputs) -> list[Inputs]:
    """Copies of inputs that a decoding step reads from memory, so that no cache keeps them."""
    size = sum(t.numel() * t.element_size() for t in inputs.tensors.values())
    if inputs.case.keys < 64 * inputs.case.queries or size < 2**20:
        return [inputs]
    copies = [inputs]
    for _ in range(ROTATED_BYTES // size):
        copies.append(
            replace(inputs, tensors={n: t.detach().clone() for n, t in inputs.tensors.items()})
        )
    return copies


def _forward_call(run: Run, copies: list[Inputs]) -> Callable[[], object]:
    rotation = itertools.cycle(copies)

    return lambda: run.call(next(rotation))


def _training_call(run: Run, inputs: Inputs, grad_out: Tensor) -> Callable[[], object]:
    return lambda: run.gradients(inputs, grad_out)


# ------------------------------------------------------------------------------ memory

MEMORY_HELP = """Extra memory is what the process needs at the peak of one forward and backward
(forward, for decoding) beyond what it held before: outputs, gradients, tensors saved for backward,
temporaries, the buffers inside libraries. On Linux it is read from the kernel, as the highest
resident set size (VmHWM) of a fresh process in which every large block is mapped and unmapped on
its own, after a warm-up call; blocks that a library keeps from call to call are therefore not
counted. On CUDA it is torch.cuda.max_memory_allocated. Elsewhere it is not measured."""


def measure_memory(
    cases: Sequence[Case],
    dtype: str,
    threads: int,
    wanted: Mapping[str, Sequence[str]] | None = None,
) -> dict[tuple[str, Level, str], int]:
    """(case, level, implementation) -> bytes, from a process of its own; empty where impossible.

    wanted: the implementations of each case, by its name; all of them when omitted.
    """
    job = {"cases": [asdict(case) for case in cases], "dtype": dtype, "threads": threads}
    job["wanted"] = wanted
    done = subprocess.run(
        [sys.executable, "-c", "from mha_ext import profile; profile.memory_worker()"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=Path(mha_ext.__file__).parents[1],
        env={**os.environ, "MHA_EXT_CPU_ISA": _C.active_isa()},
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        print(f"mha-ext profile: memory was not measured ({last})", file=sys.stderr)
        return {}
    return {(case, level, name): size for case, level, name, size in json.loads(done.stdout)}


def memory_worker() -> None:
    """Reads a job from stdin, writes [case, level, implementation, bytes] to stdout, as JSON."""
    # Large blocks go back to the kernel when they are freed, in small pages: glibc's
    # M_MMAP_THRESHOLD and Linux' PR_SET_THP_DISABLE.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 64 * 1024)
    libc.prctl(41, 1, 0, 0, 0)
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    found = []
    for case in (Case(**fields) for fields in job["cases"]):
        for level in levels(case):
            inputs, runs = prepare(case, level, DTYPES[job["dtype"]], torch.device("cpu"))
            for run in runs:
                if job["wanted"] and run.name not in job["wanted"][case.name]:
                    continue
                call = _memory_call(run, inputs)
                call()
                libc.malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
                before = _status("VmRSS")
                call()
                found.append((case.name, level, run.name, max(0, _status("VmHWM") - before)))
    json.dump(found, sys.stdout)


def _memory_call(run: Run, inputs: Inputs) -> Callable[[], object]:
    if not inputs.case.training:
        return _forward_call(run, [inputs])
    grad_out = torch.ones_like(run.call(inputs))
    return _training_call(run, inputs, grad_out)


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status, which counts kibibytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status does not show {name}")


# ------------------------------------------------------------------------------ all of it


@dataclass(frozen=True)
class Settings:
    """What to run and for how long."""

    cases: Sequence[Case] = CASES
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    seconds: float = 60.0
    repeats: int | None = None


def measure(settings: Settings) -> list[Result]:
    """Verifies, times and weighs every implementation on every case."""
    device = torch.device(settings.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {settings.device!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {settings.device} was asked for, but torch sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    if settings.threads is not None:
        most = os.cpu_count() or settings.threads
        if not 1 <= settings.threads <= most:
            raise ValueError(
                f"threads must be from 1 to {most}, the processors of this machine, "
                f"but is {settings.threads}"
            )
        torch.set_num_threads(settings.threads)
    threads = torch.get_num_threads()
    dtype = DTYPES[settings.dtype]
    groups = sum(len(levels(case)) * (2 if case.training else 1) for case in settings.cases)
    # A fifth is left for the memory; what the float64 results take, later groups have less.
    end = time.perf_counter() + 0.8 * settings.seconds
    results: list[Result] = []
    steps = sum(len(levels(case)) for case in settings.cases) + 1
    with progress(steps) as advance:
        for case in settings.cases:
            for level in levels(case):
                advance(f"{case.name}: {level}")
                peak = _C.fma_peak(settings.dtype, 0.05) if device.type == "cpu" else None
                budget = max(0.0, end - time.perf_counter()) / groups
                groups -= 2 if case.training else 1
                found = _measure_one(case, level, dtype, device, budget, settings.repeats)
                for result in found:
                    result.peak = None if peak is None else peak * threads
                    result.forward_flops = case.flops(level, False)
                    result.training_flops = case.flops(level, True)
                results += found
        advance("memory")
        if device.type == "cpu" and sys.platform == "linux":
            memory = measure_memory(settings.cases, settings.dtype, threads)
            for result in results:
                result.memory = memory.get((result.case, result.level, result.name))
    return results


def _measure_one(
    case: Case,
    level: Level,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    repeats: int | None,
) -> list[Result]:
    # Dropout is off while results are compared: every implementation draws its own.
    inputs, runs = prepare(replace(case, dropout=0.0), level, dtype, device)
    results = verify(runs, inputs, level)
    if case.dropout:
        inputs, runs = prepare(case, level, dtype, device)
    runs = [run for run in runs if not results[run.name].wrong]
    if not runs:
        return list(results.values())

    copies = rotation(inputs)
    calls = {run.name: _forward_call(run, copies) for run in runs}
    for name, samples in alternate(calls, device, seconds, repeats).items():
        found = samples.median
        results[name].forward_ms = found * 1e3
        moved = sum(t.numel() * t.element_size() for t in inputs.tensors.values())
        moved += case.batch * case.queries * case.width * dtype.itemsize
        results[name].gbytes_per_s = moved / found * 1e-9
    if len(copies) > 1 and device.type == "cpu":
        results["mha_ext"].bandwidth = _C.read_bandwidth(
            ROTATED_BYTES, 0.1, torch.get_num_threads()
        )
    if case.training:
        grad_out = torch.ones_like(runs[0].call(inputs))
        calls = {run.name: _training_call(run, inputs, grad_out) for run in runs}
        for name, samples in alternate(calls, device, seconds, repeats).items():
            results[name].training_ms = samples.median * 1e3
    if device.type == "cuda":
        for run in runs:
            call = _memory_call(run, inputs)
            call()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            results[run.name].memory = torch.cuda.max_memory_allocated() - before
    return list(results.values())


HEADERS = (
    "",
    "forward\nms",
    "vs\neager",
    "\nGFLOP/s",
    "% of\npeak",
    "fwd+bwd\nms",
    "vs\neager",
    "\nGFLOP/s",
    "% of\npeak",
    "extra\nMB",
    "max diff\nto float64",
)


def table_rows(results: Sequence[Result], level: Level) -> list[Row]:
    """The rows of one table: each case, then its implementations."""
    rows: list[Row] = []
    for name, group in itertools.groupby(
        (result for result in results if result.level == level), key=lambda result: result.case
    ):
        found = list(group)
        eager = next((result for result in found if result.name == "eager"), None)
        if rows:
            rows.append(None)
        rows.append([name] + [""] * (len(HEADERS) - 1))
        for result in found:
            row = [f"  {result.name}"]
            row += _timing_cells(result, eager, "forward")
            row += _timing_cells(result, eager, "training")
            row.append("-" if result.memory is None else f"{result.memory / 1e6:.1f}")
            row.append("-" if result.out_error is None else f"{result.out_error:.1e}")
            rows.append(row)
    return rows


def _timing_cells(result: Result, eager: Result | None, kind: str) -> list[str]:
    ms = getattr(result, f"{kind}_ms")
    if ms is None:
        return ["WRONG" if result.wrong else "-", "-", "-", "-"]
    base = None if eager is None else getattr(eager, f"{kind}_ms")
    rate = getattr(result, f"{kind}_flops") / ms * 1e3
    return [
        f"{ms:.3f}" if ms < 100 else f"{ms:.1f}",
        "-" if base is None else f"{base / ms:.2f}x",
        f"{rate * 1e-9:.1f}",
        "-" if not result.peak else f"{100 * rate / result.peak:.0f}%",
    ]


def print_results(results: Sequence[Result], settings: Settings) -> None:
    """The tables, what they mean, and whatever was wrong."""
    threads = torch.get_num_threads()
    where = f"{settings.device}, {settings.dtype}, {threads} thread{'s' if threads > 1 else ''}"
    if settings.device == "cpu":
        where += f", {_C.active_isa()}"
    for level, title in (
        ("attention", "Attention alone"),
        ("layer", "Whole layer: projections and attention"),
    ):
        rows = table_rows(results, level)  # type: ignore[arg-type]
        if rows:
            print_table(f"{title} ({where})", HEADERS, rows)
    for result in results:
        if result.bandwidth and result.gbytes_per_s:
            print(
                f"{result.case}: {result.gbytes_per_s:.1f} GB/s; as many threads can read at "
                f"{result.bandwidth * 1e-9:.1f} GB/s here."
            )
    print("eager: matmul, softmax, matmul. SDPA: torch.nn.functional.scaled_dot_product_attention.")
    print(
        "Peak: the multiply-add that mha_ext uses for this dtype, alone, measured in the same "
        "minute,\n      times the threads; a library that uses another unit (AMX) can exceed it."
    )
    print("All results were compared with float64 before they were timed.")
    for result in results:
        if result.wrong:
            what = wrong_text(result.wrong, result.excess)
            print(f"WRONG: {result.name}, {result.case}, {result.level}: {what}", file=sys.stderr)


def write_json(path: str, results: Sequence[Result], settings: Settings) -> None:
    """Everything that was measured, and where."""
    content = {
        "mha_ext": mha_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "isa": _C.active_isa(),
        "threads": torch.get_num_threads(),
        "dtype": settings.dtype,
        "device": settings.device,
        "cases": [asdict(case) for case in settings.cases],
        "results": [asdict(result) for result in results],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def write_trace(path: str, settings: Settings) -> None:
    """A torch.profiler trace (for perfetto.dev) of one layer, forward and backward."""
    case = next((c for c in settings.cases if c.layer and c.training), None)
    if case is None:
        raise ValueError("trace needs a case with a layer that is trained")
    device = torch.device(settings.device)
    inputs, runs = prepare(case, "layer", DTYPES[settings.dtype], device)
    run = next(run for run in runs if run.name == "mha_ext")
    call = _memory_call(run, inputs)
    call()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        call()
    profiler.export_chrome_trace(path)


def main(settings: Settings, json_path: str | None = None, trace_path: str | None = None) -> int:
    """Runs `mha-ext profile`; 1 if mha_ext was wrong anywhere."""
    for path in (json_path, trace_path):
        if path:
            check_output(path)
    results = measure(settings)
    if json_path:  # first, since whoever reads the tables may have gone
        write_json(json_path, results, settings)
    print_results(results, settings)
    if trace_path:
        write_trace(trace_path, settings)
    return int(any(result.wrong for result in results if result.name == "mha_ext"))
