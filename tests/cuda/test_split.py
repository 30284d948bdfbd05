"""float32 as planes of bfloat16, on the emulator: numbers that have no exact planes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mha_ext

pytestmark = pytest.mark.usefixtures("on_the_emulator")


def results(*leaves: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key and value; leaves: those and the cotangent."""
    query, key, value, grad = leaves
    wanted = [t.detach().requires_grad_() for t in (query, key, value)]
    out = mha_ext.attention(*wanted)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def plain(*leaves: Tensor) -> list[Tensor]:
    query, key, value, grad = (t.double() for t in leaves)
    wanted = [t.requires_grad_() for t in (query, key, value)]
    scores = wanted[0] @ wanted[1].mT / query.shape[-1] ** 0.5
    out = scores.softmax(-1) @ wanted[2]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def operands(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    sizes = ((70, width), (90, width), (90, width), (70, width))
    return [torch.randn(1, 1, *size, generator=generator) for size in sizes]


@pytest.mark.parametrize("width", [20, 64, 100])
@pytest.mark.parametrize("size", [1e-38, 1e-36, 1e-30, 1e-10, 1e10, 1e30, 1e36])
def test_every_magnitude(size: float, width: int) -> None:
    """Of the values and of the cotangent: outputs and gradients have their relative accuracy."""
    query, key, value, grad = operands(width)
    for factors in ((1, size), (size, 1)):
        scaled = (query, key, value * factors[0], grad * factors[1])
        for found, right in zip(results(*scaled), plain(*scaled), strict=True):
            top = right.abs().max()
            assert (found.double() - right).abs().max() <= 4e-6 * top + 1e-43


def test_columns_of_every_size() -> None:
    """Small columns of queries meet large ones of keys, and the other way round."""
    query, key, value, grad = operands(32)
    sizes = 2 ** torch.linspace(-110, 110, 32)
    query, key = query * sizes, key / sizes
    query[query.abs() < 2.0**-120] = 0
    found = results(query, key, value, grad)
    for ours, right in zip(found, plain(query, key, value, grad), strict=True):
        top = right.abs().amax(-2, keepdim=True)  # of each column
        assert ((ours.double() - right).abs() <= 1e-5 * top).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_infinite_key(sign: int) -> None:
    """Scores of -inf have no weight, of +inf are NaN; no other row of the output changes."""
    query, key, value, grad = operands(64)
    query[..., 3] = query[..., 3].abs() * -1
    clean = key.clone()
    key[0, 0, 40, 3] = sign * torch.inf
    found = mha_ext.attention(query, key, value)
    if sign < 0:
        assert found.isnan().all()
        return
    hidden = torch.ones(90, dtype=torch.bool)
    hidden[40] = False
    right = mha_ext.attention(query, clean, value, mask=hidden)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e-40, 3e38])
def test_a_hidden_number_changes_no_bit(number: float) -> None:
    query, key, value, grad = operands(64)
    mask = torch.arange(90) != 40
    want = mha_ext.attention(query, key, value, mask=mask)
    key[0, 0, 40, 3], value[0, 0, 40, 5] = number, number
    assert torch.equal(mha_ext.attention(query, key, value, mask=mask), want)
