"""Results larger than caches: they go past these, and have the bits of smaller ones."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from torch import Tensor

import mha_ext

pytestmark = [
    pytest.mark.isa,
    pytest.mark.cpu_alone("how results are written is the CPU's"),
]

LARGE = 16 << 20  # bytes, from which on it is so
LENGTHS = (1024, 1000, 1027)  # rows of whole lines, of whole vectors, and of neither


def tensors(heads: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, 1, heads, length, 8, generator=generator).to(dtype))


def heads_of(length: int, dtype: torch.dtype) -> int:
    return math.ceil(LARGE / (length * length * dtype.itemsize))


def gradient(bias: Tensor, *of: Tensor, **options: bool | str) -> Tensor:
    query, key, value, grad_out = of
    bias = bias.detach().requires_grad_()
    out = mha_ext.attention(query, key, value, bias=bias, **options)
    return torch.autograd.grad(out, bias, grad_out)[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_bias(
    dtype: torch.dtype, bias_dtype: torch.dtype | None, length: int
) -> None:
    bias_dtype = bias_dtype or dtype
    heads = heads_of(length, bias_dtype)
    of = tensors(heads, length, dtype)
    bias = torch.randn(1, heads, length, length).to(bias_dtype)
    found, causal = gradient(bias, *of), gradient(bias, *of, causal="upper_left")
    assert found.nbytes >= LARGE
    for h in (0, heads - 1):
        one = slice(h, h + 1)
        alone = [t[:, one] for t in of]
        assert torch.equal(found[:, one], gradient(bias[:, one], *alone))
        assert torch.equal(causal[:, one], gradient(bias[:, one], *alone, causal="upper_left"))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights(dtype: torch.dtype, length: int) -> None:
    heads = heads_of(length, dtype)
    query, key, *_ = tensors(heads, length, dtype)
    found = mha_ext.attention_weights(query, key)
    assert found.nbytes >= LARGE
    for h in range(heads):
        one = slice(h, h + 1)
        alone = mha_ext.attention_weights(query[:, one], key[:, one])
        assert torch.equal(found[:, one], alone)


@pytest.mark.parametrize("length", LENGTHS)
def test_tangents_of_gradients_of_a_bias(length: int) -> None:
    heads = heads_of(length, torch.float32)
    query, key, value, grad_out = tensors(heads, length, torch.float32)
    bias, direction = torch.randn(2, 1, heads, length, length)

    def tangent(some: slice) -> Tensor:
        def gradient(bias: Tensor) -> Tensor:
            def attend(bias: Tensor) -> Tensor:
                return mha_ext.attention(query[:, some], key[:, some], value[:, some], bias=bias)

            return torch.func.vjp(attend, bias)[1](grad_out[:, some])[0]

        return torch.func.jvp(gradient, (bias[:, some],), (direction[:, some],))[1]

    found = tangent(slice(None))
    for h in (0, heads - 1):
        one = slice(h, h + 1)
        assert torch.equal(found[:, one], tangent(one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_that_sequences_share(dtype: torch.dtype) -> None:
    """Of a type narrower than that of its sums, which take more than 32 MiB beside it."""
    length = 2900
    generator = torch.Generator().manual_seed(0)
    of = list(torch.randn(4, 2, 1, length, 8, generator=generator).to(dtype))
    bias = torch.randn(length, length, generator=generator).to(dtype)
    each = gradient(bias.float().expand(2, 1, -1, -1).contiguous(), *of).double()
    wanted, found = each.sum((0, 1)), gradient(bias, *of).double()
    rounding = torch.finfo(dtype).eps * wanted.abs() + torch.finfo(dtype).smallest_normal
    assert ((found - wanted).abs() <= rounding + 1e-6 * each.abs().sum((0, 1))).all()
