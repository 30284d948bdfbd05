"""What the build decides about CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import emulated
import pytest

sys.path.insert(0, str(emulated.ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402
import toolchain  # noqa: E402


def test_architectures() -> None:
    assert cuda_toolkit.architectures("8.0 9.0+PTX") == [
        "-gencode",
        "arch=compute_80,code=sm_80",
        "-gencode",
        "arch=compute_90,code=sm_90",
        "-gencode",
        "arch=compute_90,code=compute_90",
    ]
    # What the kernels cannot run on is left out.
    assert cuda_toolkit.architectures("7.5;9.0a") == ["-gencode", "arch=compute_90a,code=sm_90a"]


@pytest.mark.parametrize("text", ["Hopper", "7.5", "8.0;nine"])
def test_architectures_that_are_refused(text: str) -> None:
    with pytest.raises(cuda_toolkit.Unusable, match="TORCH_CUDA_ARCH_LIST"):
        cuda_toolkit.architectures(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A machine of our own making."""
    for name in ("MHA_EXT_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return Place(tmp_path, monkeypatch)


class Place:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.nvcc("13.0")
        self.torch("'13.0'")

    def torch(self, cuda: str) -> None:
        """A torch whose version.py names this CUDA."""
        text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: str = '6.0'\n"
        (self.folder / "version.py").write_text(text)

    def nvcc(self, version: str | None, runtime: bool = True) -> None:
        """An nvcc of this version, with or without the static runtime beside it."""
        program = self.folder / "nvcc"
        library = self.folder / "libcudart_static.a"
        library.write_text("") if runtime else library.unlink()
        program.write_text(
            f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.88\n"
            f"echo '#$ LIBRARIES= \"-L{self.folder}\"' >&2\n"
        )
        program.chmod(0o755)
        found = None if version is None else str(program)
        self.monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: found)

    def find(self, **environment: str) -> tuple[cuda_toolkit.Cuda | None, str]:
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)
        return cuda_toolkit.find_cuda(toolchain.Compiler(["g++"], "g++ 12", True), self.folder)


def test_compiled_where_it_is_possible(place: Place) -> None:
    cuda, line = place.find()
    assert cuda is not None and line == "nvcc 13.0 for sm_80, sm_90, compute_90"
    assert cuda.compiler.command == [str(place.folder / "nvcc"), "-ccbin", "g++"]
    assert cuda.libraries[0] == str(place.folder / "libcudart_static.a")
    place.nvcc("13.2")  # another minor version runs on the same drivers
    cuda, line = place.find(TORCH_CUDA_ARCH_LIST="9.0")
    assert cuda is not None and line == "nvcc 13.2 for sm_90"


def test_left_out_with_a_reason(place: Place) -> None:
    """By default whatever is missing is no error."""
    assert place.find(MHA_EXT_CUDA="0") == (None, "no (MHA_EXT_CUDA=0)")
    place.monkeypatch.delenv("MHA_EXT_CUDA")
    assert place.find(TORCH_CUDA_ARCH_LIST="7.5") == (
        None,
        "no (TORCH_CUDA_ARCH_LIST ('7.5') names no architecture of 8.0 or later)",
    )
    place.monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    nvcc = place.folder / "nvcc"
    place.nvcc("13.0", runtime=False)
    assert place.find() == (None, f"no (there is no libcudart_static.a beside {nvcc})")
    place.nvcc("12.8")
    assert place.find() == (None, f"no ({nvcc} is of CUDA 12.8, and torch of 13.0)")
    place.nvcc("11.8")
    assert place.find() == (None, f"no ({nvcc} is too old: mha_ext needs CUDA 12.0 or later)")
    place.nvcc(None)
    reason = "there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    assert place.find() == (None, f"no ({reason})")
    place.torch("None")
    assert place.find() == (None, "no (torch is not a CUDA build)")


def test_asked_for(place: Place) -> None:
    """With MHA_EXT_CUDA=1 any torch will do, and what is missing stops the build."""
    place.torch("None")
    place.nvcc("12.8")
    cuda, line = place.find(MHA_EXT_CUDA="1")
    assert cuda is not None and line == "nvcc 12.8 for sm_80, sm_90, compute_90"
    place.nvcc(None)
    with pytest.raises(
        SystemExit, match="no nvcc in .*Install a CUDA toolkit, name it in CUDA_HOME"
    ):
        place.find()
    place.nvcc("12.8")
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST must name architectures by number"):
        place.find(TORCH_CUDA_ARCH_LIST="Hopper")


def test_a_choice_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHA_EXT_CUDA", "yes")
    with pytest.raises(SystemExit, match="MHA_EXT_CUDA must be 0 or 1"):
        cuda_toolkit.wanted()


def test_only_what_changed_is_compiled_by_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc names the headers that a source includes; a change in one compiles its sources again."""
    monkeypatch.setenv("MHA_EXT_CUDA", "1")
    if cuda_toolkit.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    cuda, _ = cuda_toolkit.find_cuda(toolchain.find_compiler(), tmp_path)
    assert cuda is not None
    work = []
    for name in ("one", "two"):
        header, source = tmp_path / f"{name}.cuh", tmp_path / f"{name}.cu"
        header.write_text("constexpr int kOne = 1;\n")
        source.write_text(
            f'#include "{name}.cuh"\n__global__ void {name}(int* x) {{ *x = kOne; }}\n'
        )
        work.append(
            (
                cuda.compiler,
                source,
                tmp_path / f"{name}.cu.o",
                cuda_toolkit.flags_of(source, cuda.chosen),
            )
        )
    objects = [target for _, _, target, _ in work]

    def compiled() -> list[str]:
        before = [path.stat().st_mtime_ns if path.exists() else 0 for path in objects]
        toolchain.compile_all(True, work)
        return [p.name for p, time in zip(objects, before) if p.stat().st_mtime_ns != time]

    assert compiled() == ["one.cu.o", "two.cu.o"]
    assert compiled() == []
    (tmp_path / "two.cuh").write_text("constexpr int kOne = 2;\n")
    assert compiled() == ["two.cu.o"]


def test_hopper_has_sources_of_its_own() -> None:
    """sm_90a for them alone, and the others know that they are there."""
    both = cuda_toolkit.architectures("8.0;9.0+PTX")
    own = cuda_toolkit.flags_of(Path("forward_hopper_float16.cu"), both)
    assert own[len(cuda_toolkit.FLAGS) :] == [
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "-DMHA_EXT_HOPPER",
    ]
    others = cuda_toolkit.flags_of(Path("forward_float16.cu"), both)
    assert others == [*cuda_toolkit.FLAGS, *both, "-DMHA_EXT_HOPPER"]
    old = cuda_toolkit.architectures("8.0")
    assert cuda_toolkit.flags_of(Path("x_hopper.cu"), old) == [*cuda_toolkit.FLAGS, *old]


def test_a_compiler_with_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two copies of libstdc++ in a process crash with the first error message."""
    compiler = toolchain.find_compiler()
    if not compiler.x86:
        pytest.skip("looked at on x86-64 only")
    source, made, target = tmp_path / "a.cpp", tmp_path / "a.o", tmp_path / "a.so"
    source.write_text("#include <string>\nstd::string f(int i) { return std::to_string(i); }\n")
    toolchain.compile_one(True, compiler, source, made, ["-std=c++20", "-fPIC"])
    torch = toolchain.Path(emulated.torch.__file__).parent
    toolchain.link(compiler, [made], target, torch, [])
    assert target.is_file()
    monkeypatch.setenv("LDFLAGS", "-static-libstdc++")
    with pytest.raises(SystemExit, match="CXX=/usr/bin/g"):
        toolchain.link(compiler, [made], target, torch, [])
    assert not target.exists()
