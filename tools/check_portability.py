"""Do the kernels compile with clang, and the portable ones for aarch64?

    python tools/check_portability.py

A compiler that is not installed is skipped, and said so. Nothing is run. At -O1 clang says what it says
at -O3, of loops that it could not unroll too, in half the time; g++ may say more, of what is not initialized.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import toolchain  # noqa: E402

COMPILERS = {"clang++": True, "aarch64-linux-gnu-g++": False}  # name: for x86-64?


def main() -> int:
    work = []
    for name, x86 in COMPILERS.items():
        if shutil.which(name) is None:
            print(f"{name}: skipped, it is not installed")
            continue
        for path in toolchain.sources(ROOT, x86):
            if toolchain.is_kernel(path):
                flags = [*toolchain.flags_of(path, x86, ROOT), "-O1", "-Werror"]
                work.append((path, name, [name, *flags, "-S", "-o", "/dev/null", str(path)]))

    def compile_one(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True)

    failed = False
    with ThreadPoolExecutor(toolchain.job_count()) as pool:
        answers = pool.map(compile_one, [command for _, _, command in work])
        for (path, name, _), answer in zip(work, answers, strict=True):
            failed |= answer.returncode != 0
            errors = [line for line in answer.stderr.splitlines() if "error:" in line]
            errors = list(dict.fromkeys(errors))[:10]
            verdict = "\n  ".join(["FAILED", *errors]) if answer.returncode else "ok"
            print(f"{name}: {path.relative_to(ROOT)}: {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
