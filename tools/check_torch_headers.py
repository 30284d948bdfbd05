"""Do the sources compile with another torch's headers?

    python tools/check_torch_headers.py 2.11.0 2.15.0

Downloads each wheel (hundreds of megabytes), takes its headers, and checks every source that includes
them, without generating code. Nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import toolchain  # noqa: E402


def unpack_headers(version: str, folder: Path) -> Path:
    """torch's package folder, of which only the headers are there."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-d", str(folder), f"torch=={version}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.startswith("torch/include/")]
        )
    wheel.unlink()
    return folder / "torch"


def check(version: str) -> bool:
    compiler = toolchain.find_compiler()
    files = toolchain.sources(ROOT, compiler.x86) + sorted(ROOT.glob("csrc/cuda/*.cpp"))
    with tempfile.TemporaryDirectory() as folder:
        torch = unpack_headers(version, Path(folder))

        def syntax(path: Path) -> subprocess.CompletedProcess[str]:
            flags = [*toolchain.flags_of(path, compiler.x86, torch), "-Werror", "-fsyntax-only"]
            command = [*compiler.command, *flags, str(path)]
            return subprocess.run(command, capture_output=True, text=True)

        files = [path for path in files if not toolchain.is_kernel(path)]
        with ThreadPoolExecutor(toolchain.job_count()) as pool:
            answers = dict(zip(files, pool.map(syntax, files), strict=True))
    for path, answer in answers.items():
        verdict = "ok" if answer.returncode == 0 else f"FAILED\n{answer.stderr}"
        print(f"torch {version}: {path.relative_to(ROOT)}: {verdict}", flush=True)
    return all(answer.returncode == 0 for answer in answers.values())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    passed = [check(version) for version in sys.argv[1:]]
    sys.exit(0 if all(passed) else 1)
