"""Timing in turns (A B C A B C ...), and what the samples say.

On a shared machine the clock and the memory change from second to second. So whatever is compared is
timed in the same rounds, and the median and the quartiles of many rounds are what counts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_BLOCK_SECONDS = 2e-3  # a sample is the mean of so many calls that it lasts this long
_LONG_SECONDS = 0.05  # a call that lasts this long has long lost what the one before it left behind


@dataclass(frozen=True)
class Samples:
    """Seconds of one call, or a rate: how often it was taken, and how it is spread."""

    count: int
    median: float
    min: float
    q1: float
    q3: float
    max: float


def summary(values: Sequence[float]) -> Samples:
    """The quartiles are values between the samples, by linear interpolation."""
    if not values:
        raise ValueError("values must hold at least one sample, got none")
    q1 = q3 = values[0]
    if len(values) > 1:
        q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Samples(len(values), statistics.median(values), min(values), q1, q3, max(values))


def clock(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of one call, over `times` of them."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / times
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def calls_per_sample(call: Callable[[], object], device: torch.device) -> int:
    """Warms the call up; how many of them make a sample that the clock resolves."""
    first = clock(call, 1, device)
    if first > 10 * _BLOCK_SECONDS:
        return 1
    return min(1000, max(1, round(_BLOCK_SECONDS / max(clock(call, 1, device), 1e-7))))


def settled(
    call: Callable[[], object], sample: Callable[[], T], seconds: Callable[[T], float]
) -> Callable[[], T]:
    """`sample`, after a `call` that is not counted.

    So a sample follows a call of its own, not somebody else's, with other things in the caches and threads
    that have gone to sleep. `seconds` says how long a call took in a sample: long ones go without.
    """
    last = 0.0

    def settle() -> T:
        nonlocal last
        if last < _LONG_SECONDS:
            call()
        found = sample()
        last = seconds(found)
        return found

    return settle


def in_turns(
    visits: Mapping[K, Callable[[], T]],
    seconds: float,
    *,
    at_least: int = 3,
    at_most: int = 200,
) -> dict[K, list[T]]:
    """What the visits return, visited in turns for about `seconds`.

    A visit that takes long rests in some rounds, so that no one uses more than an equal part of the
    time; each is made at least `at_least` times, however long that takes.
    """
    found: dict[K, list[T]] = {name: [] for name in visits}
    spent = dict.fromkeys(visits, 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin = time.perf_counter()
        while True:
            elapsed = time.perf_counter() - begin
            wanted = at_most if elapsed < seconds else at_least
            waiting = [name for name in visits if len(found[name]) < wanted]
            if not waiting:
                return found
            for name in waiting:
                if spent[name] > elapsed / len(waiting) and len(found[name]) >= at_least:
                    continue
                start = time.perf_counter()
                found[name].append(visits[name]())
                spent[name] += time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def alternate(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    seconds: float,
    repeats: int | None = None,
) -> dict[str, Samples]:
    """The seconds of each call, in turns for `seconds` (or `repeats` rounds)."""

    def visit(call: Callable[[], object]) -> Callable[[], float]:
        times = calls_per_sample(call, device)
        return settled(call, lambda: clock(call, times, device), float)

    visits = {name: visit(call) for name, call in calls.items()}
    if repeats is not None:
        samples = in_turns(visits, 0.0, at_least=repeats, at_most=repeats)
    else:
        samples = in_turns(visits, seconds)
    return {name: summary(values) for name, values in samples.items()}
