"""out and lse against the definition in float64, through every option (guarantee 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import (
    DTYPES,
    PROBLEMS,
    RANDOM_PROBLEMS,
    Problem,
    assert_accurate,
    assert_same_without_lse,
    call,
    forward_results,
    largest_terms,
    make,
    plain_orders,
    to_double,
)
from sizes import on_emulator

import mha_ext
from mha_ext import reference

pytestmark = pytest.mark.isa


def check(problem: Problem) -> None:
    inputs = make(problem)
    found = forward_results(lambda i: call(mha_ext.attention, i), inputs)
    wanted = forward_results(lambda i: call(reference.attention, i), to_double(inputs))
    plains = plain_orders(inputs, forward_results)
    assert_accurate(found, wanted, plains, largest_terms(inputs), ["out", "lse"])
    if not on_emulator:
        assert_same_without_lse(inputs, found["out"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_option(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("problem", RANDOM_PROBLEMS, ids=lambda p: f"random-{p.numbers}")
def test_options_together(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_every_width_of_one_query(heads: int, dtype: torch.dtype) -> None:
    """Parts of vectors, of each length, of keys and of values."""
    for width in range(1, 35):
        shape = Problem(batch=1, queries=1, keys=70, head_dim=width, value_dim=35 - width)
        check(replace(shape, heads=heads, kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_promised_form(dtype: torch.dtype) -> None:
    """out is a view of [B, Lq, H, Dv]; lse is contiguous and float32 (float64 for float64)."""
    inputs = make(Problem(dtype=dtype, heads=4, kv_heads=2, value_dim=9))
    out, lse = call(mha_ext.attention, inputs)
    assert out.shape == (2, 4, 12, 9) and out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()
    assert lse.shape == (2, 4, 12) and lse.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(call(mha_ext.attention, inputs, return_lse=False), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_most_negative_bias_stays_finite(dtype: torch.dtype) -> None:
    """A row of finfo.min everywhere is a uniform row, not an empty one."""
    inputs = make(Problem(dtype=dtype, queries=3, keys=70))
    bias = torch.zeros(3, 70, dtype=dtype)
    bias[1] = torch.finfo(dtype).min
    out, lse = call(mha_ext.attention, inputs.replaced(bias=bias))
    wanted, _ = call(reference.attention, to_double(inputs.replaced(bias=bias)))
    assert lse.isfinite().all() and out.isfinite().all()
    if dtype != torch.float16:  # float16's is small enough to keep differences between scores
        wanted[:, :, 1] = inputs.value.double().mean(2)
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 64, 150])
def test_large_scores_do_not_overflow(dtype: torch.dtype, keys: int) -> None:
    """Scores beyond exp's range in every dtype: the largest wins, no Inf, no NaN."""
    scores = torch.arange(keys, dtype=torch.float64).flip(0) * 100.0
    query = torch.ones(1, 1, 2, 1, dtype=dtype)
    query[:, :, 1] = -1
    key = scores.to(dtype).view(1, 1, keys, 1)
    value = torch.arange(keys, dtype=torch.float64).to(dtype).view(1, 1, keys, 1)
    out, lse = mha_ext.attention(query, key, value, scale=1.0, return_lse=True)
    wanted = torch.tensor([0.0, keys - 1.0], dtype=dtype)
    torch.testing.assert_close(out.flatten(), wanted, rtol=0, atol=1e-30)  # e^-100 may remain
    assert lse[0, 0, 0] == key.max() and lse[0, 0, 1] == -key.min()


def test_a_mask_is_nonzero_not_one() -> None:
    """Every nonzero integer attends, negative ones and those whose low byte is zero too."""
    inputs = make(Problem(queries=4, keys=6))
    for dtype, values in {
        torch.uint8: (0, 1, 2, 255, 0, 128),
        torch.int8: (0, -1, -128, 127, 0, 1),
        torch.int16: (0, 256, -32768, 1, 0, 512),
        torch.int32: (0, 256, 65536, 2**31 - 1, 0, -(2**31)),
        torch.int64: (0, 2**32, 2**40, -(2**63), 0, 256),
    }.items():
        mask = torch.tensor(values, dtype=dtype)
        found = call(mha_ext.attention, inputs.replaced(mask=mask))
        wanted = call(mha_ext.attention, inputs.replaced(mask=mask != 0))
        assert all(map(torch.equal, found, wanted)), dtype


def test_defaults() -> None:
    """No options: full attention with scale 1 / sqrt(D), no dropout."""
    inputs = make(Problem(head_dim=64))
    out = mha_ext.attention(inputs.query, inputs.key, inputs.value)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


def test_causal_corners_by_hand() -> None:
    """Two queries, four keys, values that name their key: the pictures of the two corners."""
    query, key = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 4, 1)
    value = torch.eye(4)[None, None]

    def seen(**options: object) -> list[list[int]]:
        return mha_ext.attention(query, key, value, **options)[0, 0].gt(0).int().tolist()

    assert seen(causal="upper_left") == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert seen(causal="lower_right") == [[1, 1, 1, 0], [1, 1, 1, 1]]
    lengths = torch.tensor([3])
    assert seen(causal="lower_right", key_lengths=lengths) == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert seen(causal="upper_left", key_lengths=lengths) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert seen(causal="lower_right", window=(1, None)) == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(causal="lower_right", window=(0, 3)) == [[0, 0, 1, 0], [0, 0, 0, 1]]
    value, key, query = value, key, torch.zeros(1, 1, 4, 1)
    assert seen(window=(1, 0)) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(causal=True) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_seed_is_drawn_when_omitted() -> None:
    """As documented: torch.randint(0, 2**32, (2,)), so torch.manual_seed replays it."""
    inputs = make(Problem(dropout_p=0.5))
    torch.manual_seed(7)
    drawn = call(mha_ext.attention, inputs, seed=None)
    other = call(mha_ext.attention, inputs, seed=None)
    torch.manual_seed(7)
    seed = torch.randint(0, 2**32, (2,))
    assert all(map(torch.equal, drawn, call(mha_ext.attention, inputs, seed=seed)))
    assert not torch.equal(drawn[0], other[0])
