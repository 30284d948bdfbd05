"""torch.compile, torch.export, fake tensors, autocast, and PyTorch's own checks of custom operators."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mha_ext

forward = torch.ops.mha_ext.attention_forward.default
backward = torch.ops.mha_ext.attention_backward.default
weights = torch.ops.mha_ext.attention_weights.default
weights_backward = torch.ops.mha_ext.attention_weights_backward.default

INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="inductor needs a C++ compiler",
    ),
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def make(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 5,
    keys: int = 7,
    head_dim: int = 8,
    grad: bool = True,
) -> tuple[Tensor, ...]:
    """query, key, value, mask, bias, key_lengths, seed."""
    return (
        torch.randn(batch, heads, queries, head_dim, requires_grad=grad),
        torch.randn(batch, kv_heads, keys, head_dim, requires_grad=grad),
        torch.randn(batch, kv_heads, keys, head_dim, requires_grad=grad),
        torch.rand(batch, 1, 1, keys) > 0.2,
        torch.randn(heads, queries, keys, requires_grad=grad),
        torch.randint(1, keys + 1, (batch,)),
        torch.randint(0, 2**32, (2,)),
    )


def leaves(args: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor for tensor in args if tensor.requires_grad]


def model(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Tensor,
    key_lengths: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every option at once, merged heads, and the weights from the same lse."""
    options: dict[str, Any] = {
        "bias": bias,
        "key_lengths": key_lengths,
        "causal": "lower_right",
        "window": (5, None),
        "empty_rows": "uniform",
    }
    out, lse = mha_ext.attention(
        query, key, value, mask, dropout_p=0.25, seed=seed, return_lse=True, **options
    )
    shown = mha_ext.attention_weights(query, key, mask, rows=[0, 2], **options)
    return out.transpose(1, 2).flatten(2).sin() + 1, lse.clamp(min=-9), shown * 2


def results(function: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    found = function(*args)
    grads = torch.autograd.grad([x.square().sum() for x in found], leaves(args))
    return [*(x.detach() for x in found), *grads]


# PyTorch's checks of an operator: schema, autograd registration, fake tensors, tracing with dynamic shapes


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "band": {"corner": "lower_right", "window_left": 2, "window_right": 0},
    "uniform": {"uniform_empty_rows": True, "origin": [0, 1, 2, 3], "window_right": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("full", [False, True])
def test_opcheck(name: str, full: bool) -> None:
    query, key, value, mask, bias, key_lengths, seed = make()
    pairs = (mask, bias, key_lengths) if full else (None, None, None)
    options = {"scale": 0.4, **OPTIONS[name]}
    dropout = {"dropout_p": 0.3} if full else {}
    rest = (*pairs, seed if full else None)
    for with_lse in (True, False):
        torch.library.opcheck(
            forward, (query, key, value, *rest), {**options, **dropout, "with_lse": with_lse}
        )
    part = {"heads": [3, 1], "rows": [0]} if full else {}
    torch.library.opcheck(weights, (query, key, None, None, *pairs), {**options, **part})

    with torch.no_grad():
        out, *lse = forward(query, key, value, *rest, **options, **dropout)
        shown = weights(query, key, *lse, *pairs, **options, **part)
    query, key, value, *pairs = (
        t if t is None else t.detach() for t in (query, key, value, *pairs)
    )
    given = {**options, **dropout, "with_lse": False}
    torch.library.opcheck(forward, (query, key, value, *pairs, rest[3]), given)
    if not full:
        lse[1] = None
    grad_lse, rest = (lse[0] if full else None), (*pairs, rest[3])
    for mask4 in ([True] * 4, [False, True, False, True]):
        args = (out, grad_lse, query, key, value, out, *lse, *rest)
        torch.library.opcheck(backward, args, {**options, **dropout, "output_mask": mask4})
    args = (shown, shown, query, key, *lse, *pairs)
    options |= {**part, "output_mask": [True, False, True]}
    torch.library.opcheck(weights_backward, args, options)


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_call_computes_lse_for_a_derivative_alone(grad: bool) -> None:
    """As the compiler sees it, forward asks for lse where the graph has a backward pass."""
    wanted: list[bool] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls = graph.graph.find_nodes(op="call_function", target=forward)
        wanted.extend(call.kwargs.get("with_lse", True) for call in calls)
        return make_boxed_func(graph.forward)

    query, key, value, *_ = make(grad=grad)
    compiled = torch.compile(mha_ext.attention, backend=aot_autograd(fw_compiler=record))
    assert torch.equal(compiled(query, key, value), mha_ext.attention(query, key, value))
    assert wanted == [grad]


def test_meta_gives_the_strides_of_the_kernels() -> None:
    sizes = ((2, 4, 2, 5, 7, 8), (1, 1, 1, 1, 1, 1), (0, 2, 2, 3, 4, 5), (2, 2, 1, 0, 3, 4))
    for size in (*sizes, (2, 2, 1, 3, 0, 4), (3, 0, 0, 2, 2, 2)):
        query, key, value, mask, bias, *_ = make(*size, grad=False) if all(size) else empty(size)
        args = (query, key, value[..., :-1], mask, bias, None, None)
        meta = tuple(t if t is None else on_meta(t) for t in args)
        results = forward(*args, scale=1.0)
        real = (*results, *gradients(args, *results))
        results = forward(*meta, scale=1.0)
        fake = (*results, *gradients(meta, *results))
        assert [form(t) for t in real] == [form(t) for t in fake], size


def on_meta(tensor: Tensor) -> Tensor:
    size, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def empty(size: tuple[int, ...]) -> tuple[Tensor, ...]:
    batch, heads, kv_heads, queries, keys, head_dim = size
    return (
        torch.randn(batch, heads, queries, head_dim),
        torch.randn(batch, kv_heads, keys, head_dim),
        torch.randn(batch, kv_heads, keys, head_dim),
        torch.ones(batch, 1, 1, keys, dtype=torch.bool),
        torch.randn(heads, queries, keys),
    )


def gradients(args: tuple[Any, ...], out: Tensor, *lse: Tensor) -> tuple[Tensor, ...]:
    query, key, value, mask, bias, *_ = args
    saved = (out, None, query, key, value, out, *lse, mask, bias, None, None)
    shown = weights(query, key, *lse, mask, bias, None, scale=1.0)
    unwanted = backward(*saved, scale=1.0, output_mask=[False] * 4)
    return (
        *backward(*saved, scale=1.0, output_mask=[True] * 4),
        *unwanted,
        shown,
        *weights_backward(
            *(shown, shown, query, key, *lse, mask, bias, None),
            **{"scale": 1.0, "output_mask": [True] * 3},
        ),
    )


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def test_fake_tensors_read_no_values() -> None:
    with FakeTensorMode():
        query, key, value, mask, bias, *_ = make(grad=False)
        lengths = torch.tensor([99, -1])  # wrong, but only a real tensor can show it
        out, *lse = forward(query, key, value, mask, bias, lengths, None, scale=1.0)
        assert out.shape == (2, 4, 5, 8) and out.device.type == "cpu"
        assert [tensor.shape for tensor in lse] == [(2, 4, 5)] * 2


# torch.compile


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compile(backend: str, dynamic: bool) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    sizes: list[dict[str, int]] = [{}]
    if dynamic:
        sizes += [{"batch": 3, "queries": 6, "keys": 9}, {"batch": 5, "heads": 6, "keys": 4}]
    for size in sizes:
        args = make(**size)
        torch.testing.assert_close(results(compiled, args), results(model, args))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), model(*args))


def test_compile_once_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compiled(*make(batch=3, heads=10, kv_heads=5, queries=7, keys=11))
    first = counter.frame_count
    for batch, queries, keys in ((4, 9, 13), (9, 8, 30), (2, 64, 65)):
        args = make(batch=batch, heads=10, kv_heads=5, queries=queries, keys=keys)
        torch.testing.assert_close(compiled(*args), model(*args))
    assert counter.frame_count == first


def test_compile_sizes_known_only_at_run_time() -> None:
    def run(x: Tensor, chosen: Tensor) -> Tensor:
        rows = x[:, :, chosen.nonzero()[:, 0]]
        return mha_ext.attention(rows, rows, rows)

    x, chosen = torch.randn(2, 2, 9, 4), torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, chosen)
    torch.testing.assert_close(found, run(x, chosen))


def test_compile_numbers_that_are_sizes() -> None:
    """The last query; the window of a length; as many keys as there are."""

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        window = (q.shape[2], None)
        return (
            mha_ext.attention_weights(q, k, rows=[q.shape[2] - 1], heads=[q.shape[1] - 1]),
            mha_ext.attention(q, k, k, causal="lower_right", window=window),
            *mha_ext.attention_topk(q, k, min(3, k.shape[2])),
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries, keys in ((5, 9), (4, 8), (3, 2)):
        q, k = torch.randn(2, 2, queries, 4), torch.randn(2, 2, keys, 4)
        torch.testing.assert_close(compiled(q, k), run(q, k))


def test_compile_numbers_that_change() -> None:
    def run(x: Tensor, seed: Tensor, scale: float, dropout_p: float, left: int) -> Tensor:
        return mha_ext.attention(
            x, x, x, scale=scale, dropout_p=dropout_p, seed=seed, window=(left, None)
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    x, seed = torch.randn(2, 2, 9, 4), torch.tensor([5, 6])
    for numbers in ((0.3, 0.1, 3), (0.5, 0.2, 4), (0.7, 0.3, 5)):
        torch.testing.assert_close(compiled(x, seed, *numbers), run(x, seed, *numbers))


def test_compile_draws_the_seed_in_the_graph() -> None:
    def run(x: Tensor) -> Tensor:
        return mha_ext.attention(x, x, x, dropout_p=0.5)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 2, 9, 4)
    torch.manual_seed(3)
    wanted = run(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), wanted)
    assert not torch.equal(compiled(x), wanted)


def test_compile_a_functional_gradient() -> None:
    def run(*args: Tensor) -> Any:
        return torch.func.grad(lambda *a: mha_ext.attention(*a).sin().sum(), (0, 1, 2))(*args)

    args = make(grad=False)[:3]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), run(*args))


def test_compile_a_checkpoint() -> None:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(model, *args, use_reentrant=False)

    args = make()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(compiled, args), results(model, args))


def test_compiled_autograd() -> None:
    args = make()
    wanted = results(model, args)[3:]
    for _ in range(2):
        for tensor in leaves(args):
            tensor.grad = None
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            sum(x.square().sum() for x in model(*args)).backward()
        torch.testing.assert_close([tensor.grad for tensor in leaves(args)], wanted)


def test_compiled_autograd_with_other_sizes() -> None:
    """Its second graph has symbols for sizes and windows."""
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        found = []
        cases = [(left, make(keys=keys)) for left, keys in ((2, 7), (3, 9), (4, 12))]
        for left, args in cases:
            options = {"scale": 0.5, "window_left": left, "window_right": 1}
            out, *_ = forward(*args[:5], None, None, **options)
            out.sin().sum().backward()
            found.append([tensor.grad for tensor in leaves(args)])
    for (left, args), grads in zip(cases, found, strict=True):
        out, *_ = forward(*args[:5], None, None, scale=0.5, window_left=left, window_right=1)
        torch.testing.assert_close(list(torch.autograd.grad(out.sin().sum(), leaves(args))), grads)


# torch.export


class Model(torch.nn.Module):
    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return model(*args)


@pytest.mark.parametrize("decompose", [False, True])
def test_export_with_dynamic_shapes(decompose: bool) -> None:
    batch, queries, keys = (torch.export.Dim(name, min=3, max=99) for name in ("b", "q", "k"))
    rows = {0: batch, 2: keys}
    shapes = [{0: batch, 2: queries}, rows, rows, {0: batch, 3: keys}, {1: queries, 2: keys}]
    shapes += [{0: batch}, {}]
    program = torch.export.export(
        Model(), make(batch=3, grad=False), dynamic_shapes=(tuple(shapes),), strict=False
    )
    if decompose:
        program = program.run_decompositions()
    args = make(batch=4, queries=9, keys=11, grad=False)
    torch.testing.assert_close(program.module()(*args), model(*args))


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compile_it", [False, True])
def test_autocast_follows_the_context(dtype: torch.dtype, compile_it: bool) -> None:
    query, key, value, mask, bias, *_ = make()

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, lse = mha_ext.attention(query, key, value, mask, bias=bias, return_lse=True)
        return out, lse, mha_ext.attention_weights(query, key, mask, bias=bias)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True) if compile_it else run
    with torch.autocast("cpu", dtype=dtype):
        out, lse, shown = compiled(query, key, value, bias)
    assert (out.dtype, lse.dtype, shown.dtype) == (dtype, torch.float32, dtype)
    wanted = run(*(t.to(dtype) for t in (query, key, value)), bias)  # the bias is not cast
    torch.testing.assert_close((out, lse, shown), wanted)
    out.float().sum().backward()
    assert query.grad is not None and query.grad.dtype == torch.float32
    assert bias.grad is not None and bias.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mha_ext.attention(x, x, x).dtype == torch.float64
    with torch.autocast("cpu", enabled=False):
        assert mha_ext.attention(x.float(), x.float(), x.float()).dtype == torch.float32
