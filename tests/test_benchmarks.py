"""The commands in benchmarks/: they run, write what they document, and compare. Nothing is timed here."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mha_ext
from mha_ext import timing
from mha_ext.cases import DTYPES, MASKS, Case

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
# Imported from their folder, as the commands are.
sys.path.insert(0, str(FOLDER))
try:
    import budget
    import compare
    import cpu_share_of_peak
    import goals
    import measure
    import quieter
    import run
    import suite
    import sweep
    import turns
finally:
    sys.path.remove(str(FOLDER))

FAST = ["--threads", "1", "--repeats", "2", "--no-memory"]
TINY = ["--filter", "tiny.*float32", *FAST]


@pytest.fixture(autouse=True)
def _isa_as_before() -> Iterator[None]:
    isa = mha_ext._C.active_isa()
    yield
    mha_ext._C.set_isa(isa)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What --quick writes of one group, without the compiler's peer."""
    path = tmp_path_factory.mktemp("results") / "out.json"
    options = ["--quick", *TINY, "--peers", "eager", "SDPA", "onnxruntime", "--no-charts"]
    assert run.main([*options, "--output", str(path)]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def documented(heading: str) -> set[str]:
    """The names in the first column of the table below a heading of benchmarks/README.md."""
    text = (FOLDER / "README.md").read_text().split(f"\n{heading}\n", 1)[1]
    table = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    return {
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def test_runs_as_a_script(tmp_path: Path) -> None:
    """From anywhere, with charts where matplotlib is installed."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", *TINY, "--peers", "SDPA"]
    done = subprocess.run(
        [*command, "--output", str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "64 x 6 x (12, 10) x 50, float32, 1 thread" in done.stdout
    assert "tiny / best peer" in done.stdout
    assert "[1/1] tiny" in done.stderr
    assert json.loads(out.read_text())["complete"] is True


def test_fields_are_documented(result: dict[str, Any]) -> None:
    assert set(result) == documented("### The file")
    assert all(set(record) == documented("### A record") for record in result["records"])
    assert {"processor", "cores", "isa"} <= set(result["machine"])
    assert {"mha_ext", "commit", "torch", "onnxruntime", "build"} <= set(result["versions"])
    assert result["format"] == run.FORMAT
    assert result["command"].startswith("python benchmarks/run.py --quick")


def test_records(result: dict[str, Any]) -> None:
    names = {"eager", "SDPA", "mha_ext"}
    differentiable = {
        (name, what) for name in names for what in ("forward", "training", "backward")
    }
    if importlib.util.find_spec("onnxruntime"):
        differentiable.add(("onnxruntime", "forward"))
    assert {(r["implementation"], r["what"]) for r in result["records"]} == differentiable
    case = Case("", 64, 6, 12, 10, 50)
    for record in result["records"]:
        assert record["wrong"] == [] and record["error"] < 1e-5
        assert (record["isa"] is not None) == (record["implementation"] == "mha_ext")
        taken, peak = record["seconds"], record["peak"]
        assert taken["count"] == peak["count"] == 2
        assert 0 < taken["min"] <= taken["q1"] <= taken["median"] <= taken["q3"] <= taken["max"]
        assert record["share"] == pytest.approx(record["flops"] / taken["median"] / peak["median"])
        if record["what"] == "forward":
            assert record["flops"] == case.flops("attention", backward=False)
            assert record["bytes"] == 4 * 50 * 64 * 6 * (2 * 12 + 2 * 10)
    assert [peak["kind"] for peak in result["peaks"]] == ["fma"]
    by_name = {goal["name"]: goal for goal in result["goals"]}
    assert by_name["tiny / best peer"]["measured"] > 0
    assert by_name["memory at L = 16,384"]["measured"] is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--cases", "odd length", "--dtype", "float32"], {"forward", "training", "backward"}),
        (["--cases", "layer", "--dtype", "float32"], {"forward", "training", "backward"}),
        (["--cases", "overhead"], {"forward", "recorded", "training", "backward"}),
        (["--filter", "decode: 32:8, 2048.*bfloat16"], {"forward"}),
        (["--filter", "peak: 12 x 128 x 64, bfloat16"], {"forward", "training", "backward"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_kinds_of_groups(options: list[str], expected: set[str], tmp_path: Path) -> None:
    """Whatever is special in a group: layers, floors, bandwidth, further instruction sets."""
    out = tmp_path / "out.json"
    fast = [*FAST[:2], "--repeats", "1", "--no-memory", "--no-charts", "--peers", "SDPA"]
    assert run.main([*options, *fast, "--output", str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    ours = {record["what"] for record in records if record["implementation"] == "mha_ext"}
    assert ours == expected
    names = {record["implementation"] for record in records}
    if "layer" in options:
        assert measure.PROJECTIONS in names
    if "overhead" in options:
        assert measure.ADDCMUL in names
    if "decode" in options[1]:
        assert all(r["share_of_bandwidth"] > 0 for r in records)
    if "bfloat16" in options[1] and mha_ext._C.active_isa() == "amx" and "peak" in options[1]:
        assert "mha_ext avx512_bf16" in names


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
def test_memory(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--filter", "memory: 1 x 512", "--no-charts", "--output", str(out)]
    assert run.main(options) == 0
    found = {r["implementation"]: r["memory"] for r in json.loads(out.read_text())["records"]}
    assert set(found) == {"eager", "SDPA", "mha_ext"}
    assert found["eager"] > 512 * 512 * 4


def test_charts(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    path = tmp_path / "out.json"
    content = copy.deepcopy(result)
    own = next(r for r in content["records"] if r["implementation"] == "mha_ext")
    for length in (512, 1024):
        case = f"1 x {length} x 64"
        content["records"].append({**own, "topic": "peak", "case": case})
        memory = {"topic": "memory", "case": case, "what": "memory", "seconds": None}
        content["records"].append({**own, **memory, "memory": length * 1000})
        decode = {"topic": "decode", "case": f"1 head, {length} x 128", "share_of_bandwidth": 0.9}
        content["records"].append({**own, **decode})
        for what in ("jvp", "hvp"):
            content["records"].append({**own, "topic": "second order", "case": case, "what": what})
    for case in ("none", "bias"):
        content["records"].append({**own, "topic": "masks", "case": case})
    path.write_text(json.dumps(content))
    assert run.main(["--redraw", str(path)]) == 0
    drawn = {file.name for file in (tmp_path / "out").iterdir()}
    assert drawn == {
        "share-of-peak-one-thread.svg",
        "speed-up-float32-one-thread.svg",
        "decode-one-thread.svg",
        "options-one-thread.svg",
        "memory.svg",
        "second-order.svg",
    }
    assert all("<svg" in file.read_text() for file in (tmp_path / "out").iterdir())


def test_a_share_above_the_peak_is_drawn(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    import charts

    content = copy.deepcopy(result)
    own = next(r for r in content["records"] if r["implementation"] == "mha_ext")
    for length, share in ((512, 0.4), (1024, 1.9)):
        case = f"1 x {length} x 64"
        for what in ("forward", "backward"):
            here = {"topic": "peak", "case": case, "what": what, "share": share}
            content["records"].append({**own, **here})
    figure = charts._share_of_peak(content, charts.Found(content["records"]), 1)
    for ax in figure.axes:
        assert max(max(line.get_ydata()) for line in ax.lines) == 1.9 < ax.get_ylim()[1]


def test_without_matplotlib(
    result: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(result))
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.main(["--redraw", str(path)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_a_missing_peer_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure.onnxruntime_peer, "missing", lambda: "it is not installed")
    out = tmp_path / "out.json"
    options = [*TINY, "--peers", "SDPA", "onnxruntime", "--no-charts", "--output", str(out)]
    assert run.main(options) == 0
    assert "onnxruntime is left out: it is not installed" in capsys.readouterr().err
    content = json.loads(out.read_text())
    assert content["left_out"] == {"onnxruntime": "it is not installed"}
    assert {r["implementation"] for r in content["records"]} == {"SDPA", "mha_ext"}


def test_a_failing_peer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    out = tmp_path / "out.json"
    options = [*TINY, "--peers", "eager", "SDPA", "--no-charts", "--output", str(out)]
    assert run.main(options) == 0
    assert "no such kernel" in capsys.readouterr().err
    content = json.loads(out.read_text())
    assert {r["implementation"] for r in content["records"]} == {"eager", "mha_ext"}
    assert "no such kernel" in content["left_out"].values()


def test_a_peer_that_fails_once_it_is_timed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visit = measure.visit

    def fail(work: measure.Work, passes: Any) -> Any:
        if work.name == "SDPA":
            raise RuntimeError("out of memory")
        return visit(work, passes)

    monkeypatch.setattr(measure, "visit", fail)
    out = tmp_path / "out.json"
    options = [*TINY, "--peers", "eager", "SDPA", "--no-charts", "--output", str(out)]
    assert run.main(options) == 0
    assert "out of memory" in capsys.readouterr().err
    content = json.loads(out.read_text())
    assert {r["implementation"] for r in content["records"]} == {"eager", "mha_ext"}
    assert "out of memory" in content["left_out"].values()


@pytest.fixture
def _wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is off by a hundredth."""
    attention = mha_ext.attention

    def wrong(query: Tensor, *args: object, **options: object) -> Tensor:
        out: Tensor = attention(query, *args, **options)  # type: ignore[call-overload]
        return out * 1.01

    monkeypatch.setattr(mha_ext, "attention", wrong)


@pytest.mark.usefixtures("_wrong")
def test_a_wrong_result_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run.main([*TINY, "--peers", "--no-charts", "--output", str(out)]) == 1
    assert "WRONG: mha_ext, tiny" in capsys.readouterr().out
    records = json.loads(out.read_text())["records"]
    assert [(r["seconds"], "out" in r["wrong"]) for r in records] == [(None, True)]


def test_where_only_a_gradient_is_wrong_forward_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = mha_ext.attention

    def wrong(query: Tensor, *args: object, **options: object) -> Tensor:
        same = query + 0.01 * (query - query.detach())
        out: Tensor = attention(same, *args, **options)  # type: ignore[call-overload]
        return out

    monkeypatch.setattr(mha_ext, "attention", wrong)
    out = tmp_path / "out.json"
    assert run.main([*TINY, "--peers", "eager", "--no-charts", "--output", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "WRONG: mha_ext, tiny" in shown
    found = json.loads(out.read_text())["records"]
    records = {r["what"]: r for r in found if r["implementation"] == "mha_ext"}
    assert set(records) == {"forward", "backward"}
    assert records["forward"]["seconds"] and records["forward"]["wrong"] == []
    assert records["backward"]["seconds"] is None and records["backward"]["wrong"] == ["query"]
    times = records["backward"]["excess"]["query"]
    assert times > 1 and f": gradient of query ({times:.3g} times the tolerance)\n" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cases", "shoes"], "--cases"),
        (["--filter", "("], "--filter must be a regular expression"),
        (["--filter", "nothing of the kind"], "nothing is left to measure"),
        (["--threads", "none"], "--threads must be numbers of at least 1 or all, got 'none'"),
        (["--peers", "abacus"], "--peers"),
        (["--seconds", "0"], "--seconds: must be a number above 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--output", "/no/such/folder/x.json"], "/no/such/folder/x.json does not exist"),
        (["--output", "/"], "/ is a folder; name a file in it"),
        (["--redraw", "/no/such/file.json"], "/no/such/file.json cannot be read"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run.main(options)
    except SystemExit as stopped:  # what argparse itself refuses
        status = int(stopped.code or 0)
    shown = capsys.readouterr()
    assert status == 2 and shown.out == ""
    assert words in shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_the_suite_has_what_it_promises() -> None:
    groups = suite.groups()
    assert len({(g.title, g.level) for g in groups}) == len(groups)
    assert {group.topic for group in groups} == set(suite.TOPICS)
    peak = {(g.dtype, g.cases[0].queries, g.cases[0].head_dim) for g in groups if g.topic == "peak"}
    assert peak == {(t, n, d) for t in DTYPES for n in (128, 512, 2048, 4096) for d in (64, 128)}
    widths = {case.head_dim for g in groups if g.topic == "odd width" for case in g.cases}
    assert {32, 50, 80, 96, 256} <= widths
    lengths = {case.queries for g in groups if g.topic == "odd length" for case in g.cases}
    assert {197, 333, 1000} <= lengths
    assert {g.topic for g in groups if g.quick} == {g.topic for g in groups} - {"models"}


def test_every_goal_is_measured_by_some_group() -> None:
    """On made-up records of the whole suite, each taking as long as its case has operations."""
    records = []
    for group in suite.groups():
        for case in group.cases:
            peers_of_all = ("SDPA", "SDPA math", "onnxruntime", "projections alone", "aten addcmul")
            for name in (*peers_of_all, "mha_ext"):
                for what in (*group.passes, "backward", "memory"):
                    record = measure.Record(
                        group.topic, case.name, group.dtype, 1, group.level, name, what
                    )
                    record.flops = case.flops("attention", False)
                    record.bytes, record.memory = 1, 2**20
                    work = record.flops * (3 if what == "hvp" else 1)
                    record.seconds = timing.summary([work * 1e-11])
                    record.peak = record.bandwidth = timing.summary([2e11])
                    records.append(record.as_json())
    found = {row["name"]: row for row in goals.evaluate(records)}
    assert found["float32 forward, L >= 512"]["measured"] == pytest.approx(0.5)
    assert found["odd sizes / round neighbour"]["measured"] == pytest.approx(1.0)
    assert found["mean / SDPA, float32 forward"]["measured"] == pytest.approx(1.0)
    assert found["cost of mask, padding, bias"]["measured"] == pytest.approx(0.0)
    assert found["cost of mask, padding, bias"]["met"] is True
    assert found["float32 forward, L >= 512"]["met"] is False
    assert found["hvp / training"]["measured"] == pytest.approx(3.0)
    assert found["double backward / SDPA math"]["measured"] == pytest.approx(1.0)
    optional = ("AMX",)
    for name, row in found.items():
        if not any(word in name for word in optional):
            assert row["measured"] is not None, name


def test_shares_of_the_peak_count_every_number_of_threads() -> None:
    def record(threads: int, seconds: float) -> dict[str, object]:
        made = measure.Record(
            "peak", "8 x 512 x 64", "float32", threads, "attention", "mha_ext", "forward"
        )
        made.flops, made.seconds = 1e9, timing.summary([seconds])
        made.peak = timing.summary([1e11 * threads])
        return made.as_json()

    for records in ([record(1, 0.0125), record(2, 0.01)], [record(2, 0.01), record(1, 0.0125)]):
        row = goals.evaluate(records)[0]
        assert row["name"] == "float32 forward, L >= 512"
        assert row["measured"] == pytest.approx(0.5)
        assert row["where"] == "8 x 512 x 64, forward, 2 threads"


def written(path: Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def scaled(result: dict[str, Any], factor: float, only: str | None = None) -> dict[str, Any]:
    """The result with all times (of one pass) longer by a factor."""
    content = copy.deepcopy(result)
    for record in content["records"]:
        if only in (None, record["what"]):
            for name in ("median", "min", "q1", "q3", "max"):
                record["seconds"][name] *= factor
    return content


def quiet(result: dict[str, Any]) -> dict[str, Any]:
    """The result with quartiles one per cent from the medians, whatever the machine did."""
    content = copy.deepcopy(result)
    for record in content["records"]:
        for samples in (record["seconds"], record["peak"]):
            for name, factor in (("min", 0.98), ("q1", 0.99), ("q3", 1.01), ("max", 1.02)):
                samples[name] = samples["median"] * factor
    return content


def test_compare_finds_a_slowdown(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old.json", quiet(result))
    slow = written(tmp_path / "new.json", scaled(quiet(result), 1.2, "forward"))
    assert compare.main([old, slow]) == 1
    shown = capsys.readouterr().out
    assert "Slower, beyond 5% and noise" in shown
    assert "tiny: 64 x 6 x (12, 10) x 50, float32, 1 thr., forward" in shown
    assert "1.20x" in shown and "1 slower, 0 faster" in shown
    assert compare.main([old, slow, "--threshold", "0.3"]) == 0
    capsys.readouterr()
    assert compare.main([slow, old]) == 0
    assert "0 slower, 1 faster" in capsys.readouterr().out


def test_compare_ignores_noise_and_the_clock(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = quiet(result)
    slower_clock = scaled(old, 1.3)
    for record in slower_clock["records"]:
        for name in ("median", "min", "q1", "q3", "max"):
            record["peak"][name] /= 1.3
    noisy = scaled(old, 1.2)
    for record in noisy["records"]:
        record["seconds"]["q1"] /= 1.25
    a = written(tmp_path / "a.json", old)
    for number, content in enumerate((old, slower_clock, noisy)):
        assert compare.main([a, written(tmp_path / f"{number}.json", content)]) == 0
        assert "0 slower, 0 faster" in capsys.readouterr().out


def test_compare_finds_what_became_wrong(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = copy.deepcopy(result)
    own = next(r for r in content["records"] if r["implementation"] == "mha_ext")
    own["wrong"], own["seconds"] = ["out"], None
    new = written(tmp_path / "new.json", content)
    assert compare.main([written(tmp_path / "old.json", result), new]) == 1
    assert "WRONG: tiny" in capsys.readouterr().out


def test_compare_refuses_what_is_no_result(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "good.json", result)
    (tmp_path / "text.json").write_text("no JSON")
    other = written(tmp_path / "other.json", {"results": []})
    empty = written(tmp_path / "empty.json", {**result, "records": []})
    for path, words in (
        (str(tmp_path / "none.json"), "cannot be read: No such file"),
        (str(tmp_path / "text.json"), "it is not JSON"),
        (other, 'its "format" is not'),
        (empty, "no time in common"),
    ):
        assert compare.main([good, path]) == 2
        shown = capsys.readouterr()
        assert words in shown.err and len(shown.err.strip().splitlines()) == 1
    moved = copy.deepcopy(result)
    moved["machine"]["processor"] = "Another"
    assert compare.main([good, written(tmp_path / "moved.json", moved)]) == 0
    assert "warning: the results are of different machines" in capsys.readouterr().err


def build_times(folder: Path, factor: float) -> str:
    """This build, whose attention is so many times what it should be."""
    package = Path(mha_ext.__file__).parent
    shutil.copytree(package, folder / "mha_ext", copy_function=lambda a, b: Path(b).symlink_to(a))
    functional = folder / "mha_ext/functional.py"
    text = functional.read_text()
    functional.unlink()
    text += f"\n_right = attention\ndef attention(*a, **k): return _right(*a, **k) * {factor}\n"
    functional.write_text(text)
    return str(folder)


def test_builds_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(mha_ext.__file__).parents[1])
    options = ["--filter", "tiny.*float32", "--threads", "1", "--seconds", "0.01", "--starts", "2"]
    near = build_times(tmp_path / "near", 1 + 2**-22)
    for build, bits in ((here, "same"), (near, "other")):
        assert turns.main([here, build, *options]) in (0, 1)  # what it took is not looked at
        shown = capsys.readouterr().out
        lines = [line for line in shown.splitlines() if "tiny: 64 x 6 x (12, 10) x 50" in line]
        for line, what in zip(lines, ("forward", "training", "backward"), strict=True):
            assert f", 1 thr., {what} " in line and f" {bits}" in line
        assert re.search(r"^\d slower, \d faster, \d neither$", shown, re.M)
    far = build_times(tmp_path / "far", 1.5)
    for arguments, words in (
        ([here, far, *options], f"{far} (after) is wrong in out"),
        ([here, str(tmp_path), *options], "AFTER must be a folder that holds a built package"),
        ([here, here, *options[:-1], "0"], "--starts must be at least 1, got 0"),
    ):
        assert turns.main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.splitlines()[-1].startswith("turns.py: error: ")


def test_builds_differ_beyond_noise_alone() -> None:
    def compared(after: float, noise: float, count: int = 5) -> turns.Comparison:
        """Starts in which the builds take 1 and `after`, and BEFORE differs from itself by up to `noise`."""
        starts = []
        for k in range(count):
            again = 1 + noise * (k - 2) / 2
            starts.append(turns.Start.of([1.0] * 9, [after] * 9, [again] * 9, True))
        return turns.Comparison.of("", starts)

    assert compared(1.1, 0.02).is_slower and not compared(1.1, 0.02).is_faster
    assert compared(0.9, 0.02).is_faster and not compared(0.9, 0.02).is_slower
    few = compared(1.1, 0.02, 3), compared(0.9, 0.02, 3)
    for unclear in (compared(1.0, 0.0), compared(1.01, 0.02), compared(0.99, 0.02), *few):
        assert not unclear.is_slower and not unclear.is_faster
    one_slow_round = turns.Start.of([1.0] * 9, [1.0] * 8 + [9.0], [1.0] * 9, True)
    assert one_slow_round.ratio == 1.0 and one_slow_round.noise == 1.0


def test_the_quieter_run_of_each_group_counts(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that in which everything was fast, not that in which mha_ext was."""
    loud = scaled(result, 1.3)
    for record in loud["records"]:  # the peers lost more
        if record["implementation"] != "mha_ext":
            record["seconds"]["median"] *= 1.5
    lucky = copy.deepcopy(loud)
    for record in lucky["records"]:
        if record["implementation"] == "mha_ext":
            record["seconds"]["median"] /= 1.4
    further = copy.deepcopy(result["records"][0])
    further["case"] = "another"
    names = [
        written(tmp_path / "lucky.json", {**lucky, "records": [*lucky["records"], further]}),
        written(tmp_path / "quiet.json", result),
    ]
    out = tmp_path / "both.json"
    assert quieter.main([*names, "--output", str(out), "--no-charts"]) == 0
    assert "tiny / best peer" in capsys.readouterr().out
    both = json.loads(out.read_text())
    assert both["records"] == [*result["records"], further]
    assert both["goals"] == goals.evaluate(both["records"])
    assert both["command"].count("run.py") == 2 and "(1 groups)" in both["command"]
    assert set(both) == set(result)


def test_a_run_in_which_something_failed_does_not_count(result: dict[str, Any]) -> None:
    lucky = scaled(result, 0.9)
    lucky["records"] = [r for r in lucky["records"] if r["implementation"] != "SDPA"]
    lucky["left_out"] = {"SDPA, tiny": "RuntimeError"}
    both = quieter.together([lucky, result], ["a", "b"])
    assert both["records"] == result["records"] and both["left_out"] == {}


def test_a_run_whose_limit_was_lowered_does_not_count(result: dict[str, Any]) -> None:
    lowered = scaled(result, 0.9)
    for record in lowered["records"]:
        for rate in (record["peak"], record["bandwidth"]):
            if rate:
                rate["median"] *= 0.94
    assert quieter.together([lowered, result], ["a", "b"])["records"] == result["records"]
    faster = scaled(result, 0.9)
    assert quieter.together([faster, result], ["a", "b"])["records"] == faster["records"]


def test_what_was_wrong_once_stays(result: dict[str, Any]) -> None:
    slow = scaled(result, 1.3)
    own = next(r for r in slow["records"] if r["implementation"] == "mha_ext")
    own["wrong"], own["seconds"] = ["out"], None
    assert own in quieter.together([result, slow], ["a", "b"])["records"]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("machine", "processor", "Another"),
        ("machine", "isa", "another"),
        ("versions", "commit", "1234567"),
        ("versions", "torch", "1.0"),
        ("settings", "seconds", 1000.0),
    ],
)
def test_runs_of_different_builds_are_refused(
    section: str,
    name: str,
    value: object,
    result: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = copy.deepcopy(result)
    other[section][name] = value
    names = [written(tmp_path / "a.json", result), written(tmp_path / "b.json", other)]
    out = tmp_path / "both.json"
    assert quieter.main([*names, "--output", str(out)]) == 2
    shown = capsys.readouterr().err
    assert "of one build on one machine" in shown and repr(value) in shown
    assert len(shown.strip().splitlines()) == 1 and not out.exists()


def test_share_of_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against onnxruntime too, where it is installed; results are compared with float64 first."""
    out = tmp_path / "out.json"
    options = ["--length", "40", "--head-dim", "24", "--seconds", "0.001", "--json", str(out)]
    assert cpu_share_of_peak.main(["--dtype", "float32", "bfloat16", *options]) == 0
    assert "float32, one thread" in capsys.readouterr().out
    measurements = json.loads(out.read_text())["measurements"]
    for dtype in ("float32", "bfloat16"):
        names = {m["implementation"] for m in measurements if m["dtype"] == dtype}
        expected = {"SDPA", *(f"mha_ext {isa}" for isa in mha_ext._C.supported_isas())}
        if dtype == "float32" and importlib.util.find_spec("onnxruntime"):
            expected.add("onnxruntime")
        assert names == expected
    assert all(m["forward_gflops"] > 0 and m["peak_gflops"] > 0 for m in measurements)


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """Draws what there are kernels for, compares it, and lists the least speed-ups first."""
    source = random.Random(0)
    cases = [sweep.draw(source) for _ in range(300)]
    assert {case.mask for case in cases} == set(MASKS)
    assert any(case.heads > case.key_heads for case in cases)
    assert any(case.value_dim != case.head_dim for case in cases)
    options = ["--problems", "3", "--seconds", "0.001", "--worst", "4", "--dtype", "float32"]
    assert sweep.main(options) == 0
    shown = capsys.readouterr().out
    ratios = [float(found) for found in re.findall(r"([0-9.]+)x *$", shown, re.MULTILINE)]
    assert len(ratios) == 4 and ratios == sorted(ratios)
    assert "the least speed-ups of 3 problems" in shown and "of 3" in shown.splitlines()[-1]


def test_sweep_compares_with_the_faster_peer() -> None:
    """Made-up times; what is wrong has none, and no row."""
    case = sweep.draw(random.Random(0))

    def record(name: str, what: str, taken: float | None) -> measure.Record:
        found = timing.summary([taken]) if taken else None
        return measure.Record(
            "sweep", case.name, "float32", 1, "attention", name, what, seconds=found
        )

    forward = [("eager", 3.0), ("SDPA", 2.0), ("mha_ext", 4.0)]
    records = [record(name, "forward", taken) for name, taken in forward]
    records += [record("eager", "backward", 1.0), record("mha_ext", "backward", None)]
    ((ratio, row),) = sweep.speedups(records, "float32", case)
    assert ratio == 0.5
    ahead = [record("SDPA", "forward", 3.0), record("mha_ext", "forward", 1.0)]
    assert [found for found, _ in sweep.speedups(ahead, "float32", case)] == [3.0]
    assert row and (row[0], row[2:4], row[-2:]) == (
        case.name,
        ["float32", "forward"],
        ["SDPA", "0.50x"],
    )


@pytest.mark.usefixtures("_wrong")
def test_sweep_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--problems", "1", "--seconds", "0.001", "--dtype", "float32"]
    assert sweep.main(options) == 1
    assert "wrong: sweep: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--worst", "0"], "--worst must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds: must be a number above 0"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_bad_options_of_sweep(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweep.main(options)
    assert words in capsys.readouterr().err


def test_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fit finds what made-up times were made of; the command runs on two narrow widths."""
    taken = {(d, dv): 100.0 + 3 * d + 5 * dv for d in (16, 32) for dv in (16, 32, 64)}
    assert budget.fit(taken) == pytest.approx((100, 3, 5, 0), abs=1e-6)
    monkeypatch.setattr(budget, "LENGTH", 64)
    monkeypatch.setattr(budget, "WIDTHS", (8, 64))
    assert budget.main(["--seconds", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert "forward, float32" in shown and "backward, float32" in shown
    assert "dropout, beyond that" in shown


def test_second_order(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--filter", "second order: 8 x 512 x 64, float32", *FAST[:2], "--repeats", "1"]
    assert run.main([*options, "--no-memory", "--no-charts", "--output", str(out)]) == 0
    found = {(r["implementation"], r["what"]) for r in json.loads(out.read_text())["records"]}
    for name in ("mha_ext", measure.SDPA_MATH):
        assert {(name, "jvp"), (name, "hvp")} <= found


def test_turns() -> None:
    """Everyone gets its rounds, and one that takes long rests meanwhile."""
    order: list[str] = []
    found = timing.in_turns(
        {name: lambda name=name: order.append(name) for name in "ab"}, 0.0, at_least=3
    )
    assert order == list("ababab") and [len(samples) for samples in found.values()] == [3, 3]
    assert timing.summary([4.0, 1.0, 2.0, 3.0, 5.0]) == timing.Samples(5, 3.0, 1.0, 2.0, 4.0, 5.0)
    with pytest.raises(ValueError, match="at least one sample"):
        timing.summary([])


@pytest.mark.parametrize(("lasts", "order"), [(0.01, "cscs"), (0.1, "css")])
def test_samples_follow_a_call_that_is_not_counted(lasts: float, order: str) -> None:
    """All but those of long calls, where only the first does."""
    made: list[str] = []
    sample = timing.settled(lambda: made.append("c"), lambda: made.append("s") or lasts, float)
    assert [sample(), sample()] == [lasts, lasts] and "".join(made) == order


def test_the_examples_of_the_documents_are_options() -> None:
    """Each command line in the READMEs and in what is said of performance parses."""
    root = FOLDER.parent
    documents = (root / "docs" / "performance.md", *sorted(root.glob("docs/performance/*.md")))
    for path in (FOLDER / "README.md", root / "README.md", *documents):
        for line in re.findall(r"python benchmarks/run\.py([^\n`#]*)", path.read_text()):
            run._parser().parse_args(shlex.split(line))
