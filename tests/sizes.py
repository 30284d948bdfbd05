"""How large a test is: the emulated CUDA kernels take seconds for what a CPU does in milliseconds.

A test whose meaning does not hang on its sizes says two of them: `size(3000, emulated=300)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from cases import Problem

T = TypeVar("T")

on_emulator = False  # conftest.py sets it before the tests are read


def size(usual: T, *, emulated: T) -> T:
    """The second on the emulator, the first everywhere else."""
    return emulated if on_emulator else usual


def fewer(problem: Problem, batch: int = 1) -> Problem:
    """On the emulator so many sequences, and heads that suffice: one, or the two of a group."""
    if not on_emulator:
        return problem
    heads = 2 if problem.kv_heads not in (None, problem.heads) else 1
    return replace(problem, batch=batch, heads=heads, kv_heads=1)
