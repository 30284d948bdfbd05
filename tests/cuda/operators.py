"""The CUDA key on the emulator: csrc/cuda whole, from the glue that registers operators to the kernels.

The glue is compiled with the compiler and the flags of the build, the kernels as emulated.py does.
What the glue registers for CUDA can then be called with tensors of the CPU. See README.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated
import torch

sys.path.insert(0, str(emulated.ROOT / "build_backend"))

import toolchain  # noqa: E402
from torch_backend import find_torch  # noqa: E402

KEY = torch._C.DispatchKey.PrivateUse1  # where registration.h puts what is meant for CUDA
BESIDE_THE_GLUE = ("problem.cpp", "checks.cpp")  # of csrc/: what the glue calls besides the kernels


def build(substitutes: Mapping[str, Path] | None = None, folder: Path | None = None) -> Path:
    """The module of the glue and the kernels; only what changed is compiled.

    substitutes: another source instead of csrc/cuda/<name>, for a module in `folder` of its own.
    """
    (emulated.ROOT / "build").mkdir(exist_ok=True)
    with emulated.locked(emulated.ROOT / "build/cuda-emulator"):
        return _build(substitutes, folder)


def _build(substitutes: Mapping[str, Path] | None, folder: Path | None) -> Path:
    found, compiler, here = find_torch(), toolchain.find_compiler(), emulated.HERE
    assert found is not None
    tag = f"torch{found.version}-{sys.implementation.cache_tag}"
    shared = emulated.ROOT / "build" / f"cuda-emulator-{tag}"
    of_the_build = emulated.ROOT / "build" / f"objects-{tag}/csrc"
    for place in (shared, of_the_build):
        place.mkdir(parents=True, exist_ok=True)
    instead = substitutes or {}
    torch_flags = toolchain.flags_of(Path("glue.cpp"), compiler.x86, found.folder)
    glue_flags = [*torch_flags, "-include", str(here / "registration.h")]
    work = []
    for source in sorted(emulated.KERNELS.glob("*.cpp")):
        place = folder if folder and source.name in instead else shared
        source = instead.get(source.name, source)
        work.append((compiler, source, place / f"{source.name}.o", glue_flags))
    work.append((compiler, here / "device.cpp", shared / "device.cpp.o", torch_flags))
    for name in BESIDE_THE_GLUE:
        target = (of_the_build / name).with_suffix(".o")
        work.append((compiler, emulated.ROOT / "csrc" / name, target, torch_flags))
    toolchain.compile_all(False, work)
    objects = [*emulated.objects(instead=instead), *(target for _, _, target, _ in work)]
    module = (folder or shared) / "operators.so"
    record, names = module.with_suffix(".objects"), "\n".join(map(str, objects))
    made = module.stat().st_mtime if module.is_file() and record.is_file() else 0.0
    if any(path.stat().st_mtime >= made for path in objects) or record.read_text() != names:
        unfinished = module.with_suffix(".tmp")
        toolchain.link(compiler, objects, unfinished, found.folder, ["-Wl,--no-undefined"])
        unfinished.replace(module)
        record.write_text(names)
    return module


class Emulator:
    """The operators of csrc/cuda, as far as they exist, on the emulator."""

    name = "the emulated CUDA kernels"
    work_of_a_test = 3e9  # ten seconds

    def __init__(self, module: Path, hopper: bool = False) -> None:
        torch.ops.load_library(module)
        self.library = emulated.Library(module)
        self.library.traffic, self.library.watched = False, 8
        self.library.hopper = hopper
        self.library.grid_limit = 65  # what is special beyond 65535 is so beyond this
        limit = re.search(r"kMaxWidth = (\d+)", (emulated.KERNELS / "kernels.h").read_text())
        assert limit is not None
        self.widest = int(limit.group(1))

    def has(self, operator: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, KEY.name)

    def run(self, operator: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """The results, and how many kernels were launched."""
        self.library.seed += 1  # any schedule must do
        self.library.start()
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # what is not written holds NaN
        try:
            results = operator.redispatch(torch._C.DispatchKeySet(KEY), *arguments, **options)
        finally:
            torch.use_deterministic_algorithms(before)
        return results, self.library.finish().launches
