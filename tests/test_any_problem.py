"""Options that nobody has thought of together: problems drawn by hypothesis, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import test_backward
import test_forward
import test_tangents
from cases import Problem, random_problem

pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.isa
forty = settings(max_examples=40, deadline=None, derandomize=True, database=None)
sixty = settings(forty, max_examples=60)


def drawn(data: st.DataObject) -> Problem:
    def choose(values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    return random_problem(choose)


@sixty
@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    test_forward.check(drawn(data))


@forty
@given(st.data())
def test_gradients_of_any_problem(data: st.DataObject) -> None:
    test_backward.check(drawn(data))


@forty
@given(st.data())
def test_any_problem_in_any_direction(data: st.DataObject) -> None:
    """Directions that are missing, gradients that are not wanted."""
    missing = data.draw(st.sets(st.sampled_from(test_tangents.NAMES)))
    unwanted = data.draw(st.sets(st.sampled_from(range(4))))
    test_tangents.check(drawn(data), sorted(missing), sorted(unwanted))
