"""Shared by all tests: the marks, one seed for every test, and the slow tests' switch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption(
        "--device",
        choices=("cpu", "emulator", "hopper", "cuda"),
        default="cpu",
        help="where the tests marked isa, and no others, run: the emulated CUDA kernels, or a GPU",
    )
    parser.addoption(
        "--cases",
        type=int,
        default=0,
        metavar="N",
        help="with --device: so many cases of each test; 0 = all, the default",
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--device")
    if chosen != "cpu":
        import sizes
        from devices import Elsewhere, device

        sizes.on_emulator = chosen in ("emulator", "hopper")
        config.pluginmanager.register(Elsewhere(device(chosen), config.getoption("--cases")))
    config.addinivalue_line("markers", "isa: faces the kernels; run it again for every ISA")
    config.addinivalue_line("markers", "own_process: starts a process; not with --device")
    config.addinivalue_line("markers", "cpu_alone(why): not with --device")
    config.addinivalue_line("markers", "slow: minutes or gigabytes; runs with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "slow" in (config.getoption("-m") or ""):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    """Every test draws the same numbers, on one thread unless it says otherwise.

    One thread is the fastest for problems this small; that any other number gives the same bits is
    a test of its own.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
