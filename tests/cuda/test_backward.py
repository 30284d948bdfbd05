"""The CUDA backward on the emulator: the contract, through the operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import pytest
import torch
from cases import (
    PROBLEMS,
    RANDOM_PROBLEMS,
    Inputs,
    Problem,
    assert_accurate,
    call,
    exact,
    largest_terms,
    make,
    plain_orders,
    results,
)
from emulated import ALL_DTYPES as DTYPES
from emulated import HALF, SPLIT, WIDEST
from torch import Tensor

import mha_ext

pytestmark = pytest.mark.usefixtures("on_the_emulator")


def ours(inputs: Inputs) -> dict[str, Any]:
    return results(lambda i: call(mha_ext.attention, i), inputs)


def check(inputs: Inputs) -> None:
    found = ours(inputs)
    names = ["out", *(name for name in found if name.startswith("grad_"))]
    plains = plain_orders(inputs, results)
    assert_accurate(found, exact(inputs), plains, largest_terms(inputs), names)


CHOSEN = [p for p in PROBLEMS + RANDOM_PROBLEMS if max(p.head_dim, p.value_dim or 0) <= WIDEST]
CHOSEN = [p for p in CHOSEN if p.dtype in HALF][::2] + [p for p in CHOSEN if p.dtype not in HALF][
    ::9
]


@pytest.mark.parametrize("problem", CHOSEN, ids=lambda p: f"{p},{p.numbers}")
def test_every_option(problem: Problem) -> None:
    check(make(problem))


# Options that kernels of every width and dtype must know.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "b1qk", "bias": "bhqk", "dropout_p": 0.2},
    {"mask": "bh1k", "bias": "hqk", "empty_rows": "uniform", "dropout_p": 0.1},
    {"causal": "lower_right", "window": (20, None), "bias": "1h1k", "key_lengths": "random"},
    {"causal": "upper_left", "bias": "q1", "key_lengths": "edges", "empty_rows": "uniform"},
    {"window": (30, 9), "causal": "upper_left", "bias": "k", "layout": "sliced"},
    {"bias": "b1q1", "layout": "strided", "dropout_p": 0.3},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [20, 100, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype: torch.dtype, width: int, options: dict[str, Any]) -> None:
    """Grouped heads, ragged tiles, and each of the kernels for a width."""
    sizes = Problem(dtype, 1, 4, 2, queries=75, keys=83, head_dim=width, value_dim=width - 9)
    check(make(replace(sizes, **options)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "query value", "key bias"])
def test_only_the_gradients_asked_for(dtype: torch.dtype, wanted: str) -> None:
    for bias in ("bhqk", "1hqk"):
        inputs = make(Problem(dtype, 2, 2, queries=33, keys=70, head_dim=16, bias=bias))
        everything = ours(inputs)
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.leaves().items()}
        out, lse = call(mha_ext.attention, inputs.replaced(**leaves))
        used = [(out, inputs.grad_out), (lse, inputs.grad_lse)][: 2 if lse.requires_grad else 1]
        torch.autograd.backward(*zip(*used, strict=True))
        for name in wanted.split():
            assert torch.equal(leaves[name].grad, everything[f"grad_{name}"]), name


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], but: str = "") -> None:
    for name in wanted:
        if name not in but.split():
            assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_does_not_matter(dtype: torch.dtype, number: float) -> None:
    """Behind a mask, a length, the band and a bias of -inf: bit for bit the same gradients."""
    sizes = Problem(dtype, 2, 1, queries=70, keys=130, head_dim=24, value_dim=40)
    for options in (
        {"mask": "1qk"},
        {"mask": "1k", "bias": "hqk", "dropout_p": 0.2},
        {"bias": "1k"},
        {"key_lengths": "random"},
        {"causal": "lower_right", "window": (20, None)},
    ):
        inputs = make(replace(sizes, **options))
        seen = inputs.seen()  # [B, H, Lq, Lk]
        want = ours(inputs)
        # Keys and values that no query of any head sees; queries that see no key.
        unseen = (~seen.any(2).any(1)).nonzero().tolist()
        blind = (~seen.any(3)).nonzero().tolist()
        key, value, query, grad_out, grad_lse = (
            getattr(inputs, name).clone()
            for name in ("key", "value", "query", "grad_out", "grad_lse")
        )
        for b, j in unseen:
            key[b, :, j], value[b, :, j] = number, number
        for b, h, i in blind:
            query[b, h, i], grad_out[b, h, i], grad_lse[b, h, i] = number, number, number
        dirty = {"query": query, "key": key, "value": value}
        dirty |= {"grad_out": grad_out, "grad_lse": grad_lse}
        assert unseen or blind
        found = ours(inputs.replaced(**dirty))
        same(found, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_goes_where_it_is_seen(dtype: torch.dtype, number: float) -> None:
    """A bad cotangent of one row reaches the keys that it sees, and those only."""
    inputs = make(Problem(dtype, 1, 1, queries=70, keys=130, head_dim=24, mask="qk"))
    seen, want = inputs.seen()[0, 0], ours(inputs)
    grad_out = inputs.grad_out.clone()
    grad_out[0, 0, 5, 3] = number
    found = ours(inputs.replaced(grad_out=grad_out))
    for name in ("grad_key", "grad_value"):
        mine = found[name][0, 0]
        assert torch.equal(mine[~seen[5]], want[name][0, 0][~seen[5]])
    mine = found["grad_value"][0, 0]
    assert torch.equal(mine[:, :3], want["grad_value"][0, 0, :, :3])
    assert not mine[seen[5], 3].isfinite().any()
    others = torch.arange(70) != 5
    assert torch.equal(found["grad_query"][0, 0][others], want["grad_query"][0, 0][others])
    # And a bad key: what its gradients reach is not finite, the rows that do not see it stay.
    key = inputs.key.clone()
    key[0, 0, 7, 2] = number
    found = ours(inputs.replaced(key=key))
    blind = ~seen[:, 7]
    assert blind.any()
    assert torch.equal(found["grad_query"][0, 0][blind], want["grad_query"][0, 0][blind])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 120, 160])
def test_any_schedule_gives_the_same_bits(dtype: torch.dtype, width: int) -> None:
    sizes = Problem(dtype, 2, 2, 1, queries=70, keys=90, head_dim=width, value_dim=30)
    inputs = make(replace(sizes, mask="qk", bias="1hqk", dropout_p=0.3))
    found = []
    for seed in range(3):
        emulated.library().seed = 100 + seed
        found.append(ours(inputs))
    for other in found[1:]:
        same(other, found[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    sizes = Problem(dtype, 3, 2, queries=40, keys=70, head_dim=16, bias="b1qk", mask="b1qk")
    whole = make(sizes)
    want = ours(whole)
    names = ("query", "key", "value", "bias", "mask", "grad_out", "grad_lse")
    part = ours(whole.replaced(**{name: getattr(whole, name)[1:2] for name in names}))
    for name in want:
        assert torch.equal(part[name], want[name][1:2]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shard_gives_what_the_whole_does(dtype: torch.dtype) -> None:
    """Origin: the keys of a shard at no multiple of 8 are dropped as those of the whole."""
    whole = make(Problem(dtype, 2, 4, queries=40, keys=90, head_dim=16))
    seed = torch.tensor([5, 7])
    options = {"dropout_p": 0.4, "corner": "upper_left", "window_left": 6, "window_right": 5}

    def grads(i: Inputs, origin: tuple[int, ...]) -> tuple[Tensor, ...]:
        operands = (i.query, i.key, i.value, None, None, None, seed)
        options["origin"], options["scale"] = origin, 0.3
        out, lse, low = torch.ops.mha_ext.attention_forward(*operands, **options)
        saved = (i.grad_out, None, *operands[:3], out, lse, low, *operands[3:])
        arguments = {**options, "output_mask": [True, True, True, False]}
        return torch.ops.mha_ext.attention_backward(*saved, **arguments)

    b, h, q, k = 1, 2, 16, 3
    part = whole.replaced(
        query=whole.query[b:, h:, q:],
        grad_out=whole.grad_out[b:, h:, q:],
        key=whole.key[b:, h:, k:],
        value=whole.value[b:, h:, k:],
    )
    found, full = grads(part, (b, h, q, k)), grads(whole, (0, 0, 0, 0))
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype in HALF else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[0], full[0][b:, h:, q:], **tolerance)
    # The first queries, which the shard has not, see keys up to q + 5.
    torch.testing.assert_close(found[1][:, :, q + 3 :], full[1][b:, h:, q + k + 3 :], **tolerance)
    torch.testing.assert_close(found[2][:, :, q + 3 :], full[2][b:, h:, q + k + 3 :], **tolerance)


def test_groups() -> None:
    """Under vmap each group is a problem of its own, with a bias of its own here."""
    problems = [make(Problem(torch.float16, bias="1hqk", numbers=n)) for n in range(3)]
    names = ("query", "key", "value", "bias", "grad_out")
    stacked = [torch.stack([getattr(i, name) for i in problems]) for name in names]

    def grads(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, out: Tensor) -> Any:
        def function(*leaves: Tensor) -> Tensor:
            return mha_ext.attention(*leaves[:3], bias=leaves[3])

        return torch.func.vjp(function, query, key, value, bias)[1](out)

    found = torch.func.vmap(grads)(*stacked)
    for i, inputs in enumerate(problems):
        alone = grads(*(getattr(inputs, name) for name in names))
        assert all(torch.equal(x[i], y) for x, y in zip(found, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_more_heads_than_a_grid_dimension(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a grid could be 7 high: batch x heads goes over two of its dimensions."""
    monkeypatch.setattr(emulated.library(), "grid_limit", 7)
    check(make(Problem(dtype, 2, 12, 6, queries=3, keys=70, head_dim=8, mask="bhqk", bias="qk")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_past_32_bits(dtype: torch.dtype) -> None:
    """Strides of 2^31 elements and more; only a few rows of that memory are touched."""
    inputs = make(Problem(dtype, 2, 1, queries=3, keys=5, head_dim=8))
    far = (1 << 31) + 64

    def spread(tensor: Tensor) -> Tensor:
        memory = torch.empty(far + 64, dtype=tensor.dtype)
        return memory.as_strided(tensor.shape, (far, far, 8, 1)).copy_(tensor)

    names = ("query", "key", "value", "grad_out")
    same(
        ours(inputs.replaced(**{name: spread(getattr(inputs, name)) for name in names})),
        ours(inputs),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_no_bank_conflicts(dtype: torch.dtype, width: int) -> None:
    """And within the shared memory of the smallest GPUs of compute capability 8."""
    inputs = make(Problem(dtype, 1, 1, queries=70, keys=70, head_dim=width))
    ours(inputs)
    report = emulated.library().report
    assert report.blocks >= 2 and report.barriers > 2
    fragments = dtype in HALF or (dtype == torch.float32 and width <= SPLIT)
    assert (report.products > 0) == fragments
    for traffic in (report.matrices, report.copies, report.plain):
        assert traffic.conflicts == 0
