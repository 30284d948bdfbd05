"""docs/scaling.md shows what benchmarks/scaling.py prints, and the break-even points break even."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from mha_ext.distributed import costs

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/scaling.md").read_text()
SHOWN = re.findall(
    r"```sh\npython benchmarks/scaling\.py ?(.*?)\n```\n\n```text\n(.*?)```", TEXT, re.DOTALL
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks/scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arguments, printed", SHOWN, ids=["default", "many key heads"])
def test_document_shows_what_the_script_prints(
    script: ModuleType, arguments: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(arguments.split()) == 0
    assert capsys.readouterr().out == printed


def shape(tokens: int, kv_heads: int = 4) -> costs.Shape:
    return costs.Shape(1, 32, kv_heads, tokens, tokens, 64, 64)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("kv_heads", [1, 4, 32])
def test_more_ranks_than_break_even_speak_for_all_to_all(
    script: ModuleType, ranks: int, kv_heads: int
) -> None:
    case = shape(4096, kv_heads)
    fewer = costs.all_to_all_bytes(case, ranks) < costs.ring_bytes(case, ranks, backward=False)
    assert fewer == (ranks > script.fewer_bytes_from(case))


@pytest.mark.parametrize("ranks", [2, 64])
def test_ring_hides_what_it_sends_from_the_length_that_is_said(
    script: ModuleType, ranks: int
) -> None:
    bandwidth, speed = 1e9, 1e12
    length = script.hidden_from(shape(1), ranks, bandwidth, speed)
    for factor, hidden in ((1.01, True), (0.99, False)):
        case = shape(round(length * factor))
        computing = costs.flops(case, causal=True, backward=False) / ranks / speed
        taken = costs.ring_seconds(case, ranks, bandwidth, speed, causal=True, backward=False)
        assert (taken == computing) == hidden


def test_heads_that_do_not_divide_go_round() -> None:
    assert costs.cheapest(shape(4096, 32), 16, 16, backward=True) == "all_to_all"
    assert costs.cheapest(shape(4096, 4), 16, 16, backward=True) == "ring"
    assert costs.cheapest(shape(4096, 32), 2, 2, backward=False) == "ring"  # a tie
