"""The CUDA forward on the emulator: the contract, through the operators."""

from __future__ import annotations

from dataclasses import replace

import emulated
import pytest
import torch
from cases import (
    PROBLEMS,
    RANDOM_PROBLEMS,
    Inputs,
    Problem,
    assert_accurate,
    call,
    forward_results,
    largest_terms,
    make,
    plain_orders,
    to_double,
)
from emulated import ALL_DTYPES as DTYPES
from emulated import HALF, SPLIT, WIDEST
from torch import Tensor

import mha_ext
from mha_ext import reference

pytestmark = pytest.mark.usefixtures("on_the_emulator")


def fits(problem: Problem) -> bool:
    return max(problem.head_dim, problem.value_dim or 0) <= WIDEST


# Every problem in 16 bits; of those in float32 and float64, whose kernels are one, every sixth.
CHOSEN = [p for p in PROBLEMS + RANDOM_PROBLEMS if fits(p)]
CHOSEN = [p for p in CHOSEN if p.dtype in HALF] + [p for p in CHOSEN if p.dtype not in HALF][::6]


def check(inputs: Inputs) -> None:
    found = forward_results(lambda i: call(mha_ext.attention, i), inputs)
    wanted = forward_results(lambda i: call(reference.attention, i), to_double(inputs))
    plains = plain_orders(inputs, forward_results)
    assert_accurate(found, wanted, plains, largest_terms(inputs), ["out", "lse"])


@pytest.mark.parametrize("problem", CHOSEN, ids=lambda p: f"{p},{p.numbers}")
def test_every_option(problem: Problem) -> None:
    check(make(problem))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 17, 128])
def test_keys_in_parts(dtype: torch.dtype, queries: int) -> None:
    """Few queries and many keys: the parts are added up, and parts may see nothing."""
    sizes = Problem(dtype, 1, 2, 1, queries=queries, keys=2100, head_dim=16, value_dim=9)
    for problem in (
        sizes,
        replace(sizes, mask="11q1", empty_rows="uniform", dropout_p=0.1),
        replace(sizes, key_lengths="random", causal="lower_right", window=(30, None)),
    ):
        check(make(problem))


def operands(inputs: Inputs, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and lse_low from the operator itself."""
    i = inputs
    return torch.ops.mha_ext.attention_forward(
        i.query, i.key, i.value, i.mask, i.bias, i.key_lengths, i.seed, scale=0.3, **options
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_does_not_matter(dtype: torch.dtype) -> None:
    """NaN and Inf behind a mask, a length, the band and a bias of -inf: bit for bit the same."""
    sizes = Problem(dtype, heads=1, queries=70, keys=130, head_dim=24, value_dim=40, mask="1qk")
    for problem in (
        sizes,
        replace(sizes, mask="1k", bias="hqk", dropout_p=0.2),
        replace(sizes, mask=None, bias="1k"),
        replace(sizes, mask=None, key_lengths="random"),
        replace(sizes, mask=None, causal="lower_right", window=(20, None)),
    ):
        inputs = make(problem)
        seen = inputs.seen()  # [B, H, Lq, Lk]
        unseen_keys = ~seen.any(2).any(1)  # [B, Lk]: by no query of any head
        if problem.mask == "1k" or problem.bias == "1k" or problem.key_lengths:
            assert unseen_keys.any()
        want = call(mha_ext.attention, inputs)
        for number in (torch.nan, torch.inf, -torch.inf):
            key, value, bias = inputs.key.clone(), inputs.value.clone(), inputs.bias
            for b, j in unseen_keys.nonzero().tolist():
                key[b, :, j], value[b, :, j] = number, number
            dirty = inputs.replaced(key=key, value=value, bias=bias)
            for ours, right in zip(call(mha_ext.attention, dirty), want, strict=True):
                assert torch.equal(ours, right)
        # One bad value: the rows that do not see its key stay, the others are as by definition.
        for number, j in zip((torch.nan, torch.inf, -torch.inf), (0, 65, 129), strict=True):
            value = inputs.value.clone()
            value[:, :, j, 3] = number
            dirty = inputs.replaced(value=value)
            ours = call(mha_ext.attention, dirty)[0]
            right = call(reference.attention, to_double(dirty), pairwise=True)[0]
            hidden = ~seen[..., j]
            assert torch.equal(ours[hidden], want[0][hidden])
            assert torch.equal(ours[..., 3].isnan(), right[..., 3].isnan())
            assert torch.equal(ours[..., 3].isinf(), right[..., 3].isinf())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_schedule_gives_the_same_bits(dtype: torch.dtype) -> None:
    sizes = Problem(dtype, 1, 1, queries=130, keys=150, head_dim=40, mask="qk", dropout_p=0.3)
    inputs = make(sizes)
    found = []
    for seed in range(4):
        emulated.library().seed = 100 + seed
        found.append(call(mha_ext.attention, inputs))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shard_gives_what_the_whole_does(dtype: torch.dtype) -> None:
    """Origin: dropout and the band of a shard whose first key is at no multiple of 8."""
    whole = make(Problem(dtype, 2, 4, queries=40, keys=90, dropout_p=0.4))
    options = {"dropout_p": 0.4, "corner": "upper_left", "window_left": 6, "window_right": 5}
    full = operands(whole, **options)
    b, h, q, k = 1, 2, 16, 3
    part = whole.replaced(
        query=whole.query[b:, h:, q:],
        key=whole.key[b:, h:, k:],
        value=whole.value[b:, h:, k:],
    )
    ours = operands(part, origin=(b, h, q, k), **options)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in HALF else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(ours[0], full[0][b:, h:, q:], **tolerance)
    torch.testing.assert_close(ours[1], full[1][b:, h:, q:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_to_twice_the_precision(dtype: torch.dtype) -> None:
    inputs = make(Problem(dtype, queries=20, keys=70, head_dim=32))
    inputs.query.mul_(30)
    _, lse, lse_low = operands(inputs)
    exact = call(reference.attention, to_double(inputs), scale=0.3)[1]
    error = (lse.double() + lse_low.double() - exact).abs().max()
    assert (lse_low != 0).any() and error < (1e-9 if dtype == torch.float64 else 1e-4)


def test_groups() -> None:
    """Under vmap each group is a problem of its own; bias and lengths are shared here."""
    problems = [make(Problem(torch.float16, bias="hqk", numbers=n)) for n in range(3)]
    stacked = [torch.stack(t) for t in zip(*((i.query, i.key, i.value) for i in problems))]
    bias = problems[0].bias
    found = torch.func.vmap(lambda q, k, v: mha_ext.attention(q, k, v, bias=bias))(*stacked)
    for i, inputs in enumerate(problems):
        assert torch.equal(found[i], call(mha_ext.attention, inputs.replaced(bias=bias))[0])


def test_lengths_are_clamped() -> None:
    inputs = make(Problem(torch.bfloat16, keys=40))
    wild = operands(inputs.replaced(key_lengths=torch.tensor([99, -5])))
    right = operands(inputs.replaced(key_lengths=torch.tensor([40, 0])))
    assert all(torch.equal(x, y) for x, y in zip(wild, right, strict=True))


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_more_heads_than_a_grid_dimension(empty_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a grid could be 7 high: batch x heads goes over two of its dimensions."""
    monkeypatch.setattr(emulated.library(), "grid_limit", 7)
    sizes = Problem(torch.float16, 2, 12, queries=3, keys=1100, head_dim=8, mask="bhqk")
    check(make(replace(sizes, empty_rows=empty_rows)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_past_32_bits(dtype: torch.dtype) -> None:
    """Strides of 2^31 elements and more; only a few rows of that memory are touched."""
    inputs = make(Problem(dtype, 2, 1, queries=3, keys=5, head_dim=8))
    far = (1 << 31) + 64

    def spread(tensor: Tensor) -> Tensor:
        memory = torch.empty(far + 64, dtype=tensor.dtype)
        wide = memory.as_strided(tensor.shape, (far, far, 8, 1))
        return wide.copy_(tensor)

    found = operands(inputs.replaced(key=spread(inputs.key), value=spread(inputs.value)))
    assert all(torch.equal(x, y) for x, y in zip(found, operands(inputs), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_no_bank_conflicts(dtype: torch.dtype, width: int) -> None:
    """And within the shared memory of the smallest GPUs of compute capability 8."""
    call(mha_ext.attention, make(Problem(dtype, 1, 1, queries=130, keys=130, head_dim=width)))
    report = emulated.library().report
    assert report.blocks >= 2 and report.barriers > 2
    fragments = dtype in HALF or (dtype == torch.float32 and width <= SPLIT)
    assert (report.products > 0) == fragments
    for traffic in (report.matrices, report.copies, report.plain):
        assert traffic.conflicts == 0
    assert (report.matrices.accesses > 0) == fragments
    assert report.plain.accesses > 0 or dtype in HALF
