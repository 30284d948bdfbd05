"""attention_received, attention_entropy, attention_topk against the whole matrix of weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mha_ext

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "lower_right"},
    {"window": (20, 3), "causal": "upper_left"},
    {"key_lengths": torch.tensor([0, 90])},
    {"key_lengths": torch.tensor([0, 90]), "empty_rows": "uniform", "scale": -0.3},
    {"mask": torch.rand(2, 1, 70, 90, generator=torch.Generator().manual_seed(0)) < 0.5},
]


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 90, 8)
    bias = torch.randn(4, 1, 90)
    return tuple(x.to(dtype).requires_grad_() for x in (query, key, bias))  # type: ignore[return-value]


def weights(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    return mha_ext.reference.attention_weights(query, key, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_received(options: dict[str, Any]) -> None:
    query, key, bias = problem()
    found = mha_ext.attention_received(query, key, bias=bias, **options)
    expected = weights(query, key, bias=bias, **options).sum(2)
    check(found, expected, (query, key, bias))


@pytest.mark.parametrize("options", OPTIONS)
def test_entropy(options: dict[str, Any]) -> None:
    query, key, bias = problem()
    found = mha_ext.attention_entropy(query, key, bias=bias, **options)
    p = weights(query, key, bias=bias, **options)
    check(found, -(p * p.clamp_min(1e-300).log()).sum(-1), (query, key, bias))


@pytest.mark.parametrize("options", OPTIONS)
def test_topk(options: dict[str, Any]) -> None:
    query, key, bias = problem()
    found = mha_ext.attention_topk(query, key, 5, bias=bias, **options)
    p = weights(query, key, bias=bias, **options)
    check(found.weights, p.topk(5).values, (query, key, bias))
    assert_close(p.gather(-1, found.keys), found.weights)


def check(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
        strict=True,
    ):
        assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    query, key, _ = problem(dtype)
    received = mha_ext.attention_received(query, key)
    assert received.dtype == torch.float32
    tolerance = {"atol": 1e-4 if dtype == torch.float32 else 0.5, "rtol": 0}
    assert_close(received.sum(-1), torch.full((2, 4), 70.0), **tolerance)
    assert mha_ext.attention_topk(query, key, 3).weights.dtype == dtype
    entropy = mha_ext.attention_entropy(torch.zeros_like(query), key)
    assert_close(entropy, torch.full((2, 4, 70), math.log(90)), atol=2e-2, rtol=0)


def test_no_queries_and_bad_arguments() -> None:
    query, key, _ = problem()
    none = query[:, :, :0]
    assert mha_ext.attention_received(none, key).shape == (2, 4, 90)
    assert mha_ext.attention_entropy(none, key).shape == (2, 4, 0)
    assert mha_ext.attention_topk(none, key, 2).keys.shape == (2, 4, 0, 2)
    for k in (0, 91):
        with pytest.raises(ValueError, match="k must be from 1 to the number of keys, 90, but is"):
            mha_ext.attention_topk(query, key, k)
    for k in (True, 2.0, torch.ones(5, 90)):
        with pytest.raises(TypeError, match="^k must be an int, not .*; it stands before mask$"):
            mha_ext.attention_topk(query, key, k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dropout_p must be left out: the options are bias"):
        mha_ext.attention_entropy(query, key, dropout_p=0.1)
    with pytest.raises(ValueError, match="key must have 4 dimensions"):
        mha_ext.attention_topk(query, key[0], 2)
    with pytest.raises(TypeError, match="heads and rows must be left out here"):
        mha_ext.attention_received(query, key, rows=[0])
    with pytest.raises(TypeError, match="key must be a tensor"):
        mha_ext.attention_entropy(query, None)  # type: ignore[arg-type]


def test_no_queries_have_gradients() -> None:
    query, key, _ = problem()
    none = query[:, :, :0].detach().requires_grad_()
    for result in (
        mha_ext.attention_received(none, key),
        mha_ext.attention_entropy(none, key),
        mha_ext.attention_topk(none, key, 2).weights,
    ):
        (grad,) = torch.autograd.grad(result.sum(), none)
        assert grad.shape == none.shape


def test_under_torch_func() -> None:
    query, key, _ = problem()
    leaf = query.detach().requires_grad_()
    (expected,) = torch.autograd.grad(mha_ext.attention_entropy(leaf, key).square().sum(), leaf)
    found = torch.func.grad(lambda q: mha_ext.attention_entropy(q, key).square().sum())(query)
    assert_close(found, expected)


def test_memory_is_linear() -> None:
    """Nothing of the size of the weights is ever allocated."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor):
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
            return out

    length = 1024
    query, key = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(2))
    with Largest() as largest:
        mha_ext.attention_received(query, key).square().sum().backward()
        mha_ext.attention_entropy(query, key).sum().backward()
        mha_ext.attention_topk(query, key, 4).weights.sum().backward()
    assert largest.elements <= 2 * 64 * length * 2
