"""Ring and all-to-all attention against one process: outputs, logsumexp and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor

import mha_ext
from mha_ext.distributed import sequence_parallel_attention, shard_sequence, unshard_sequence

TIGHT = {"atol": 1e-10, "rtol": 1e-10}
PLAIN = cases.Problem(torch.float64, 2, 4, None, 48, 48, 8)

PROBLEMS = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "value width": replace(PLAIN, causal=True, value_dim=5),
    "grouped": replace(PLAIN, kv_heads=4, heads=8, causal=True),
    "dropout": replace(PLAIN, dropout_p=0.3),
    "causal, dropout": replace(PLAIN, causal=True, dropout_p=0.3),
    "cross": replace(PLAIN, queries=32, keys=64),
    "upper left": replace(PLAIN, queries=32, keys=64, causal="upper_left"),
    "lower right": replace(PLAIN, queries=32, keys=64, causal="lower_right"),
    "lower right, more queries": replace(PLAIN, queries=64, keys=32, causal="lower_right"),
    "lower right, dropout": replace(
        PLAIN, queries=32, keys=64, causal="lower_right", dropout_p=0.3, window=(9, None)
    ),
    "lower right, lengths": replace(PLAIN, causal="lower_right", key_lengths="random"),
    "lower right, lengths, dropout": replace(
        PLAIN, causal="lower_right", key_lengths="random", dropout_p=0.3, mask="b1qk"
    ),
    "window": replace(PLAIN, window=(5, 7)),
    "window, causal": replace(PLAIN, window=(5, None), causal=True, dropout_p=0.2),
    "window, one side": replace(PLAIN, window=(None, 3), dropout_p=0.2),
    "lengths": replace(PLAIN, key_lengths="random"),
    "lengths, causal": replace(PLAIN, key_lengths="random", causal="upper_left", dropout_p=0.2),
    "lengths 0": replace(PLAIN, key_lengths="edges", causal="upper_left"),
    "mask": replace(PLAIN, mask="bhqk"),
    "mask of rows": replace(PLAIN, mask="q1"),
    "mask of keys": replace(PLAIN, mask="b11k", mask_dtype=torch.int32),
    "mask of heads": replace(PLAIN, mask="1h1k", causal=True),
    "bias": replace(PLAIN, bias="bhqk"),
    "bias of heads": replace(PLAIN, bias="1hqk", causal=True, dropout_p=0.2),
    "bias, shared": replace(PLAIN, bias="qk"),
    "bias of keys": replace(PLAIN, bias="1h1k", dropout_p=0.2),
    "bias of rows": replace(PLAIN, bias="1hq1", causal=True),
    "bias of batch": replace(PLAIN, bias="b111"),
    "bias of nothing": replace(PLAIN, bias=""),
    "uniform": replace(PLAIN, mask="bhqk", empty_rows="uniform"),
    "uniform, lengths": replace(PLAIN, key_lengths="edges", empty_rows="uniform"),
    "uniform, dropout": replace(
        PLAIN, mask="b1qk", empty_rows="uniform", dropout_p=0.4, key_lengths="random", window=(3, 0)
    ),
    "scale": replace(PLAIN, scale=-0.7, causal=True),
    "strided": replace(PLAIN, layout="strided", causal=True),
}


def rows_of(pairs: Tensor | None, order: str) -> Tensor | None:
    """This rank's rows of mask or bias."""
    if pairs is None or pairs.dim() < 2 or pairs.shape[-2] == 1:
        return pairs
    return shard_sequence(pairs, dim=-2, order=order)


def compare(problem: cases.Problem, method: str, order: str) -> None:
    inputs = cases.make(problem)
    one = cases.results(partial(cases.call, mha_ext.attention), inputs)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves().items()}
    cut = partial(shard_sequence, dim=2, order=order)
    bias = rows_of(leaves.get("bias"), order)
    out, lse = sequence_parallel_attention(
        *(cut(leaves[name]) for name in ("query", "key", "value")),
        rows_of(inputs.mask, order),
        bias=bias,
        key_lengths=inputs.key_lengths,
        seed=inputs.seed,
        return_lse=True,
        method=method,
        order=order,
        **inputs.options,
    )
    whole = partial(unshard_sequence, dim=2, order=order)
    tight = TIGHT if problem.dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(whole(out), one["out"], **tight)
    torch.testing.assert_close(whole(lse), one["lse"], **tight)
    cotangents = [cut(inputs.grad_out), cut(inputs.grad_lse.to(lse.dtype))]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), cotangents)
    for (name, _), grad in zip(leaves.items(), grads, strict=True):
        dist.all_reduce(grad)  # each rank has the part of its own rows
        torch.testing.assert_close(grad, one[f"grad_{name}"], **tight)


def methods(problem: cases.Problem) -> list[str]:
    size = dist.get_world_size()
    heads = problem.heads if problem.kv_heads is None else problem.kv_heads
    return ["ring", "all_to_all"] if heads % size == 0 else ["ring"]


def in_every_way(problem: cases.Problem) -> None:
    for method in methods(problem):
        for order in ("zigzag", "contiguous"):
            compare(problem, method, order)


def under_autocast() -> None:
    """float64 stays, everything else is cast before it is looked at, as in one process."""
    x = torch.randn(1, 4, 16, 8)
    half, bias = x.bfloat16(), torch.randn(16)
    of_keys = torch.tensor([16], dtype=torch.uint16)
    cut = partial(shard_sequence, dim=2)
    for query, key, value, options in (
        (x.double(), x.double(), x.double(), {}),
        (x, half, half, {}),
        (half, half, x, {}),
        (x, x, x, {"bias": bias.bfloat16()}),
        (x, x, x, {"bias": bias, "key_lengths": of_keys}),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            one = mha_ext.attention(query, key, value, **options)
            for method in methods(PLAIN):
                found = sequence_parallel_attention(
                    cut(query), cut(key), cut(value), method=method, **options
                )
                whole = unshard_sequence(found, dim=2)
                assert whole.dtype == one.dtype
                tight = TIGHT if one.dtype == torch.float64 else {"atol": 0.05, "rtol": 0.05}
                torch.testing.assert_close(whole, one, **tight)


CASES: dict[str, Callable[[], Any]] = {
    name: partial(in_every_way, problem) for name, problem in PROBLEMS.items()
} | {"under autocast": under_autocast}
