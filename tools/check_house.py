"""Who may know whom (docs/design.md), as greps; weak symbols in the kernels' objects; words.

    python tools/check_house.py

One line per violation, and exit status 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import toolchain  # noqa: E402

TORCH = r"[<\"](torch|ATen|c10|pybind11)/"
SPEC = r"\"(\.\./|\.\./\.\./)?(spec/)?(attention|dropout|linear|mask)\.h\""
INTRINSICS = r"<(immintrin|arm_neon|arm_sve|cpuid|riscv_vector)\.h>"
PLAIN_C = r"<(sys/)?\w+\.h>"
OWN = r"\"[\w-]+\.h\""
OWN_CUDA = r"\"[\w-]+\.(h|cuh)\""

# files, what their includes must match, why
MAY_INCLUDE = [
    ("csrc/spec/*", rf"<(stdint|math)\.h>|{SPEC}", "spec/ knows <stdint.h> and <math.h> only"),
    (
        "csrc/cpu/isa_*.cpp",
        rf"<(stdint|math)\.h>|{INTRINSICS}|{SPEC}|{OWN}",
        "an ISA file knows spec/ and intrinsics: no torch, no C++ library",
    ),
    (
        "csrc/cpu/*-inl.h",
        rf"<(stdint|math)\.h>|{INTRINSICS}|{SPEC}|{OWN}",
        "the algorithm knows spec/ and intrinsics: no torch, no C++ library",
    ),
    ("csrc/cpu/kernels.h", rf"{PLAIN_C}|{SPEC}|{OWN}", "the seam is plain C++: no C++ library"),
    ("csrc/cpu/kernels.cpp", rf"{PLAIN_C}|{INTRINSICS}|{SPEC}|{OWN}", "no torch below the seam"),
    ("csrc/cuda/*.cu", rf"{SPEC}|{OWN_CUDA}", "a kernel knows spec/ and its own headers"),
    ("csrc/cuda/*.cuh", rf"{SPEC}|{OWN_CUDA}", "a kernel knows spec/ and its own headers"),
    ("csrc/cuda/kernels.h", SPEC, "the seam is plain C++: no C++ library"),
]
# files, what no line may match, why
MUST_NOT = [
    ("csrc/cuda/*.cu*", rf"#include *{TORCH}", "no torch below the seam"),
    ("csrc/cpu/*", r"#include .*cuda", "cpu/ and cuda/ never see each other"),
    ("csrc/cuda/*", r"#include .*cpu/", "cpu/ and cuda/ never see each other"),
    ("csrc/**/*", r"#\s*(el)?if(def)?\b.*__(AVX|SSE|FMA|F16C)", "an ISA is a type, not a macro"),
    ("csrc/**/*", r"ffast-math|Ofast", "sums are never reordered"),
    ("mha_ext/functional.py", r"^from mha_ext\.modules|mha_ext import modules", "one way through"),
    (
        "mha_ext/*.py",
        r"^(from|import) mha_ext\.distributed",
        "one device loads nothing of many: import it where a tensor is a DTensor",
    ),
]
SPEAKS_TORCH = re.compile(
    r"csrc/((ops|problem|checks|sizes|autograd|autograd_call|autograd_nodes|autocast|meta|composite|direct|linear|explain)\.(h|cpp)"
    r"|(cpu|cuda)/(attention|linear)\.cpp|cpu/(gradients|weights|explain)\.cpp|cpu/(attention|padding|pages|schedule)\.h)"
)
REFERENCE_IMPORTS = {"__future__", "collections", "math", "torch", "typing"}
WORDS = [
    (r"(?<![\w.\]})~-])/(work|tmp|home|root|opt|mnt)/\w", "a path of one machine"),
    (r"pypi\.org|python[h]osted|download\.pytorch\.org|anaconda\.org", "the host of a registry"),
]
LINES = 450  # more makes one wonder whether a file still holds one concept


def text_files() -> list[Path]:
    """What is tracked, or would be; every file where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = answer.stdout.splitlines() if answer.returncode == 0 else ROOT.rglob("*")
    found = [ROOT / name for name in names if (ROOT / name).is_file()]
    return [path for path in found if b"\0" not in path.read_bytes()[:4096]]


def includes() -> list[str]:
    found = []
    for pattern, allowed, why in MAY_INCLUDE:
        for path in sorted(ROOT.glob(pattern)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                included = re.match(r"\s*#\s*include\s+(\S+)", line)
                if included and not re.fullmatch(allowed, included.group(1)):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {why}: {line.strip()}")
    for pattern, forbidden, why in MUST_NOT:
        for path in sorted(ROOT.glob(pattern)):
            if not path.is_file():
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(forbidden, line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {why}: {line.strip()}")
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        speaks = path.is_file() and re.search(rf"#\s*include\s+{TORCH}", path.read_text())
        if speaks and not SPEAKS_TORCH.fullmatch(name):
            found.append(f"{name}: only {SPEAKS_TORCH.pattern} speak torch")
    for path in sorted((ROOT / "csrc/cuda").glob("*.cu*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            wraps = path.name in ("tile.cuh", "tile_hopper.cuh")
            if not wraps and re.search(r"\basm\b|__sync\w+\(|__\w+_sync\(", line):
                where = f"{path.relative_to(ROOT)}:{number}"
                found.append(
                    f"{where}: all PTX and intrinsics are in tile.cuh and tile_hopper.cuh: {line.strip()}"
                )
    reference = ROOT / "mha_ext/reference.py"
    if reference.is_file():
        for number, line in enumerate(reference.read_text().splitlines(), 1):
            imported = re.match(r"\s*(?:import|from)\s+(\w+)", line)
            if imported and imported.group(1) not in REFERENCE_IMPORTS:
                found.append(f"mha_ext/reference.py:{number}: imports torch only: {line.strip()}")
    return found


def weak_symbols() -> list[str]:
    """Functions that the linker may take from an ISA's object for the whole program: none may be.

    Compiled without inlining, where every function that could be emitted is.
    """
    compiler = toolchain.find_compiler()
    files = [path for path in toolchain.sources(ROOT, compiler.x86) if toolchain.is_kernel(path)]

    def check(path: Path) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "kernel.o")
            flags = [*toolchain.flags_of(path, compiler.x86, ROOT), "-O0"]
            command = [*compiler.command, *flags, "-c", str(path), "-o", str(target)]
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode != 0:
                return [f"{path.relative_to(ROOT)} does not compile: {answer.stderr.strip()}"]
            symbols = subprocess.run(["nm", "-C", target], capture_output=True, text=True).stdout
        weak = re.findall(r"^[0-9a-f]{16} ([VWuvw]) (.*)$", symbols, re.MULTILINE)
        return [f"{path.relative_to(ROOT)}: weak symbol: {kind} {name}" for kind, name in weak]

    with ThreadPoolExecutor(toolchain.job_count()) as pool:
        return [line for lines in pool.map(check, files) for line in lines]


def words() -> list[str]:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern, what in WORDS:
                if re.search(pattern, line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:100]}")
    return found


def main() -> int:
    for path in text_files():
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}:
            count = len(path.read_text().splitlines())
            if count > LINES:
                print(f"note: {path.relative_to(ROOT)} has {count} lines")
    found = includes() + words() + weak_symbols()
    print("\n".join(found) if found else "the house is in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
