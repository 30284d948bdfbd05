"""The command line: `mha-ext profile | info | check`."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mha_ext
from mha_ext import check, exact, peers, report
from mha_ext.__main__ import main
from mha_ext.cases import CASES, DTYPES, MASKS, SQUARE_MASKS, Case, MaskKind, levels

SMALL = ["profile", "--batch", "2", "--heads", "4", "--queries", "9", "--head-dim", "16"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_and_isa_as_before() -> object:
    threads, isa = torch.get_num_threads(), mha_ext._C.active_isa()
    yield
    torch.set_num_threads(threads)
    mha_ext._C.set_isa(isa)


def test_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mha_ext", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == mha_ext.__version__


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for word in ("version", "torch", "compiler", "cuda", "threads", "copy bandwidth"):
        assert word in shown
    assert f"active {mha_ext._C.active_isa()}" in shown
    for dtype in DTYPES:
        assert f"peak {dtype}" in shown
    line = next(line for line in shown.splitlines() if line.startswith("kernels on CPU"))
    for name in ("attention_forward", "attention_backward_tangent", "attention_weights", "linear"):
        assert name in line
    line = next(line for line in shown.splitlines() if line.startswith("kernels on CUDA"))
    assert ("attention_forward" in line) == (not mha_ext._C.build_info()["cuda"].startswith("no"))


def test_profile_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    options = ["--repeats", "1", "--threads", "1", "--json", str(out), "--trace", str(trace)]
    assert main([*SMALL, *options]) == 0
    shown = capsys.readouterr().out
    assert "Attention alone" in shown and "Whole layer" in shown

    found = json.loads(out.read_text())
    assert found["threads"] == 1
    assert found["isa"] == mha_ext._C.active_isa()
    names = {(result["level"], result["name"]) for result in found["results"]}
    assert names == {
        *(("attention", name) for name in ("eager", "SDPA", "mha_ext")),
        *(("layer", name) for name in ("eager", "SDPA", "nn.MultiheadAttention", "mha_ext")),
    }
    for result in found["results"]:
        assert result["wrong"] == []
        assert result["forward_ms"] > 0 and result["training_ms"] > 0
        assert result["out_error"] < 1e-5 and result["grad_error"] < 1e-3
        assert result["peak"] > 0
    if sys.platform == "linux":
        assert all(result["memory"] is not None for result in found["results"])
    assert "traceEvents" in json.loads(trace.read_text())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_implementations_agree(mask: MaskKind, dtype: str) -> None:
    case = Case("", 3, 4, 20, 20, 16, mask=mask)
    _verify(case, dtype)
    _verify(replace(case, kv_heads=2), dtype)
    if mask not in SQUARE_MASKS:
        _verify(replace(case, keys=33), dtype)
        _verify(replace(case, keys=1), dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """The real shapes, at a batch of two."""
    _verify(replace(case, batch=min(2, case.batch)), "float32")


@pytest.mark.parametrize("mask", MASKS)
def test_large_problems_are_verified_by_rows(
    mask: MaskKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mha_ext.exact.SCORES_CHECKED_IN_FULL", 0)
    _verify(Case("", 2, 2, 50, 50, 8, mask=mask), "float32")


def _verify(case: Case, dtype: str) -> None:
    for level in levels(case):
        inputs, runs = peers.prepare(case, level, DTYPES[dtype], CPU)
        results = exact.verify(runs, inputs, level)
        assert "mha_ext" in results
        for result in results.values():
            assert result.wrong == [], result.name


def test_a_wrong_result_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = mha_ext.attention

    def wrong(query: Tensor, *args: object, **options: object) -> Tensor:
        out: Tensor = attention(query, *args, **options)  # type: ignore[call-overload]
        return out * 1.01

    monkeypatch.setattr(mha_ext, "attention", wrong)
    assert main([*SMALL, "--repeats", "1"]) == 1
    shown = capsys.readouterr()
    assert "WRONG" in shown.out
    assert "WRONG: mha_ext" in shown.err and "attention: out (" in shown.err


def test_how_far_off_a_result_is() -> None:
    result = exact.Result("case", "attention", "mha_ext")
    for name, error, tolerance in (
        *(("out", 1e-6, 1e-6), ("query", 3e-6, 2e-6), ("key", math.nan, 1.0)),
        *(("value", math.inf, 1.0), ("bias", 1e-9, 0.0), ("hvp of key", 2.0, 1.0)),
    ):
        result.judge(name, error, tolerance)
    assert exact.wrong_text(result.wrong, result.excess) == (
        "gradient of query (1.5 times the tolerance), gradient of key, gradient of value, "
        "gradient of bias, hvp of key (2 times the tolerance)"
    )
    assert exact.wrong_text(["out"], {}) == "out"  # of files that do not say how far


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "0"], "--batch: must be a whole number of at least 1"),
        (["--queries", "many"], "--queries: must be a whole number"),
        (["--heads", "6", "--kv-heads", "4"], "kv_heads must divide heads, got 4 and 6"),
        (["--mask", "diagonal"], "--mask"),
        (["--mask", "causal", "--queries", "3", "--keys", "4"], "causal needs as many keys"),
        (["--dropout", "1"], "dropout must be at least 0 and below 1"),
        (["--dropout", "nan"], "dropout must be at least 0 and below 1"),
        (["--seconds", "-1"], "--seconds: must be a number above 0"),
        (["--threads", "99999"], "threads must be from 1 to "),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N"),
        (["--device", "meta"], "device must be cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json"),
        (["--json", "/"], "/ is a folder; name a file in it"),
        (["--json", "x" * 300], "cannot be written: File name too long"),
        (["--trace", "/"], "/ is a folder; name a file in it"),
        (["--batch", "9" * 20], "--batch: must be a whole number of at least 1 and below 2**31"),
        (["--batch", "9" * 5000], "--batch: must be a whole number of at least 1 and below 2**31"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["profile", *options])
    except SystemExit as stopped:  # what argparse itself refuses
        status = int(stopped.code or 0)
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_a_place_where_nobody_may_write_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: mode != os.W_OK)
    assert main(["profile", "--json", str(tmp_path / "x.json")]) == 2
    assert "x.json cannot be written; name a file where that is" in capsys.readouterr().err


def test_a_shape_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--batch", "100000", "--heads", "1000", "--queries", "100000"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mha-ext profile: error: the tensors do not fit into memory")


@pytest.mark.parametrize(("command", "status"), [("info", 0), ("profile", 141)])
def test_a_reader_that_has_seen_enough(command: str, status: int, tmp_path: Path) -> None:
    """As in `mha-ext info | head -1`; what was measured is written all the same."""
    ours, theirs = os.pipe()
    os.close(ours)
    out = tmp_path / "out.json"
    options = [*SMALL[1:], "--repeats", "1", "--json", str(out)] if command == "profile" else []
    with os.fdopen(theirs, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "mha_ext", command, *options],
            stdout=closed,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
    assert out.exists() == (command == "profile")


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "0 results outside the tolerance" in shown
    for isa in mha_ext._C.supported_isas():
        assert f"{isa} float32" in shown


def test_check_finds_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = mha_ext.attention

    def wrong(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = attention(*args, **options)  # type: ignore[call-overload]
        return out * (1 + 1e-5), lse

    monkeypatch.setattr(mha_ext, "attention", wrong)
    isa = mha_ext._C.active_isa()
    assert check.main(isa=isa, dtype="float32") == 1
    shown = capsys.readouterr()
    assert f"FAILED: {isa}, float32, plain: out is off by" in shown.err
    assert mha_ext._C.active_isa() == isa


def test_plain_table_is_aligned() -> None:
    text = report.plain_table(["", "two\nlines", "n"], [["name", "1.0", "22"], None, ["x", "", ""]])
    assert text.split("\n") == [
        "        two",
        "      lines   n",
        "---------------",
        "name    1.0  22",
        "---------------",
        "x",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_drawn_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rich on a terminal that is wide enough, else as plain text: no number is ever cut short."""
    headers, rows = ["", "two\nlines", "n"], [["name", "1.0", "[22]"], None, ["x", "", ""]]
    plain = f"Title\n\n{report.plain_table(headers, rows)}\n\n"
    drawn = {}
    for columns in range(10, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        file = Terminal()
        report.print_table("Title", headers, rows, file)
        drawn[columns] = file.getvalue()
        assert all(word in drawn[columns] for word in ("name", "1.0", "[22]", "lines"))
    assert drawn[10] == plain and "─" in drawn[59]
    pipe = io.StringIO()
    report.print_table("Title", headers, rows, pipe)
    assert pipe.getvalue() == plain


def test_importing_leaves_rich_alone(tmp_path: Path) -> None:
    code = "import sys, mha_ext; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_flops() -> None:
    case = Case("", 2, 3, 8, 8, 5)
    assert case.flops("attention", backward=False) == 4 * 2 * 3 * 8 * 8 * 5
    assert case.flops("attention", backward=True) == 3.5 * 4 * 2 * 3 * 8 * 8 * 5
    causal = replace(case, mask="causal")
    assert causal.flops("attention", backward=False) == 2 * 2 * 3 * 8 * 8 * 5
    projections = 4 * 2 * (2 * 8) * 15 * 15
    assert case.flops("layer", backward=False) == 4 * 2 * 3 * 8 * 8 * 5 + projections
