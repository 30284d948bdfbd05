"""The guarantees, one test or more for each; 5 and 8 have files of their own (see each section)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch
from cases import (
    DTYPES,
    Inputs,
    Problem,
    assert_accurate,
    call,
    exact,
    largest_terms,
    make,
    plain_orders,
    results,
    to_double,
)
from sizes import fewer, size
from torch import Tensor

import mha_ext
from mha_ext import _C, reference
from mha_ext.functional import attention_with_lse

pytestmark = pytest.mark.isa

no_kernel = pytest.mark.cpu_alone("calls no kernel")
wide = pytest.mark.cpu_alone("has heads wider than 256")

NAN, INF = float("nan"), float("inf")


def ours(inputs: Inputs) -> dict[str, Tensor]:
    return results(lambda i: call(mha_ext.attention, i), inputs)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bit for bit, NaN where NaN is wanted."""
    for name, tensor in wanted.items():
        assert same(found[name], tensor), name


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def run(script: str, *arguments: str, timeout: float = 240) -> str:
    """What a fresh Python process prints, started where no source folder is in its way."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=tempfile.gettempdir()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# 1. What is hidden contributes nothing, whatever it holds. -----------------------------------------

TINY = Problem(heads=2, kv_heads=1, queries=5, keys=7, head_dim=3, value_dim=2, mask="bhqk")
ONE_TILE = Problem(heads=2, kv_heads=2, queries=12, keys=10, head_dim=50, mask="bhqk")
TILES = Problem(heads=2, kv_heads=1, queries=70, keys=270, head_dim=20, mask="bhqk", bias="1hqk")
LEAKS = {
    "tiny": TINY,
    "tiny bias": replace(TINY, bias="bhqk"),
    "tiny dropout": replace(TINY, dropout_p=0.4, bias="1hqk"),
    "tiny causal": replace(TINY, mask=None, causal="lower_right", key_lengths="random"),
    "tiny window": replace(TINY, mask="b11k", causal="upper_left", window=(2, None)),
    "one tile": replace(ONE_TILE, bias="1hqk"),
    "one tile lengths": replace(ONE_TILE, mask=None, key_lengths="random"),
    "one tile dropout": replace(ONE_TILE, dropout_p=0.4, head_dim=5),
    "tiles": TILES,
    "tiles band": replace(TILES, mask=None, causal="lower_right", window=(80, None)),
    "tiles lengths": replace(TILES, mask=None, bias=None, key_lengths="random"),
    "tiles dropout": replace(TILES, dropout_p=0.3, head_dim=65),
    "cut keys": replace(TINY, queries=3, keys=600, bias="1hqk", dropout_p=0.2),
    "cut keys band": replace(TINY, queries=9, keys=700, mask="b11k", causal="lower_right"),
    "keys met once": replace(TINY, queries=9, keys=130, kv_heads=None, bias="1hqk"),
    "rows of many heads": replace(TINY, heads=24, queries=3, keys=70, mask="b1qk"),
}
leaks = pytest.mark.parametrize("problem", [fewer(p) for p in LEAKS.values()], ids=list(LEAKS))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
poisons = pytest.mark.parametrize("poison", [NAN, INF, -INF])


def some(count: int, limit: int) -> list[int]:
    """All of a small range, otherwise its ends, its tiles' ends and a few in between."""
    every = range(limit) if limit <= count else (0, 1, 37, 62, 63, 64, 65, 127, 128, limit - 1)
    return sorted({i for i in size(every, emulated=(1, limit - 1)) if i < limit})


def put(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def over_heads(affected: Tensor, kv_heads: int) -> Tensor:
    """[B, H, L] to [B, Hkv, L]: what any of a group's heads touches."""
    return affected.unflatten(1, (kv_heads, -1)).any(2)


def reach(seen: Tensor, rows: Tensor, kv_heads: int) -> dict[str, Tensor]:
    """What rows [B, H, Lq] that hold NaN may reach: keys that they see, their own row."""
    keys = over_heads((rows[..., None] & seen).any(2), kv_heads)
    return {"row": rows, "key": keys}


def onto_bias(rows: Tensor, inputs: Inputs) -> Tensor:
    """The elements of the bias that add up something of these rows."""
    assert inputs.bias is not None
    return (rows[..., None] & inputs.seen()).float().sum_to_size(inputs.bias.shape) > 0


def assert_untouched(
    found: dict[str, Tensor], wanted: dict[str, Tensor], touched: dict[str, Tensor]
) -> None:
    """Equal, bit for bit, outside of what may be touched."""
    for name, where in touched.items():
        width = [1] * (wanted[name].dim() - where.dim())
        where = where.view(*where.shape, *width).expand_as(wanted[name])
        clean = wanted[name].masked_fill(where, 0)
        assert clean.isfinite().all() or name == "lse"
        assert same(found[name].masked_fill(where, 0), clean), name


@leaks
@dtypes
@poisons
def test_key_and_value_behind_a_mask(problem: Problem, dtype: torch.dtype, poison: float) -> None:
    """K_j and V_j reach the queries that see key j, and through them the keys that those see."""
    inputs = make(replace(problem, dtype=dtype))
    seen, kv_heads = inputs.seen(), inputs.key.shape[1]
    wanted = ours(inputs)
    for j in some(7, problem.keys):
        bad = inputs.replaced(
            key=put(inputs.key, (slice(None), slice(None), j, 1), poison),
            value=put(inputs.value, (slice(None), slice(None), j, 0), poison),
        )
        found = ours(bad)
        to = reach(seen, seen[..., j], kv_heads)
        touched = {
            "out": to["row"],
            "lse": to["row"],
            "grad_query": to["row"],
            "grad_key": to["key"],
            "grad_value": to["key"],
        }
        if inputs.bias is not None:
            touched["grad_bias"] = onto_bias(to["row"], inputs)
        assert_untouched(found, wanted, touched)
        if poison != poison:
            assert found["out"][..., 0][to["row"]].isnan().all(), "a visible NaN propagates"


@leaks
@dtypes
@poisons
def test_query_and_cotangent_of_one_row(
    problem: Problem, dtype: torch.dtype, poison: float
) -> None:
    """Q_i and dO_i reach their own row and the keys that it sees, nothing else."""
    inputs = make(replace(problem, dtype=dtype))
    seen, kv_heads = inputs.seen(), inputs.key.shape[1]
    wanted = ours(inputs)
    for i in some(5, problem.queries):
        at = (slice(None), slice(None), i, 0)
        row = torch.zeros_like(seen[..., 0])
        row[:, :, i] = seen[:, :, i].any(-1)  # a row that sees nothing touches nothing
        to = reach(seen, row, kv_heads)
        touched = {"grad_query": row, "grad_key": to["key"], "grad_value": to["key"]}
        if inputs.bias is not None:
            touched["grad_bias"] = onto_bias(row, inputs)
        found = ours(inputs.replaced(grad_out=put(inputs.grad_out, at, poison)))
        assert_untouched(found, wanted, {**touched, "out": row & False, "lse": row & False})
        found = ours(inputs.replaced(query=put(inputs.query, at, poison)))
        assert_untouched(found, wanted, {**touched, "out": row, "lse": row})


@dtypes
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_bias_behind_a_mask_pair_by_pair(dtype: torch.dtype, dropout_p: float) -> None:
    """Whatever a hidden bias element holds, all results are the same, and its gradient is 0."""
    tiny = replace(TINY, dtype=dtype, bias="bhqk", dropout_p=dropout_p, key_lengths="int32")
    inputs = make(fewer(tiny, batch=2))
    inputs.bias = inputs.bias.masked_fill(inputs.bias == -INF, 0.25)
    seen, wanted = inputs.seen(), ours(inputs)
    assert not wanted["grad_bias"][~seen].any()
    for poison in (NAN, INF, -INF):
        for pair in (~seen).nonzero().tolist()[:: size(1, emulated=7)]:
            assert_same(ours(inputs.replaced(bias=put(inputs.bias, tuple(pair), poison))), wanted)
        everywhere = inputs.replaced(bias=inputs.bias.masked_fill(~seen, poison))
        assert_same(ours(everywhere), wanted)


@dtypes
@leaks
def test_a_bias_of_minus_infinity_masks(problem: Problem, dtype: torch.dtype) -> None:
    """It is a mask: the same results, whatever query, key and value hold behind it."""
    inputs = make(replace(problem, dtype=dtype, bias=None))
    seen = inputs.seen()
    added = torch.zeros(seen.shape, dtype=dtype)
    masked = inputs.replaced(bias=added, mask=seen)
    biased = inputs.replaced(bias=added.masked_fill(~seen, -INF), mask=None)
    masked.options = biased.options = {**inputs.options, "causal": False, "window": None}
    masked.key_lengths = biased.key_lengths = None
    wanted = ours(masked)
    assert_same(ours(biased), wanted)
    hidden = ~seen.flatten(1, 2).any(1).any(0)  # keys that no query sees
    biased.bias = biased.bias.clone()
    biased.bias[..., 0] = -INF  # ... such as this one, at least
    hidden[0] = True
    wanted = ours(biased)
    for poison in (NAN, INF):
        key = biased.key.masked_fill(hidden[:, None], poison)
        value = biased.value.masked_fill(hidden[:, None], poison)
        assert_same(ours(biased.replaced(key=key, value=value)), wanted)


@dtypes
def test_poisoned_padding(dtype: torch.dtype) -> None:
    """The everyday case: padding keys full of NaN, by mask, by lengths, in whole tiles."""
    for kind in ("mask", "lengths"):
        inputs = make(Problem(dtype=dtype, batch=3, queries=65, keys=200, kv_heads=1, bias="hqk"))
        lengths = torch.tensor([200, 77, 0])
        padding = torch.arange(200) >= lengths[:, None]
        if kind == "mask":
            inputs.mask = ~padding[:, None, None]
        else:
            inputs.key_lengths = lengths
        wanted = ours(inputs)
        hidden = padding[:, None, :, None]
        key, value = (t.masked_fill(hidden, NAN) for t in (inputs.key, inputs.value))
        found = ours(inputs.replaced(key=key, value=value))
        assert_same(found, wanted)
        for name in ("grad_key", "grad_value"):
            assert not found[name].masked_select(hidden).any()


@dtypes
def test_a_dropped_pair_is_visible(dtype: torch.dtype) -> None:
    """Dropout hides no NaN: it is there with some other seed."""
    inputs = make(Problem(dtype=dtype, queries=40, keys=1, dropout_p=0.5))
    kept = reference.keep(inputs.seed, 0.5, (2, 2, 40, 1))
    assert kept.any() and not kept.all()
    out, _ = call(mha_ext.attention, inputs.replaced(value=torch.full_like(inputs.value, NAN)))
    assert out.isnan().all()


@dtypes
@leaks
def test_weights_behind_a_mask(problem: Problem, dtype: torch.dtype) -> None:
    """attention_weights and its gradients: hidden pairs are 0, and hidden keys reach nothing."""
    inputs = make(replace(problem, dtype=dtype, dropout_p=0.0))
    seen, kv_heads = inputs.seen(), inputs.key.shape[1]
    options = {"bias": inputs.bias, "key_lengths": inputs.key_lengths}
    options |= {name: inputs.options[name] for name in ("causal", "window")}
    grad_weights = torch.randn(seen.shape).to(dtype)

    def weigh(key: Tensor, grad_weights: Tensor) -> dict[str, Tensor]:
        leaves = [t.detach().requires_grad_() for t in (inputs.query, key)]
        weights = mha_ext.attention_weights(*leaves, inputs.mask, **options)
        grads = torch.autograd.grad(weights, leaves, grad_weights)
        return dict(zip(("weights", "query", "key"), (weights.detach(), *grads), strict=True))

    wanted = weigh(inputs.key, grad_weights)
    assert not wanted["weights"][~seen].any()
    assert_same(weigh(inputs.key, grad_weights.masked_fill(~seen, NAN)), wanted)
    for j in some(7, problem.keys):
        found = weigh(put(inputs.key, (slice(None), slice(None), j, 1), NAN), grad_weights)
        to = reach(seen, seen[..., j], kv_heads)
        touched = {"weights": to["row"], "query": to["row"], "key": to["key"]}
        assert_untouched(found, wanted, touched)
        assert not found["weights"][~seen].any()


# 2. A row with nothing to attend to. ---------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("hide", ["mask", "bias", "lengths", "causal", "window", "no keys"])
def test_empty_rows(hide: str, dtype: torch.dtype) -> None:
    """out = 0, lse = -inf, gradient 0, whatever dO and dL hold; or the mean over all keys."""
    p = Problem(dtype=dtype, batch=3, kv_heads=1, queries=70, keys=66, dropout_p=0.2)
    p = replace(p, keys=0) if hide == "no keys" else p
    p = replace(p, causal="lower_right") if hide == "causal" else p  # 70 > 66: the first 4 rows
    p = replace(p, causal="upper_left", window=(1, None)) if hide == "window" else p  # the last
    inputs = make(p)
    if hide == "mask":
        inputs.mask = torch.rand(3, 1, 70, 1) < 0.5
    if hide == "bias":
        inputs.bias = torch.zeros(70, 1, dtype=dtype).masked_fill(torch.rand(70, 1) < 0.5, -INF)
    if hide == "lengths":
        inputs.key_lengths = torch.tensor([0, 66, 0])
    empty = ~inputs.seen().any(-1)
    assert empty.any()
    wanted = ours(inputs)
    for name in ("out", "grad_query"):
        assert not wanted[name][empty].any() and wanted[name].isfinite().all()
    assert (wanted["lse"][empty] == -INF).all() and wanted["lse"][~empty].isfinite().all()
    for poison in (NAN, INF):
        grad_out = inputs.grad_out.masked_fill(empty[..., None], poison)
        grad_lse = inputs.grad_lse.masked_fill(empty, poison)
        query = inputs.query.masked_fill(empty[..., None], poison)
        found = ours(inputs.replaced(grad_out=grad_out, grad_lse=grad_lse, query=query))
        assert_same(found, wanted)

    inputs.options["empty_rows"], inputs.options["dropout_p"] = "uniform", 0.0
    uniform = ours(inputs)
    assert (uniform["lse"][empty] == -INF).all()
    assert not uniform["grad_query"][empty].any()
    mean = inputs.value.double().mean(2, keepdim=True).nan_to_num().expand(3, 2, 70, -1)[empty]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(uniform["out"][empty].double(), mean, rtol=4 * eps, atol=4 * eps)


# 3. Bitwise the same: threads, runs, what else is in the batch. ------------------------------------

STEADY = {
    "plain": Problem(batch=3, heads=4, kv_heads=2, queries=130, keys=300, head_dim=40),
    "masked": Problem(
        batch=3, heads=4, queries=100, keys=190, mask="b1qk", bias="b1qk", key_lengths="random"
    ),
    "causal": Problem(batch=3, heads=4, queries=200, keys=200, causal=True, bias="11qk"),
    "dropout": Problem(batch=3, heads=2, kv_heads=1, queries=90, keys=700, dropout_p=0.2),
    "one query": Problem(batch=4, heads=4, kv_heads=1, queries=1, keys=2000),
    "few queries, cut keys": Problem(
        batch=3,
        heads=4,
        kv_heads=2,
        queries=3,
        keys=1200,
        mask="b1qk",
        bias="bhqk",
        key_lengths="random",
        dropout_p=0.2,
        empty_rows="uniform",
    ),
    "few queries of many heads": Problem(
        batch=3, heads=20, kv_heads=1, queries=7, keys=600, mask="b1qk", dropout_p=0.2
    ),
    "short queries, cut keys": Problem(
        batch=3,
        heads=2,
        queries=70,
        keys=1500,
        causal="lower_right",
        window=(1100, None),
        key_lengths="edges",
        mask="b1qk",
        empty_rows="uniform",
    ),
    "heads side by side": Problem(
        batch=3, heads=20, kv_heads=10, queries=1, keys=1100, head_dim=96, layout="heads"
    ),
    "one head, cut keys": Problem(batch=3, heads=1, queries=40, keys=1300, dropout_p=0.1),
    "many heads, cut keys": Problem(batch=3, heads=8, queries=70, keys=1100, head_dim=8),
    "one tile": Problem(
        batch=9,
        heads=6,
        head_dim=50,
        mask="b1qk",
        bias="bhqk",
        dropout_p=0.2,
        empty_rows="uniform",
    ),
    "broadcast bias": Problem(batch=5, heads=3, queries=70, keys=130, bias="k"),
    "bias summed in shares": Problem(batch=20, heads=3, queries=9, keys=20, bias="hqk"),
}
steady = pytest.mark.parametrize(
    "problem", [fewer(p, batch=3) for p in STEADY.values()], ids=list(STEADY)
)


@steady
@dtypes
def test_any_number_of_threads_and_any_run(problem: Problem, dtype: torch.dtype) -> None:
    inputs = make(replace(problem, dtype=dtype))
    torch.set_num_threads(1)
    wanted = ours(inputs)
    for threads in size((1, 2, 3, 5, 8), emulated=(1, 2)):
        torch.set_num_threads(threads)
        assert_same(ours(inputs), wanted)


@pytest.mark.cpu_alone("a GPU has no threads to set")
@pytest.mark.parametrize("heads", [1, 13])
def test_more_threads_than_heads_or_shares(heads: int) -> None:
    """A thread begins with heads of its own, of which there are up to 64 shares, and helps the others after that."""
    inputs = make(
        Problem(
            batch=7,
            heads=heads,
            kv_heads=heads,
            queries=200,
            keys=130,
            head_dim=64,
            causal="lower_right",
        )
    )
    torch.set_num_threads(1)
    wanted = ours(inputs)
    for threads in (3, 11, 70):
        torch.set_num_threads(threads)
        assert_same(ours(inputs), wanted)


@pytest.mark.cpu_alone("how many blocks a task has is each device's own")
@dtypes
@pytest.mark.parametrize("head_dim", [32, 200])
def test_a_task_of_many_blocks(head_dim: int, dtype: torch.dtype) -> None:
    """18 blocks of queries, which one thread takes by up to 16 of them: the bits of some queries alone.

    Where they are cut, no block is left with so few rows that it is multiplied in another way.
    """
    p = Problem(batch=1, heads=1, queries=1100, keys=300, head_dim=head_dim, mask="11qk")
    inputs = make(replace(p, dtype=dtype))
    torch.set_num_threads(1)
    found = ours(inputs)
    for threads in (2, 8):
        torch.set_num_threads(threads)
        assert_same(ours(inputs), found)
    assert inputs.mask is not None
    for some in (slice(0, 128), slice(500, 600), slice(960, 1100)):
        alone = ours(
            inputs.replaced(
                query=inputs.query[:, :, some],
                mask=inputs.mask[:, :, some],
                grad_out=inputs.grad_out[:, :, some],
                grad_lse=inputs.grad_lse[:, :, some],
            )
        )
        for name in ("out", "lse"):
            assert_same({name: alone[name]}, {name: found[name][:, :, some]})


@steady
@dtypes
def test_any_content_and_size_of_the_batch(problem: Problem, dtype: torch.dtype) -> None:
    """Each sequence alone, in a batch of others, in another place: the same bits."""
    p = replace(problem, dtype=dtype, dropout_p=0.0)
    inputs, other = make(p), make(replace(p, numbers=1))
    shared_bias = inputs.bias is not None and (inputs.bias.dim() < 4 or inputs.bias.shape[0] == 1)
    wanted = ours(inputs)

    def pick(tensor: Tensor | None, index: list[int], stranger: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dim() in (2, 3) or tensor.shape[0] != p.batch:
            return tensor  # broadcast over the batch
        assert stranger is not None
        return torch.stack([tensor[i] if i >= 0 else stranger[0] for i in index])

    names = ("query", "key", "value", "mask", "bias", "key_lengths", "grad_out", "grad_lse")
    others = ([0], [2], [2, 0], [-1, 1, -1, -1, 0, -1, -1])
    for index in size(others, emulated=([2, 0], [-1, 1, -1])):
        changed = {
            n: pick(getattr(inputs, n), index, getattr(other, n)) for n in names if n != "grad_lse"
        }
        changed["grad_lse"] = torch.stack(
            [(inputs if i >= 0 else other).grad_lse[max(i, 0)] for i in index]
        )
        found = ours(inputs.replaced(**changed))
        for name, tensor in wanted.items():
            if name == "grad_bias" and (shared_bias or tensor.dim() < 4):
                continue  # a sum over the batch
            for place, i in enumerate(index):
                if i >= 0:
                    assert torch.equal(found[name][place], tensor[i]), (name, index)


@pytest.mark.parametrize("rise", [0.0, 20.0])
@dtypes
def test_a_hidden_pair_changes_no_other_row(dtype: torch.dtype, rise: float) -> None:
    """Whole tiles may be computed otherwise than those with a hidden pair: the same bits.

    Also where the scores of every other row rise with the keys, so that each tile has a maximum
    far above the one before.
    """
    inputs = make(Problem(dtype=dtype, queries=70, keys=256, head_dim=40, value_dim=24))
    key, query = inputs.key.clone(), inputs.query.clone()
    key[..., 0] = torch.arange(256).div(64, rounding_mode="floor") * rise
    query[:, :, ::2, 0] = 0.0
    query[:, :, 1::2, 0] = 6.0
    mask = torch.ones(70, 256, dtype=torch.bool)
    mask[3, 255] = mask[66, 100] = False
    rows = [row for row in range(70) if row not in (3, 66)]
    wanted = ours(inputs.replaced(query=query, key=key))
    found = ours(inputs.replaced(query=query, key=key, mask=mask))
    for name in ("out", "lse", "grad_query"):
        assert torch.equal(found[name][:, :, rows], wanted[name][:, :, rows]), name
    exactly = results(
        lambda i: call(reference.attention, i), to_double(inputs.replaced(query=query, key=key))
    )
    eps = torch.finfo(dtype).eps  # scores reach 60, and carry its rounding
    for name in ("out", "lse"):
        torch.testing.assert_close(
            wanted[name].double(), exactly[name], rtol=128 * eps, atol=128 * eps
        )


@pytest.mark.parametrize("queries", size((17, 24, 33, 40, 56), emulated=(24, 33)))
@dtypes
def test_queries_that_do_not_fill_a_vector(dtype: torch.dtype, queries: int) -> None:
    """The last queries may take a part of the lanes that others need: the same bits as among 64."""
    inputs = make(
        Problem(
            dtype=dtype,
            heads=3,
            queries=64,
            keys=100,
            head_dim=150,
            value_dim=70,
            mask="b1qk",
            bias="bhqk",
            dropout_p=0.2,
        )
    )
    names = ("query", "mask", "bias", "grad_out")
    first = {name: getattr(inputs, name)[:, :, :queries].contiguous() for name in names}
    found = ours(inputs.replaced(**first, grad_lse=inputs.grad_lse[:, :, :queries].contiguous()))
    wanted = ours(inputs)
    for name in ("out", "lse", "grad_query", "grad_bias"):
        assert torch.equal(found[name], wanted[name][:, :, :queries]), name


@pytest.mark.parametrize("poison", [0.0, NAN])
@pytest.mark.parametrize("heads", [2, 11])
@pytest.mark.parametrize("group", [1, 2])
@dtypes
def test_heads_side_by_side_or_apart(
    dtype: torch.dtype, group: int, heads: int, poison: float
) -> None:
    """Few queries take together the heads whose keys lie side by side in a page: the same bits.

    Eleven heads are more than a page holds, and no multiple of it. Each head has a mask of its
    own, with whole tiles that only some of the heads see. One row alone reads a head that lies
    apart in the order of its memory.
    """
    problem = Problem(
        dtype=dtype,
        heads=group * heads,
        kv_heads=heads,
        queries=group,
        keys=size(1100, emulated=150),
        head_dim=130,
        value_dim=40,
        layout="heads",
        mask="bhqk",
        bias="bhqk",
        dropout_p=0.2,
        key_lengths="random",
        empty_rows="zero" if poison else "uniform",
    )
    inputs = make(problem)
    mask = inputs.mask.clone()
    mask[:, ::3, :, 64:128] = False
    mask[:, 1::4] = False
    inputs = inputs.replaced(mask=mask)
    seen = mask.unflatten(1, (heads, group)).any(2).any(2)
    key = inputs.key.masked_fill(~seen[..., None], poison)
    value = inputs.value.masked_fill(~seen[..., None], poison)
    wanted = call(
        mha_ext.attention, inputs.replaced(key=key.contiguous(), value=value.contiguous())
    )
    row = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = call(mha_ext.attention, inputs.replaced(key=row[0], value=row[1]))
        assert all(map(torch.equal, found, wanted))
    if not poison:
        exactly = call(reference.attention, to_double(inputs.replaced(key=key, value=value)))
        torch.testing.assert_close(wanted[0].double(), exactly[0], rtol=0.02, atol=0.02)


@pytest.mark.cpu_alone("how memory is read is the CPU's")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(130, 80), (48, 64)])
@pytest.mark.parametrize(("group", "queries"), [(1, 1), (4, 1), (2, 3), (1, 8), (9, 1), (2, 530)])
@dtypes
def test_how_rows_are_read_changes_no_bit(
    dtype: torch.dtype, group: int, queries: int, head_dim: int, value_dim: int, apart: bool
) -> None:
    """What depends on the processor: how many rows of a head are read in the order of memory, and in turn with those of
    others; V packed or not.

    The keys are more than two of the stretches that are read in order, with an odd end, and not one range; the queries
    one, a few, or more blocks than read V where it lies.
    """
    inputs = make(
        Problem(
            dtype=dtype,
            heads=3 * group,
            kv_heads=3,
            queries=queries,
            keys=2 * 512 + 150,
            head_dim=head_dim,
            value_dim=value_dim,
            layout="contiguous" if apart else "heads",
            mask="bhqk",
            bias="bhqk",
            dropout_p=0.2,
            key_lengths="random",
            empty_rows="uniform",
        )
    )
    before = _C.whole_vectors()
    try:
        _C.set_whole_vectors(True)
        found = ours(inputs)
        _C.set_whole_vectors(False)
        assert_same(found, ours(inputs))
    finally:
        _C.set_whole_vectors(before)


@dtypes
def test_a_shard_gives_what_the_whole_gives(dtype: torch.dtype) -> None:
    """With `origin`, a part of the batch and of the heads drops and computes what the whole does."""
    inputs = make(Problem(dtype=dtype, batch=3, heads=4, queries=70, keys=130, dropout_p=0.3))
    forward = torch.ops.mha_ext.attention_forward.default
    whole = ours(inputs)
    part = (slice(1, 3), slice(2, 4))
    tensors = [t[part] for t in (inputs.query, inputs.key, inputs.value)]
    options = {"dropout_p": 0.3, "scale": inputs.scale()}
    found = forward(*tensors, None, None, None, inputs.seed, origin=[1, 2, 0, 0], **options)
    assert torch.equal(found[0], whole["out"][part]) and torch.equal(found[1], whole["lse"][part])


@dtypes
@pytest.mark.parametrize(
    ("first", "queries", "keys"), [(37, 40, 60), (37, 130, 150), (90, 3, 130), (90, 7, 130)]
)
def test_a_shard_of_the_sequence(first: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    """Queries first .. and keys 11 .. of a longer sequence: diagonal and dropout are global."""
    problem = Problem(
        dtype=dtype,
        heads=2,
        queries=queries,
        keys=keys,
        causal="upper_left",
        window=(30, None),
        dropout_p=0.4,
        scale=0.3,
    )
    inputs = make(problem).replaced(origin=(3, 1, first, 11), seed=torch.tensor([5, 2**32 - 1]))

    def of_shard(i: Inputs) -> tuple[Tensor, Tensor]:
        options = {name: i.options[name] for name in ("causal", "window", "dropout_p", "scale")}
        found = attention_with_lse(
            i.query, i.key, i.value, i.mask, seed=i.seed, origin=i.origin, **options
        )
        return found[0], found[1]

    found = results(of_shard, inputs)
    wanted = results(lambda i: call(reference.attention, i, origin=i.origin), to_double(inputs))
    names = ["out", "lse", "grad_query", "grad_key", "grad_value"]
    assert_accurate(found, wanted, plain_orders(inputs, results), largest_terms(inputs), names)


# 4. Memory is linear in the sequence length. -------------------------------------------------------

MEMORY = """
import sys, torch, mha_ext

def peak():  # kB: the high-water mark since it was last cleared
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

length, dtype, options = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
heads, width = (int(n) for n in sys.argv[4:] or (2, 32))
torch.set_num_threads(2)

def problem(length):
    q, k, v = (torch.randn(1, heads, length, width).to(dtype).requires_grad_() for _ in range(3))
    arguments = {}
    if "mask" in options:
        arguments["mask"] = (torch.rand(1, 1, 1, length) < 0.9)
    if "bias" in options:
        arguments["bias"] = torch.randn(1, heads, length, 1).to(dtype).requires_grad_()
    if "dropout" in options:
        arguments["dropout_p"] = 0.1
    if "causal" in options:
        arguments["causal"] = True
    return (q, k, v), arguments

def attend(tensors, arguments):
    mha_ext.attention(*tensors, **arguments).sum().backward()

attend(*problem(256))  # what is allocated once
tensors, arguments = problem(length)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
before = peak()
attend(tensors, arguments)
print(peak() - before)
"""


def can_measure_memory() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        return True
    except OSError:
        return False


@pytest.mark.own_process
@pytest.mark.skipif(not can_measure_memory(), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize(
    "dtype, options",
    [("float32", ""), ("bfloat16", "dropout"), ("float32", "mask bias dropout causal")],
)
def test_memory_is_linear(dtype: str, options: str) -> None:
    """The room of results and gradients and 8 Lq D floats a head, not of Lq Lk scores."""
    length, heads, width = 6144, 2, 32
    used = 1024 * int(run(MEMORY, str(length), dtype, options))
    rows = 4 * heads * length * width  # one [H, L, D] tensor in float32
    results_and_gradients = 6 * rows  # out, its cotangent, three gradients, lse and the like
    assert used <= results_and_gradients + 8 * rows + 2**24
    assert used < 4 * length * length / 4, "a quarter of one head's scores"


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.skipif(not can_measure_memory(), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_memory_of_long_sequences(dtype: str) -> None:
    short, long = (
        int(run(MEMORY, str(n), dtype, "mask bias dropout causal", timeout=1800))
        for n in (8192, 32768)
    )
    assert long <= 4.5 * short + 2**14


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.skipif(not can_measure_memory(), reason="needs /proc/self/clear_refs")
def test_memory_of_one_long_head() -> None:
    """Forward and backward take less than 64 MiB beside inputs, output, cotangent and gradients."""
    length, width = 16384, 64
    used = 1024 * int(run(MEMORY, str(length), "float32", "", "1", str(width), timeout=1800))
    assert used - 5 * 4 * length * width < 2**26


# 5. Accuracy: test_forward.py, test_backward.py, test_weights.py. ----------------------------------

# 6. Dropout is a pure function of position. --------------------------------------------------------


@no_kernel
@pytest.mark.parametrize(
    "key, counter, wanted",
    [
        ([0, 0], [0, 0, 0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0xA4093822, 0x299F31D0],
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(key: list[int], counter: list[int], wanted: str) -> None:
    """The known answers of Philox4x32-10 that its authors publish (Random123, kat_vectors)."""
    words = reference.philox(torch.tensor(key), *torch.tensor(counter))
    assert " ".join(f"{int(word):08x}" for word in words) == wanted


def kept_by(seed: Tensor, dropout_p: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Which pairs attention keeps: with values that form an identity matrix, out is Z."""
    batch, heads, queries, keys = shape
    query = torch.zeros(batch, heads, queries, 1, dtype=dtype)
    key = torch.zeros(batch, heads, keys, 1, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    out = mha_ext.attention(query, key, value, dropout_p=dropout_p, seed=seed)
    scale = reference.keep_scale(dropout_p) / keys
    torch.testing.assert_close(
        out[out > 0].double(),
        torch.full_like(out[out > 0], scale, dtype=torch.float64),
        rtol=8 * torch.finfo(dtype).eps,
        atol=0,
    )
    return out > 0


@dtypes
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.75, 0.99])
def test_dropout_bits(dtype: torch.dtype, dropout_p: float) -> None:
    """Each pair, against Philox in plain integer arithmetic."""
    shape = (2, 3, 70, 101)
    for words in ([0, 0], [1, 2], [2**32 - 1, 2**31], [-1, 2**40 + 7]):
        seed = torch.tensor(words)
        assert torch.equal(
            kept_by(seed, dropout_p, shape, dtype), reference.keep(seed, dropout_p, shape)
        )


@dtypes
def test_dropout_by_hand(dtype: torch.dtype) -> None:
    """The eight lanes of one block: word (k & 7) >> 1, low half first, dropped iff below t."""
    seed = torch.tensor([0xA4093822, 0x299F31D0])
    words = reference.philox(seed, *torch.tensor([1, 6, 4, 1]))  # k >> 3, q, h, b
    lanes = [half for word in words for half in (int(word) & 0xFFFF, int(word) >> 16)]
    for dropout_p in (0.2, 0.5, 0.8):
        kept = kept_by(seed, dropout_p, (2, 5, 7, 20), dtype)[1, 4, 6, 8:16]
        assert kept.tolist() == [lane >= min(round(65536 * dropout_p), 65535) for lane in lanes]


def test_dropout_probabilities() -> None:
    """The share of what is dropped is p; neighbours, heads and seeds are independent."""
    shape = size((2, 4, 512, 256), emulated=(2, 2, 128, 256))
    count = math.prod(shape)
    for dropout_p in (0.1, 0.5):
        one = ~kept_by(torch.tensor([1, 1]), dropout_p, shape, torch.float32)
        two = ~kept_by(torch.tensor([2, 1]), dropout_p, shape, torch.float32)
        three = ~kept_by(torch.tensor([1, 2]), dropout_p, shape, torch.float32)
        sigma = (dropout_p * (1 - dropout_p) / count) ** 0.5
        assert abs(float(one.double().mean()) - dropout_p) < 5 * sigma
        pairs = [(one, two), (one, three), (two, three), (one[:, 1:], one[:, :-1])]
        pairs += [
            (one[:, :, 1:], one[:, :, :-1]),
            (one[..., 1:], one[..., :-1]),
            (one[:1], one[1:]),
        ]
        for a, b in pairs:
            both, number = float((a & b).double().mean()), a.numel()
            square = dropout_p**2
            assert abs(both - square) < 5 * (square * (1 - square) / number) ** 0.5


def test_the_same_bits_for_every_dtype_and_in_backward() -> None:
    """Backward drops what forward dropped: V's gradient is Z^T dO."""
    shape, seed = (1, 2, 40, 50), torch.tensor([3, 4])
    kept = reference.keep(seed, 0.3, shape)
    for dtype in DTYPES:
        query, key = torch.zeros(1, 2, 40, 1, dtype=dtype), torch.zeros(1, 2, 50, 1, dtype=dtype)
        value = torch.zeros(1, 2, 50, 40, dtype=dtype, requires_grad=True)
        out = mha_ext.attention(query, key, value, dropout_p=0.3, seed=seed)
        out.backward(torch.eye(40, dtype=dtype).expand(1, 2, 40, 40))
        assert torch.equal(value.grad.mT > 0, kept)


# 7. Large and empty dimensions. --------------------------------------------------------------------


MANY = size(70000, emulated=70)  # more rows than a grid may have: there 65
EACH = size(300, emulated=9)


@pytest.mark.parametrize(
    "batch, heads, queries, keys",
    [(MANY, 1, 1, 2), (1, MANY, 1, 2), (EACH, EACH, 1, 1), (1, 1, MANY, 2), (1, 1, 2, MANY)],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_dimensions_past_65535(
    batch: int, heads: int, queries: int, keys: int, dropout_p: float
) -> None:
    inputs = make(
        Problem(
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            head_dim=2,
            mask="b1qk",
            dropout_p=dropout_p,
        )
    )
    found, wanted = ours(inputs), exact(inputs)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-4, atol=1e-5)


def test_offsets_past_2_31_elements() -> None:
    """Strides that reach past 2^31 elements, in memory that is reserved but hardly touched."""
    step, rows = 2**28, 10
    huge = torch.empty(step * rows + 64, dtype=torch.float16)  # 5 GiB of address space
    view = huge.as_strided((1, 1, rows, 16), (step, step, step, 1))
    assert int(view[0, 0, -1].storage_offset()) > 2**31
    small = torch.randn(1, 1, rows, 16).half()
    view.copy_(small)
    grads = torch.randn(1, 1, rows, 16).half()

    def attend(tensor: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for _ in range(3)]
        out, lse = mha_ext.attention(*leaves, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, grads)]

    assert all(map(torch.equal, attend(view), attend(small)))
    view = huge.as_strided((rows, 1, 4, 16), (step, step, 16, 1))
    view.copy_(torch.randn(rows, 1, 4, 16))
    assert torch.equal(
        mha_ext.attention(view, view, view),
        mha_ext.attention(*[view.clone(memory_format=torch.contiguous_format)] * 3),
    )


def test_an_expanded_mask_past_2_31_elements() -> None:
    """Masks and biases are read through their strides: a virtual size costs nothing."""
    batch, queries, keys = size((40, 8192, 8192), emulated=(2, 2**20, 2048))  # 2^31 and more
    mask = (torch.rand(keys) < 0.9).expand(batch, 1, queries, keys)
    query = torch.randn(1, 1, 1, 4).expand(batch, 1, queries, 4)[:, :, :3]
    key = torch.randn(batch, 1, keys, 4)
    out = mha_ext.attention(query, key, key, mask[:, :, :3])
    assert torch.equal(out, mha_ext.attention(query, key, key, mask[0, 0, 0]))


@wide
@pytest.mark.slow
def test_outputs_past_2_31_elements() -> None:
    """2^31 elements and more in query and out: about 13 GiB in half precision."""
    length = 2**31 // 512 + 3
    query = torch.zeros(1, 1, length, 512, dtype=torch.float16)
    query[0, 0, -3:] = torch.randn(3, 512).half()
    key = torch.randn(1, 1, 2, 512).half()
    value = torch.randn(1, 1, 2, 512).half()
    out = mha_ext.attention(query, key, value)
    last = mha_ext.attention(query[:, :, -3:].clone(), key, value)
    torch.testing.assert_close(out[:, :, -3:], last, rtol=2**-9, atol=2**-9)  # 4 ulp
    assert torch.equal(out[:, :, -4:-3], out[:, :, :1])


@dtypes
@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "queries keys"])
def test_empty_dimensions(empty: str, dtype: torch.dtype) -> None:
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 4}
    sizes |= dict.fromkeys(empty.split(), 0)
    for options in (
        {},
        {"mask": "b1qk", "bias": "1hqk", "dropout_p": 0.5},
        {"key_lengths": "random", "causal": "lower_right", "empty_rows": "uniform"},
    ):
        inputs = make(Problem(dtype=dtype, **sizes, **options))
        found, wanted = ours(inputs), exact(inputs)
        for name, tensor in wanted.items():
            assert found[name].shape == tensor.shape
            assert not found[name].nan_to_num(neginf=0).any() or name == "lse"
            assert same(found[name].double(), tensor), name
        weights = mha_ext.attention_weights(inputs.query, inputs.key, inputs.mask, bias=inputs.bias)
        assert weights.shape == (sizes["batch"], sizes["heads"], sizes["queries"], sizes["keys"])


@wide
@pytest.mark.parametrize("width", [513, 700, 1023])
def test_head_dims_beyond_512(width: int) -> None:
    inputs = make(Problem(head_dim=width, value_dim=width + 1, queries=5, keys=70))
    found, wanted = ours(inputs), exact(inputs)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-4, atol=1e-4)


# 8. Bad input: test_python_errors.py, and the operators' own tests. --------------------------------

# The definition itself. ----------------------------------------------------------------------------


@no_kernel
@leaks
def test_the_definition_keeps_its_guarantees(problem: Problem) -> None:
    """Pair by pair it gives what it gives by products, and NaN behind a mask reaches nothing."""
    inputs = to_double(make(replace(problem, batch=1, queries=9, keys=11, head_dim=3)))

    def pairwise(inputs: Inputs) -> dict[str, Tensor]:
        return results(lambda i: call(reference.attention, i, pairwise=True), inputs)

    wanted = pairwise(inputs)
    for name, tensor in exact(inputs).items():
        torch.testing.assert_close(tensor, wanted[name])
    hidden = torch.zeros(11, 1).bool()
    hidden[4] = True
    inputs.mask = inputs.seen() & ~hidden[:, 0]
    inputs.options |= {"causal": False, "window": None}
    inputs.key_lengths = None
    empty = ~inputs.mask.any(-1)[..., None]
    wanted = pairwise(inputs)
    bad = inputs.replaced(
        query=inputs.query.masked_fill(empty, NAN),
        key=inputs.key.masked_fill(hidden, NAN),
        value=inputs.value.masked_fill(hidden, NAN),
        grad_out=inputs.grad_out.masked_fill(empty, NAN),
        grad_lse=inputs.grad_lse.masked_fill(empty[..., 0], NAN),
    )
    assert_same(pairwise(bad), wanted)


# Processes. ----------------------------------------------------------------------------------------

FORK = """
import os, signal, torch, mha_ext

torch.set_num_threads(2)
q = torch.randn(2, 4, 300, 64, requires_grad=True)

def attend():
    with torch.no_grad():
        out, lse = mha_ext.attention(q, q, q, return_lse=True)
        grads = torch.ops.mha_ext.attention_backward(
            out, None, q, q, q, out, lse, None, None, None, None, None,
            scale=0.125, output_mask=[True, True, True, False])
    return [out, *grads[:3]]

mha_ext.attention(q, q, q).sum().backward()
before = attend()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a hang ends the child
    after = attend()
    torch.set_num_threads(1)  # torch's own operators do hang
    os._exit(0 if all(map(torch.equal, before, after)) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with status {status}"
assert all(map(torch.equal, before, attend()))
print("done")
"""


@pytest.mark.own_process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_use() -> None:
    """A child forked after the threads have started computes the same and does not hang."""
    assert run(FORK, timeout=120).strip() == "done"
