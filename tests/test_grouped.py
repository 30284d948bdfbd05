"""Heads that share keys and values, with few queries each: forward fills its tiles with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    Inputs,
    Problem,
    assert_accurate,
    call,
    exact,
    largest_terms,
    make,
    plain_orders,
    results,
)
from sizes import size
from torch import Tensor

import mha_ext

pytestmark = pytest.mark.isa

# Queries, heads, key/value heads, keys. Together they are a part of a block, one, a bit more, several, and
# more than a task takes; a block begins within a head; the keys are in several ranges. With up to eight
# queries a head nothing is grouped.
SHAPES = size(
    (
        (1, 64, 2, 130),
        (4, 16, 2, 200),
        (5, 6, 1, 65),
        (7, 10, 2, 100),
        (7, 20, 2, 150),
        (12, 8, 2, 128),
        (12, 32, 4, 130),
        (33, 4, 2, 100),
        (40, 26, 2, 66),
        (40, 6, 2, 70),
        (3, 48, 1, 1100),
    ),
    emulated=((4, 8, 1, 70), (12, 4, 1, 70)),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads side by side": {"layout": "heads"},
    "strided": {"layout": "strided"},
    "wide": {"head_dim": 128},
    "width": {"head_dim": 23, "value_dim": 37, "layout": "sliced"},
    "lengths": {"key_lengths": "random"},
    "edges": {"key_lengths": "edges", "empty_rows": "uniform"},
    "causal": {"causal": "upper_left"},
    "last corner": {"causal": "lower_right", "key_lengths": "random", "empty_rows": "uniform"},
    "window": {"causal": "lower_right", "window": (20, None)},
    "mask of keys": {"mask": "b11k"},
    "mask of queries": {"mask": "qk", "empty_rows": "uniform"},
    "mask of heads": {"mask": "bh1k"},
    "mask of pairs": {"mask": "bhqk", "causal": "lower_right", "mask_dtype": torch.int16},
    "sliced mask": {"mask": "1hqk", "mask_layout": "sliced"},
    "bias of keys": {"bias": "k"},
    "bias of queries": {"bias": "b1qk", "bias_dtype": torch.float32},
    "bias of heads": {"bias": "1h1k"},
    "bias of pairs": {"bias": "bhqk", "mask": "qk"},
    "turned bias": {"bias": "hqk", "bias_layout": "transposed"},
    "bias of one key": {"bias": "b1q1"},
    "dropout": {"dropout_p": 0.3},
    "all": {
        "layout": "heads",
        "mask": "hqk",
        "bias": "1qk",
        "causal": "lower_right",
        "key_lengths": "random",
        "dropout_p": 0.2,
        "empty_rows": "uniform",
        "scale": -0.7,
    },
}


def grouped(dtype: torch.dtype, shape: tuple[int, int, int, int], **options: Any) -> Inputs:
    queries, heads, kv_heads, keys = shape
    sizes = {"queries": queries, "heads": heads, "kv_heads": kv_heads, "keys": keys, "head_dim": 24}
    return make(Problem(**{"dtype": dtype, "batch": 2, **sizes, **options}))


def every_result(inputs: Inputs) -> dict[str, Tensor]:
    return results(lambda i: call(mha_ext.attention, i), inputs)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results(
    dtype: torch.dtype, shape: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    inputs = grouped(dtype, shape, **options)
    found = every_result(inputs)
    assert_accurate(
        found, exact(inputs), plain_orders(inputs, results), largest_terms(inputs), tuple(found)
    )


@pytest.mark.parametrize(("heads", "numbers"), ((10, 98), (16, 13)))
def test_scores_of_few_queries_are_sums_over_lanes(heads: int, numbers: int) -> None:
    """In the order of a tile gradients had up to 1.7 times the error that is allowed."""
    inputs = make(
        Problem(
            batch=1, heads=heads, kv_heads=1, queries=3, keys=200, head_dim=128, numbers=numbers
        )
    )
    found = every_result(inputs)
    assert_accurate(
        found, exact(inputs), plain_orders(inputs, results), largest_terms(inputs), tuple(found)
    )


@pytest.mark.cpu_alone("a GPU has kernels of its own")
@pytest.mark.parametrize("head_dim", (24, 50, 64, 67, 128, 200))
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] <= 8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_few_queries_are_those_of_a_head_alone(
    dtype: torch.dtype, shape: tuple[int, int, int, int], head_dim: int
) -> None:
    """Where one score is far above all others, lse is that score."""
    inputs = grouped(dtype, shape, head_dim=head_dim, scale=1e4)
    _, found = call(mha_ext.attention, inputs)
    group = shape[1] // shape[2]
    apart = inputs.replaced(
        key=inputs.key.repeat_interleave(group, 1), value=inputs.value.repeat_interleave(group, 1)
    )
    _, wanted = call(mha_ext.attention, apart)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ("plain", "mask of heads", "last corner", "all"))
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_group_are_as_if_alone(
    dtype: torch.dtype, shape: tuple[int, int, int, int], name: str
) -> None:
    """Where queries are more than few, scores are summed in one order, whatever a tile is filled with."""
    inputs = grouped(dtype, shape, **OPTIONS[name])
    found = call(mha_ext.attention, inputs)
    group = shape[1] // shape[2]
    apart = inputs.replaced(
        key=inputs.key.repeat_interleave(group, 1), value=inputs.value.repeat_interleave(group, 1)
    )
    for ours, wanted in zip(found, call(mha_ext.attention, apart), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.cpu_alone("a GPU has no threads to set")
@pytest.mark.parametrize("name", ("plain", "mask of pairs", "all"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_and_batch(dtype: torch.dtype, shape: tuple[int, int, int, int], name: str) -> None:
    inputs = grouped(dtype, shape, **OPTIONS[name])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = every_result(inputs)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert_same(every_result(inputs), wanted)
    finally:
        torch.set_num_threads(before)
    if inputs.options["dropout_p"]:
        return  # another place in the batch has other pairs
    names = ("query", "key", "value", "mask", "key_lengths", "grad_out", "grad_lse")
    last = {
        name: tensor if tensor is None or tensor.shape[0] == 1 else tensor[1:]
        for name, tensor in ((name, getattr(inputs, name)) for name in names)
    }
    found = every_result(inputs.replaced(**last))
    assert_same(found, {name: tensor[1:] for name, tensor in wanted.items() if name in found})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_reaches_nothing(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    inputs = grouped(dtype, shape, mask="bh1k")
    mask = inputs.mask
    assert mask is not None
    mask[..., 3] = mask[..., -1] = False
    mask[:, 0, :, 5] = False  # one head alone does not see what is finite
    wanted = every_result(inputs)
    for name in ("key", "value"):
        tensor = getattr(inputs, name)
        tensor[:, :, 3], tensor[:, :, -1] = torch.nan, torch.inf
    found = every_result(inputs)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_infinite_values_are_seen(shape: tuple[int, int, int, int]) -> None:
    """By the heads that see them."""
    inputs = grouped(torch.float32, shape, mask="1h1k")
    mask = inputs.mask
    assert mask is not None
    mask[:, 0, :, 3], mask[:, 1:, :, 3] = False, True
    inputs.value[:, :, 3] = torch.inf
    out, _ = call(mha_ext.attention, inputs)
    assert out[:, 0].isfinite().all()
    group = shape[1] // shape[2]
    assert out[:, 1:group].isposinf().all()


def large_scores(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Queries, keys and values with scores whose rounding is a large part of an exponent: a P made of a
    score that was summed in another order than that of lse is not a part of 1. And how far from 1 a sum
    of P may be."""
    inputs = grouped(dtype, shape, head_dim=128)
    times = {torch.float64: 2.0**40, torch.float32: 2.0**12}.get(dtype, 2.0**10)
    tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    return (inputs.query * times, inputs.key, inputs.value), tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_and_weights_sum_scores_as_forward(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    (query, key, value), tolerance = large_scores(dtype, shape)
    value.requires_grad_()
    out, lse = mha_ext.attention(query, key, value, return_lse=True)
    assert lse.isfinite().all()
    # The gradient of a value is a sum of P over its queries.
    (of_backward,) = torch.autograd.grad(out, value, torch.ones_like(out))
    rows = shape[0] * shape[1] / shape[2]
    assert (of_backward.double().sum(2) / rows - 1).abs().max() < tolerance
    weights = mha_ext.attention_weights(query, key)
    assert (weights.double().sum(-1) - 1).abs().max() < tolerance


@pytest.mark.cpu_alone("forward's scores come from the tensor cores, the tangents' do not")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tangents_sum_scores_as_forward(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """lse' is a sum of P o S', and S' of a bias whose tangent is 1 is 1."""
    (query, key, value), tolerance = large_scores(dtype, shape)
    bias = torch.zeros(shape[0], shape[3], dtype=dtype)

    def levels(bias: Tensor) -> Tensor:
        return mha_ext.attention(query, key, value, bias=bias, return_lse=True)[1]

    lse, tangent = torch.func.jvp(levels, (bias,), (torch.ones_like(bias),))
    assert lse.isfinite().all()
    assert (tangent - 1).abs().max() < tolerance


@pytest.mark.cpu_alone("a GPU has kernels of its own")
def test_explain_names_them() -> None:
    key = torch.randn(1, 2, 300, 16)

    def kernel(queries: int, heads: int) -> tuple[str, tuple[int, int]]:
        found = mha_ext.explain(torch.randn(1, heads, queries, 16), key, key).forward
        return found.kernel, found.tile

    assert kernel(4, 14)[0] == "few queries"
    assert kernel(4, 16) == ("grouped", (32, 64))
    assert kernel(16, 8) == ("grouped", (64, 64))
    assert kernel(100, 8)[0] == "tiled"
    assert kernel(16, 2)[0] == "tiled"  # nothing is shared
