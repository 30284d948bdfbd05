"""tools/gpu.py and benchmarks/gpu.py where there is no GPU: what they would run, and how they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    name = path.replace("/", "_").removesuffix(".py")  # two are called gpu.py
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


gpu = load("tools/gpu.py")
sys.path.insert(0, str(ROOT / "benchmarks"))
bench = load("benchmarks/gpu.py")


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_steps_fit_into_the_time() -> None:
    """Limits add up to more, since few steps reach theirs; each alone leaves room for others."""
    found = gpu.steps(Path("results"), "avx2", "9.0")
    names = [step.name for step in found]
    assert names[:3] == ["gpu", "torch", "build"] and set(gpu.SANITIZERS) < set(names)
    assert all(step.seconds <= 240 for step in found)
    by_name = {step.name: step for step in found}
    assert by_name["build"].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert by_name["build"].environment["MHA_EXT_WERROR"] == "0"
    assert "--report-api-errors no" in " ".join(by_name["memcheck"].command)
    assert all(s.after in ("", "build") for s in found)
    assert "tests/test_forward.py" in by_name["contract"].command
    assert "tests/test_cli.py" not in by_name["contract"].command


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["results", "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(gpu.steps(Path("."), "", ""))
    assert any("--tool racecheck" in line for line in printed)
    assert gpu.main(["results", "--dry-run", "--only", "build"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "MHA_EXT_CUDA=1" in line and "--no-build-isolation --no-deps -e ." in line
    with pytest.raises(SystemExit):
        gpu.main(["results", "--only", "everything"])


def test_a_toolkit_that_is_not_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "toolkit/bin/of-the-toolkit"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # what main adds goes away again
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    step = gpu.Step("tool", (tool.name,), 10, needs=tool.name)
    monkeypatch.setattr(gpu, "steps", lambda *_: [step])
    assert gpu.main([str(tmp_path / "results")]) == 0
    assert "passed" in (tmp_path / "results/summary.txt").read_text()


def test_steps_that_fail_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python(text: str) -> tuple[str, ...]:
        return (sys.executable, "-c", text)

    chosen = [
        gpu.Step("good", python("print('fine')"), 60),
        gpu.Step("bad", python("raise SystemExit('broken')"), 60),
        gpu.Step("slow", python("import time; time.sleep(600)"), 2),
        gpu.Step("absent", ("no-such-program-here",), 5),
        gpu.Step("without", ("true",), 5, needs="no-such-program-here"),
        gpu.Step("after", ("true",), 5, after="bad"),
        gpu.Step("last", python("import os; print(os.environ['GIVEN'])"), 60, {"GIVEN": "here"}),
    ]
    monkeypatch.setattr(gpu, "steps", lambda *_: chosen)
    assert gpu.main([str(tmp_path / "new")]) == 1
    found = {o["name"]: o for o in json.loads((tmp_path / "new/results.json").read_text())}
    assert {name: o["status"] for name, o in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "slow": "out of time",
        "absent": "failed",
        "without": "skipped",
        "after": "skipped",
        "last": "passed",
    }
    assert found["bad"]["last_line"] == "broken" and found["last"]["last_line"] == "here"
    summary = (tmp_path / "new/summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in summary] == [step.name for step in chosen]


def test_gpu_benchmarks_list() -> None:
    done = call("benchmarks/gpu.py", "--list", "--topics", "peak", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "peak: 4096 x 128, causal, bfloat16" in lines
    assert lines[-1].endswith(
        "mha_ext, FLASH_ATTENTION, EFFICIENT_ATTENTION, CUDNN_ATTENTION, MATH"
    )
    assert all(line.startswith("peak: ") for line in lines[:-1])


def test_gpu_benchmarks_need_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = call("benchmarks/gpu.py")
    assert done.returncode == 2 and done.stderr.startswith("gpu.py: error: torch finds no GPU")


class Event:
    """torch.cuda.Event without a GPU: every interval is a millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def test_gpu_benchmarks_with_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the clock and the counter of memory, on the CPU: what is measured and written."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(bench, "GPU", cpu)
    monkeypatch.setattr(bench, "COPIED", 2**10)
    monkeypatch.setattr(bench, "FACTORS", dict.fromkeys((2, 4, 8), 16))
    for name, value in {"Event": Event, "is_available": lambda: True}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, number in {"memory_allocated": 100, "max_memory_allocated": 300}.items():
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    case = bench.Case("tiny", 1, 2, 16, 16, 8)
    one = bench.Case("one", 1, 2, 1, 16, 8, training=False, layer=False)
    groups = [
        bench.Group("peak", "float32", case),
        bench.Group("masks", "float32", bench.replace(case, name="dropout", dropout=0.1)),
        bench.Group("decode", "float64", one),
    ]
    monkeypatch.setattr(bench, "groups", lambda: groups)
    output = tmp_path / "gpu.json"
    arguments = ["--output", str(output), "--seconds", "0.01", "--peers", "MATH"]
    assert bench.main(arguments) == 0
    found = json.loads(output.read_text())
    assert found["gpu"] == "a stand-in" and not found["failures"] and not found["not_measured"]
    figures = {(r["topic"], r["implementation"], r["what"]): r for r in found["records"]}
    assert len(figures) == 2 * (3 + 3 + 1)
    forward = figures["peak", "mha_ext", "forward"]
    assert forward["flops"] == 4 * 2 * 16 * 16 * 8 and forward["bytes"] == 4 * 4 * 2 * 16 * 8
    assert forward["share"] > 0 and forward["error"] < 1e-5 and forward["memory"] is None
    assert figures["peak", "MATH", "training"]["memory"] == 200
    assert figures["decode", "mha_ext", "forward"]["share_of_bandwidth"] > 0
