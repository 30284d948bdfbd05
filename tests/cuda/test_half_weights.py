"""The weights of 16-bit types on the emulator, and their backward: every width, alignment and run of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import pytest
import torch
from cases import Problem, make
from emulated import HALF, WIDEST, Described
from torch import Tensor

ON_CPU = torch.ops.mha_ext
SIZES = Problem(torch.float16, 1, 4, 2, queries=75, keys=83, head_dim=20)
# Runs of rows (query, count, to): whole tiles, parts of warps, single rows, in another order.
RUNS = [(70, 5, 0), (0, 1, 5), (3, 17, 6), (64, 2, 23), (11, 64, 25)]
ROWS = torch.cat([torch.arange(query, query + count) for query, count, _ in RUNS])
BANDS = {
    False: {},
    "upper_left": {"corner": "upper_left", "window_right": 0},
    "lower_right": {"corner": "lower_right", "window_right": 0},
}


class Case:
    """A problem with its lse, and what the operators of the CPU make of it."""

    def __init__(self, problem: Problem, **changes: Tensor) -> None:
        i = self.inputs = make(problem).replaced(**changes)
        self.pairs = (i.mask, i.bias, i.key_lengths)
        self.options: dict[str, Any] = {"scale": i.scale(), **BANDS[i.options["causal"]]}
        if i.options["window"]:
            self.options["window_left"] = i.options["window"][0]
        self.options["uniform_empty_rows"] = i.options["empty_rows"] == "uniform"
        forward = ON_CPU.attention_forward(
            i.query, i.key, i.value, *self.pairs, None, **self.options
        )
        self.levels = forward[1:]

    def described(self) -> Described:
        i = self.inputs
        problem = Described(i.query, i.key, i.value, *self.pairs, None, self.options)
        problem.keep += self.levels
        problem.struct.lse, problem.struct.lse_low = (t.data_ptr() for t in self.levels)
        return problem

    def weights(self, heads: Any = None, runs: Any = None) -> Tensor:
        return emulated.library().weights(self.described(), heads, runs)

    def weights_on_cpu(self) -> Tensor:
        i = self.inputs
        return ON_CPU.attention_weights(i.query, i.key, *self.levels, *self.pairs, **self.options)

    def backward(
        self,
        grad: Tensor,
        wanted: tuple[bool, ...] = (True,) * 3,
        library: emulated.Library | None = None,
    ) -> list[Tensor | None]:
        weights = self.weights_on_cpu()
        delta = torch.where(weights == 0, 0, weights.float() * grad.float()).sum(-1)
        problem = self.described()
        problem.struct.value_dim = 0
        library = library or emulated.library()
        found = library.weights_backward(problem, grad, delta, wanted)
        return [found[0], found[1], found[3]]

    def backward_on_cpu(self, grad: Tensor) -> tuple[Tensor, ...]:
        i = self.inputs
        saved = (grad, self.weights_on_cpu(), i.query, i.key, *self.levels, *self.pairs)
        return ON_CPU.attention_weights_backward(*saved, **self.options, output_mask=[True] * 3)


def close(found: Tensor | None, wanted: Tensor) -> None:
    """But for the rounding of the numbers of 16 bits that enter the last sum, and of the result."""
    if found is None:
        assert wanted.numel() == 0
        return
    eps = torch.finfo(found.dtype).eps
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=4 * eps, atol=2 * eps * largest)


def cotangent(case: Case) -> Tensor:
    weights = case.weights_on_cpu()
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    grad[~case.inputs.seen()] = torch.nan  # of what is hidden nothing is known
    return grad.to(weights.dtype)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "b1qk", "bias": "bhqk"},
    {"mask": "bh1k", "bias": "hqk", "empty_rows": "uniform"},
    {"causal": "lower_right", "window": (20, None), "bias": "1h1k"},
    {
        "batch": 2,
        "causal": "upper_left",
        "bias": "q1",
        "key_lengths": "edges",
        "empty_rows": "uniform",
    },
    {"causal": "upper_left", "bias": "k", "layout": "sliced", "scale": 0.1},
    {"keys": 576, "queries": 40, "causal": "lower_right"},  # 576: more than one block has
    {"keys": 620, "queries": 20, "mask": "1qk", "layout": "strided"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [20, 64, 100, 200])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_option(dtype: torch.dtype, width: int, options: dict[str, Any]) -> None:
    case = Case(replace(SIZES, dtype=dtype, head_dim=width, **options))
    close(case.weights(), case.weights_on_cpu())
    grad = cotangent(case)
    for mine, theirs in zip(case.backward(grad), case.backward_on_cpu(grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("keys", [1, 2, 8, 63, 64, 70, 83, 136])
@pytest.mark.parametrize("width", [1, 17, 128, 129, 193, WIDEST])
def test_every_alignment(keys: int, width: int) -> None:
    """Rows of the result and of its cotangent that are 16, 4 or 2 bytes aligned."""
    case = Case(replace(SIZES, keys=keys, head_dim=width, scale=0.2, mask="q1"))
    close(case.weights(), case.weights_on_cpu())
    grad = cotangent(case)
    for mine, theirs in zip(case.backward(grad), case.backward_on_cpu(grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("keys", [83, 136])
def test_heads_and_runs_are_parts_of_the_whole(keys: int) -> None:
    """Bit for bit, and nothing beside them is written."""
    case = Case(replace(SIZES, keys=keys, mask="bhqk", bias="hqk", empty_rows="uniform"))
    whole = case.weights()
    assert torch.equal(case.weights(None, RUNS), whole[:, :, ROWS])
    assert torch.equal(case.weights([3, 0, 3], RUNS), whole[:, [3, 0, 3]][:, :, ROWS])
    assert case.weights([], RUNS).numel() == case.weights(None, []).numel() == 0


@pytest.mark.parametrize("layout", ["sliced", "one row", "one head", "far"])
def test_a_cotangent_with_strides(layout: str) -> None:
    """Rows that are not aligned, that broadcast, or that are 2^31 elements apart."""
    case = Case(replace(SIZES, mask="1qk"))
    shape = case.weights_on_cpu().shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)).half()
    if layout == "sliced":
        wide = torch.full((*shape[:-1], shape[-1] + 6), torch.nan).half()
        wide[..., 3:-3] = grad
        grad = wide[..., 3:-3]
    elif layout == "one row":
        grad = grad[:, :, :1].expand(shape)
    elif layout == "one head":
        grad = grad[:, :1].expand(shape)
    else:
        far = (1 << 31) + 64
        memory = torch.empty(far * shape[1], dtype=torch.float16)
        grad = memory.as_strided(shape, (0, far, 88, 1)).copy_(grad)
    for mine, theirs in zip(case.backward(grad), case.backward(grad.contiguous()), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_does_not_matter(dtype: torch.dtype, number: float) -> None:
    """Behind a mask, a length, the band and a bias of -inf: bit for bit the same."""
    sizes = Problem(dtype, 2, 1, queries=70, keys=130, head_dim=24)
    for options in (
        {"mask": "1k", "bias": "hqk"},
        {"bias": "1k", "empty_rows": "uniform"},
        {"key_lengths": "random", "mask": "b1q1"},
        {"causal": "lower_right", "window": (20, None)},
    ):
        case = Case(replace(sizes, **options))
        seen, grad = case.inputs.seen(), cotangent(case)
        query, key = case.inputs.query.clone(), case.inputs.key.clone()
        key[~seen.any(2).any(1)[:, None].expand(key.shape[:3])] = number
        query[~seen.any(3)] = number
        assert not (query.isfinite().all() and key.isfinite().all())
        dirty = Case(replace(sizes, **options), query=query, key=key)
        assert torch.equal(dirty.weights(), case.weights())
        other = torch.where(seen, grad, number)
        for mine, clean in zip(dirty.backward(other), case.backward(grad), strict=True):
            assert mine is clean is None or torch.equal(mine, clean)


def test_a_bad_number_goes_where_it_is_seen() -> None:
    case = Case(replace(SIZES, heads=1, kv_heads=1, mask="qk"))
    seen, whole = case.inputs.seen()[0, 0], case.weights()[0, 0]
    key = case.inputs.key.clone()
    key[0, 0, 9, 3] = torch.nan
    found = Case(replace(SIZES, heads=1, kv_heads=1, mask="qk"), key=key).weights()[0, 0]
    assert torch.equal(found[~seen[:, 9]], whole[~seen[:, 9]])
    assert found[seen[:, 9]][seen[seen[:, 9]]].isnan().all()
    assert (found[~seen] == 0).all()


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_rows_whose_scores_are_all_minus_infinity(empty_rows: str) -> None:
    """They count as rows without keys, although their keys are visible."""
    sizes = Problem(torch.bfloat16, 1, 1, queries=20, keys=70, head_dim=16, empty_rows=empty_rows)
    key, query = make(sizes).key.abs() * 1e25, make(sizes).query
    query[0, 0, 3] = -1e25
    case = Case(sizes, query=query, key=key)
    assert torch.equal(case.levels[0] == -torch.inf, torch.arange(20).expand(1, 1, 20) == 3)
    found = case.weights()[0, 0, 3]
    assert torch.equal(found, torch.full_like(found, 1 / 70 if empty_rows == "uniform" else 0))


def test_scores_far_from_zero() -> None:
    """lse_low counts: with lse alone P would be 1 for each of several equal keys."""
    i = make(Problem(torch.bfloat16, 1, 1, queries=20, keys=70, head_dim=16, bias="1h1k"))
    case = Case(
        Problem(torch.bfloat16, 1, 1, queries=20, keys=70, head_dim=16, bias="1h1k"),
        bias=torch.full_like(i.bias, -3e38),
    )
    close(case.weights(), case.weights_on_cpu())
    grad = cotangent(case)
    for mine, theirs in zip(case.backward(grad), case.backward_on_cpu(grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("width", [40, 200])
def test_any_schedule_gives_the_same_bits(width: int) -> None:
    case = Case(replace(SIZES, head_dim=width, mask="qk", bias="1hqk"))
    grad, found = cotangent(case), []
    for seed in range(3):
        emulated.library().seed = 100 + seed
        found.append([case.weights(), *case.backward(grad)])
    for other in found[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, found[0], strict=True))


def test_only_the_gradients_asked_for() -> None:
    for bias in ("bhqk", "1hqk"):
        case = Case(replace(SIZES, batch=2, heads=2, queries=33, bias=bias))
        grad = cotangent(case)
        everything = case.backward(grad)
        for n in range(3):
            found = case.backward(grad, tuple(i == n for i in range(3)))
            assert torch.equal(found[n], everything[n])


def test_more_heads_than_a_grid_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.library(), "grid_limit", 7)
    case = Case(replace(SIZES, batch=2, heads=12, kv_heads=6, queries=3, mask="bhqk", bias="qk"))
    close(case.weights(), case.weights_on_cpu())
    grad = cotangent(case)
    for mine, theirs in zip(case.backward(grad), case.backward_on_cpu(grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("keys", [128, 130, 131])
@pytest.mark.parametrize("width", [64, 128, WIDEST])
def test_no_bank_conflicts(width: int, keys: int) -> None:
    """On the tensor cores, within the shared memory of the smallest GPUs. Rows that are not 16 bytes
    aligned are copied in smaller pieces, where the cotangent is read."""
    case = Case(replace(SIZES, keys=keys, head_dim=width))
    grad = cotangent(case)
    for run in [case.weights, lambda: case.backward(grad)][: 1 if keys % 8 else 2]:
        run()
        report = emulated.library().report
        assert report.products > 0 and report.blocks >= 2 and report.barriers > 2
        for traffic in (report.matrices, report.copies, report.plain):
            assert traffic.conflicts == 0


def test_tiles_without_a_visible_pair_cost_no_product() -> None:
    sizes = replace(SIZES, queries=128, keys=128, head_dim=64)
    counts = []
    for causal in (False, "upper_left"):
        Case(replace(sizes, causal=causal)).weights()
        counts.append(emulated.library().report.products)
    assert counts[1] <= 0.8 * counts[0]


@pytest.mark.parametrize("count", [0, 1, 256, 257, 1000])
def test_lists_of_heads_and_rows(count: int) -> None:
    """They travel as parameters of kernels, so many a launch."""
    numbers = torch.arange(count) * (1 << 40) - 7
    library = emulated.library()
    assert torch.equal(library.upload(numbers), numbers)
    assert library.report.launches == -(-count // 256)
