"""What the tests of the emulated kernels share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import emulated
import pytest


@pytest.fixture
def on_the_emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operators run on the emulator, on a schedule of this test's own."""
    emulated.library().seed = len(request.node.name)  # any schedule must do
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        with emulated.installed():
            yield
