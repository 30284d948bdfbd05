"""The kernels of both devices on the same operands: the same dropout and masks, other rounding."""

from __future__ import annotations

from dataclasses import replace

import emulated
import pytest
import torch
from cases import Inputs, Problem, make
from emulated import HALF
from test_forward import DTYPES
from torch import Tensor

SIZES = Problem(None, 2, 2, 1, queries=20, keys=75, head_dim=24, value_dim=30)
KINDS = (
    {"mask": "bh1k", "bias": "hqk", "empty_rows": "uniform", "dropout_p": 0.4},
    {"key_lengths": "edges", "bias": "1h1k", "empty_rows": "uniform"},
)
ON_CPU = torch.ops.mha_ext


def close(found: Tensor, wanted: Tensor) -> None:
    """The same but for rounding, beside the largest of the numbers."""
    loose = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 0.01}.get(found.dtype, 0.05)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=loose, atol=loose * max(largest, 1.0))


def made(dtype: torch.dtype, kind: dict[str, str]) -> tuple[Inputs, dict[str, object]]:
    """A problem, and the options of its operators."""
    inputs = make(replace(SIZES, dtype=dtype, **kind))
    options = {"dropout_p": kind.get("dropout_p", 0.0), "scale": 24**-0.5}
    return inputs, {**options, "uniform_empty_rows": True, "origin": (1, 2, 3, 5)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype: torch.dtype, kind: dict[str, str]) -> None:
    i, options = made(dtype, kind)
    pairs = (i.mask, i.bias, i.key_lengths, i.seed)
    forward = ON_CPU.attention_forward(i.query, i.key, i.value, *pairs, **options)
    saved = (i.grad_out, i.grad_lse, i.query, i.key, i.value, *forward, *pairs)
    options["output_mask"] = [True] * 4
    found = emulated.attention_backward(*saved, **options)
    for mine, theirs in zip(found, ON_CPU.attention_backward(*saved, **options), strict=True):
        close(mine, theirs)


NAMES = ("query", "key", "value", "bias")


def described(i: Inputs, options: dict[str, object], *, dropped: bool = True) -> emulated.Described:
    seed = i.seed if dropped else None
    return emulated.Described(i.query, i.key, i.value, i.mask, i.bias, i.key_lengths, seed, options)


def levels(problem: emulated.Described, lse: Tensor, lse_low: Tensor) -> None:
    problem.keep += [lse, lse_low]
    problem.struct.lse, problem.struct.lse_low = lse.data_ptr(), lse_low.data_ptr()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_and_their_backward(dtype: torch.dtype, kind: dict[str, object]) -> None:
    i, options = made(dtype, {**kind, "dropout_p": 0.0})
    pairs = (i.mask, i.bias, i.key_lengths)
    forward = ON_CPU.attention_forward(i.query, i.key, i.value, *pairs, None, **options)
    del options["dropout_p"]
    saved = (i.query, i.key, *forward[1:], *pairs)
    wanted = ON_CPU.attention_weights(*saved, **options)
    problem = described(i, options)
    levels(problem, *forward[1:])
    library = emulated.library()
    close(library.weights(problem, None, None), wanted)
    some = library.weights(problem, [1, 0], [(7, 2, 0), (19, 1, 2)])
    rows = torch.tensor([7, 8, 19])
    close(some, wanted[:, [1, 0]][:, :, rows])
    assert library.weights(problem, None, []).shape == (2, 2, 0, 75)

    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad[wanted == 0] = torch.nan  # of what is hidden nothing is known
    delta = torch.where(wanted == 0, 0, wanted * grad).to(forward[1].dtype).sum(-1)
    found = library.weights_backward(problem, grad, delta, [True] * 3)
    theirs = ON_CPU.attention_weights_backward(
        grad, wanted, *saved, **options, output_mask=[True] * 3
    )
    for mine, other in zip((found[0], found[1], found[3]), theirs, strict=True):
        close(mine, other)


# Which directions there are; each leaves out products of its own.
DIRECTIONS = (
    ("query", "key", "value", "bias", "out", "lse", "grad_out", "grad_lse"),
    ("query", "lse", "out"),
    ("key", "bias", "lse"),
    ("value", "out"),
    ("grad_out",),
    ("grad_lse",),
)


@pytest.mark.parametrize(
    ("names", "width"),
    [*((names, 24) for names in DIRECTIONS), (DIRECTIONS[0], 100), (DIRECTIONS[0], 140)],
    ids=lambda value: value if isinstance(value, int) else "+".join(value),
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tangents(
    dtype: torch.dtype, kind: dict[str, object], names: tuple[str, ...], width: int
) -> None:
    i, options = made(dtype, {**kind, "head_dim": width, "value_dim": width + 6})
    pairs = (i.mask, i.bias, i.key_lengths, i.seed)
    forward = ON_CPU.attention_forward(i.query, i.key, i.value, *pairs, **options)
    like = {"query": i.query, "key": i.key, "value": i.value, "bias": i.bias, "out": forward[0]}
    like |= {"lse": forward[1], "grad_out": i.grad_out, "grad_lse": i.grad_lse}
    rng = torch.Generator().manual_seed(2)
    moved: dict[str, Tensor | None] = {
        name: torch.randn(tensor.shape, generator=rng).to(tensor.dtype) if name in names else None
        for name, tensor in like.items()
    }
    leaves, rest = [moved[n] for n in NAMES], [moved[n] for n in ("grad_out", "grad_lse")]
    library = emulated.library()

    found = library.forward_tangent(
        described(i, options), forward, {name: moved[name] for name in NAMES}
    )
    operands = (i.query, i.key, i.value, *forward)
    wanted = ON_CPU.attention_forward_tangent(*operands, *leaves, *pairs, **options)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)

    grads = library.backward_tangent(
        described(i, options), i.grad_out, i.grad_lse, forward, moved, [True] * 4
    )
    wanted = ON_CPU.attention_backward_tangent(
        i.grad_out,
        i.grad_lse,
        *operands,
        moved["out"],
        moved["lse"],
        *leaves,
        *rest,
        *pairs,
        **options,
        output_mask=[True] * 4,
    )
    for mine, theirs in zip(grads, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_infinite_value_that_some_see(dtype: torch.dtype) -> None:
    """P o S' has either sign, and so has what it makes of infinity."""
    i = make(Problem(dtype, 1, 1, queries=20, keys=70, head_dim=16, mask="qk"))
    i.value[0, 0, 3, 5], i.value[0, 0, 4, 6] = torch.inf, -torch.inf
    direction = torch.randn(i.query.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    pairs = (i.mask, None, None, None)
    operands = (i.query, i.key, i.value)
    forward = ON_CPU.attention_forward(*operands, *pairs, scale=0.25)
    leaves = (direction, None, None, None)
    wanted = ON_CPU.attention_forward_tangent(*operands, *forward, *leaves, *pairs, scale=0.25)[0]
    found = emulated.library().forward_tangent(
        described(i, {"scale": 0.25}), forward, {"query": direction}
    )[0]
    assert wanted.isinf().any() and wanted.isfinite().any() and wanted.isnan().any()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(wanted))


@pytest.mark.parametrize("far", [-1e9, -3e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_far_from_zero(dtype: torch.dtype, far: float) -> None:
    """A bias as some use it for a mask, here for all keys of a row: P is a mean."""
    i = make(Problem(dtype, 1, 1, queries=20, keys=70, head_dim=16))
    pairs = (None, torch.full((1, 1, 20, 70), far), None, None)
    forward = ON_CPU.attention_forward(i.query, i.key, i.value, *pairs, scale=0.25)
    saved = (i.grad_out, i.grad_lse, i.query, i.key, i.value, *forward, *pairs)
    found = emulated.attention_backward(*saved, scale=0.25, output_mask=[True] * 4)
    wanted = ON_CPU.attention_backward(*saved, scale=0.25, output_mask=[True] * 4)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_that_see_minus_infinity_alone(dtype: torch.dtype, empty_rows: str) -> None:
    """Products of finite numbers that overflow: such a row counts as one without keys."""
    i = make(Problem(dtype, 1, 2, 1, queries=20, keys=70, head_dim=16))
    query, key, large = i.query.clone(), i.key.clone(), torch.finfo(dtype).max ** 0.5 * 4
    key[..., 0], query[..., 0], query[:, :, [3, 9], 0] = large, 0, -large
    options = {"scale": 1.0, "uniform_empty_rows": empty_rows == "uniform"}
    pairs = (None, None, None, None)
    forward = ON_CPU.attention_forward(query, key, i.value, *pairs, **options)
    overflows = (torch.arange(20) == 3) | (torch.arange(20) == 9)
    assert torch.equal(forward[1] == -torch.inf, overflows.expand(1, 2, 20))
    saved = (i.grad_out, i.grad_lse, query, key, i.value, *forward, *pairs)
    options["output_mask"] = [True, True, True, False]
    found = emulated.attention_backward(*saved, **options)
    wanted = ON_CPU.attention_backward(*saved, **options)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.isfinite(theirs).all()
        close(mine[..., 1:], theirs[..., 1:])
