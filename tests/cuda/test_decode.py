"""Few queries in 16 bits (decode_half.cuh): heads that share keys, keys in parts, every option."""

from __future__ import annotations

from dataclasses import replace

import emulated
import pytest
import torch
from cases import (
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
from emulated import HALF
from torch import Tensor

import mha_ext
from mha_ext import reference

pytestmark = pytest.mark.usefixtures("on_the_emulator")


def check(inputs: Inputs) -> None:
    found = forward_results(lambda i: call(mha_ext.attention, i), inputs)
    wanted = forward_results(lambda i: call(reference.attention, i), to_double(inputs))
    plains = plain_orders(inputs, forward_results)
    assert_accurate(found, wanted, plains, largest_terms(inputs), ["out", "lse"])


def operands(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and lse_low from the operator itself."""
    i = inputs
    return torch.ops.mha_ext.attention_forward(
        i.query, i.key, i.value, i.mask, i.bias, i.key_lengths, i.seed, scale=0.3
    )


# Heads, heads of keys, queries, keys, widths: one row and many, whole and broken fragments, one
# part and several, each width of a kernel.
SIZES = (
    (8, 2, 1, 700, 128, 128),
    (4, 4, 1, 530, 64, 64),
    (6, 1, 3, 1100, 40, 33),  # two fragments
    (10, 2, 4, 300, 100, 128),
    (3, 1, 16, 129, 128, 7),  # two blocks of rows
    (2, 2, 2, 260, 256, 200),
    (5, 1, 7, 150, 197, 256),
    (1, 1, 5, 1, 8, 8),
)
OPTIONS = (
    {},
    {"mask": "bhqk", "empty_rows": "uniform"},
    {"mask": "b11k", "mask_dtype": torch.int32, "dropout_p": 0.2},
    {"key_lengths": "random", "layout": "heads"},
    {"key_lengths": "edges", "causal": "lower_right", "window": (70, None)},
    {"bias": "hqk", "causal": "lower_right", "window": (200, 9), "bias_dtype": torch.float32},
    {"bias": "b1q1", "causal": "upper_left", "layout": "strided"},
)


def sized(dtype: torch.dtype, sizes: tuple[int, ...]) -> Problem:
    heads, kv_heads, queries, keys, head_dim, value_dim = sizes
    return Problem(dtype, 2, heads, kv_heads, queries, keys, head_dim, value_dim)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_every_size_with_every_option(number: int, options: dict[str, object]) -> None:
    check(make(replace(sized(HALF[number % 2], SIZES[number]), **options)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("options", ({"mask": "b11k"}, {"key_lengths": "random"}, {"bias": "1k"}))
def test_what_is_hidden_does_not_matter(dtype: torch.dtype, options: dict[str, str]) -> None:
    """Bit for bit; what is visible is as by definition."""
    problem = replace(sized(dtype, (8, 2, 2, 600, 64, 80)), **options)
    inputs = make(problem)
    unseen = ~inputs.seen().any(2).any(1)  # [B, Lk]
    assert unseen.any() and not unseen.all()
    want = operands(inputs)
    for number in (torch.nan, torch.inf, -torch.inf):
        key, value = inputs.key.clone(), inputs.value.clone()
        key.transpose(1, 2)[unseen] = number
        value.transpose(1, 2)[unseen] = number
        dirty = inputs.replaced(key=key, value=value)
        for ours, right in zip(operands(dirty), want, strict=True):
            assert torch.equal(ours, right)
    # A row whose query sees the bad value, beside rows that do not.
    mask = torch.ones(8, 2, 600, dtype=torch.bool)
    mask[::2, 1, 333] = False
    value = inputs.value.clone()
    value[:, :, 333, 5], value[:, 1, 333, 6] = torch.nan, torch.inf
    dirty = make(sized(dtype, (8, 2, 2, 600, 64, 80))).replaced(mask=mask, value=value)
    ours = call(mha_ext.attention, dirty)[0]
    right = call(reference.attention, to_double(dirty), pairwise=True)[0]
    assert torch.equal(ours.isnan(), right.isnan()) and torch.equal(ours.isinf(), right.isinf())
    assert ours.isnan().any() and ours.isinf().any()


def test_empty_rows() -> None:
    """Lengths of 0, parts that see nothing, rows that see nothing beside rows that see all."""
    inputs = make(sized(torch.bfloat16, (4, 1, 2, 1200, 16, 24)))
    mask = torch.ones(2, 4, 2, 1200, dtype=torch.bool)
    mask[1, 2, 1], mask[1, 3, :, :700] = False, False
    dirty = inputs.replaced(mask=mask, key_lengths=torch.tensor([0, 900]))
    out, lse, _ = operands(dirty)
    assert (lse[0] == -torch.inf).all() and lse[1, 2, 1] == -torch.inf
    assert not out[0].any() and not out[1, 2, 1].any() and lse[1].isfinite().sum() == 7
    check(dirty)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_alignment(shift: int) -> None:
    """Elements 2, 4 and 8 bytes past a multiple of 16: the same bits as at one."""
    inputs = make(sized(torch.bfloat16, (4, 2, 2, 300, 64, 64)))

    def shifted(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
        at = (-memory.data_ptr() // 2) % 8 + shift
        return memory[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)

    moved = {name: shifted(getattr(inputs, name)) for name in ("query", "key", "value")}
    found = operands(inputs.replaced(**moved))
    assert all(torch.equal(x, y) for x, y in zip(found, operands(inputs), strict=True))


def test_neither_batch_nor_other_heads_nor_schedule_matter() -> None:
    whole = make(replace(sized(torch.float16, (8, 4, 3, 900, 64, 64)), key_lengths="random"))
    full = operands(whole)
    for seed in range(3):
        emulated.library().seed = seed
        assert all(torch.equal(x, y) for x, y in zip(full, operands(whole), strict=True))
    part = whole.replaced(
        query=whole.query[1:, 2:4],
        key=whole.key[1:, 1:2],
        value=whole.value[1:, 1:2],
        key_lengths=whole.key_lengths[1:],
    )
    for mine, theirs in zip(operands(part), full, strict=True):
        assert torch.equal(mine, theirs[1:, 2:4])


ALIGNED = (*SIZES[:2], (4, 1, 7, 300, 64, 64), (2, 1, 16, 300, 128, 128), (5, 1, 7, 150, 256, 256))


@pytest.mark.parametrize("sizes", ALIGNED, ids=str)
def test_no_bank_conflicts(sizes: tuple[int, ...]) -> None:
    call(mha_ext.attention, make(sized(torch.bfloat16, sizes)))
    report = emulated.library().report
    assert report.products > 0 and report.copies.accesses > 0
    for traffic in (report.matrices, report.copies, report.plain):
        assert traffic.conflicts == 0


def test_keys_are_read_once_for_all_their_heads() -> None:
    """The blocks: a part each, for all heads of a group; and one for each row of the result."""
    call(mha_ext.attention, make(replace(sized(torch.bfloat16, SIZES[0]), batch=1)))
    report = emulated.library().report
    assert report.launches == 2 and report.blocks == 2 * 6 + 8
