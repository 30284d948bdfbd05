"""mha_ext.distributed on 2 and 4 ranks (gloo) against one process; the cases are in tests/ranks."""

from __future__ import annotations

import pytest
import ranks.data_cases
import ranks.operator_cases
import ranks.sequence_cases
import ranks.tensor_cases
from ranks.launch import reports

MODULES = {
    "sequence_cases": ranks.sequence_cases.CASES,
    "operator_cases": ranks.operator_cases.CASES,
    "data_cases": ranks.data_cases.CASES,
    "tensor_cases": ranks.tensor_cases.CASES,
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "module, name", [(module, name) for module, found in MODULES.items() for name in found]
)
def test_equals_one_process(module: str, name: str, world: int) -> None:
    report = reports(module, world)
    assert name in report, f"not reached: {report}"
    assert report[name] == "", report[name]
