"""attention_weights: P against the definition, its gradients, the heads and rows asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import (
    DTYPES,
    PROBLEMS,
    RANDOM_PROBLEMS,
    Inputs,
    Problem,
    assert_accurate,
    largest_terms,
    make,
    plain_orders,
    to_double,
    ulp,
)
from torch import Tensor

import mha_ext
from mha_ext import reference
from mha_ext.functional import attention_with_lse, weights_from_lse

pytestmark = pytest.mark.isa

OPTIONS = ("causal", "window", "scale", "empty_rows")
SOME = tuple(p for p in PROBLEMS if p.dropout_p == 0 and p.head_dim < 65 and p.value_dim is None)[
    ::3
]


def call_weights(function: object, inputs: Inputs, **changes: object) -> Tensor:
    options = {name: inputs.options[name] for name in OPTIONS}
    options |= {"bias": inputs.bias, "key_lengths": inputs.key_lengths, **changes}
    return function(inputs.query, inputs.key, inputs.mask, **options)


def with_identity(inputs: Inputs) -> Inputs:
    """The same problem with the identity for V, so that Z is P."""
    eye = torch.eye(inputs.key.shape[2], dtype=inputs.key.dtype)
    return inputs.replaced(value=eye.expand(*inputs.key.shape[:2], -1, -1))


def check(problem: Problem) -> None:
    inputs = make(replace(problem, dropout_p=0.0))
    found = {"weights": call_weights(mha_ext.attention_weights, inputs)}
    wanted = {"weights": call_weights(reference.attention_weights, to_double(inputs))}
    plains = plain_orders(with_identity(inputs), lambda plain, i: {"weights": plain(i)[0]})
    assert found["weights"].dtype == inputs.query.dtype
    assert_accurate(found, wanted, plains, largest_terms(inputs), ["weights"])


@pytest.mark.parametrize("problem", SOME, ids=str)
def test_every_option(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("problem", RANDOM_PROBLEMS[::3], ids=lambda p: f"random-{p.numbers}")
def test_options_together(problem: Problem) -> None:
    check(problem)


BIASED = Problem(heads=4, kv_heads=2, queries=33, keys=70, mask="b1qk", bias="1hqk")


@pytest.mark.parametrize("heads", [None, [0], [3, 1], [], [2, 2]])
@pytest.mark.parametrize("rows", [None, [32], [5, 0, 31], [], [7, 7]])
def test_heads_and_rows(heads: list[int] | None, rows: list[int] | None) -> None:
    """A selection is that part of the whole, bit for bit, in the order asked for."""
    for dtype in DTYPES:
        inputs = make(replace(BIASED, dtype=dtype))
        whole = call_weights(mha_ext.attention_weights, inputs)
        part = call_weights(mha_ext.attention_weights, inputs, heads=heads, rows=rows)
        wanted = whole if heads is None else whole[:, heads]
        wanted = wanted if rows is None else wanted[:, :, rows]
        assert torch.equal(part, wanted)


def weight_gradients(
    function: object, inputs: Inputs, grad_weights: Tensor, **changes: object
) -> dict[str, Tensor]:
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.leaves().items() if n != "value"}
    weights = call_weights(function, inputs.replaced(**leaves), **changes)
    grads = torch.autograd.grad(
        weights, list(leaves.values()), grad_weights.to(weights.dtype), allow_unused=True
    )
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
@pytest.mark.parametrize("selected", [False, True])
def test_gradients(dtype: torch.dtype, empty_rows: str, selected: bool) -> None:
    """Of P, for query, key and bias; P behaves as Z does for the values of an identity matrix."""
    inputs = make(replace(BIASED, dtype=dtype, empty_rows=empty_rows, causal="lower_right"))
    chosen = {"heads": [3, 1, 3], "rows": [32, 5, 1, 5]} if selected else {}
    shape = call_weights(reference.attention_weights, inputs, **chosen).shape
    grad_weights = torch.randn(shape).to(dtype)

    found = weight_gradients(mha_ext.attention_weights, inputs, grad_weights, **chosen)
    wanted = weight_gradients(
        reference.attention_weights, to_double(inputs), grad_weights, **chosen
    )

    def plain_gradients(
        plain: Callable[[Inputs], tuple[Tensor, ...]], i: Inputs
    ) -> dict[str, Tensor]:
        def function(query: Tensor, key: Tensor, mask: Tensor, **options: object) -> Tensor:
            weights = plain(i.replaced(query=query, key=key, bias=options["bias"]))[0]
            return weights[:, chosen["heads"]][:, :, chosen["rows"]] if selected else weights

        return weight_gradients(function, i, grad_weights)

    plains = plain_orders(with_identity(inputs), plain_gradients)
    terms = weight_terms(inputs, grad_weights, chosen)
    assert_accurate(found, wanted, plains, terms, list(wanted))


def weight_terms(
    inputs: Inputs, grad_weights: Tensor, chosen: dict[str, list[int]]
) -> dict[str, float]:
    """The largest uncancelled terms: |dS| |K| and so on, with |dS| = P (|dP| + P·|dP|)."""
    double = to_double(inputs)
    weights = call_weights(reference.attention_weights, double, **chosen)
    grad = grad_weights.double().abs()
    grad_scores = weights * (grad + (weights * grad).sum(-1, keepdim=True))
    whole = torch.zeros(*inputs.query.shape[:3], inputs.key.shape[2], dtype=torch.float64)
    heads = torch.tensor(chosen.get("heads", range(whole.shape[1])))
    rows = torch.tensor(chosen.get("rows", range(whole.shape[2])))
    where = (torch.arange(whole.shape[0])[:, None, None], heads[:, None], rows)
    whole.index_put_(where, grad_scores, accumulate=True)
    scale, groups = abs(inputs.scale()), inputs.query.shape[1] // inputs.key.shape[1]
    key = double.key.abs().repeat_interleave(groups, 1)
    grad_key = (whole.mT @ double.query.abs()).unflatten(1, (-1, groups)).sum(2)
    return {
        "query": float(scale * (whole @ key).max()),
        "key": float(scale * grad_key.max()),
        "bias": float(whole.sum_to_size(inputs.bias.shape).max()),
    }


def test_lse_saves_a_pass_and_changes_nothing() -> None:
    """Given the lse of attention, the weights are the same, and so are their gradients."""
    for dtype in DTYPES:
        inputs = make(replace(BIASED, dtype=dtype))
        options = {name: inputs.options[name] for name in OPTIONS}
        _, *lse = attention_with_lse(
            inputs.query, inputs.key, inputs.value, inputs.mask, bias=inputs.bias, **options
        )

        def cached(
            query: Tensor, key: Tensor, mask: Tensor, *, lse: list[Tensor] = lse, **options: object
        ) -> Tensor:
            return weights_from_lse(query, key, *lse, mask, **options)

        found = call_weights(cached, inputs)
        wanted = call_weights(mha_ext.attention_weights, inputs)
        assert torch.equal(found, wanted)
        grad_weights = torch.randn(found.shape).to(dtype)
        found, wanted = (
            weight_gradients(function, inputs, grad_weights)
            for function in (cached, mha_ext.attention_weights)
        )
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_sum_to_one_or_zero() -> None:
    for dtype in DTYPES:
        inputs = make(replace(BIASED, dtype=dtype))
        sums = call_weights(mha_ext.attention_weights, inputs).double().sum(-1)
        wanted = inputs.seen().any(-1).double()
        assert (sums - wanted).abs().max() <= 70 * ulp(dtype, 1.0)
        uniform = call_weights(mha_ext.attention_weights, inputs, empty_rows="uniform")
        empty = uniform[~inputs.seen().any(-1)]
        assert empty.numel() and (empty == torch.tensor(1 / 70, dtype=dtype)).all()


def test_hidden_weights_are_exactly_zero() -> None:
    inputs = make(replace(BIASED, key_lengths="random", causal="upper_left"))
    weights = call_weights(mha_ext.attention_weights, inputs)
    assert torch.equal(weights > 0, inputs.seen())
