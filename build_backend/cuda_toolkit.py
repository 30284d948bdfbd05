"""nvcc: whether and how the CUDA kernels are compiled.

They are where torch is a CUDA build and there is an nvcc of the same major version. Environment:
MHA_EXT_CUDA (0: never; 1: with any torch, or the build stops), TORCH_CUDA_ARCH_LIST (the
architectures, as for torch's own extensions) and CUDA_HOME.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from toolchain import Compiler, fail

ARCHITECTURES = "8.0;9.0+PTX"
OLDEST_ARCHITECTURE, OLDEST_NVCC = 80, (12, 0)
FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]


class Cuda(NamedTuple):
    """A CUDA toolkit and what it compiles for."""

    compiler: Compiler
    chosen: list[str]  # what `architectures` gives
    libraries: list[str]  # for the linker
    name: str


class Unusable(Exception):
    """Why the kernels cannot be compiled here, and what to do about it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


def wanted() -> bool | None:
    """MHA_EXT_CUDA; None = where it is possible."""
    asked = os.environ.get("MHA_EXT_CUDA", "")
    if asked not in ("", "0", "1"):
        fail(f"MHA_EXT_CUDA must be 0 or 1, but is {asked!r}")
    return None if asked == "" else asked == "1"


def architectures(text: str) -> list[str]:
    """-gencode for each architecture of a list such as "8.0;9.0+PTX". Raises Unusable."""
    flags, found = [], [name for name in re.split(r"[;,\s]+", text) if name]
    for name in found:
        number = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if number is None:
            raise Unusable(
                f"TORCH_CUDA_ARCH_LIST must name architectures by number, as in "
                f"{ARCHITECTURES!r}, but has {name!r}"
            )
        major, minor, family, ptx = number.groups()
        if int(major + minor) < OLDEST_ARCHITECTURE:
            continue  # those kernels would not run there
        real = f"{major}{minor}{family}"
        flags += ["-gencode", f"arch=compute_{real},code=sm_{real}"]
        if ptx:
            flags += ["-gencode", f"arch=compute_{real},code=compute_{real}"]
    if not flags:
        raise Unusable(f"TORCH_CUDA_ARCH_LIST ({text!r}) names no architecture of 8.0 or later")
    return flags


def flags_of(source: Path, chosen: list[str]) -> list[str]:
    """Those of one source, for what `architectures` gives.

    The kernels of compute capability 9.0 use what later GPUs do not have (sm_90a): their sources
    are compiled for it alone, and the others are told that they are there.
    """
    hopper = any("compute_90" in flag for flag in chosen)
    if hopper and is_hopper(source):
        chosen = ["-gencode", "arch=compute_90a,code=sm_90a"]
    return [*FLAGS, *chosen, *(["-DMHA_EXT_HOPPER"] if hopper else [])]


def is_hopper(source: Path) -> bool:
    return "_hopper" in source.stem


def find_nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [Path(home, "bin/nvcc") for home in homes if home]
    places += [Path(found) for found in [shutil.which("nvcc")] if found]
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in places if path.is_file()), None)


def torch_cuda(torch: Path) -> str | None:
    """The CUDA version that the package torch in this folder is built for."""
    text = (torch / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def find_cuda(host: Compiler, torch: Path) -> tuple[Cuda | None, str]:
    """The toolkit, or None; and in a line what is compiled, or why nothing is."""
    chosen = wanted()
    if chosen is False:
        return None, "no (MHA_EXT_CUDA=0)"
    try:
        if chosen is None and torch_cuda(torch) is None:
            raise Unusable("torch is not a CUDA build")
        cuda = toolkit(host, None if chosen else torch_cuda(torch))
    except Unusable as unusable:
        if chosen:
            fail(f"{unusable}{unusable.fix}")
        return None, f"no ({unusable})".replace('"', "'")
    return cuda, cuda.name


def toolkit(host: Compiler, fits: str | None) -> Cuda:
    """nvcc, and the libraries beside it; of the major version of `fits`. Raises Unusable."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise Unusable(
            "there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda",
            ". Install a CUDA toolkit, name it in CUDA_HOME, or set MHA_EXT_CUDA=0",
        )
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if release is None or tuple(map(int, release.groups())) < OLDEST_NVCC:
        raise Unusable(
            f"{nvcc} is too old: mha_ext needs CUDA 12.0 or later", ". Name another in CUDA_HOME"
        )
    if fits and fits.split(".")[0] != release.group(1):
        raise Unusable(f"{nvcc} is of CUDA {'.'.join(release.groups())}, and torch of {fits}")
    command = [nvcc, "-ccbin", host.command[0]]
    dry = [*command, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull]
    answer = subprocess.run(dry, capture_output=True, text=True)
    folders = re.findall(r"-L([^\"\s]+)", answer.stderr)
    folder = next((path for path in folders if Path(path, "libcudart_static.a").is_file()), None)
    if folder is None:
        raise Unusable(
            f"there is no libcudart_static.a beside {nvcc}",
            ": install the CUDA runtime for developers",
        )
    chosen = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", "") or ARCHITECTURES)
    codes = [flag.split("code=")[1] for flag in chosen if "code=" in flag]
    name = f"nvcc {'.'.join(release.groups())} for {', '.join(codes)}"
    compiler = Compiler(command, name, host.x86, ["-Werror", "all-warnings"], "")
    libraries = [str(Path(folder, "libcudart_static.a")), "-ldl", "-lrt", "-lpthread"]
    return Cuda(compiler, chosen, libraries, name)


def sources(root: Path) -> list[Path]:
    return sorted(root.glob("csrc/cuda/*.cu"))


def binding(root: Path) -> list[Path]:
    """The C++ that goes with them, compiled as all that speaks torch."""
    return sorted(root.glob("csrc/cuda/*.cpp"))
