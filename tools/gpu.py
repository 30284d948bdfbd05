"""Builds, tests, sanitizes and measures on a machine with an NVIDIA GPU, within ten minutes.

    python tools/gpu.py RESULTS                  # everything; RESULTS is a folder
    python tools/gpu.py RESULTS --only build test_gpu --minutes 4
    python tools/gpu.py RESULTS --dry-run        # the commands and their times; needs no GPU

No network: torch, setuptools, pytest and nvcc must be there. Each step has a limit of time and a log
in RESULTS; a step that fails or takes too long does not keep the others from running.
RESULTS/summary.txt and RESULTS/results.json are written after each step. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The others need none.
ON_A_GPU = ("test_products_on_a_gpu", "test_chain_on_a_gpu", "test_pipeline_on_a_gpu")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What runs under the sanitizers, which slow a kernel down a hundred times.
SANITIZED = "test_as_on_the_cpu and (everything or plain or bias)"


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take."""

    name: str
    command: tuple[str, ...]
    seconds: int
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # a program without which it is skipped
    after: str = ""  # a step without whose success it is skipped


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    status: str  # passed, failed, out of time, skipped
    seconds: float
    command: str
    log: str = ""
    last_line: str = ""


def contract_tests() -> list[str]:
    """The files with tests that face the kernels."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [f"tests/{path.name}" for path in files if "pytest.mark.isa" in path.read_text()]


def steps(results: Path, isas: str, architectures: str) -> list[Step]:
    """All of them, in the order in which they run."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    # Another compiler than that of the checks may warn of something new.
    build = {"MHA_EXT_CUDA": "1", "MHA_EXT_ISAS": isas, "MHA_EXT_WERROR": "0"}
    if architectures:
        build["TORCH_CUDA_ARCH_LIST"] = architectures
    install = ("-m", "pip", "install", "--verbose", "--no-build-isolation", "--no-deps", "-e", ".")
    versions = (
        "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version());"
        "print(torch.cuda.get_device_properties(0))"
    )
    found = [
        Step("gpu", ("nvidia-smi",), 20, needs="nvidia-smi"),
        Step("torch", (python, "-c", versions), 60),
        Step("build", (python, *install), 240, build),
        Step(
            "wrappers",
            (
                *pytest,
                "tests/cuda/test_wrappers.py",
                *(f"tests/cuda/test_wrappers_hopper.py::{name}" for name in ON_A_GPU),
            ),
            90,
            needs="nvcc",
        ),
        Step("test_gpu", (*pytest, "tests/cuda/test_gpu.py"), 100, after="build"),
    ]
    contract = (*pytest, *several(), "--device", "cuda", "--continue-on-collection-errors")
    threads = {"OMP_NUM_THREADS": "1"} if "-n" in contract else {}
    found.append(Step("contract", (*contract, *contract_tests()), 150, threads, after="build"))
    # Without torch's cache each tensor is memory of its own, and torch's kernels are not looked at.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    chosen = (kernel_filter(), "kns=mha_ext")
    for tool in SANITIZERS:
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "86", *chosen)
        if tool == "memcheck":  # torch asks for symbols and features that a driver may not have
            command += ("--report-api-errors", "no")
        command += (*pytest, "tests/cuda/test_gpu.py", "-k", SANITIZED)
        found.append(Step(tool, command, 100, alone, "compute-sanitizer", "build"))
    bench = (python, "benchmarks/gpu.py", "--output", str(results / "benchmarks.json"))
    bench += ("--minutes", "1.5", "--seconds", "0.7")
    found.append(Step("benchmarks", bench, 140, after="build"))
    return found


def several() -> tuple[str, ...]:
    """All cases in several processes, whose references take processors; else a part of the cases."""
    processes = min(14, os.cpu_count() or 1)
    if processes > 1 and importlib.util.find_spec("xdist"):
        return ("-n", str(processes), "--dist", "loadfile")
    return ("--cases", "40")


def kernel_filter() -> str:
    """The sanitizer's option for kernels by name, which older versions call otherwise."""
    if not shutil.which("compute-sanitizer"):
        return "--kernel-name"
    answer = subprocess.run(["compute-sanitizer", "--help"], capture_output=True, text=True)
    return "--kernel-regex" if "--kernel-regex" in answer.stdout else "--kernel-name"


def architecture_here() -> str:
    """That of the first GPU, as TORCH_CUDA_ARCH_LIST names it: one is compiled faster than two."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    found = re.match(r"\d+\.\d+", answer.stdout)
    return found.group() if found else ""


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:200]


def run(step: Step, log: Path, seconds: float) -> Outcome:
    """Runs a step in a process group of its own, which ends with it."""
    begin, command = time.monotonic(), shlex.join(step.command)
    with log.open("w") as output:
        output.write(f"$ {command}\n")
        output.flush()
        try:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **step.environment},
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{error}\n")
            return Outcome(step.name, "failed", 0.0, command, log.name, str(error))
        try:
            status = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
            except ProcessLookupError:
                pass
            process.wait()
    return Outcome(step.name, status, time.monotonic() - begin, command, log.name, last_line(log))


def write(results: Path, outcomes: Sequence[Outcome]) -> None:
    """summary.txt and results.json."""
    lines = [f"{o.name:12} {o.status:12} {o.seconds:6.0f} s  {o.last_line}" for o in outcomes]
    (results / "summary.txt").write_text("\n".join(lines) + "\n")
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
    (results / "results.json").write_text(text + "\n")


def why_skipped(step: Step, outcomes: Sequence[Outcome], asked: bool, left: float) -> str:
    """Empty where the step can run."""
    failed = {o.name for o in outcomes if o.status != "passed"}
    if not asked:
        return "not asked for"
    if step.needs and not shutil.which(step.needs):
        return f"there is no {step.needs}"
    if step.after in failed and step.after in {o.name for o in outcomes if o.log}:
        return f"{step.after} did not pass"
    if left < 10:
        return "no time left"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="the folder of logs and results")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default: 9.5)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only these steps")
    parser.add_argument("--isas", default="avx2", help="MHA_EXT_ISAS of the build: avx2")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    arguments = parser.parse_args(argv)
    results = arguments.results.resolve()
    # A toolkit need not be in PATH; the build finds it there, too.
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *places])
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or architecture_here()
    found = steps(results, arguments.isas, architectures)
    names = [step.name for step in found]
    unknown = set(arguments.only or []) - set(names)
    if unknown:
        parser.error(f"--only must name steps of {', '.join(names)}, not {sorted(unknown)[0]}")
    wanted = arguments.only or names
    if arguments.dry_run:
        for step in found:
            if step.name in wanted:
                given = " ".join(f"{k}={shlex.quote(v)}" for k, v in step.environment.items())
                print(f"{step.name} ({step.seconds} s): {given} {shlex.join(step.command)}")
        return 0
    results.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + 60 * arguments.minutes, []
    for number, step in enumerate(found):
        left = end - time.monotonic()
        reason = why_skipped(step, outcomes, step.name in wanted, left)
        if reason:
            outcome = Outcome(step.name, "skipped", 0.0, shlex.join(step.command), "", reason)
        else:
            print(f"{step.name} ...", flush=True)
            log = results / f"{number:02}-{step.name}.log"
            outcome = run(step, log, min(step.seconds, left))
        print(f"{step.name}: {outcome.status}, {outcome.last_line}", flush=True)
        outcomes.append(outcome)
        write(results, outcomes)
    return 1 if any(o.status in ("failed", "out of time") for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
