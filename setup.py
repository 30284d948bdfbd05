"""Compiles csrc/ into mha_ext._C against the torch of the environment that is installed into.

Everything that does not depend on that torch is in pyproject.toml. Environment: CXX, CXXFLAGS,
LDFLAGS, MAX_JOBS (compilers at once), MHA_EXT_ISAS (the instruction sets to compile),
MHA_EXT_TORCH_SITE (the site-packages whose torch to use), MHA_EXT_WERROR (1: warnings are
errors, as in editable builds; 0: they are not), and for CUDA what build_backend/cuda_toolkit.py names.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402
import toolchain  # noqa: E402
from torch_backend import TESTED, Torch, find_torch, torch_requirement  # noqa: E402

OLDEST = (2, 11)


def usable_torch() -> Torch:
    """The torch to build against, or one message that says what to do."""
    torch = find_torch()
    if torch is None:
        toolchain.fail(
            "there is no torch to build against. With build isolation pip fetches one; without it, "
            f"install one first: pip install torch=={TESTED}"
        )
    if torch.minor < OLDEST:
        toolchain.fail(
            f"torch {torch.version} ({torch.folder}) is too old: mha_ext needs torch 2.11 or "
            f"later. pip install -U torch=={TESTED}"
        )
    if not (torch.folder / "include/torch/library.h").is_file():
        toolchain.fail(
            f"torch {torch.version} has no C++ headers in {torch.folder / 'include'}: this is not "
            f"one of PyTorch's own builds. pip install --force-reinstall torch=={TESTED}"
        )
    return torch


def object_of(objects: Path, source: Path) -> Path:
    """Where the object of a source lies: attention.cpp and attention.cu may stand side by side."""
    place = objects / source.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place.with_suffix(".cu.o" if source.suffix == ".cu" else ".o")


class BuildExtension(build_ext):
    """Two kinds of sources: with torch's headers, and (the kernels) without them."""

    def run(self) -> None:
        if sys.platform != "linux":
            toolchain.fail(f"it runs on Linux only, and this is {sys.platform}")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            toolchain.fail(
                "Python.h is missing. Install Python's headers: apt install python3-dev, "
                "dnf install python3-devel"
            )
        self.torch = usable_torch()
        self.compiler_found = toolchain.find_compiler()
        super().run()
        info = f'TORCH_VERSION = "{self.torch.version}"\n'
        folders = [Path(self.build_lib, "mha_ext")]
        if self.inplace:  # an editable build: the source folder is what is imported
            folders.append(ROOT / "mha_ext")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_build_info.py").write_text(info)

    def build_extension(self, extension: Extension) -> None:
        torch, compiler = self.torch, self.compiler_found
        gpu, gpu_line = cuda_toolkit.find_cuda(compiler, torch.folder)
        files = toolchain.sources(ROOT, compiler.x86)
        isas = ", ".join(toolchain.isa_names(files))
        print(f"mha_ext {self.distribution.get_version()}")
        print(f"  torch     {torch.version} in {torch.folder}")
        print(f"  compiler  {compiler.name}, {toolchain.job_count()} at once")
        print(f"  ISAs      {isas}\n  CUDA      {gpu_line}", flush=True)
        described = {
            "VERSION": self.distribution.get_version(),
            "TORCH": torch.version,
            "COMPILER": compiler.name,
            "ISAS": isas,
            "CUDA": gpu_line,
        }
        macros = [f'-DMHA_EXT_{name}="{value}"' for name, value in described.items()]
        # Objects of another torch or Python are never taken for this one's.
        objects = ROOT / "build" / f"objects-torch{torch.version}-{sys.implementation.cache_tag}"
        strict = os.environ.get("MHA_EXT_WERROR", "1" if self.editable_mode else "0") != "0"
        work = []
        for source in files + (cuda_toolkit.binding(ROOT) if gpu else []):
            flags = toolchain.flags_of(source, compiler.x86, torch.folder, macros)
            work.append((compiler, source, object_of(objects, source), flags))
        if gpu:  # the slowest come first
            work[:0] = [
                (
                    gpu.compiler,
                    source,
                    object_of(objects, source),
                    cuda_toolkit.flags_of(source, gpu.chosen),
                )
                for source in cuda_toolkit.sources(ROOT)
            ]
        toolchain.compile_all(strict, work)
        module = Path(self.get_ext_fullpath(extension.name))
        module.parent.mkdir(parents=True, exist_ok=True)
        made = [target for _, _, target, _ in work]
        toolchain.link(compiler, made, module, torch.folder, gpu.libraries if gpu else [])


setup(
    install_requires=["numpy", torch_requirement()],
    ext_modules=[Extension("mha_ext._C", [])],
    cmdclass={"build_ext": BuildExtension},
)
