"""`pytest --device emulator` runs the contract on the emulated kernels, on nothing else, and says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import emulated
import operators

TESTS = emulated.HERE.parent


def run(module: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest with this module, in a process of its own."""
    command = [sys.executable, "-I", "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider"]
    command += ["--device", "emulator", *arguments]
    environment = dict(os.environ, MHA_EXT_EMULATOR=str(module), PYTHONPATH=str(TESTS))
    return subprocess.run(
        command, capture_output=True, text=True, cwd=emulated.ROOT, env=environment, timeout=600
    )


OUTCOMES = """
import pytest, torch
import mha_ext

pytestmark = pytest.mark.isa
q = torch.randn(1, 2, 5, 8)

def test_it_runs():
    assert mha_ext.attention(q, q, q).isfinite().all()

def test_needs_what_is_not_there():
    torch.ops.mha_ext.linear(q, q)

def test_swallows_that():
    try:
        torch.ops.mha_ext.linear(q, q)
    except BaseException:
        pass
    mha_ext.attention(q, q, q)

def test_too_much():
    for _ in range(10_000):
        mha_ext.attention(q, q, q)

def test_too_wide():
    mha_ext.attention(*[torch.randn(1, 1, 2, 300)] * 3)

def test_runs_nothing():
    pass

def test_is_wrong():
    assert not mha_ext.attention(q, q, q).isfinite().all()

def test_everything_is_written():
    out, lse, low = torch.ops.mha_ext.attention_forward(q, q, q, None, None, None, None, scale=1.0)
    assert out.isfinite().all() and lse.isfinite().all() and low.isfinite().all()

@pytest.mark.parametrize("number", range(40))
def test_many(number):
    mha_ext.attention(q, q, q)

@pytest.mark.own_process
def test_starts_a_process():
    raise AssertionError("it ran")

@pytest.mark.cpu_alone("asks for threads")
def test_of_threads():
    raise AssertionError("it ran")
"""
NO_CONTRACT = """
def test_of_something_else():
    raise AssertionError("it ran")
"""


def test_outcomes(tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    (tmp_path / "test_else.py").write_text(NO_CONTRACT)
    files = ["-p", "conftest", "-c", "pyproject.toml", str(tmp_path)]
    answer = run(operators.build(), *files, "--cases", "7")
    text = answer.stdout
    assert answer.returncode == 1, text + answer.stderr
    assert re.search(r"1 failed, 9 passed, 5 skipped, 36 deselected", text), text
    assert re.search(r"FAILED .*::test_is_wrong", text)
    for line in (
        "2 skipped: needs mha_ext::linear, which has no kernel there",
        "1 skipped: too much work for it",
        "1 skipped: heads are wider than 256",
        "1 skipped: ran no kernel there",
        "1 deselected: faces no kernel",
        "1 deselected: starts a process",
        "1 deselected: asks for threads",
        "33 deselected: other cases of the same tests",
    ):
        assert line in text, text
    idle = re.findall(r"^no case ran of \S*::(\w+)$", text, re.MULTILINE)
    assert idle == [
        *("test_is_wrong", "test_needs_what_is_not_there", "test_runs_nothing"),
        *("test_swallows_that", "test_too_much", "test_too_wide"),
    ]
    assert re.search(r"^replaced: .*mha_ext::attention_forward", text, re.MULTILINE)
    assert re.search(r"^not there: .*mha_ext::linear", text, re.MULTILINE)
    assert re.search(r"^9 tests passed, with \d\d\d+ launches", text, re.MULTILINE)


def test_a_wrong_kernel_fails_the_contract(tmp_path: Path) -> None:
    """The scale of float16 is off by a hundredth: its tests of forward fail, the others pass."""
    name = "forward_float16.cu"
    text = (emulated.KERNELS / name).read_text()
    given = "const char* forward_of<Float16>(const Attention& a,"
    assert text.count(given) == 1
    head, body = text.split(given)
    body = body.replace("{\n", "{\n  Attention a = right;\n  a.scale *= 1.01;\n", 1)
    mutant = tmp_path / name
    mutant.write_text(head + given.replace("& a,", "& right,") + body)
    module = operators.build({name: mutant}, tmp_path)
    chosen = ["tests/test_forward.py", "--cases", "24", "-k", "every_option"]
    answer = run(module, *chosen)
    failed = re.findall(r"^FAILED (\S+)", answer.stdout, re.MULTILINE)
    assert failed and all("dtype=float16" in test for test in failed), answer.stdout
    answer = run(operators.build(), *chosen)
    assert answer.returncode == 0, answer.stdout
