"""Very long rows and very large scores."""

import pytest
import torch

import mha_ext
from mha_ext import reference


def test_weights_of_one_long_row_do_not_depend_on_the_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, n, 8, generator=generator) for n in (1, 40_000))
    grad = torch.randn(1, 1, 1, 40_000, generator=generator)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            q, k = query.clone().requires_grad_(), key.clone().requires_grad_()
            found.append(torch.autograd.grad(mha_ext.attention_weights(q, k), (q, k), grad))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.isa
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_a_finite_bias_stays_finite(queries: int) -> None:
    """finfo.min plus a negative score must not become -inf, which would hide the key."""
    query = torch.full((1, 1, queries, 1), 1e16)
    key = torch.full((1, 1, 9, 1), -1e16)  # scores of -1e32: -inf when added to finfo.min
    value = torch.arange(9.0).reshape(1, 1, 9, 1)
    bias = torch.full((9,), torch.finfo(torch.float32).min)
    out, lse = mha_ext.attention(query, key, value, bias=bias, return_lse=True)
    assert torch.isfinite(lse).all()
    torch.testing.assert_close(out, reference.attention(query, key, value, bias=bias))
