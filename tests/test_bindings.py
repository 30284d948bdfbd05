"""The functions of the compiled module: the operators without torch.ops, and what it says about itself."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import _C, reference

B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 5, 7, 8, 6


@pytest.fixture(autouse=True)
def _same_isa() -> Iterator[None]:
    name = _C.active_isa()
    yield
    _C.set_isa(name)


def tensors(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV)
    query, key, value = (torch.randn(shape, requires_grad=grad) for shape in shapes)
    return query, key, value


def pairs() -> dict[str, Tensor]:
    return {
        "mask": torch.rand(B, 1, LQ, LK) > 0.2,
        "bias": torch.randn(H, 1, LK),
        "key_lengths": torch.tensor([LK, 4]),
    }


def test_defaults() -> None:
    query, key, value = tensors()
    out, lse, lse_low = _C.attention_forward(query, key, value)
    wanted = reference.attention(query, key, value, return_lse=True)
    torch.testing.assert_close((out, lse), wanted)
    shown = _C.attention_weights(query, key)
    torch.testing.assert_close(shown, reference.attention_weights(query, key))
    given = (torch.ones_like(out), None, query, key, value, out, lse)
    found = [_C.attention_backward(*given), _C.attention_backward(*given, lse_low)]
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    wanted = torch.autograd.grad(reference.attention(*leaves).sum(), leaves)
    for grads in found:
        torch.testing.assert_close(grads[:3], wanted)
        assert grads[3].shape == (0,)


def test_the_same_as_the_operators() -> None:
    query, key, value = tensors()
    options: dict[str, Any] = {
        "corner": "lower_right",
        "window_left": 4,
        "window_right": 0,
        "scale": 0.3,
        "uniform_empty_rows": True,
        "origin": (1, 2, 3, 4),
    }
    seed, pair = torch.tensor([3, 4]), pairs()
    dropout: dict[str, Any] = {"dropout_p": 0.2, **options}
    ours = _C.attention_forward(query, key, value, **pair, seed=seed, **dropout)
    positional = (query, key, value, *pair.values(), seed)
    wanted = torch.ops.mha_ext.attention_forward(*positional, **dropout)
    assert all(map(torch.equal, ours, wanted))
    out, lse, lse_low = ours
    results: dict[str, Tensor] = {"lse": lse, "lse_low": lse_low}

    mask = [True, False, True, True]
    grad = torch.randn_like(out)
    found = _C.attention_backward(
        *(grad, lse, query, key, value, out),
        **results,
        **pair,
        seed=seed,
        **dropout,
        output_mask=mask,
    )
    right = torch.ops.mha_ext.attention_backward(
        *(grad, lse, query, key, value, out, lse, lse_low, *pair.values(), seed),
        **dropout,
        output_mask=mask,
    )
    assert all(map(torch.equal, found, right)) and found[1].shape == (0,)

    options |= {"heads": [3, 0], "rows": [4, 1]}
    found = _C.attention_weights(query, key, **results, **pair, **options)
    given = (query, key, lse, lse_low, *pair.values())
    right = torch.ops.mha_ext.attention_weights(*given, **options)
    assert torch.equal(found, right) and found.shape == (B, 2, 2, LK)


def test_options_are_keywords() -> None:
    query, key, value = tensors()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _C.attention_forward(query, key, value, None, None, None, None, "upper_left")
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _C.attention_forward(query.tolist(), key, value)


def test_gradients_flow() -> None:
    leaves = tensors(grad=True)
    bias = pairs()["bias"].requires_grad_()
    out, lse, _ = _C.attention_forward(*leaves, bias=bias)
    found = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), [*leaves, bias])
    out, lse = reference.attention(*leaves, bias=bias, return_lse=True)
    wanted = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), [*leaves, bias])
    torch.testing.assert_close(found, wanted)


# the call of mha_ext.attention


class Wrapped(Tensor):
    """A subclass without anything of its own."""


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_direct_is_the_operator() -> None:
    query, key, value = tensors()
    pair, seed = pairs(), torch.tensor([3, 4])
    inputs = (query, key, value, *pair.values(), seed)
    assert _C.is_direct(4, *inputs) and _C.is_direct(4, nn.Parameter(query), key, value, None)
    found = _C.attention_direct(*inputs, "lower_right", 4, 0, 0.2, 0.3, True, (1, 2, 3, 4), False)
    wanted = torch.ops.mha_ext.attention_forward(
        *inputs,
        corner="lower_right",
        window_left=4,
        window_right=0,
        dropout_p=0.2,
        scale=0.3,
        uniform_empty_rows=True,
        origin=(1, 2, 3, 4),
    )
    assert isinstance(found, tuple) and all(map(torch.equal, found, wanted))
    none = [None] * 4
    out = _C.attention_direct(
        query, key, value, *none, None, None, None, 0.0, None, False, None, True
    )
    plain = torch.ops.mha_ext.attention_forward(query, key, value, *none, scale=D**-0.5)
    assert torch.equal(out, plain[0])


class Calls(TorchDispatchMode):
    """Whether each call of forward that reaches the device wants lse, and what it returns as lse."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bool] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.mha_ext.attention_forward.default:
            self.wanted.append((kwargs or {}).get("with_lse", True))
            assert found[1].shape == found[2].shape and found[1].dtype == found[2].dtype
            self.shapes.append(tuple(found[1].shape))
        return found


def along_query(function: Any, query: Tensor) -> Any:
    return torch.func.jvp(function, (query,), (torch.ones_like(query),))[1]


def test_lse_is_computed_where_it_is_asked_for_or_a_derivative_needs_it() -> None:
    query, key, value = tensors()
    layer, merged = mha_ext.MultiHeadAttention(D, 2), torch.randn(B, LQ, D)
    whole = (B, H, LQ)

    def plain(query: Tensor, **options: Any) -> Any:
        return mha_ext.attention(query, key, value, **options)

    calls: list[tuple[Any, bool, tuple[int, ...]]] = [
        (lambda: plain(query), False, (0,)),
        (lambda: plain(query, return_lse=True), True, whole),
        (lambda: _C.attention_forward(query, key, value), True, whole),
        (lambda: _C.attention_forward(query, key, value, with_lse=False), False, (0,)),
        (lambda: _C.multi_head_attention(merged, merged, merged, 2), False, (0,)),
        (lambda: layer.requires_grad_(False)(merged), False, (0,)),
        (lambda: layer.requires_grad_(True)(merged), True, (B, 2, LQ)),
        (lambda: plain(query.clone().requires_grad_()), True, whole),
        (lambda: along_query(plain, query), True, whole),
        (lambda: torch.vmap(plain)(torch.stack([query, query])), True, (2, *whole)),
        (lambda: plain(query.as_subclass(Wrapped)), False, (0,)),
    ]
    for run, wanted, shape in calls:
        with Calls() as seen:
            run()
        assert seen.wanted == [wanted] and seen.shapes == [shape]
    with torch.no_grad(), Calls() as seen:
        plain(query.clone().requires_grad_())
    assert seen.shapes == [(0,)]


def test_without_lse_in_float64_its_dtype_is_kept() -> None:
    for dtype, kind in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        given = [tensor.to(dtype) for tensor in tensors()]
        found = _C.attention_forward(*given, with_lse=False)
        wanted = _C.attention_forward(*given)
        assert torch.equal(found[0], wanted[0])
        assert [tensor.dtype for tensor in found] == [dtype, kind, kind]


@pytest.mark.parametrize("grad", [False, True])
def test_a_derivative_is_right_without_lse(grad: bool) -> None:
    """The operator that promises that nobody reads lse, where its derivatives do."""
    given = tuple(tensor.double() for tensor in tensors())

    def ours(*tensors: Tensor) -> Tensor:
        return _C.attention_forward(*tensors, with_lse=False)[0]

    if not grad:
        moved = tuple(torch.randn_like(tensor) for tensor in given)
        found = torch.func.jvp(ours, given, moved)
        wanted = torch.func.jvp(reference.attention, given, moved)
    else:
        leaves = [tensor.requires_grad_() for tensor in given]
        found = torch.autograd.grad(ours(*leaves).sin().sum(), leaves)
        wanted = torch.autograd.grad(reference.attention(*leaves).sin().sum(), leaves)
    torch.testing.assert_close(found, wanted)


def test_direct_refuses_what_torch_must_see() -> None:
    query, key, value = tensors()
    wrapped = query.as_subclass(Wrapped)
    assert _C.is_direct(4, query, key, value) and _C.is_direct(3, query[0], key, value)
    others = [
        (wrapped, key, value),
        (query, key, None),
        (query, [1.0], value),
        (query[0], key, value),
    ]
    for given in (*others, (query, key), (query, key, value, wrapped)):
        assert not _C.is_direct(4, *given)
    with Functions():
        assert not _C.is_direct(4, query, key, value)
    with pytest.raises(TypeError, match="attention_direct must be given what is_direct accepts"):
        _C.attention_direct(wrapped, key, value)
    with pytest.raises(TypeError, match="integer"):
        _C.is_direct("4", query, key, value)


def test_merged_direct() -> None:
    query, key, value = tensors()
    pair, seed = pairs(), torch.tensor([3, 4])
    options: dict[str, Any] = {"corner": "lower_right", "window_left": 4, "window_right": 0}
    options |= {"dropout_p": 0.2, "scale": 0.3, "uniform_empty_rows": True}
    merged = [tensor.transpose(1, 2).flatten(2).contiguous() for tensor in (query, key, value)]
    given = (*merged, *pair.values(), seed, *options.values())
    found = _C.merged_attention_direct(*given, D, DV)
    wanted = _C.attention_forward(query, key, value, **pair, seed=seed, **options)[0]
    assert torch.equal(found, wanted.transpose(1, 2).flatten(2))
    with pytest.raises(RuntimeError, match="unflatten"):
        _C.merged_attention_direct(*given, D + 1, DV)
    with pytest.raises(TypeError, match="merged_attention_direct must be given what is_direct"):
        _C.merged_attention_direct(*given, D)


def test_attention_is_seen_by_modes_and_subclasses() -> None:
    query, key, value = tensors()
    op, wanted = torch.ops.mha_ext.attention_forward.default, mha_ext.attention(query, key, value)
    with Functions() as functions:
        assert torch.equal(mha_ext.attention(query, key, value), wanted)
    assert op in functions.seen

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            dispatched.append(func)
            return func(*args, **(kwargs or {}))

    dispatched: list[Any] = []
    with Dispatched():
        out = mha_ext.attention(query, key, value)
    assert dispatched == [op] and torch.equal(out, wanted)
    out = mha_ext.attention(query.as_subclass(Wrapped), key, value)
    assert type(out) is Wrapped and torch.equal(out.as_subclass(Tensor), wanted)


# multi_head_attention


def merge(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(2)


def test_multi_head_attention() -> None:
    query, key, value = tensors()
    merged = merge(query), merge(key), merge(value)
    found = _C.multi_head_attention(*merged, H, HKV, **pairs_of_one_draw())
    wanted = merge(mha_ext.attention(query, key, value, **pairs_of_one_draw()))
    assert torch.equal(found, wanted) and found.shape == (B, LQ, H * DV)
    assert found.is_contiguous()

    seed = torch.tensor([5, 6])
    options = {"corner": "upper_left", "window_left": 3, "window_right": 0, "dropout_p": 0.3}
    found = _C.multi_head_attention(*merged, num_heads=H, num_kv_heads=HKV, seed=seed, **options)
    options = {"causal": "upper_left", "window": (3, None), "dropout_p": 0.3}
    assert torch.equal(found, merge(mha_ext.attention(query, key, value, seed=seed, **options)))


def pairs_of_one_draw() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return pairs()


def test_multi_head_attention_has_gradients_and_as_many_key_heads() -> None:
    leaves = [torch.randn(B, n, H * D, requires_grad=True) for n in (LQ, LK, LK)]
    found = _C.multi_head_attention(*leaves, H)
    split = [tensor.unflatten(2, (H, D)).transpose(1, 2) for tensor in leaves]
    wanted = merge(reference.attention(*split))
    torch.testing.assert_close(found, wanted)
    ours = torch.autograd.grad(found.sin().sum(), leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted.sin().sum(), leaves))


def test_multi_head_attention_reads_slices_in_place() -> None:
    """A packed projection, and an expanded batch."""
    packed = torch.randn(1, LQ, 3 * H * D).expand(B, -1, -1)
    query, key, value = packed.chunk(3, -1)
    found = _C.multi_head_attention(query, key, value, H)
    same = (tensor.contiguous() for tensor in (query, key, value))
    assert torch.equal(found, _C.multi_head_attention(*same, H))


def test_multi_head_attention_empty() -> None:
    def call(batch: int, queries: int, keys: int, value_dim: int = D) -> Tensor:
        widths = (queries, H * D), (keys, H * D), (keys, H * value_dim)
        result: Tensor = _C.multi_head_attention(*(torch.zeros(batch, *w) for w in widths), H)
        return result

    assert call(0, LQ, LK).shape == (0, LQ, H * D)
    assert call(B, 0, LK).shape == (B, 0, H * D)
    assert call(B, LQ, 0).eq(0).all() and call(B, LQ, 0).shape == (B, LQ, H * D)
    assert call(B, LQ, LK, 0).shape == (B, LQ, 0)


def test_multi_head_attention_errors() -> None:
    x = torch.zeros(B, LQ, 30)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (
            (x, x, x, 4),
            "query must have a width that num_heads = 4 divides, but has 30; project it to a multiple of 4",
        ),
        (
            (x, x, x, 6, 4),
            "key must have a width that num_kv_heads = 4 divides, but has 30; project it to a multiple of 4",
        ),
        (
            (x, x[0], x, 6),
            "key must have 3 dimensions [batch, length, num_heads * head_dim], but has shape [5, 30]; merge "
            "the heads into the last dimension with key.flatten(2)",
        ),
        (
            (x, x, x, 0),
            "num_heads must be at least 1, but is 0; pass the number of heads that query holds",
        ),
        (
            (x, x, x[:, :3], 6),
            "value must have key's length 5, but has 3 (shape [2, 6, 3, 5]); give each key one value",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError) as error:
            _C.multi_head_attention(*arguments)
        assert str(error.value) == message


# Threads, instruction sets, what the build says


def test_other_threads_run_meanwhile() -> None:
    query = torch.randn(2, 8, 2048, 64)
    done: list[float] = []

    def work() -> None:
        _C.attention_forward(query, query, query)
        done.append(time.perf_counter())

    thread = threading.Thread(target=work)
    begin = time.perf_counter()
    thread.start()
    ticks = 0
    while not done:
        time.sleep(1e-4)  # gives the GIL away: it comes back at once, or after the kernel
        ticks += 1
    thread.join()
    assert ticks > 2, f"nothing ran during {done[0] - begin:.3f} s"


def test_instruction_sets() -> None:
    compiled, supported = _C.compiled_isas(), _C.supported_isas()
    assert set(supported) <= set(compiled) and "portable" in supported
    assert supported == [name for name in compiled if name in supported]
    assert _C.active_isa() in supported
    query, key, value = tensors()
    wanted = reference.attention(query, key, value)
    for name in supported:
        _C.set_isa(name)
        assert _C.active_isa() == name
        torch.testing.assert_close(mha_ext.attention(query, key, value), wanted)
    _C.set_isa(None)
    assert _C.active_isa() == supported[0]


@pytest.mark.isa
def test_the_instruction_set_that_was_asked_for_is_the_one_that_runs() -> None:
    asked = os.environ.get("MHA_EXT_CPU_ISA")
    assert _C.active_isa() == (asked or _C.supported_isas()[0])


def test_unknown_instruction_set() -> None:
    before = _C.active_isa()
    with pytest.raises(ValueError) as error:
        _C.set_isa("sse9")
    message = str(error.value)
    assert "\n" not in message and '"sse9"' in message and message.startswith("name must be")
    assert all(name in message for name in _C.supported_isas())
    assert _C.active_isa() == before


def test_build_info() -> None:
    info = _C.build_info()
    assert set(info) == {"version", "torch", "compiler", "isas", "cuda"}
    assert all(isinstance(text, str) and text for text in info.values())
    assert info["version"] == mha_ext.__version__
    assert info["cuda"].split()[0] in ("nvcc", "no")


def test_ceilings() -> None:
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        peak = _C.fma_peak(dtype, seconds=0.01)
        assert math.isfinite(peak) and peak > 0
    for measure in (_C.copy_bandwidth, _C.read_bandwidth):
        for threads in (1, 2):
            speed = measure(bytes=1 << 16, seconds=0.01, threads=threads)
            assert math.isfinite(speed) and speed > 0
        with pytest.raises(ValueError, match="threads must be positive, but is 0"):
            measure(bytes=1 << 16, threads=0)
        with pytest.raises(ValueError, match="bytes must be positive, but is -1"):
            measure(bytes=-1)
    with pytest.raises(
        ValueError, match="dtype must be float64, float32, bfloat16 or float16, but"
    ):
        _C.fma_peak("int8")


def test_every_function_is_documented() -> None:
    names = [name for name in dir(_C) if not name.startswith("_")]
    assert len(names) == 21, names
    for name in names:
        text = getattr(_C, name).__doc__
        assert len(text.splitlines()) > 1, name  # the signature, and what it does
