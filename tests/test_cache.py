"""Decoding with a KVCache equals the full pass; rotary embedding."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import mha_ext
from mha_ext import KVCache

DOUBLE = torch.float64


def layer(**options: Any) -> mha_ext.MultiHeadAttention:
    torch.manual_seed(0)
    return mha_ext.MultiHeadAttention(
        24, 4, num_kv_heads=2, causal=True, dtype=DOUBLE, **options
    ).eval()


@pytest.mark.parametrize("rotary_base", [None, 10000.0])
@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("steps", [[12], [1] * 12, [5, 1, 1, 3, 2]])
@torch.no_grad()
def test_decoding_equals_the_full_pass(
    rotary_base: float | None, window: Any, steps: list[int]
) -> None:
    attention = layer(rotary_base=rotary_base, window=window, value_head_dim=5)
    x = torch.randn(3, 12, 24, dtype=DOUBLE)
    expected = attention(x)
    cache = KVCache.of(attention, batch=3, max_length=12)
    address = cache.key.data_ptr()
    found = torch.cat([attention(part, cache=cache) for part in x.split(steps, 1)], 1)
    assert_close(found, expected)
    assert cache.lengths.tolist() == [12] * 3
    assert cache.key.data_ptr() == address  # appended in place


@pytest.mark.parametrize("rotary_base", [None, 10000.0])
@torch.no_grad()
def test_sequences_of_different_lengths(rotary_base: float | None) -> None:
    attention = layer(rotary_base=rotary_base)
    sequences = [torch.randn(n, 24, dtype=DOUBLE) for n in (4, 0, 7)]
    later = [torch.randn(5, 24, dtype=DOUBLE) for _ in sequences]
    cache = KVCache.of(attention, batch=3, max_length=12)
    lengths = torch.tensor([len(s) for s in sequences])
    padded = torch.stack(
        [torch.cat([torch.full((7 - len(s), 24), torch.nan).to(s), s]) for s in sequences]
    )
    first = attention(padded, cache=cache, new_lengths=lengths)
    second = attention(torch.stack([s[:2] for s in later]), cache=cache)
    third = attention(
        torch.stack([s[2:] for s in later]), cache=cache, new_lengths=torch.tensor([3, 3, 3])
    )
    assert cache.lengths.tolist() == [9, 5, 12]
    for b, (early, late) in enumerate(zip(sequences, later, strict=True)):
        expected = attention(torch.cat([early, late])[None])[0]
        found = torch.cat([first[b, 7 - len(early) :], second[b], third[b]])
        assert_close(found, expected)


@torch.no_grad()
def test_weights_masks_and_blocks() -> None:
    attention = layer()
    x = torch.randn(2, 6, 24, dtype=DOUBLE)
    mask = torch.rand(6, 6) < 0.6
    expected, weights = attention(x, mask=mask, need_weights=True)
    cache = KVCache.of(attention, batch=2, max_length=6)
    attention(x[:, :4], mask=mask[:4, :4], cache=cache)
    found, last = attention(x[:, 4:], mask=mask[4:], cache=cache, need_weights=True)
    assert_close(found, expected[:, 4:])
    assert_close(last, weights[:, :, 4:])


@torch.no_grad()
def test_masks_of_sequences_of_different_lengths() -> None:
    """A mask has `longest` + L keys, and `longest` is that of the real tokens."""
    attention = layer()
    x = torch.randn(2, 6, 24, dtype=DOUBLE)
    cache = KVCache.of(attention, batch=2, max_length=9)
    assert not cache.key.any() and not cache.value.any()
    attention(x[:, :5], cache=cache, new_lengths=torch.tensor([2, 3]))
    assert cache.longest == 3
    padding = torch.tensor([[True, False, True, False], [False, True, True, True]])
    found, weights = attention(x[:, 5:], cache=cache, key_padding_mask=padding, need_weights=True)
    assert weights.shape == (2, 4, 1, 4)
    for b, count in enumerate((2, 3)):
        whole = x[b : b + 1, 5 - count :]
        expected = attention(whole, key_padding_mask=padding[b : b + 1, : count + 1])
        assert_close(found[b], expected[0, -1:])
    cache.truncate(torch.tensor([2, 1]))
    assert cache.longest == 2 and "lengths=[2, 1]" in repr(cache)


@torch.no_grad()
@pytest.mark.parametrize("empty", [False, True])
def test_masks_beside_new_lengths(empty: bool) -> None:
    """They cover `longest` + L keys whatever is new of these, so a shape says nothing about the lengths."""
    attention = layer()
    x = torch.randn(2, 9, 24, dtype=DOUBLE)
    before, new = (torch.tensor([0, 0]) if empty else torch.tensor([6, 3])), torch.tensor([1, 3])
    cache = KVCache.of(attention, batch=2, max_length=9)
    if not empty:
        attention(x[:, :6], cache=cache, new_lengths=before)
    keys = cache.longest + 3
    mask, bias = torch.rand(2, 1, 3, keys) < 0.7, torch.randn(4, 3, keys, dtype=DOUBLE)
    padding = torch.rand(2, keys) < 0.7
    options = {"mask": mask, "bias": bias, "key_padding_mask": padding}
    last = x[:, 6:]
    for chosen in ({"mask"}, {"bias"}, {"key_padding_mask"}, set(options)):
        at_hand = {name: options[name] for name in chosen}
        found = attention(last, cache=copy.deepcopy(cache), new_lengths=new, **at_hand)
        for b in range(2):
            count, total = int(new[b]), int(before[b] + new[b])
            whole = torch.cat([x[b, 6 - int(before[b]) : 6], last[b, 3 - count :]])[None]
            of_one: dict[str, Tensor] = {}
            if "mask" in chosen:
                of_one["mask"] = torch.ones(1, 1, total, total, dtype=torch.bool)
                of_one["mask"][:, :, -count:] = mask[b : b + 1, :, 3 - count :, :total]
            if "bias" in chosen:
                of_one["bias"] = torch.zeros(4, total, total, dtype=DOUBLE)
                of_one["bias"][:, -count:] = bias[:, 3 - count :, :total]
            if "key_padding_mask" in chosen:
                of_one["key_padding_mask"] = padding[b : b + 1, :total]
            assert_close(found[b, 3 - count :], attention(whole, **of_one)[0, -count:])


@torch.no_grad()
def test_a_call_that_raises_leaves_no_tokens() -> None:
    attention = layer()
    x = torch.randn(2, 3, 24, dtype=DOUBLE)
    cache = KVCache.of(attention, batch=2, max_length=9)
    attention(x, cache=cache)

    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    hook = attention.out_proj.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        attention(x, cache=cache)
    hook.remove()
    assert cache.lengths.tolist() == [3, 3]
    assert_close(attention(x, cache=cache), attention(torch.cat([x, x], 1))[:, 3:])


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@torch.no_grad()
def test_no_shape_depends_on_what_a_device_holds(fake: bool) -> None:
    """`longest` is a bound there, and what is refused by it says so. Nor is there anything to read in a fake tensor."""
    device = "cpu" if fake else "meta"
    with FakeTensorMode() if fake else contextlib.nullcontext():
        attention = layer(device=device)
        x = torch.randn(2, 6, 24, device=device, dtype=DOUBLE)
        cache = KVCache.of(attention, batch=2, max_length=9)
        found = attention(x, cache=cache, new_lengths=torch.tensor([3, 0], device=device))
        assert found.shape == (2, 6, 24) and cache.longest == 6
        with pytest.raises(
            ValueError, match="max_length must be at least 12 for these tokens, but is"
        ):
            attention(x, cache=cache)
        cache.reorder(torch.tensor([1, 0], device=device))
        cache.truncate(torch.tensor([2, 2], device=device))
        assert repr(cache).endswith("longest=6)")


@torch.no_grad()
def test_compiled_in_one_graph() -> None:
    attention = layer()
    x, lengths = torch.randn(2, 5, 24, dtype=DOUBLE), torch.tensor([3, 5])
    plain, compiled = (KVCache.of(attention, batch=2, max_length=9) for _ in range(2))

    def prompt(cache: KVCache) -> Tensor:
        found: Tensor = attention(x, cache=cache, new_lengths=lengths)
        return found

    wanted = prompt(plain)
    found = torch.compile(prompt, backend="aot_eager", fullgraph=True)(compiled)
    assert_close(found[0, 2:], wanted[0, 2:])
    assert_close(found[1], wanted[1])
    assert compiled.lengths.tolist() == [3, 5]
    assert_close(attention(x[:, :2], cache=compiled), attention(x[:, :2], cache=plain))


@torch.no_grad()
def test_padding_is_written_nowhere() -> None:
    """Also where a sequence gets nothing, is full, or is of no length at all."""
    cache = KVCache(3, 1, 3, 1)
    rows = torch.arange(1.0, 10.0).view(3, 1, 3, 1)
    cache.append(rows, rows, torch.tensor([3, 1, 0]))
    assert cache.key.flatten(1).tolist() == [[1, 2, 3], [6, 0, 0], [0, 0, 0]]
    cache.append(-rows, -rows, torch.tensor([0, 2, 0]))
    assert cache.key.flatten(1).tolist() == [[1, 2, 3], [6, -5, -6], [0, 0, 0]]
    assert torch.equal(cache.key, cache.value) and cache.lengths.tolist() == [3, 3, 0]
    none = KVCache(3, 1, 0, 1)
    none.append(rows, rows, torch.tensor([0, 0, 0]))
    assert none.longest == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16])
@torch.no_grad()
def test_integers_of_any_width(dtype: torch.dtype) -> None:
    """PyTorch's own indexing takes uint8 for a mask, and some of the others not at all."""
    cache = KVCache(3, 1, 4, 1)
    rows = torch.tensor([10.0, 20.0, 30.0]).view(3, 1, 1, 1)
    cache.append(rows, rows, torch.tensor([1, 1, 0], dtype=dtype))
    assert cache.lengths.tolist() == [1, 1, 0]
    cache.reorder(torch.tensor([2, 0, 1], dtype=dtype))
    assert cache.lengths.tolist() == [0, 1, 1]
    assert cache.key[:, 0, 0, 0].tolist() == [0.0, 10.0, 20.0]
    cache.truncate(torch.tensor([4, 0, 1], dtype=dtype))
    assert cache.lengths.tolist() == [0, 0, 1]


@torch.no_grad()
def test_of_a_layer_whose_projections_are_wrapped() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    attention = layer()
    x = torch.randn(2, 4, 24, dtype=DOUBLE)
    expected = attention(x)
    attention.k_proj = Wrapped(attention.k_proj)  # type: ignore[assignment]
    assert_close(attention(x, cache=KVCache.of(attention, 2, 4)), expected)


@torch.no_grad()
def test_truncate_and_reorder() -> None:
    attention = layer()
    x, other = torch.randn(2, 6, 24, dtype=DOUBLE), torch.randn(2, 3, 24, dtype=DOUBLE)
    cache = KVCache.of(attention, batch=2, max_length=9)
    attention(x, cache=cache)
    cache.truncate(4)  # a draft of two tokens is rejected
    found = attention(other, cache=cache)
    assert_close(found, attention(torch.cat([x[:, :4], other], 1))[:, 4:])
    cache.truncate(torch.tensor([4, 2]))
    cache.reorder(torch.tensor([1, 1]))
    assert cache.lengths.tolist() == [2, 2]
    found = attention(other, cache=cache)
    whole = torch.cat([x[1:, :2].expand(2, -1, -1), other], 1)
    assert_close(found, attention(whole)[:, 2:])


@torch.no_grad()
def test_the_bound_is_on_the_real_lengths() -> None:
    attention = layer()
    cache = KVCache.of(attention, batch=2, max_length=6)
    x = torch.randn(2, 4, 24, dtype=DOUBLE)
    attention(x, cache=cache, new_lengths=torch.tensor([1, 2]))
    attention(x, cache=cache, new_lengths=torch.tensor([4, 4]))  # 5 and 6: fits
    with pytest.raises(
        ValueError, match="max_length must be at least 7 for these tokens, but is 6"
    ):
        attention(x[:, :1], cache=cache)
    assert cache.lengths.tolist() == [5, 6]


def test_errors() -> None:
    attention = layer()
    x = torch.randn(2, 3, 24, dtype=DOUBLE)
    cache = KVCache.of(attention, batch=2, max_length=6)
    with pytest.raises(RuntimeError, match="key and value must not need gradients where they are"):
        attention(x, cache=cache)
    with torch.no_grad():
        cases: list[tuple[dict[str, Any], str]] = [
            ({"key": x.clone()}, "key must be None with a cache"),
            ({"key_lengths": torch.tensor([1, 2])}, "key_lengths must be left out with a cache"),
            (
                {"causal": "upper_left"},
                "causal must be True, .* or left out with a cache, .* 'upper_",
            ),
            (
                {"causal": False},
                "causal must be True, .* or left out with a cache, .* but is False",
            ),
            ({"new_lengths": [1, 2]}, r"new_lengths must be an integer tensor \[2\], but is list"),
            (
                {"mask": torch.ones(3, 1, 3).bool()[None]},
                r"mask must broadcast to .*\[2, 4, 3, 3\]",
            ),
            ({"bias": torch.zeros(2, 3, 3, dtype=DOUBLE)}, r"bias must broadcast to"),
            ({"mask": torch.ones(2, 3).bool()}, r"mask must be .* Lq = 3 and .*but is \[2, 3\]"),
            ({"bias": [1.0]}, r"bias must be a tensor, not list \[1.0\]"),
            ({"bias": torch.zeros(3, 3).to_sparse()}, r"bias must be dense, but is torch.sparse"),
            (
                {"mask": torch.ones(3, 2).bool()},
                r"mask must .* Lk = cache.longest \+ Lq = 3, but is \[3, 2\]",
            ),
            (
                {"bias": torch.zeros(2, dtype=DOUBLE), "new_lengths": torch.tensor([1, 2])},
                r"bias must .* Lk = cache.longest \+ Lq = 3, but is \[2\]",
            ),
            ({"key_padding_mask": torch.ones(2, 4).bool()}, r"key_padding_mask must be .*\[2, 3\]"),
            ({"positions": torch.arange(3)}, "positions must be None without rotary embedding"),
            ({"new_lengths": torch.tensor([1.0, 2.0])}, "new_lengths must be an integer tensor"),
            ({"new_lengths": torch.tensor([1, 4])}, "new_lengths must be from 0 to the number of"),
            ({"cache": {}}, "cache must be a mha_ext.KVCache, not dict"),
            ({"cache": KVCache(3, 2, 6, 6, dtype=DOUBLE)}, "cache must have query's batch size 2"),
            ({"cache": KVCache(2, 4, 6, 6, dtype=DOUBLE)}, r"key must be \[2, 4, 3, 6\]"),
            (
                {"cache": KVCache(2, 2, 6, 6)},
                "cache must have the layer's dtype torch.float64, but",
            ),
            (
                {"cache": KVCache(2, 2, 6, 6, device="meta", dtype=DOUBLE)},
                "cache must be on query's",
            ),
        ]
        for options, message in cases:
            with pytest.raises((ValueError, TypeError), match=message):
                attention(x, **{"cache": cache, **options})
        assert cache.lengths.tolist() == [0, 0] and cache.longest == 0
        assert_close(attention(x, cache=cache, causal=True), attention(x))  # as if nothing had been
        refused: list[tuple[Any, str]] = [
            (lambda: cache.truncate(-1), "lengths must be at least 0, but is -1"),
            (
                lambda: cache.truncate(2.5),
                "lengths must be an int or an integer tensor .* float 2.5",
            ),  # type: ignore[arg-type]
            (lambda: cache.truncate(torch.tensor([1.0, 2.0])), "lengths must be an integer tensor"),
            (
                lambda: cache.truncate(torch.tensor([1, -2])),
                r"lengths must be at least 0, but are \[",
            ),
            (lambda: cache.reorder(1), "indices must be an integer tensor"),  # type: ignore[arg-type]
            (
                lambda: cache.reorder(torch.tensor([True, False])),
                "indices must be an integer tensor",
            ),
            (
                lambda: cache.reorder([0, 1]),
                r"indices must be an integer tensor \[n\], but is list",
            ),  # type: ignore[arg-type]
            (
                lambda: cache.reorder(torch.tensor([0, -1])),
                "indices must be from 0 to 1, sequences",
            ),
            (lambda: cache.reorder(torch.tensor([0, 5])), r"but are \[0, 5\]"),
        ]
        for call, message in refused:
            with pytest.raises((ValueError, TypeError, IndexError), match=message):
                call()
        assert cache.lengths.tolist() == [3, 3]
        token = torch.zeros(2, 2, 1, 6, dtype=DOUBLE)
        appended: list[tuple[Any, str]] = [
            (
                (token[0], token[0]),
                r"key must be \[2, 2, 1, 6\] for this cache, but is \[2, 1, 6\]",
            ),
            ((token, [0.0]), r"value must be a tensor, not list \[0.0\]"),
            ((token.to_sparse(), token), "key must be dense, but is torch.sparse_coo"),
        ]
        for tensors, message in appended:
            with pytest.raises((ValueError, TypeError), match=message):
                cache.append(*tensors)
        with pytest.raises(ValueError, match="new_lengths must be None without a cache"):
            attention(x, new_lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="max_length must be an int of at least 0, but is -1"):
        KVCache(1, 1, -1, 4)
    with pytest.raises(ValueError, match="value_head_dim must be an int of at least 0, but is 1.5"):
        KVCache(1, 1, 4, 4, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype must be torch.float32, .* not torch.int64"):
        KVCache(1, 1, 4, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="rotary_base must be finite, not 1000"):
        mha_ext.MultiHeadAttention(8, 2, rotary_base=10**400)
    with pytest.raises(ValueError, match="head_dim must be even with rotary_base, not 3"):
        mha_ext.MultiHeadAttention(6, 2, rotary_base=10000.0)
    with pytest.raises(ValueError, match="rotary_base must be positive, not 0"):
        mha_ext.MultiHeadAttention(8, 2, rotary_base=0)
    with pytest.raises(TypeError, match="rotary_base must be a float or None, not bool True"):
        mha_ext.MultiHeadAttention(8, 2, rotary_base=True)
    with pytest.raises(ValueError, match="head_dim must be even for rotary embedding, but is 3"):
        mha_ext.rotate(torch.rand(1, 1, 2, 3), torch.arange(2))
    turned = layer(rotary_base=10000.0)
    x = torch.randn(2, 3, 24, dtype=DOUBLE)
    there = torch.arange(3, device="meta")
    for options, message in (
        ({"new_lengths": [3, 3]}, r"new_lengths must be an integer tensor \[2\], but is list"),
        (
            {"new_lengths": torch.tensor([3, 3, 3])},
            r"new_lengths must be .* but is torch.int64 \[3\]",
        ),
        ({"positions": there}, "positions must be on query's device cpu, not meta"),
        (
            {"key": x.clone(), "positions": torch.arange(3), "cache": None},
            "positions must be None with a key",
        ),
    ):
        with torch.no_grad(), pytest.raises((ValueError, TypeError), match=message):
            turned(x, **{"cache": KVCache.of(turned, 2, 6), **options})
    x = torch.rand(2, 1, 3, 4)
    for arguments, message in (
        ((x.long(), torch.arange(3)), "x must be a floating tensor"),
        ((x[0], torch.arange(3)), r"x must be \[B, H, L, D\], but is \[1, 3, 4\]"),
        ((x, [0, 1, 2]), r"positions must be an integer tensor \[3\] or \[2, 3\], but is list"),
        ((x, torch.arange(3.0)), "positions must be integers, but are torch.float32"),
        ((x, torch.arange(4)), r"positions must be \[3\] or \[2, 3\], but are \[4\]"),
        ((x, torch.arange(3), 0.0), "base must be a positive number, but is 0.0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            mha_ext.rotate(*arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"positions must be \[3\] or \[2, 3\], but are \[1, 2, 3\]"
    ):
        layer(rotary_base=10000.0)(
            torch.rand(2, 3, 24, dtype=DOUBLE), positions=torch.ones(1, 2, 3).long()
        )


def by_complex_numbers(x: Tensor, positions: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    frequency = base ** (-torch.arange(half, dtype=DOUBLE) / half)
    turned = pairs * torch.exp(1j * positions[..., None] * frequency)
    return torch.cat([turned.real, turned.imag], -1)


def test_rotate() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=DOUBLE, requires_grad=True)
    positions = torch.tensor([0, 1, 2, 70, 1000])
    assert_close(mha_ext.rotate(x, positions, 500.0), by_complex_numbers(x, positions, 500.0))
    each = torch.stack([positions, positions + 3])
    assert_close(mha_ext.rotate(x, each)[1], by_complex_numbers(x[1], each[1], 10000.0))
    assert torch.autograd.gradcheck(lambda x: mha_ext.rotate(x, positions), x)
    half = mha_ext.rotate(x.bfloat16(), positions)
    assert half.dtype == torch.bfloat16
    assert_close(half.to(DOUBLE), mha_ext.rotate(x, positions), atol=4e-2, rtol=0)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    attention = layer(rotary_base=100.0)
    x = torch.randn(2, 6, 24, dtype=DOUBLE)
    assert_close(attention(x), attention(x, positions=torch.arange(6) + 40))
    assert "rotary_base=100.0" in repr(attention)


def test_rotary_is_that_of_llama() -> None:
    modeling = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="pip install transformers"
    )
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    positions = torch.arange(6)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    assert_close(mha_ext.rotate(q, positions), expected[0], atol=1e-5, rtol=1e-5)
    assert_close(mha_ext.rotate(k, positions), expected[1], atol=1e-5, rtol=1e-5)
