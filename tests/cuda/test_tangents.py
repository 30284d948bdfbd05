"""The tangents on the emulator: any schedule, hidden numbers, and the definition's own derivatives."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from cases import Inputs, Problem, call, make, to_double
from emulated import ALL_DTYPES as DTYPES
from torch import Tensor
from torch.func import jvp

from mha_ext import reference

NAMES = ("query", "key", "value", "bias")
SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 20, "keys": 70, "head_dim": 20}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "qk", "bias": "1hqk", "dropout_p": 0.3},
    {"causal": "lower_right", "key_lengths": "random", "bias": "bhqk"},
)


def moved(i: Inputs) -> dict[str, Tensor]:
    """A direction of every input."""
    rng = torch.Generator().manual_seed(3)
    like = {name: getattr(i, name) for name in (*NAMES, "grad_out", "grad_lse")}
    return {n: torch.randn(t.shape, generator=rng).to(t.dtype) for n, t in like.items()}


def tangents(i: Inputs, directions: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both tangents, from forward to the tangent of backward, by name."""
    library, options = emulated.library(), {"scale": i.scale()}
    options |= {"dropout_p": i.options["dropout_p"], "uniform_empty_rows": False}
    if i.options["causal"]:
        options |= {"corner": i.options["causal"], "window_right": 0}

    def described() -> emulated.Described:
        operands = (i.query, i.key, i.value, i.mask, i.bias, i.key_lengths, i.seed)
        return emulated.Described(*operands, options)

    saved = library.forward(described())
    leaves = {name: directions[name] for name in NAMES}
    out, lse = library.forward_tangent(described(), saved, leaves)
    everything = {**directions, "out": out, "lse": lse}
    grads = library.backward_tangent(
        described(), i.grad_out, i.grad_lse, saved, everything, [True] * 4
    )
    return {"out": out, "lse": lse, **dict(zip(NAMES, grads, strict=True))}  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_derivative_of_the_definition(options: dict[str, Any]) -> None:
    """float64: forward, and the gradients with respect to query, key, value and bias."""
    i = make(Problem(torch.float64, **SIZES, **options))
    i.bias.masked_fill_(i.bias == -torch.inf, 0.5)  # type: ignore[union-attr]
    directions = moved(i)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        names = (*NAMES, "grad_out", "grad_lse")
        given = to_double(i).replaced(**dict(zip(names, tensors, strict=True)))
        leaves = [getattr(given, name) for name in NAMES]

        def forward(*four: Tensor) -> tuple[Tensor, Tensor]:
            again = given.replaced(**dict(zip(NAMES, four, strict=True)))
            out, lse = call(reference.attention, again)
            return out, torch.where(lse == -torch.inf, 0.0, lse)

        results, pull = torch.func.vjp(forward, *leaves)
        return (*results, *pull((given.grad_out, given.grad_lse)))

    names = (*NAMES, "grad_out", "grad_lse")
    primals = tuple(getattr(i, name) for name in names)
    wanted = jvp(function, primals, tuple(directions[name] for name in names))[1]
    found = tangents(i, directions)
    for name, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_schedule_gives_the_same_bits(dtype: torch.dtype) -> None:
    i = make(Problem(dtype, **SIZES, **OPTIONS[0]))
    found = []
    for seed in range(2):
        emulated.library().seed = 50 + seed
        found.append(tangents(i, moved(i)))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float16, 20), (torch.bfloat16, 72), (torch.bfloat16, 136), (torch.float32, 20)],
    ids=str,
)
def test_what_is_hidden_does_not_matter(
    dtype: torch.dtype, width: int, options: dict[str, Any]
) -> None:
    i = make(Problem(dtype, **{**SIZES, "head_dim": width}, **options))
    seen, directions = i.seen(), moved(i)
    want = tangents(i, directions)
    unseen, blind = ~seen.any(2).any(1), ~seen.any(3)  # [B, Lk], [B, H, Lq]
    assert unseen.any() or blind.any()

    def poisoned(tensor: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, torch.tensor(torch.nan, dtype=tensor.dtype), tensor)

    keys, rows = unseen[:, None, :, None], blind[..., None]
    where = {"query": rows, "key": keys, "value": keys, "grad_out": rows, "grad_lse": blind}
    dirty = i.replaced(**{name: poisoned(getattr(i, name), at) for name, at in where.items()})
    turned = {name: poisoned(directions[name], at) for name, at in where.items()}
    found = tangents(dirty, {**directions, **turned})
    for name in want:
        assert torch.equal(found[name], want[name]), name
