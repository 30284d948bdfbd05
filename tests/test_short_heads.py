"""Short heads are taken several at a time, side by side: each has the bits that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    Inputs,
    Problem,
    assert_accurate,
    assert_same_without_lse,
    exact,
    largest_terms,
    make,
    plain_orders,
    results,
)
from sizes import on_emulator, size
from torch import Tensor

from mha_ext.functional import attention_with_lse

pytestmark = pytest.mark.isa

# Rows that fill a vector, a part of it, or more than one; keys for which rows are packed beside the
# product, or before it; columns in whole pieces, with some left over, and too many for one sum.
SHAPES = {
    f"{queries} x {keys} x {head_dim}": (queries, keys, head_dim)
    for queries, keys, head_dim in size(
        (
            *((12, 10, 50), (12, 10, 3), (12, 10, 128), (12, 10, 150), (16, 12, 64), (8, 11, 33)),
            *((5, 1, 8), (7, 2, 17), (9, 3, 18), (13, 5, 19), (6, 7, 4), (16, 9, 16), (10, 4, 7)),
            *((16, 13, 32), (12, 64, 20), (17, 12, 50), (20, 30, 24), (32, 10, 40), (33, 12, 16)),
        ),
        emulated=((12, 10, 50),),
    )
}
# With more queries than a band has.
LONGER = ((12, 10, 50), (20, 30, 24), (32, 24, 8), *size(((64, 60, 20),), emulated=()))
OPTIONS = {
    "plain": {},
    "mask": {"mask": "bhqk", "empty_rows": "uniform"},
    "mask of keys": {"mask": "b11k"},
    "lengths": {"key_lengths": "edges", "causal": "lower_right"},
    "window": {
        "causal": "upper_left",
        "window": (3, None),
        "key_lengths": "random",
        "empty_rows": "uniform",
    },
    "bias": {"bias": "bhqk", "scale": -1.5},
    "shared bias": {"bias": "hqk"},
    "causal, shared bias": {"bias": "hqk", "causal": "lower_right"},
    "constant bias": {"bias": "bhq1", "mask": "1h1k"},
    "dropout": {"dropout_p": 0.4, "mask": "bhqk"},
}


def ours(inputs: Inputs) -> dict[str, Tensor]:
    def function(i: Inputs) -> tuple[Tensor, Tensor]:
        tensors = {"bias": i.bias, "key_lengths": i.key_lengths, "seed": i.seed}
        out, lse, _ = attention_with_lse(
            i.query, i.key, i.value, i.mask, origin=i.origin, **tensors, **i.options
        )
        return out, lse

    return results(function, inputs)


def one_head(inputs: Inputs, b: int, h: int) -> Inputs:
    """The same head as a problem of its own."""

    def pick(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dim() == 0:
            return tensor
        for dim, index in ((-4, b), (-3, h)):
            if tensor.dim() >= -dim and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, index, 1)
        return tensor

    names = ("query", "key", "value", "mask", "bias", "grad_out")
    lengths = None if inputs.key_lengths is None else inputs.key_lengths[b : b + 1]
    return inputs.replaced(
        **{name: pick(getattr(inputs, name)) for name in names},
        grad_lse=inputs.grad_lse[b : b + 1, h : h + 1],
        key_lengths=lengths,
        origin=(b, h, 0, 0),
    )


def assert_each_alone(inputs: Inputs, names: tuple[str, ...]) -> None:
    together = ours(inputs)
    if not on_emulator:
        assert_same_without_lse(inputs, together["out"])
    for b in range(inputs.query.shape[0]):
        for h in range(inputs.query.shape[1]):
            alone = ours(one_head(inputs, b, h))
            for name in names:
                found, wanted = together[name][b, h], alone[name][0, 0]
                assert torch.equal(found.isnan(), wanted.isnan()), (name, b, h)
                assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), (name, b, h)


def assert_right(inputs: Inputs) -> None:
    found, plains = ours(inputs), plain_orders(inputs, results)
    assert_accurate(found, exact(inputs), plains, largest_terms(inputs), tuple(found))


RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value")


def short(dtype: torch.dtype, shape: tuple[int, int, int], **options: Any) -> Problem:
    """Nine heads of so many queries, keys and columns, side by side in memory."""
    names = ("queries", "keys", "head_dim")
    sizes = dict(zip(names, shape, strict=True)) | {"batch": 3, "heads": size(3, emulated=2)}
    return Problem(dtype=dtype, layout="heads", **sizes, **options)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    inputs = make(short(dtype, shape, value_dim=max(1, shape[2] - 3)))
    assert_each_alone(inputs, RESULTS)
    assert_right(inputs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", LONGER, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option(
    dtype: torch.dtype, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    inputs = make(short(dtype, shape, **options))
    own = inputs.bias is not None and inputs.bias.dim() == 4
    assert_each_alone(inputs, (*RESULTS, "grad_bias") if own else RESULTS)
    assert_right(inputs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_that_are_not_finite(dtype: torch.dtype, poison: float) -> None:
    """They reach nobody: neither their own head, nor one beside it that sees all of its keys."""
    inputs = make(Problem(dtype=dtype, batch=3, heads=3, head_dim=50, layout="heads"))
    mask = torch.ones(3, 3, 12, 10, dtype=torch.bool)
    mask[0, 1, :, 3] = mask[1, 2, :, 7] = mask[2, 0, :, 9] = False
    mask[1, 1] = False  # a head that sees nothing
    seen = mask.any(2)[..., None]
    clean = inputs.replaced(mask=mask)
    dirty = clean.replaced(
        key=inputs.key.masked_fill(~seen, poison), value=inputs.value.masked_fill(~seen, poison)
    )
    wanted, found = ours(clean), ours(dirty)
    for name in RESULTS:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_that_is_not_finite(dtype: torch.dtype) -> None:
    """Its NaN stays in it: in the rows that see them, and in no other head."""
    inputs = make(Problem(dtype=dtype, batch=3, heads=3, head_dim=50, mask="bhqk", layout="heads"))
    query, value = inputs.query.clone(), inputs.value.clone()
    query[1, 0, 4] = float("nan")
    value[2, 1, 5] = float("inf")
    assert_each_alone(inputs.replaced(query=query, value=value), RESULTS)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(12, 10, 50), (20, 30, 24), (32, 24, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_the_keys(
    dtype: torch.dtype, shape: tuple[int, int, int], dropout_p: float
) -> None:
    """The operator may be given some of the keys that O and lse are of: their part of the gradients."""
    i = make(short(dtype, shape, dropout_p=dropout_p, causal="lower_right"))
    options = {"dropout_p": dropout_p, "scale": i.scale(), "corner": "upper_left"}
    options["window_right"] = shape[1] - shape[0] if shape[1] > shape[0] else 3
    forward = torch.ops.mha_ext.attention_forward
    out, lse, low = forward(i.query, i.key, i.value, None, None, None, i.seed, **options)

    def gradients(query: slice, head: slice, keys: slice, whole: bool) -> list[Tensor]:
        at, some = (query, head), (query, head, keys)
        saved = (out[at], lse[at], low[at], None, None, None, i.seed)
        origin = [query.start or 0, head.start or 0, 0, keys.start or 0]
        found = torch.ops.mha_ext.attention_backward(
            *(i.grad_out[at], None, i.query[at], i.key[some], i.value[some], *saved),
            **options,
            origin=origin,
            output_mask=[True, True, True, False],
            all_keys=whole,
        )
        return list(found[:3])

    every, half = slice(None), shape[1] // 2
    parts = [gradients(every, every, keys, False) for keys in (slice(0, half), slice(half, None))]
    for b in range(3):
        for h in range(i.query.shape[1]):
            alone = gradients(slice(b, b + 1), slice(h, h + 1), slice(half, None), False)
            for found, wanted in zip(parts[1], alone, strict=True):
                assert torch.equal(found[b, h], wanted[0, 0]), (b, h)
    whole = gradients(every, every, every, True)
    sums = [parts[0][0] + parts[1][0], *(torch.cat(p, 2) for p in list(zip(*parts))[1:])]
    slack = 64 * torch.finfo(dtype).eps
    for found, wanted in zip(sums, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=slack, atol=slack)


def test_a_call_takes_any_number_of_heads() -> None:
    """One, a tile's worth, and some that are left over: the same bits, on one thread or more."""
    inputs = make(Problem(batch=11, heads=1, head_dim=50, mask="b1qk", dropout_p=0.1))
    wanted = ours(inputs)
    for count in (1, 2, 3, 4, 5, 8, 9):
        names = ("query", "key", "value", "mask", "grad_out", "grad_lse")
        some = inputs.replaced(**{name: getattr(inputs, name)[:count] for name in names})
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = ours(some)
            for name in RESULTS:
                assert torch.equal(found[name], wanted[name][:count]), (name, count, threads)
