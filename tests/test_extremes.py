"""Very long rows and very large scores."""

from typing import Any

import numpy
import pytest
import torch
from cases import DTYPES
from torch import Tensor

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


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_scores_that_are_alike_far_from_zero(dtype: torch.dtype, queries: int) -> None:
    """A bias of -1e9 for each key, say, swallows the products: a mean, not NaN, not an empty row."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, n, 16, generator=generator).to(dtype) for n in (queries, 70, 70)
    )
    mean = value.float().mean(2, keepdim=True).expand(1, 1, queries, 16)
    value.requires_grad_()
    for size in (1e9, 1e10, 1e20, 2e38):
        for sign in (-1, 1):
            bias = torch.full((queries, 70), sign * size)
            out, lse = mha_ext.attention(query, key, value, bias=bias, return_lse=True)
            torch.testing.assert_close(lse, torch.full_like(lse, sign * size), rtol=1e-6, atol=0)
            torch.testing.assert_close(out.float(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps)
            (grad_value,) = torch.autograd.grad(out.float().sum(), value)
            share = torch.full_like(grad_value, queries / 70)
            torch.testing.assert_close(grad_value, share, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(3, 133), (70, 20), (70, 133), (130, 600)])
def test_rows_whose_scores_are_large(dtype: torch.dtype, queries: int, keys: int) -> None:
    """Each row by itself: scores of its own size, and the bits that it has beside small rows."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, n, 16, generator=generator).to(dtype) for n in (queries, keys, keys)
    )
    key[..., 0] = 1
    query[..., 0] = 0
    sizes = 1.6171875 * torch.tensor(
        [0.0, 2**3, -(2**9), 2**14, 2**40, -(2**60), 2**100, -(2**124)]
    )
    size = sizes[torch.randperm(queries, generator=generator) % len(sizes)].to(dtype)
    large = query.clone()
    large[..., 0] = size
    found, lse = mha_ext.attention(large, key, value, scale=0.3, return_lse=True)
    small, small_lse = mha_ext.attention(query, key, value, scale=0.3, return_lse=True)
    assert torch.equal(found[..., size == 0, :], small[..., size == 0, :])
    assert torch.equal(lse[..., size == 0], small_lse[..., size == 0])
    wanted = reference.attention(query.double(), key.double(), value.double(), scale=0.3)
    near, lost = size.abs() < 2**11, size.abs() >= 2**40  # beside which other terms are lost
    wanted[..., lost, :] = value.double().mean(2, keepdim=True)
    for rows in (near, lost):
        torch.testing.assert_close(
            found[..., rows, :].double(), wanted[..., rows, :], rtol=0.02, atol=0.02
        )
    assert found.isfinite().all()
    far = size.abs() > 2**13
    expected = (0.3 * size.float()).to(lse).expand_as(lse)
    torch.testing.assert_close(lse[..., far], expected[..., far], rtol=2e-3, atol=0)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_large_scores_have_the_same_bits_in_all_passes(dtype: torch.dtype, biased: bool) -> None:
    """P of backward is the exponential of a score less lse: of alike scores 1 / Lk, however large."""
    query, key, value = (torch.zeros(1, 1, n, 32) for n in (64, 128, 128))
    largest = 3e4 if dtype == torch.float16 else 1e9
    query[..., 0] = largest * torch.linspace(1, 1.9, 64)
    key[..., 0] = 1
    query, key, value = (x.to(dtype).requires_grad_() for x in (query, key, value))
    bias = torch.full((1, 1, 1, 128), 20.0) if biased else None
    out = mha_ext.attention(query, key, value, bias=bias, scale=0.3)
    (grad_value,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad_value.float(), torch.full((1, 1, 128, 32), 0.5))


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_level_that_may_just_rise(dtype: torch.dtype) -> None:
    """Scores of a second tile 5.5 above the first: other rows, whose level rises, change no bit."""
    generator = torch.Generator().manual_seed(0)
    heads, scale = 500, 0.4708822965621948
    query = torch.zeros(1, heads, 18, 32)
    key, value = torch.zeros(1, 1, 128, 32), torch.randn(1, 1, 128, 32, generator=generator)
    key[..., 0] = 1
    key[:, :, 64, 1:4] = 1
    key[..., 4] = -torch.rand(128, generator=generator)
    key[:, :, [0, 64], 4] = 0
    query[:, :, 0, 0] = (100 * torch.rand(heads, generator=generator) / scale).to(dtype).float()
    above = 5.5 / scale * (1 + 1e-5 * torch.randn(heads, generator=generator))
    for i in range(1, 4):
        query[:, :, 0, i] = above.to(dtype).float()
        above = above - query[0, :, 0, i]
    query[:, :, 0, 4] = 1
    other = query.clone()
    other[:, :, 17, 1] = 85

    def rows(query: torch.Tensor) -> list[torch.Tensor]:
        operands = [query, key.expand(1, heads, 128, 32), value.expand(1, heads, 128, 32)]
        found = mha_ext.attention(*(x.to(dtype) for x in operands), scale=scale, return_lse=True)
        return [result[:, :, :17] for result in found]

    assert all(map(torch.equal, rows(query), rows(other)))


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [3e38, -3e38])
def test_a_scale_near_the_largest_number(dtype: torch.dtype, scale: float) -> None:
    """Whose product with log2 e is infinite; all scores are zero."""
    key, value = torch.randn(2, 1, 1, 70, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    query = torch.zeros(1, 1, 70, 32, dtype=dtype)
    key, value = key.requires_grad_(), value.requires_grad_()
    out = mha_ext.attention(query, key, value, scale=scale)
    near = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), **near)
    grad_key, grad_value = torch.autograd.grad(out.sum(), (key, value))
    near["atol"] += 70 * torch.finfo(torch.float32).eps  # so many terms
    torch.testing.assert_close(grad_value, torch.ones_like(value), **near)
    assert not grad_key.any()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 32])
def test_queries_that_first_see_a_later_tile(dtype: torch.dtype, first: int) -> None:
    """Half of a block of queries sees nothing of the first keys, the other half nothing of the rest."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, n, 32, generator=generator).to(dtype) for n in (64, 256, 256)
    )
    mha_ext.attention(query, key, torch.full_like(value, torch.nan))  # what memory may hold before
    value[:, :, 80, 3] = torch.nan  # nobody sees it
    seen = torch.zeros(64, 256, dtype=torch.bool)
    seen[first : first + 32, :70] = True
    seen[32 - first : 64 - first, 130:250] = True
    out = mha_ext.attention(query, key, value, seen)
    value[:, :, 80, 3] = 0
    wanted = reference.attention(query.double(), key.double(), value.double(), seen)
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), wanted, **near)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_row_that_stands_for_all(dtype: torch.dtype) -> None:
    """K and V whose rows lie 0 numbers apart, in whole tiles and in the last."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, n, 32, generator=generator).to(dtype) for n in (70, 1, 1)
    )
    for keys in (5, 64, 133):
        key_rows, value_rows = (rows.expand(1, 2, keys, 32) for rows in (key, value))
        out = mha_ext.attention(query, key_rows, value_rows)
        near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0}
        torch.testing.assert_close(out, value.expand_as(query), **near)


@pytest.mark.isa
@pytest.mark.parametrize("width", [16, 32, 50, 64, 100])
@pytest.mark.parametrize("queries", [70, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_subnormal_result(dtype: torch.dtype, queries: int, width: int) -> None:
    """A mean of normal numbers that is subnormal is not taken for zero, though vdpbf16ps would: with up to 64 queries
    that instruction gets weights which are divided already, and its products are zero."""
    query, key = (
        torch.zeros(1, 1, queries, width, dtype=dtype),
        torch.ones(1, 1, 64, width, dtype=dtype),
    )
    value = torch.zeros(1, 1, 64, width, dtype=dtype)
    value[:, :, ::2] = 1.5 * 2.0**-126
    out = mha_ext.attention(query, key, value)
    assert torch.equal(out, torch.full_like(out, 0.75 * 2.0**-126))


@pytest.mark.isa
@pytest.mark.parametrize("keys", [7, 64, 65, 101])
@pytest.mark.parametrize("queries", [1, 4, 12, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_value_that_is_seen(dtype: torch.dtype, queries: int, keys: int) -> None:
    """It makes its own column infinite and no other, the last of an odd number of keys as well."""
    rng = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, n, 40, generator=rng).to(dtype) for n in (queries, keys, keys)
    )
    value[:, :, -1, 3] = torch.inf
    out = mha_ext.attention(query, key, value)
    columns = torch.arange(40) == 3
    assert out[..., columns].isposinf().all() and out[..., ~columns].isfinite().all()


@pytest.mark.isa
@pytest.mark.parametrize("options", [{}, {"causal": "lower_right"}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, n) for n in (-120, -60, 15, 16, 17, 40, 100)]
    + [(torch.float16, n) for n in (-16, -8, 8, 13)],
    ids=str,
)
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out"])
def test_numbers_of_every_size(
    where: str, dtype: torch.dtype, exponent: int, options: dict[str, Any]
) -> None:
    """A few that are much larger or smaller than the rest: as exact as their own terms, and no others suffer."""
    generator = torch.Generator().manual_seed(0)
    length, width = 515, 33
    half = dtype == torch.float16
    names = ("query", "key", "value", "grad_out")
    given = {n: torch.randn(1, 1, length, width, generator=generator) for n in names}
    rows, column = torch.randperm(length, generator=generator)[:9], 4
    given[where][:, :, rows, column] *= 2.0**exponent
    if exponent > 0 and where in ("query", "key"):  # scores stay as they were, or smaller
        given["key" if where == "query" else "query"][..., column] *= 2.0**-exponent
    if half and exponent > 0 and where in ("value", "grad_out"):  # and gradients in range
        given["grad_out" if where == "value" else "value"] *= 2.0**-exponent
    given = {name: tensor.to(dtype) for name, tensor in given.items()}
    if "dropout_p" in options:
        options = options | {"seed": torch.tensor([1, 2])}

    def results(function: Any, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        *inputs, grad_out = (tensors[name].clone() for name in names)
        leaves = [tensor.requires_grad_() for tensor in inputs]
        out = function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    found = results(mha_ext.attention, given)
    wide = {name: tensor.double() for name, tensor in given.items()}
    wanted = results(reference.attention, wide)
    # What is rounded: the sums of the terms' absolute values, and scores, which P doubles.
    query, key, value, grad_out = (wide[name][0, 0] for name in names)
    scores, terms = (query @ key.T, query.abs() @ key.abs().T)
    if "causal" in options:
        scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
    p = (scores * width**-0.5).softmax(-1) / 0.8
    p *= 1 + terms * width**-0.5
    grads = grad_out.abs() @ value.abs().T
    ds = p * (grads + (p * grads).sum(-1, keepdim=True)) * width**-0.5
    bounds = [p @ value.abs(), ds @ key.abs(), ds.T @ query.abs(), p.T @ grad_out.abs()]
    for name, a, b, bound in zip(("out", *names), found, wanted, bounds, strict=False):
        error = (a[0, 0].double() - b[0, 0]).abs()
        eps, smallest = (2.0**-11, 2.0**-24) if half else (16 * torch.finfo(dtype).eps, 2.0**-126)
        allowed = eps * bound + smallest
        assert (error <= allowed).all(), f"{name}: {(error / allowed).max():.3g} of what is allowed"


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["", "mask", "dropout", "mask and dropout"])
@pytest.mark.parametrize("special", ["", "rising", "lowest", "hides", "nan"])
def test_a_bias_of_keys_is_that_of_all_pairs(
    special: str, options: str, dtype: torch.dtype
) -> None:
    """The same bits whether the queries share a bias or each has its own of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 3, n, 40, generator=generator).to(dtype) for n in (150, 400, 400)
    )
    bias = torch.randn(1, 3, 1, 400, generator=generator)
    if special == "rising":  # by more than what no level has to be raised for
        bias += torch.arange(400) * 0.4
    if special == "lowest":
        bias[..., ::7] = torch.finfo(torch.float32).min
    if special == "hides":
        bias[..., 70:75] = bias[..., 192:256] = -torch.inf
    if special == "nan":
        bias[..., 300] = torch.nan
    bias = bias.to(torch.float64 if dtype == torch.float64 else torch.float32)
    mask = torch.rand(150, 400, generator=generator) > 0.3 if "mask" in options else None
    drops = {"dropout_p": 0.2, "seed": torch.tensor([1, 2])} if "dropout" in options else {}
    of_pairs = bias.expand(1, 3, 150, 400).contiguous()
    shared = mha_ext.attention(query, key, value, mask, bias=bias, **drops)
    own = mha_ext.attention(query, key, value, mask, bias=of_pairs, **drops)
    torch.testing.assert_close(shared, own, rtol=0, atol=0, equal_nan=True)
    assert shared.isnan().all() if special == "nan" and mask is None else shared.isfinite().any()
    tight = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 5e-2)  # scores up to 160
    wide = [x.double() for x in (query, key, value)]
    exact = reference.attention(*wide, mask, bias=bias.double(), **drops)
    torch.testing.assert_close(shared.double(), exact, rtol=tight, atol=tight, equal_nan=True)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["turned", "apart", "of queries", "of heads", "of all"])
def test_a_bias_of_any_layout(layout: str, dtype: torch.dtype) -> None:
    """The same bits as one whose keys are neighbours; in the type of the queries, or in float32."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, n, 40, generator=generator).to(dtype) for n in (170, 460, 460)
    )
    shape = {"of queries": (2, 3, 170, 1), "of heads": (1, 3, 1, 1), "of all": (1, 1, 170, 460)}
    bias = torch.randn(shape.get(layout, (2, 3, 170, 460)), generator=generator)
    bias[:, :, 3::50] = -torch.inf  # queries that see nothing
    types = [dtype] if dtype == torch.float64 else [dtype, torch.float32]
    for own in (bias.to(wanted) for wanted in types):
        same = own.expand(2, 3, 170, 460).contiguous()
        if layout == "turned":
            own = own.mT.contiguous().mT
        if layout == "apart":
            own = torch.stack([own, own], -1)[..., 0]
        found = mha_ext.attention(query, key, value, bias=own)
        assert torch.equal(found, mha_ext.attention(query, key, value, bias=same))
        wanted = reference.attention(*(x.double() for x in (query, key, value)), bias=same.double())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=32 * eps, atol=32 * eps)


@pytest.mark.cpu_alone("other kernels take other layouts on a GPU")
@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unusual", [False, True], ids=["", "unusual"])
@pytest.mark.parametrize("layout", ["own", "turned", "apart", "of keys", "of queries"])
def test_gradients_with_a_bias_of_any_layout(
    layout: str, unusual: bool, dtype: torch.dtype
) -> None:
    """The same bits as with one whose keys are neighbours, and as with a mask of what it hides."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, n, 40, generator=generator).to(dtype) for n in (100, 264, 264, 100)
    )
    if unusual:  # more than half a float16 holds, and what AMX has in limbs
        value[:, :, 7] = 60000 if dtype == torch.float16 else 100000
    shape = {"of keys": (1, 2, 1, 264), "of queries": (1, 2, 100, 1)}
    bias = torch.randn(shape.get(layout, (1, 2, 100, 264)), generator=generator)
    hidden = torch.zeros(bias.shape, dtype=torch.bool)  # late in a tile, not in every one
    hidden[:, :1, -1:, 100:110] = hidden[:, 1, 50:, 150::7] = True
    if layout == "of queries":
        hidden[:, 1, 40:50] = True
    mask = torch.rand(100, 264, generator=generator) > 0.2
    types = [dtype] if dtype == torch.float64 else [dtype, torch.float32]

    def gradients(mask: Tensor | None, bias: Tensor, dropout_p: float) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        seed = torch.tensor([1, 2]) if dropout_p else None
        out = mha_ext.attention(*leaves, mask, bias=bias, dropout_p=dropout_p, seed=seed)
        return torch.autograd.grad(out, leaves, grad)

    for given, dropout_p in ((None, 0.0), (mask, 0.0), (None, 0.3)):
        for finite in (bias.to(wanted, copy=True) for wanted in types):
            # Rows that only what is hidden keeps from having more than their lowest scores.
            finite[:, :1, -1:] = finite[:, 1, 56:58] = torch.finfo(finite.dtype).min
            own = finite.masked_fill(hidden, -torch.inf)
            same = own.expand(1, 2, 100, 264).contiguous()
            if layout == "turned":
                own = own.mT.contiguous().mT
            if layout == "apart":
                own = torch.stack([own, own], -1)[..., 0]
            found = gradients(given, own, dropout_p)
            torch.testing.assert_close(found, gradients(given, same, dropout_p), rtol=0, atol=0)
            seen = ~hidden if given is None else given & ~hidden
            finite = finite.expand(1, 2, 100, 264).contiguous()
            masked = gradients(seen.expand(1, 2, 100, 264), finite, dropout_p)
            torch.testing.assert_close(found, masked, rtol=0, atol=0)
            leaves = [x.double().requires_grad_() for x in (query, key, value)]
            seed = torch.tensor([1, 2]) if dropout_p else None
            options = {"bias": same.double(), "dropout_p": dropout_p, "seed": seed}
            exact = torch.autograd.grad(
                reference.attention(*leaves, given, **options), leaves, grad.double()
            )
            for mine, wanted in zip(found, exact, strict=True):
                error = (mine.double() - wanted).abs().max() / wanted.abs().max()
                assert error <= 32 * torch.finfo(dtype).eps


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["", "mask", "dropout"])
@pytest.mark.parametrize("hides", ["later keys", "far keys", "blocks", "all but one"])
def test_a_bias_hides_what_a_mask_hides(hides: str, options: str, dtype: torch.dtype) -> None:
    """Whole tiles and parts of them: what stands behind -inf, NaN as well, leaves no trace."""
    generator = torch.Generator().manual_seed(0)
    length = 530
    query, key, value = (
        torch.randn(1, 2, length, 40, generator=generator).to(dtype) for _ in range(3)
    )
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = {
        "later keys": row >= column,
        "far keys": (row - column).abs() < 90,
        "blocks": (row // 100 + column // 100) % 2 == 0,
        "all but one": (row != 300) & (column != 200),
    }[hides]
    bias = torch.randn(length, length, generator=generator)
    bias = bias.to(torch.float64 if dtype == torch.float64 else torch.float32)
    given: dict[str, Any] = {"mask": None}
    if options == "mask":
        given["mask"] = torch.rand(length, length, generator=generator) > 0.3
    if options == "dropout":
        given |= {"dropout_p": 0.2, "seed": torch.tensor([1, 2])}
    unseen = ~seen.any(0)
    both = seen if given["mask"] is None else seen & given["mask"]
    wanted = reference.attention(
        *(x.double() for x in (query, key, value)), **given | {"mask": both}, bias=bias.double()
    )
    key[:, :, unseen] = value[:, :, unseen] = torch.nan
    found = mha_ext.attention(query, key, value, **given, bias=bias.masked_fill(~seen, -torch.inf))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=32 * eps, atol=32 * eps)


@pytest.mark.isa
def test_large_numbers_behind_a_mask() -> None:
    """Finite ones, too, leave the bits of what does not see them alone."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 320, 24, generator=generator) for _ in range(4)]
    seen = torch.rand(320, 320, generator=generator) > 0.3
    seen[:, 100] = False  # no query sees key 100
    seen[10] = False  # query 10 sees nothing

    def gradients(size: float) -> list[torch.Tensor]:
        query, key, value, grad = (tensor.clone() for tensor in tensors)
        for tensor, row in ((key, 100), (value, 100), (query, 10), (grad, 10)):
            tensor[:, :, row] = size
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = mha_ext.attention(*leaves, seen)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    wanted = gradients(1.0)
    for size in (65535.0, 65536.0, 1e6, 3e38):
        for found, as_before in zip(gradients(size), wanted, strict=True):
            assert torch.equal(found, as_before), size


@pytest.mark.isa
@pytest.mark.parametrize("queries", [20, 32, 84, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_rise_from_tile_to_tile(dtype: torch.dtype, queries: int) -> None:
    """In a block that is no more than half a one, too, of whose first tile a pair is hidden."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, n, 64, generator=generator).to(dtype) for n in (queries, 320, 320)
    )
    key[:, :, 64:128] = 2 * query[:, :, 5:6]
    key[:, :, 192:] = 4 * query[:, :, -3:-2]
    seen = torch.ones(queries, 320, dtype=torch.bool)
    seen[-4, 0] = seen[0, 0] = False
    for block in (0, -1):
        seen[block, :64] = False  # a query that sees nothing there
        found = mha_ext.attention(query, key, value, seen)
        wanted = reference.attention(query.double(), key.double(), value.double(), seen)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=64 * eps, atol=64 * eps)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_that_the_scale_makes_large(dtype: torch.dtype) -> None:
    """They alone need not be in range."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, 320, 48, generator=generator).to(dtype) for _ in range(4)
    )
    query[:, :, ::7, 5] *= 1024
    key[..., 5] /= 1024
    options = {"scale": 64.0, "causal": "lower_right"}

    def results(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [(tensor / 8).requires_grad_() for tensor in tensors[:2]]
        leaves.append(tensors[2].clone().requires_grad_())
        out = function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    found = results(mha_ext.attention, query, key, value)
    wanted = results(reference.attention, query.double(), key.double(), value.double())
    eps = max(torch.finfo(dtype).eps, 2.0**-16)
    for a, b in zip(found, wanted, strict=True):
        largest = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=8 * eps, atol=2 * eps * largest)


@pytest.mark.isa
def test_small_gradients_of_a_bias() -> None:
    """Subnormal ones are those that they are without a hidden key."""
    query, key = torch.zeros(1, 1, 256, 64), torch.zeros(1, 1, 256, 64)
    value = torch.ones(1, 1, 256, 64)
    value[:, :, 1:129] += torch.rand(128, 1, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(256, 256)
    bias[:, 1:129] = -torch.linspace(70, 82, 256)[:, None]
    bias.requires_grad_()
    seen = torch.ones(256, 256, dtype=torch.bool)
    seen[:, 40] = False

    def gradient(size: float) -> torch.Tensor:
        hidden = value.clone()
        hidden[:, :, 40] = size
        out = mha_ext.attention(query, key, hidden, seen, bias=bias)
        return torch.autograd.grad(out, bias, torch.full_like(out, 2.0**-12))[0]

    wanted = gradient(0.0)
    found = wanted[:, 1:40].abs()
    assert ((0 < found) & (found < 2.0**-126)).sum() > 1000
    for size in (1e6, torch.nan):
        assert torch.equal(gradient(size), wanted)


@pytest.mark.isa
def test_large_gradients_beside_large_numbers() -> None:
    """A key that nobody sees leaves gradients their bits, however large these are."""
    generator = torch.Generator().manual_seed(0)
    query = torch.zeros(1, 1, 256, 64, requires_grad=True)
    key = torch.randn(1, 1, 256, 64, generator=generator, requires_grad=True)
    value = torch.full((1, 1, 256, 64), 1000.0)
    value[:, :, 1::2] = -1000.0
    seen = torch.ones(256, 256, dtype=torch.bool)
    seen[:, 254:] = False

    def gradients(last: float) -> tuple[torch.Tensor, ...]:
        hidden = value.clone()
        hidden[:, :, 255] = last
        out = mha_ext.attention(query, key, hidden, seen)
        return torch.autograd.grad(out, (query, key), torch.full_like(out, 1000.0))

    wanted = gradients(0.0)
    assert wanted[0].abs().max() > 65536
    for last in (1e6, torch.nan):
        assert all(map(torch.equal, gradients(last), wanted))


@pytest.mark.isa
def test_large_keys_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, 256, 64, generator=generator, requires_grad=True) for _ in range(3)
    )
    with torch.no_grad():
        query[..., 4] *= 1e-5
        key[:, :, 64::7, 4] = 1e5
    threads = torch.get_num_threads()

    def gradients(count: int) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(count)
        out = mha_ext.attention(query, key, value)
        return torch.autograd.grad(out.square().sum(), (query, key, value))

    try:
        wanted = gradients(1)
        for count in (2, 3, 8):
            assert all(map(torch.equal, gradients(count), wanted)), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.isa
@pytest.mark.parametrize("hides", ["mask", "bias"])
@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_tiles_beside_what_is_not_finite(dtype: torch.dtype, width: int, hides: str) -> None:
    """Who does not see a key, or is not seen by a query, that holds NaN has the gradients it has without.

    Rows of 1 KB stand further apart where they are packed, and what is packed again for a tile that
    holds NaN is wanted by the next one as it was.
    """
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn((1, tokens, 2, width), generator=generator).to(dtype).transpose(1, 2)
        for tokens in (128, 640, 640, 128)
    ]
    seen = torch.rand(128, 640, generator=generator) > 0.3
    seen[:64, 100] = False  # of query tile 0 nobody sees key 100
    seen[10, 64:] = False  # of the keys only tile 0 is seen by query 10
    seen[:, 70] = False  # key 70 is not seen at all
    pairs = torch.zeros(128, 640).masked_fill(~seen, -torch.inf).to(dtype)
    options = {"mask": seen} if hides == "mask" else {"bias": pairs}

    def gradients(poisoned: str) -> list[torch.Tensor]:
        query, key, value, grad = (tensor.clone() for tensor in operands)
        if poisoned == "key":
            key[:, :, 100], value[:, :, 100] = torch.nan, torch.inf
        if poisoned == "hidden key":
            key[:, :, 70], value[:, :, 70] = torch.nan, torch.inf
        if poisoned == "query":
            query[:, :, 10], grad[:, :, 10] = torch.nan, torch.inf
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = mha_ext.attention(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    clean, hidden, beside_key, beside_query = map(
        gradients, ("nothing", "hidden key", "key", "query")
    )
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for found, wanted in zip(hidden, clean, strict=True):
        torch.testing.assert_close(found, wanted, **near)
    for found, wanted in zip(beside_key[:2], clean[:2], strict=True):
        torch.testing.assert_close(found[:, :, :64], wanted[:, :, :64], **near)
        assert found[:, :, 64:].isnan().any()
    for found, wanted in zip(beside_query[2:], clean[2:], strict=True):
        torch.testing.assert_close(found[:, :, 64:], wanted[:, :, 64:], **near)
        assert found[:, :, :64].isnan().any()


@pytest.mark.isa
@pytest.mark.parametrize("queries", [1, 3, 33, 70])
def test_a_uniform_row_passes_on_what_is_not_finite(queries: int) -> None:
    """A row without any key is the mean of all values: each of them gets its share of an infinity."""
    query, key, value = (torch.ones(1, 1, n, 5) for n in (queries, 70, 70))
    mask = torch.ones(queries, 70, dtype=torch.bool)
    mask[0], mask[1:, 65] = False, False
    value.requires_grad_()
    out = mha_ext.attention(query, key, value, mask, empty_rows="uniform")
    grad_out = torch.ones_like(out)
    grad_out[0, 0, 0, 3] = torch.inf
    (grad_value,) = torch.autograd.grad(out, value, grad_out)
    assert grad_value[..., 3].isposinf().all()
    grad_value[..., 3] = 0
    assert grad_value.isfinite().all()
    assert (grad_value[0, 0, 65, :3] == torch.tensor(1 / 70)).all()


def second_weight(x: Tensor, queries: int) -> Tensor:
    """P of the second of two keys with scores 0 and x, for each x; `queries` of them share a head."""
    bias = torch.stack([torch.zeros_like(x), x], 1).reshape(-1, 1, queries, 2)
    query = torch.zeros(len(bias), 1, queries, 1, dtype=x.dtype)
    key = torch.zeros(len(bias), 1, 2, 1, dtype=x.dtype)
    value = torch.tensor([0.0, 1.0], dtype=x.dtype).reshape(2, 1).expand(len(bias), 1, 2, 1)
    return mha_ext.attention(query, key, value, bias=bias).flatten()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [4, 4096])
def test_every_exponential(dtype: torch.dtype, queries: int) -> None:
    """Two keys with scores 0 and x <= 0: the output is e^x / (1 + e^x), to a few units and x."""
    lowest = -80.0 if dtype == torch.float32 else -700.0
    for start in (lowest, -20.0, -1.0, -1e-3):
        x = torch.linspace(start, 0, 4096, dtype=dtype)
        out = second_weight(x, queries)
        wanted = numpy.exp(x.numpy().astype(numpy.longdouble))
        wanted /= 1 + wanted
        error = numpy.abs(out.numpy().astype(numpy.longdouble) / wanted - 1)
        allowed = (6 - x.numpy()) * torch.finfo(dtype).eps
        assert (error <= allowed).all()


@pytest.mark.cpu_alone("other kernels may give e^x where it is subnormal")
@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [4, 4096])
def test_exponentials_end_in_zero(dtype: torch.dtype, queries: int) -> None:
    """Two keys with scores 0 and x: where e^x is subnormal, P is at most that, and then exactly 0."""
    smallest = float(numpy.log(torch.finfo(dtype).tiny))
    x = torch.linspace(smallest - 4, smallest + 1, 4094, dtype=dtype)
    x = torch.cat([x, torch.tensor([-1e30, -torch.inf], dtype=dtype)])
    out = second_weight(x, queries)
    wanted = numpy.exp(x.numpy().astype(numpy.longdouble))
    error = out.numpy().astype(numpy.longdouble) - wanted
    allowed = 1000 * torch.finfo(dtype).eps * wanted
    normal = (x > smallest + 0.01).numpy()
    assert (error[normal] >= -allowed[normal]).all()
    assert (out >= 0).all() and (error[:-2] <= allowed[:-2]).all()
    assert (out[x < smallest - 1] == 0).all()
