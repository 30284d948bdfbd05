"""mha_ext.distributed on 2 and 4 ranks (gloo) against one process; the cases are in tests/ranks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from ranks.launch import reports

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

MODULES = (
    "sequence_cases",
    "tensor_cases",
    "operator_cases",
    "data_cases",
    "count_cases",
    "layout_cases",
    "failure_cases",
)
CASES = [
    f"{module}: {case}"
    for module in MODULES
    for case in importlib.import_module(f"ranks.{module}").CASES
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_on_ranks(case: str, world: int) -> None:
    report = reports(",".join(MODULES), world)
    wrong = {name: error for name, error in report.items() if error}
    assert case in report, f"not reached, because of {wrong}"
    assert report[case] == "", report[case]


def test_example_trains_alike_on_every_layout(tmp_path: Path) -> None:
    """Exits with 1 where a layout disagrees with one process."""
    example = Path(__file__).resolve().parents[1] / "examples/distributed_lm.py"
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(example), "--steps=3"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for layout in ("one process", "DDP", "FSDP2", "tensor", "ring", "all-to-all"):
        assert f"\n{layout}: " in "\n" + answer.stdout


@pytest.mark.parametrize(
    "case, world",
    [
        ("silent_cases: silent", 2),
        ("stalled_cases: stalls", 2),
        ("dead_cases: dies", 2),
        ("dead_cases: dies", 4),
    ],
)
def test_a_rank_that_is_gone_is_an_error_on_the_others(case: str, world: int) -> None:
    report = reports(case.split(":")[0], world)
    assert report == {case: ""}, report
