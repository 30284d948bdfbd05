"""The C++ compiler: which one, which flags, how many at once, what need not be compiled again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

# -ffp-contract=off: the same sums in every function and with every compiler; the kernels ask for
# fused multiply-adds by name. -fno-math-errno and -fno-trapping-math change no result, and let sqrt
# and selections be vectorised.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno"]
# g++ 12 imagines overflows in torch's inlined reference counts (and clang does not know the word).
TORCH_FLAGS = ["-DTORCH_EXTENSION_NAME=_C", "-Wno-unknown-warning-option", "-Wno-stringop-overflow"]
# -falign-functions: where a kernel begins must not depend on the code before it; what one takes
# has changed by 4% with that.
KERNEL_FLAGS = ["-fno-exceptions", "-fno-rtti", "-fno-trapping-math", "-falign-functions=64"]

GIB = 2**30
MEMORY_OF_A_JOB = 1.5 * GIB


class Compiler(NamedTuple):
    """A compiler that is new enough."""

    command: list[str]
    name: str
    x86: bool
    strict: list[str] = ["-Werror"]  # what makes a warning an error
    user_flags: str = "CXXFLAGS"  # the variable with more flags


def fail(message: str) -> NoReturn:
    raise SystemExit(f"\nmha_ext cannot be built: {message}\n")


def find_compiler() -> Compiler:
    """CXX, else the first of g++, clang++ and c++ that exists."""
    default = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "g++")
    command = shlex.split(os.environ.get("CXX", "")) or [default]
    try:
        answer = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True
        )
    except OSError:
        answer = None
    if answer is None or answer.returncode != 0:
        fail(
            f"there is no C++ compiler ({shlex.join(command)} does not run). Install g++ 11 or "
            "later (apt install g++, dnf install gcc-c++, conda install gxx_linux-64), or name one "
            "in CXX"
        )
    macros = dict(re.findall(r"^#define (\w+) (.*)$", answer.stdout, re.MULTILINE))
    kind, oldest, names = "g++", 11, ["__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__"]
    if "__clang__" in macros:
        kind, oldest = "clang", 14
        names = ["__clang_major__", "__clang_minor__", "__clang_patchlevel__"]
    numbers = [macros[name] for name in names]
    name = f"{kind} {'.'.join(numbers)}"
    if int(numbers[0]) < oldest:
        fail(
            f"{shlex.join(command)} is {name}, and C++20 needs g++ 11 or clang 14 or later. "
            "Install a newer one and name it, for example CXX=g++-12"
        )
    return Compiler(command, name, "__x86_64__" in macros)


def is_kernel(source: Path) -> bool:
    """Below the seam: compiled without torch's headers, so that it cannot include them."""
    return source.parent.name == "cpu" and source.name.startswith(("isa_", "kernels"))


def sources(root: Path, x86: bool) -> list[Path]:
    """What is compiled, kernels (the slowest) first; x86 kernels only for x86-64.

    MHA_EXT_ISAS, instruction sets with commas between them, leaves out all but these and portable.
    """
    found = sorted(root.glob("csrc/*.cpp")) + sorted(root.glob("csrc/cpu/*.cpp"))
    isas = {path.stem.removeprefix("isa_"): path for path in found if path.stem.startswith("isa_")}
    asked = {name for name in os.environ.get("MHA_EXT_ISAS", "").split(",") if name}
    if unknown := asked - set(isas):
        fail(
            f"MHA_EXT_ISAS must name instruction sets of {', '.join(isas)}, but it names "
            f"{', '.join(sorted(unknown))}"
        )
    unwanted = {
        path
        for name, path in isas.items()
        if (asked and name not in asked | {"portable"})
        or (not x86 and "<immintrin.h>" in path.read_text())
    }
    chosen = [path for path in found if path not in unwanted]
    return sorted(chosen, key=lambda path: not is_kernel(path))


def isa_names(files: Sequence[Path]) -> list[str]:
    names = [path.stem.removeprefix("isa_") for path in files if path.name.startswith("isa_")]
    return sorted(names, key=lambda name: (name == "portable", name))


def flags_of(source: Path, x86: bool, torch: Path, macros: Sequence[str] = ()) -> list[str]:
    """The flags of one source; `torch` is the folder of the package torch."""
    if is_kernel(source):
        return [*FLAGS, *KERNEL_FLAGS, f"-DMHA_EXT_X86={int(x86)}"]
    include = torch / "include"
    system = [include, include / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    own = macros if source.name == "ops.cpp" else []
    return [
        *FLAGS,
        *TORCH_FLAGS,
        *own,
        *(argument for folder in system for argument in ("-isystem", str(folder))),
    ]


def job_count() -> int:
    """MAX_JOBS, else as many as there are cores, and 1.5 GB of free memory, to use."""
    asked = os.environ.get("MAX_JOBS", "")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            fail(f"MAX_JOBS must be a number of compilers to run at once, but it is {asked!r}")
        return int(asked)
    free = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    memory = int(free.group(1)) * 1024 if free else GIB
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and limit.read_text().strip().isdigit():
        memory = min(memory, int(limit.read_text()))
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / MEMORY_OF_A_JOB)))


def up_to_date(target: Path, command: str) -> bool:
    """Whether the same command made this object after the last change of every file it read."""
    record, dependencies = target.with_suffix(".command"), target.with_suffix(".d")
    if not (target.is_file() and record.is_file() and dependencies.is_file()):
        return False
    read = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = target.stat().st_mtime
    return record.read_text() == command and all(
        os.path.exists(name) and os.path.getmtime(name) <= made for name in read
    )


def compile_one(
    strict: bool, compiler: Compiler, source: Path, target: Path, flags: Sequence[str]
) -> None:
    command = [*compiler.command, *flags, *shlex.split(os.environ.get(compiler.user_flags, ""))]
    text = shlex.join([*command, str(source)])
    if up_to_date(target, text):
        return
    if strict:
        command += compiler.strict
    started, unfinished = time.time(), target.with_suffix(".tmp")
    outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source)]
    answer = subprocess.run(
        [*command, *outputs, "-o", str(unfinished)], capture_output=True, text=True
    )
    if answer.returncode != 0:
        sys.stderr.write(answer.stderr)
        hints = {
            "Killed": "memory ran out: try again with MAX_JOBS=1",
            "[-Werror": "it is a warning: MHA_EXT_WERROR=0 lets it pass",
        }
        hint = next((hint for sign, hint in hints.items() if sign in answer.stderr), "see above")
        fail(f"{compiler.name} refused {source} ({hint}). The command was\n{text}")
    os.utime(unfinished, (started, started))  # a header that changed meanwhile is newer
    unfinished.replace(target)
    if not answer.stderr:  # what warns is compiled, and warns, every time
        target.with_suffix(".command").write_text(text)
    print(f"  {source.name}: {time.time() - started:.0f} s", flush=True)
    sys.stderr.write(answer.stderr)


def compile_all(strict: bool, work: Sequence[tuple[Compiler, Path, Path, Sequence[str]]]) -> None:
    """Compile each (compiler, source, object, flags) that is not up to date, or stop at a refusal.

    strict: a warning is a refusal.
    """
    with ThreadPoolExecutor(job_count()) as pool:
        futures = [pool.submit(compile_one, strict, *item) for item in work]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def link(
    compiler: Compiler, objects: Sequence[Path], target: Path, torch: Path, more: Sequence[str]
) -> None:
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", *more]
    command = [*compiler.command, "-shared", "-fopenmp", *map(str, objects), "-o", str(target)]
    command += ["-L" + str(torch / "lib"), *libraries, *shlex.split(os.environ.get("LDFLAGS", ""))]
    answer = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(answer.stderr)
    if answer.returncode != 0:
        fail(f"linking failed (see above). The command was\n{shlex.join(command)}")
    if compiler.x86 and b"libstdc++.so" not in target.read_bytes():
        target.unlink()
        fail(
            f"{shlex.join(compiler.command)} links a C++ library of its own into the module, beside "
            "the shared libstdc++ that torch has loaded: the first error message would crash. Name "
            "another compiler in CXX, for example CXX=/usr/bin/g++, or take -static-libstdc++ out of "
            "LDFLAGS"
        )
