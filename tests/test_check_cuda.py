"""tools/check_cuda.py: what it runs, by its record; the checks themselves are counted, not run."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAID = "sm_80 forward_kernel: 96 of 128 registers, 0 bytes of spills, 0 shared\n"


class Checks:
    """The tool on a small tree of its own; `ran` is what it ran, `fails` what of that fails."""

    def __init__(self, tool: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tool, self.root, self.release, self.fails = tool, root, "nvcc 13.0", ""
        self.ran: list[str] = []
        for name in ("csrc/cuda/forward.cuh", "csrc/spec/attention.h", "tests/cuda/emulated.py"):
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text("// 1\n")
        (root / "tools").mkdir()
        self.record = root / "tools/cuda_record.txt"
        monkeypatch.setattr(tool, "ROOT", root)
        monkeypatch.setattr(tool, "RECORD", self.record)
        monkeypatch.setattr(tool, "nvcc_release", lambda: self.release)
        monkeypatch.setattr(tool, "subprocess", SimpleNamespace(run=self._run, PIPE=-1))

    def _run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        self.ran.append(text)
        failed = bool(self.fails) and self.fails in text
        return subprocess.CompletedProcess(command, int(failed), SAID if "ptxas" in text else "")

    def __call__(self, *arguments: str) -> list[str]:
        """What it runs, with these arguments."""
        self.ran.clear()
        assert self.tool.main(arguments) == 0
        return list(self.ran)


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checks:
    spec = importlib.util.spec_from_file_location("check_cuda", ROOT / "tools/check_cuda.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return Checks(tool, tmp_path, monkeypatch)


def is_all(ran: list[str]) -> bool:
    assert all("--cases" not in line for line in ran)
    wanted = ["check_ptxas.py 80 90", "--slow tests/cuda", "--device emulator", "--device hopper"]
    return len(ran) == 4 and all(what in line for what, line in zip(wanted, ran))


def test_without_a_record_everything_is_checked(checks: Checks) -> None:
    assert is_all(checks())
    assert not checks.record.exists()


def test_with_a_record_some_cases_are_run(checks: Checks) -> None:
    assert is_all(checks("--record"))
    assert checks.record.read_text().splitlines()[1:] == ["nvcc 13.0", SAID.strip()]
    ran = checks()
    assert len(ran) == 2 and all("--cases 4" in line for line in ran)
    assert "--device emulator" in ran[0] and "--device hopper" in ran[1]
    checks.release = ""  # without nvcc nothing can be said of registers that the record does not
    assert len(checks()) == 2


@pytest.mark.parametrize("name", ["csrc/cuda/forward.cuh", "csrc/spec/attention.h"])
def test_a_changed_source_is_checked(checks: Checks, name: str) -> None:
    checks("--record")
    (checks.root / name).write_text("// 2\n")
    assert is_all(checks())
    (checks.root / name).write_text("// 1\n")
    assert len(checks()) == 2
    (checks.root / name).with_name("new" + Path(name).suffix).write_text("")
    assert is_all(checks())


def test_another_nvcc_is_asked(checks: Checks) -> None:
    checks("--record")
    checks.release = "nvcc 13.1"
    assert is_all(checks())


@pytest.mark.parametrize("fails", ["check_ptxas.py", "tests/cuda", "emulator", "hopper"])
def test_what_fails_is_not_recorded(checks: Checks, fails: str) -> None:
    checks.fails = fails
    for arguments in (["--record"], []):
        with pytest.raises(SystemExit) as stopped:
            checks.tool.main(arguments)
        assert stopped.value.code == 1
    assert not checks.record.exists()


def test_what_changes_meanwhile_is_not_recorded(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.tool, "digest", iter(["before", "after"]).__next__)
    with pytest.raises(SystemExit, match="the sources have changed meanwhile"):
        checks.tool.main(["--record"])
    assert not checks.record.exists()


def test_a_failing_case_fails_beside_a_record(checks: Checks) -> None:
    checks("--record")
    checks.fails = "hopper"
    with pytest.raises(SystemExit) as stopped:
        checks.tool.main([])
    assert stopped.value.code == 1


def test_what_it_looks_at_exists(checks: Checks) -> None:
    for pattern in checks.tool.SOURCES:
        assert list(ROOT.glob(pattern)), pattern
    assert all((ROOT / name).is_file() for name in checks.tool.HOPPER if name.endswith(".py"))
