"""explain(): what it tells is what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import PROBLEMS, Problem, call, make
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import mha_ext
from mha_ext import _C, explain
from mha_ext.explanation import Explanation, Pass, Tiles


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tensors(
    queries: int = 70,
    keys: int = 70,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    **form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (torch.randn(batch, kv_heads, keys, 16, **form) for _ in range(2))
    return torch.randn(batch, heads, queries, 16, **form), key, value


def counted(seen: Tensor, rows: int) -> Tiles:
    """The tiles of a bool matrix of visible pairs [..., rows, keys], without what they are skipped by."""
    full = partial = empty = 0
    for matrix in seen.flatten(0, -3):
        for strip in matrix.split(rows):
            for tile in strip.split(64, dim=1):
                full += bool(tile.all())
                partial += bool(tile.any() and not tile.all())
                empty += not tile.any()
    return Tiles(full, partial, {"": empty})


@pytest.mark.parametrize("problem", PROBLEMS[::5], ids=str)
def test_counts_what_is_visible(problem: Problem) -> None:
    inputs = make(problem)
    found: Explanation = call(explain, inputs)
    seen = inputs.replaced(bias=None).seen()
    assert found.pairs == seen.numel() and found.visible_pairs == seen.sum()
    if seen.numel() == 0:
        return
    shared = problem.heads // (problem.kv_heads or problem.heads)
    of_group = seen.unflatten(1, (-1, shared)).flatten(2, 3)  # rows of the heads that share a key
    for each in found.passes():
        rows = each.tile[0]
        wanted = counted(of_group if each.kernel in ("few queries", "grouped") else seen, rows)
        assert each.tiles is not None
        skipped = sum(each.tiles.skipped.values())
        assert (each.tiles.full, each.tiles.partial) == (wanted.full, wanted.partial)
        assert skipped == wanted.skipped[""]


def test_says_what_hides() -> None:
    mask = torch.ones(300, 300, dtype=torch.bool)
    mask[:, :64] = False
    lengths = torch.tensor([300, 130])
    found = explain(
        *tensors(300, 300), mask, key_lengths=lengths, causal="upper_left", window=(100, None)
    )
    assert set(found.hidden) == {"key_lengths", "causal or window", "mask"}
    assert found.hidden["key_lengths"] == 4 * 300 * 170
    assert found.forward.tiles is not None
    assert set(found.forward.tiles.skipped) == {"key_lengths", "causal or window", "mask"}
    text = str(found)
    assert f"mask hides {found.hidden['mask']}" in text and f"{found.visible_pairs} of" in text


# Which kernel, and its cuts


def test_kernels() -> None:
    torch.set_num_threads(2)
    few = explain(*tensors(3, 900)).forward
    assert few.kernel == "few queries" and few.tile == (6, 64) and few.key_ranges == 2
    one = explain(*tensors(12, 10)).forward
    assert one.kernel == "one tile" and one.threads == 1
    assert any("each million" in reason for reason in one.why)
    tiled = explain(*tensors(300, 300)).forward
    assert tiled.kernel == "tiled" and tiled.threads == 2 and tiled.key_ranges == 1
    assert any("all that this call may use" in reason for reason in tiled.why)


def test_memory_is_worth_threads_where_it_binds() -> None:
    torch.set_num_threads(2)
    query, key = torch.empty(1, 1, 1, 64, device="meta"), torch.empty(1, 1, 1000, 64, device="meta")
    few = mha_ext.explain(query, key, key)  # 512 KB, and a quarter of a million operations
    assert few.forward.threads == 2 and few.backward.threads == 2
    window = mha_ext.explain(query, key, key, causal="lower_right", window=(60, None))
    assert window.forward.threads == 1 and window.backward.threads == 1
    short = torch.empty(1, 24, 16, 32, device="meta")  # 196 KB, and 0.8 million operations
    assert mha_ext.explain(short, short, short).forward.threads == 2
    half = short[:, :12]
    assert mha_ext.explain(half, half, half).forward.threads == 1


def test_heads_side_by_side_leave_every_thread_a_task() -> None:
    """Few queries take heads together only as far as the tasks are enough for the threads."""
    query = torch.empty(1, 1, 32, 128, device="meta").transpose(1, 2)
    for keys, together in ((100, None), (500, None), (20_000, 8)):
        key = torch.empty(1, keys, 8, 128, device="meta").transpose(1, 2)
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found = mha_ext.explain(query, key, key).forward
            said = [reason for reason in found.why if "side by side" in reason]
            assert found.kernel == "few queries" and found.threads >= min(threads, 1 + keys // 100)
            assert found.tasks >= threads
            if together is not None or threads == 1:
                assert len(said) == 1 and " 8 heads" in said[0]


def test_short_heads_side_by_side_leave_every_thread_two_tasks() -> None:
    """On one thread as many as a tile has room for; elsewhere no more than leaves enough tasks."""
    torch.set_num_threads(1)
    for heads, queries, keys in ((16, 12, 10), (3, 12, 10), (16, 33, 10), (16, 12, 64)):
        query, key = (torch.empty(1, heads, n, 50, device="meta") for n in (queries, keys))
        found = mha_ext.explain(query, key, key)
        for one in (found.forward, found.backward):
            said = [reason for reason in one.why if "side by side" in reason]
            assert one.kernel == "one tile" and bool(said) == (one.tasks < heads)
            assert bool(said) == (queries < 33)
            if said:
                together = int(said[0].split("takes ")[1].split()[0])
                assert one.tasks == -(-heads // together)
    query, key = (torch.empty(1, 4, n, 50, device="meta") for n in (12, 10))
    torch.set_num_threads(2)
    found = mha_ext.explain(query, key, key)
    assert (found.forward.tasks, found.backward.tasks) == (4, 4)


def test_the_blocks_of_a_head_are_cut_into_equal_parts() -> None:
    torch.set_num_threads(2)  # 96 blocks, six of them for each of 16 tasks; a head has eight
    long = tensors(512, 512, batch=1, heads=12, kv_heads=12, dtype=torch.float64)
    found = explain(*long).forward
    assert found.tasks == 24 and any("takes 4 blocks" in reason for reason in found.why)


@pytest.mark.parametrize("whole", [False, True])
def test_few_rows_read_a_dense_head_in_order(whole: bool) -> None:
    """One, or, where 512 bits are one operation and AMD's kernels run, eight."""
    before = _C.whole_vectors()
    most = 8 if whole and _C.active_isa() == "avx512_bf16" else 1
    try:
        _C.set_whole_vectors(whole)
        for heads, queries, dense in (
            (8, 1, True),
            (8, 2, True),  # two rows
            (16, 1, True),  # two heads share K and V
            (32, 2, True),
            (72, 1, True),
            (8, 1, False),
        ):
            query = torch.empty(1, heads, queries, 64, device="meta")
            key = torch.empty(1, 8, 500, 64 if dense else 80, device="meta")[..., :64]
            found = mha_ext.explain(query, key, key).forward
            assert found.kernel == "few queries"
            in_order = dense and heads // 8 * queries <= most
            assert any("read in order" in reason for reason in found.why) == in_order
    finally:
        _C.set_whole_vectors(before)


def test_tasks_follow_the_threads() -> None:
    long = tensors(64, 4096, batch=1, heads=1, kv_heads=1)
    torch.set_num_threads(2)
    found = explain(*long)
    assert found.forward.key_ranges == found.forward.tasks == 8
    assert "sums of the ranges" in found.forward.memory
    assert found.backward.tasks == 8 and "sums of grad_query" in found.backward.memory
    torch.set_num_threads(1)
    found = explain(*long)
    assert (found.forward.tasks, found.forward.threads) == (1, 1)
    assert (found.backward.tasks, found.backward.threads) == (1, 1)


@pytest.mark.parametrize(("threads", "tasks"), [(1, 8), (2, 16), (4, 32), (16, 64)])
def test_forward_leaves_every_thread_eight_tasks(threads: int, tasks: int) -> None:
    """Blocks of 64 queries, of which there are 64 here, go together as far as that allows."""
    torch.set_num_threads(threads)
    long = tensors(512, 512, batch=1, heads=8, kv_heads=8, dtype=torch.float64)
    found = explain(*long).forward
    assert (found.tasks, found.threads) == (tasks, threads)


@pytest.mark.skipif(_C.active_isa() != "amx", reason="operands are packed for AMX alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("threads", "tasks"), [(1, 8), (2, 8), (4, 16), (16, 64)])
def test_what_is_packed_for_amx_is_shared(dtype: torch.dtype, threads: int, tasks: int) -> None:
    """By all blocks where a thread is alone, else by as many as leave each thread four tasks; up to 16 of a head."""
    torch.set_num_threads(threads)
    found = explain(*tensors(512, 512, batch=1, heads=8, kv_heads=8, dtype=dtype)).forward
    assert (found.tasks, found.threads) == (tasks, threads)
    if threads > 1:
        return
    for width, blocks in ((64, 16), (256, 8)):
        shape = (1, 2, 4096, width)  # 64 blocks of a head
        long = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(3)]
        assert explain(*long).forward.tasks == 2 * 64 // blocks
    torch.set_num_threads(2)  # of so few keys bfloat16 alone goes to the unit
    few_keys = tensors(512, 100, batch=1, heads=8, kv_heads=8, dtype=dtype)
    assert explain(*few_keys).forward.tasks == (8 if dtype == torch.bfloat16 else 16)


@pytest.mark.parametrize(
    "shape, says",
    [
        ((2, 4, 70, 70), "dS is its gradient"),
        ((4, 70, 70), "sums beside its gradient, in 2 shares added in order"),
        ((2, 4, 1, 70), "with an owner"),
        ((2, 4, 70, 1), "constant along the keys"),
    ],
)
def test_gradient_of_the_bias(shape: tuple[int, ...], says: str) -> None:
    why = explain(*tensors(), bias=torch.randn(shape)).backward.why
    assert any(says in reason for reason in why)


def test_heads_that_share_a_large_bias_take_turns() -> None:
    """Sums of its own type are added up in the gradient itself, others beside it."""
    bias = torch.randn(8, 260, 260)
    found = explain(*tensors(260, 260, 3, 8, 8), bias=bias).backward
    assert any("take turns and add dS to its gradient" in reason for reason in found.why)
    assert any("3 key/value heads, one after the other" in reason for reason in found.why)
    assert "sums of the bias' gradient" not in found.memory
    half = [t.bfloat16() for t in (*tensors(260, 260, 3, 8, 8), bias)]
    found = explain(*half[:3], bias=half[3]).backward
    assert any("beside its gradient, rounded once" in reason for reason in found.why)
    assert found.memory["sums of the bias' gradient"] == 4 * bias.numel()
    for length, says in (1100, "beside its gradient"), (3000, "with an owner"):  # 256 MiB of sums
        large = torch.empty(8, length, length, dtype=torch.bfloat16)
        half = [t.bfloat16() for t in tensors(length, length, 3, 8, 8)]
        found = explain(*half, bias=large).backward
        assert any(says in reason for reason in found.why)


# Memory: what it says is what the allocator hands out, in a thread that has kept nothing yet


def allocated(run: Callable[[], Any]) -> int:
    found: list[int] = []

    def measure() -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p:
            run()
        events = [e for e in p.events() if e.name.startswith("mha_ext::attention")]
        memory = [e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
        assert events
        found.append(sum(max(e.nbytes(), 0) for e in memory))

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return found[0]


MEMORY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "few": ((3, 900), {}),
    "one tile": ((12, 10), {}),
    "tiled": ((300, 300), {"causal": True}),
    "ranges": ((64, 4096, 1, 1, 1), {}),
    "wide": ((256, 1024, 8, 8, 8), {"dropout_p": 0.1}),
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_what_is_allocated(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    sizes, options = MEMORY[name]
    query, key, value = tensors(*sizes)
    seed = torch.tensor([1, 2])
    found = explain(query, key, value, seed=seed, **options)
    run = torch.ops.mha_ext
    dropout_p = options.get("dropout_p", 0.0)
    window = {"window_right": 0} if options.get("causal") else {}
    rest, scale = (None, None, None, seed), {"scale": 0.25, "dropout_p": dropout_p, **window}
    out, lse, low = run.attention_forward(query, key, value, *rest, **scale)

    def backward() -> None:
        args = (out, None, query, key, value, out, lse, low, *rest)
        run.attention_backward(*args, **scale, output_mask=[True, True, True, False])

    calls = {
        "forward": lambda: run.attention_forward(query, key, value, *rest, **scale),
        "backward": backward,
    }
    for each in (found.forward, found.backward):
        used = allocated(calls[each.name])
        assert 0 <= used - sum(each.memory.values()) <= 256, each  # rounded up to a cache line


# FLOPs


def test_flops_are_those_of_the_counter() -> None:
    query, key, value = (x.requires_grad_() for x in tensors())
    found = explain(query, key, value, causal=True)
    with FlopCounterMode(display=False) as counter:
        out = mha_ext.attention(query, key, value, causal=True)
    assert found.forward.flops == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert found.backward.flops == counter.get_total_flops()
    assert found.visible_pairs == 8 * 70 * 71 // 2
    assert found.forward.visible_flops == found.forward.flops * found.visible_pairs // found.pairs


def test_only_the_gradients_that_are_wanted() -> None:
    query, key, value = tensors()
    everything = explain(query, key, value).backward
    found = explain(query, key.requires_grad_(), value).backward
    assert "grad_key" in found.memory and "grad_query" not in found.memory
    assert found.flops < everything.flops


# Where there are no values, and no other effects


def plans(found: Explanation) -> list[tuple[Any, ...]]:
    def plan(p: Pass) -> tuple[Any, ...]:
        return p.kernel, p.why, p.tile, p.key_ranges, p.tasks, p.threads, p.flops, p.memory

    return [plan(p) for p in found.passes()]


@pytest.mark.parametrize("problem", PROBLEMS[::40], ids=str)
def test_meta_tensors_have_the_same_plan(problem: Problem) -> None:
    inputs = make(problem)

    def on_meta(x: Tensor | None) -> Tensor | None:
        form = None if x is None else {"dtype": x.dtype, "device": "meta"}
        return None if x is None else torch.empty_strided(x.shape, x.stride(), **form)

    changes = {name: on_meta(getattr(inputs, name)) for name in ("query", "key", "value", "mask")}
    changes |= {name: on_meta(getattr(inputs, name)) for name in ("bias", "key_lengths", "seed")}
    found, meta = call(explain, inputs), call(explain, inputs.replaced(**changes))
    assert plans(found) == plans(meta)
    assert meta.copied == found.copied
    unknown = inputs.mask is not None or inputs.key_lengths is not None
    assert (meta.hidden is None) == (meta.forward.tiles is None) == unknown
    assert meta.hidden == (None if unknown else found.hidden)
    assert str(meta)


def test_fake_tensors_have_no_values() -> None:
    wanted = explain(*tensors(), key_lengths=torch.tensor([70, 3]))
    with FakeTensorMode():
        found = explain(*tensors(), key_lengths=torch.tensor([70, 3]))
        assert explain(*tensors(), torch.ones(70, 70, dtype=torch.bool)).hidden is None
    assert found.hidden is None and plans(found) == plans(wanted)


def test_a_copy_is_said() -> None:
    query, key, value = tensors()
    assert explain(query, key, value).copied == 0
    columns = torch.randn(2, 4, 16, 70).transpose(2, 3)
    found = explain(columns, key, value)
    assert found.copied == columns.numel() * 4 and "are copied" in str(found)


def test_draws_nothing_and_refuses_what_attention_refuses() -> None:
    query, key, value = tensors()
    state = torch.get_rng_state()
    explain(query, key, value, dropout_p=0.5, return_lse=True)
    assert torch.equal(state, torch.get_rng_state())
    bad: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((query, key[..., 1:], value), {}),
        ((query, key, value), {"causal": 1.0}),
        ((query, key, value), {"key_lengths": torch.tensor([99, 1])}),
    ]
    for args, options in bad:
        with pytest.raises((TypeError, ValueError)) as told:
            explain(*args, **options)
        with pytest.raises((TypeError, ValueError)) as refused:
            mha_ext.attention(*args, **options)
        assert str(told.value) == str(refused.value)
