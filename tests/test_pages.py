"""Large memory comes in huge pages, and what is computed there is what is computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mha_ext

SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPPED_ANEW = 32 << 20  # bytes


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """Whether the mapping in which the middle of `tensor` lies has madvise's flag."""
    at = tensor.data_ptr() + tensor.nbytes // 2
    found = False
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            found = begin <= at < end
        elif found and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping holds the tensor")


def long_out(rows: int) -> Tensor:
    query, key = torch.randn(1, 2, rows, 32), torch.randn(1, 2, 3, 32)
    return mha_ext.attention(query, key, key)


def long_tangent(rows: int) -> Tensor:
    query, key = torch.randn(1, 2, rows, 32), torch.randn(1, 2, 3, 32)
    return torch.func.jvp(lambda q: mha_ext.attention(q, key, key), (query,), (query,))[1]


def long_grad_query(rows: int) -> Tensor:
    query, key = torch.randn(1, 2, rows, 32), torch.randn(1, 2, 3, 32)
    query.requires_grad_()
    (grad,) = torch.autograd.grad(mha_ext.attention(query, key, key).sum(), query)
    return grad


def long_grads(rows: int) -> tuple[Tensor, ...]:
    query, key, value = torch.randn(1, 2, 3, 32), *torch.randn(2, 1, 2, rows, 32)
    inputs = (key.requires_grad_(), value.requires_grad_())
    return torch.autograd.grad(mha_ext.attention(query, *inputs).sum(), inputs)


def long_grad_key(rows: int) -> Tensor:
    return long_grads(rows)[0]


def long_grad_value(rows: int) -> Tensor:
    return long_grads(rows)[1]


def weights_grad_key(rows: int) -> Tensor:
    query, key = torch.randn(1, 2, 3, 32), torch.randn(1, 2, rows, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(mha_ext.attention_weights(query, key).square().sum(), key)
    return grad


def grad_bias(rows: int) -> Tensor:
    query, key = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 2048, 8)
    bias = torch.randn(1, 2, rows, 2048, requires_grad=True)
    (grad,) = torch.autograd.grad(
        mha_ext.attention(query, key, key, bias=bias).square().sum(), bias
    )
    return grad


def weights(rows: int) -> Tensor:
    return mha_ext.attention_weights(torch.randn(1, 2, rows, 8), torch.randn(1, 2, 2048, 8))


def linear(rows: int) -> Tensor:
    return torch.ops.mha_ext.linear(torch.randn(rows, 8), torch.randn(4096, 8), None)


def cached_keys(rows: int) -> Tensor:
    cache = mha_ext.KVCache(1, 2, rows, 32)
    assert not cache.key.any()
    return cache.key


MAKERS = [
    (long_out, 131_072 + 16),
    (long_tangent, 131_072 + 16),
    (long_grad_query, 131_072 + 16),
    (long_grad_key, 131_072 + 16),
    (long_grad_value, 131_072 + 16),
    (weights_grad_key, 131_072 + 16),
    (cached_keys, 131_072),
    (grad_bias, 2048),
    (weights, 2048),
    (linear, 2048),
]


@pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="a kernel without huge pages")
@pytest.mark.parametrize(("make", "rows"), MAKERS)
def test_large_results_ask_for_huge_pages(make: Callable[[int], Tensor], rows: int) -> None:
    made = make(rows)
    assert made.nbytes >= MAPPED_ANEW
    assert asks_for_huge_pages(made)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_results_have_the_bits_of_small_ones(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        query, key, value, out = (torch.randn(1, 3, 2048, 8) for _ in range(4))
        bias = torch.randn(1, 3, 2048, 2048)

        def results(heads: slice) -> list[Tensor]:
            inputs = [x[:, heads].clone().requires_grad_() for x in (query, key, value, bias)]
            found = mha_ext.attention(*inputs[:3], bias=inputs[3])
            return [found, *torch.autograd.grad(found, inputs, out[:, heads])]

        whole = results(slice(None))
        assert whole[-1].nbytes >= MAPPED_ANEW
        for head in range(3):
            for part, wanted in zip(results(slice(head, head + 1)), whole, strict=True):
                assert torch.equal(part, wanted[:, head : head + 1])
    finally:
        torch.set_num_threads(before)
