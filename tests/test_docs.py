"""The documents say what is true: examples run and print what they show, names and links exist."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import mha_ext

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/performance/*.md")),
]
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block, and the ``text`` block right behind it: what it prints."""

    code: str
    line: int
    prints: str | None


def python_blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    fences = list(FENCE.finditer(text))
    for number, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        prints = None
        following = fences[number + 1] if number + 1 < len(fences) else None
        if following and following[1] == "text":
            if not text[fence.end() : following.start()].strip():
                prints = following[2]
        yield Block(fence[2], text.count("\n", 0, fence.start(2)), prints)


def prose(path: Path) -> str:
    """The document without its fenced blocks."""
    return FENCE.sub("", path.read_text())


def slugs(path: Path) -> set[str]:
    """The anchors that a document's headings get."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        plain = re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@documents
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ``python`` blocks of a document, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    for package in re.findall(r"^import (onnxruntime)$", path.read_text(), re.MULTILINE):
        pytest.importorskip(package, reason=f"pip install {package}")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(path):
        printed = io.StringIO()
        code = compile("\n" * block.line + block.code, path.name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.prints is not None:
            assert printed.getvalue() == block.prints, f"{path.name}:{block.line}"


@documents
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in slugs(file), target


@documents
def test_named_files_and_tests_exist(path: Path) -> None:
    text = prose(path)
    folders = "csrc|mha_ext|tests|tools|docs|benchmarks|examples|build_backend"
    for name in re.findall(rf"`((?:{folders})/[\w./*-]*)`", text):
        assert list(ROOT.glob(name.rstrip("/"))), name
    sources = "\n".join(file.read_text() for file in ROOT.glob("tests/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in sources, name


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the README, without its two top lines."""
    section = prose(ROOT / "README.md").split(f"\n{heading}\n", 1)[1]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_support_table_names_real_options() -> None:
    """Every option that it names is an argument somewhere, and every argument of attention is named."""
    functions = [mha_ext.attention, mha_ext.attention_weights, mha_ext.MultiHeadAttention]
    known = {
        name for f in (*functions, mha_ext.MultiHeadAttention.forward) for name in parameters(f)
    }
    rows = table_after("## What it supports")
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert named <= known, named - known
    assert set(parameters(mha_ext.attention)) - {"query", "key", "value"} <= named


@pytest.mark.parametrize(
    "heading, functions",
    [
        ("### Of the layer", [mha_ext.MultiHeadAttention]),
        ("### Of its call", [mha_ext.MultiHeadAttention.forward]),
    ],
    ids=["layer", "call"],
)
def test_argument_tables_are_complete(heading: str, functions: list[object]) -> None:
    named = [name for row in table_after(heading) for name in re.findall(r"`(\w+)`", row[0])]
    assert named == [name for function in functions for name in parameters(function)]
