"""What takes long of the checks of the CUDA kernels, none of which needs a GPU.

    python tools/check_cuda.py              # all of it where a source has changed, else some cases
    python tools/check_cuda.py --record     # all of it, and write tools/cuda_record.txt

All of it is: the registers of every kernel (check_ptxas.py; needs nvcc), small errors in the kernels that
tests/cuda must catch, and every case of the contract's tests on the emulated kernels: an hour and a half on
two cores. The record says of which sources all of that was in order, and by what ptxas said. Where it is of
these, the same checks would say the same again: four cases of each of the contract's tests are run, which
face the CPU's side of the package, too.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools/cuda_record.txt"
sys.path.insert(0, str(ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402
import toolchain  # noqa: E402

ARCHITECTURES = ("80", "90")
# What the checks depend on. The contract's tests themselves are run, in part, whatever changed.
SOURCES = (
    "csrc/cuda/*.[ch]*",
    "csrc/spec/*.h",
    "tests/cuda/*.[chp]*",
    "tests/cases.py",
    "tests/devices.py",
    "tests/sizes.py",
    "build_backend/cuda_toolkit.py",
    "tools/check_cuda.py",
    "tools/check_ptxas.py",
)
# What is special on Hopper are the kernels of 16-bit types.
HOPPER = ["--device", "hopper", "-k", "float16"]
HOPPER += [f"tests/test_{name}.py" for name in ("forward", "backward", "guarantees", "extremes")]


def nvcc_release() -> str:
    """Of the nvcc that is here; empty if there is none."""
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        return ""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return "nvcc " + re.findall(r"release ([\d.]+)", answer)[0]


def digest() -> str:
    """Of the sources in SOURCES."""
    state = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def is_recorded() -> bool:
    """Whether the record is of these sources, and by the nvcc that is here."""
    if not RECORD.is_file():
        return False
    sources, release = RECORD.read_text().splitlines()[:2]
    return sources == f"sources {digest()}" and nvcc_release() in ("", release)


def run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    status = subprocess.run([sys.executable, "-I", *command], cwd=ROOT).returncode
    if status != 0:
        sys.exit(status)


def run_tests(*arguments: str) -> None:
    """A file stays in one process: what it makes for all its tests happens once."""
    jobs = str(min(4, toolchain.job_count()))
    run("-m", "pytest", "-q", "--timeout", "600", "-n", jobs, "--dist", "loadfile", *arguments)


def registers() -> list[str]:
    """What check_ptxas.py says, a line for each kernel."""
    print("$ tools/check_ptxas.py", *ARCHITECTURES, flush=True)
    command = [sys.executable, "tools/check_ptxas.py", *ARCHITECTURES]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(answer.stdout, end="", flush=True)
    if answer.returncode != 0:
        sys.exit(answer.returncode)
    return sorted(answer.stdout.splitlines())


def check_all() -> list[str]:
    """Every check; what ptxas said."""
    lines = registers() if nvcc_release() else []
    run_tests("--slow", "tests/cuda", "-k", "mutations or past_the_end")
    run_tests("--device", "emulator")
    run_tests(*HOPPER)
    return lines


def check_some(cases: int = 4) -> None:
    for where in (["--device", "emulator"], HOPPER):
        run_tests(*where, "--cases", str(cases))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="check all, and write the record")
    given = parser.parse_args(arguments)
    name = RECORD.relative_to(ROOT)
    if given.record:
        release, before = nvcc_release(), digest()
        if not release:
            sys.exit("--record needs nvcc, for the registers, and there is none")
        lines = check_all()
        if digest() != before:
            sys.exit("the sources have changed meanwhile: nothing was recorded")
        RECORD.write_text("\n".join([f"sources {before}", release, *lines]) + "\n")
    elif is_recorded():
        print(f"{name} is of these sources: some cases are run")
        check_some()
    else:
        print(f"{name} is of other sources, or another nvcc: everything is checked", flush=True)
        check_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
