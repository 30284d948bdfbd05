"""What the build decides about CUDA, without a compiler."""

from __future__ import annotations

import sys

import emulated
import pytest

sys.path.insert(0, str(emulated.ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402


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
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST"):
        cuda_toolkit.architectures(text)


@pytest.mark.parametrize(("asked", "wanted"), [("", False), ("0", False), ("1", True)])
def test_when_the_kernels_are_compiled(
    asked: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHA_EXT_CUDA", asked)
    assert cuda_toolkit.wanted() == wanted


def test_a_choice_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHA_EXT_CUDA", "yes")
    with pytest.raises(SystemExit, match="MHA_EXT_CUDA must be 0 or 1"):
        cuda_toolkit.wanted()
