"""FastLinear and the operator linear: accuracy, derivatives, transforms, and when the kernel is taken."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune

import mha_ext
from mha_ext import linear as module
from mha_ext.linear import FastLinear

pytestmark = [
    pytest.mark.isa,
    pytest.mark.cpu_alone("calls mha_ext::linear, an operator of CPUs"),
]

op = torch.ops.mha_ext.linear.default


@pytest.fixture
def taken() -> Iterator[mock.Mock]:
    """The kernel is taken wherever it can be, and for small problems, too; the calls are counted."""
    with (
        mock.patch.object(module, "_decision", True),
        mock.patch.object(module, "_least_sizes", return_value=(16, 32)),
        mock.patch.object(module, "_linear", wraps=op) as calls,
    ):
        yield calls


def worst(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max())


# input's shape, out_features: edges of vectors, of panels of 64, of blocks and of the sums' parts.
# Sums of 32 terms and more may take another kernel.
SHAPES = [
    ((7,), 5),
    ((33, 31), 40),
    ((17, 32), 16),
    ((530, 257), 1100),
    ((3, 600), 70),
    ((1, 1), 1),
    ((3, 4, 30), 17),
    ((300,), 300),
    ((2, 3, 50, 130), 257),
    ((259, 193), 515),
    ((1, 64), 64),
    ((65, 1), 3),
]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape, out_features", SHAPES)
def test_accuracy(shape: tuple[int, ...], out_features: int, with_bias: bool) -> None:
    """Result and gradients against float64, with at most twice the error of F.linear and 4 ulp."""
    inputs = [torch.randn(shape), torch.randn(out_features, shape[-1])]
    inputs += [torch.randn(out_features)] * with_bias
    grad = torch.randn(*shape[:-1], out_features)
    results: list[tuple[Tensor, ...]] = []
    for call, dtype in ((op, torch.float32), (F.linear, torch.float32), (F.linear, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = call(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))))
    for found, torchs, exact in zip(*results, strict=True):
        assert found.shape == exact.shape and found.is_contiguous()
        ulp = float(exact.abs().max()) * 2.0**-23
        assert worst(found, exact) <= 2 * worst(torchs, exact) + 4 * ulp


def test_strides() -> None:
    """Transposed, sliced, expanded and doubly strided operands are what their copies are."""
    x, weight = torch.randn(40, 50), torch.randn(30, 50)
    wanted = op(x, weight)
    assert torch.equal(op(x.t().contiguous().t(), weight), wanted)
    assert torch.equal(op(x, weight.t().contiguous().t()), wanted)
    assert torch.equal(op(torch.stack([x, x], 2)[..., 0], weight), wanted)
    wide = torch.randn(40, 90)
    wide[:, 20:70] = x
    assert torch.equal(op(wide[:, 20:70], weight), wanted)
    row = torch.randn(50)
    assert torch.equal(op(row.expand(40, 50), weight), op(row.repeat(40, 1), weight))
    column = torch.randn(40, 1)
    assert torch.equal(op(column.expand(40, 50), weight), op(column.repeat(1, 50), weight))
    assert torch.equal(op(x, weight[:1].expand(30, 50)), op(x, weight[:1].repeat(30, 1)))
    y = torch.randn(3, 50, 40)
    assert torch.equal(op(y.transpose(1, 2), weight), op(y.transpose(1, 2).contiguous(), weight))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = torch.randn(7, shape[-1], requires_grad=True), torch.randn(7, requires_grad=True)
    out = op(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias))
    out.sum().backward()
    assert x.grad.shape == x.shape and not weight.grad.any()
    assert torch.equal(bias.grad, torch.full((7,), float(out[..., 0].numel())))
    assert op(torch.randn(3, 5), torch.randn(0, 5)).shape == (3, 0)


def test_bits() -> None:
    """Neither the number of threads nor the other rows change a bit of a row."""
    x, weight, bias = torch.randn(700, 300), torch.randn(600, 300), torch.randn(600)
    grad = torch.randn(700, 600)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append((op(x, weight, bias), op(grad, weight.t()), op(grad.t(), x.t())))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    torch.set_num_threads(1)
    for rows in (slice(0, 1), slice(5, 30), slice(251, 253), slice(690, 700)):
        assert torch.equal(op(x[rows], weight, bias), results[0][0][rows])
        assert torch.equal(op(grad[rows], weight.t()), results[0][1][rows])


def test_nan_stays_in_its_row() -> None:
    x, weight = torch.randn(20, 40), torch.randn(70, 40)
    wanted = op(x, weight)
    x[3, 7], weight[66, 0] = float("nan"), float("inf")
    found = op(x, weight)
    assert found[3].isnan().all() and not found[:, 66].isfinite().any()
    keep = torch.arange(20) != 3
    assert torch.equal(found[keep][:, :66], wanted[keep][:, :66])


@pytest.mark.parametrize("turned", [False, True])
def test_large_and_small_numbers(turned: bool) -> None:
    """As exact beside 1e10 as without, down to subnormal numbers; and what is large stays in its row and column."""
    x, weight, bias = torch.randn(70, 300), torch.randn(150, 300), torch.randn(150)
    wanted = op(x, weight, bias)
    scales = 10.0 ** torch.randint(-30, 5, (70, 1)).float()
    for large, small in ((1e10, 1e-20), (7e10, 1.0), (2.0**36, 1e-38), (1e30, 1e-30)):
        a, b = x * scales * small, weight * scales.flatten()[:1]
        a[3, 7], a[3, 290], b[66, 0], b[149, 299] = large, -large, large, -large
        if turned:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        exact = a.double() @ b.double().t()
        bound = a.double().abs() @ b.double().abs().t()
        assert ((op(a, b) - exact).abs() <= 4e-6 * bound + 2.0**-140).all()
    for value in (1e12, float("inf"), float("nan")):
        a, b = x.clone(), weight.clone()
        a[3, 7], b[66, 0] = value, value
        if turned:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        found = op(a, b, bias)
        rows, columns = torch.arange(70) != 3, torch.arange(150) != 66
        assert torch.equal(found[rows][:, columns], wanted[rows][:, columns])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_derivatives(rank: int, with_bias: bool) -> None:
    """Reverse, forward, and both twice, against finite differences (in float64)."""
    inputs = [torch.randn(*(2, 3, 4)[-rank:]), torch.randn(5, 4)] + [torch.randn(5)] * with_bias
    inputs = [x.double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(
        op, inputs, check_fwd_over_rev=True, check_rev_over_rev=True
    )


def test_float32_derivatives_of_every_order() -> None:
    """The kernel's own numbers: a gradient penalty, and a tangent, as F.linear has them."""
    x, weight, bias = torch.randn(6, 40), torch.randn(50, 40), torch.randn(50)
    direction = torch.randn(50, 40)
    found = []
    for call in (op, F.linear):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        (grad,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[0], create_graph=True)
        penalty = torch.autograd.grad(grad.square().sum(), leaves)
        with forward_ad.dual_level():
            dual = call(leaves[0], forward_ad.make_dual(leaves[1], direction), leaves[2])
            tangent = forward_ad.unpack_dual(dual).tangent
            found.append((*penalty, tangent, *torch.autograd.grad(tangent.sum(), leaves[0])))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max())
        )


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_frozen(wanted: tuple[int, int, int], taken: mock.Mock) -> None:
    """Gradients of those that ask for one, and no product for the others."""
    layer, x = FastLinear(40, 50), torch.randn(20, 40, requires_grad=bool(wanted[0]))
    layer.weight.requires_grad_(bool(wanted[1]))
    layer.bias.requires_grad_(bool(wanted[2]))
    layer(x).sum().backward()
    assert taken.call_count == 1
    for tensor, asked in zip((x, layer.weight, layer.bias), wanted, strict=True):
        assert (tensor.grad is not None) == bool(asked)


def test_transforms() -> None:
    """vmap over every combination of arguments; grad, jvp and hessian by torch.func."""
    x, weight, bias = torch.randn(3, 4, 6), torch.randn(3, 5, 6), torch.randn(3, 5)
    for dims in [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0), (1, None, 0)]:
        args = [t if d is not None else t[0] for t, d in zip((x, weight, bias), dims, strict=True)]
        if dims[0] == 1:
            args[0] = x.movedim(0, 1)
        found, wanted = (torch.vmap(call, dims)(*args) for call in (op, F.linear))
        torch.testing.assert_close(found, wanted)
    for transform in (
        lambda call: torch.func.grad(lambda w: call(x, w).square().sum())(weight[0]),
        lambda call: torch.func.jvp(lambda w: call(x, w), (weight[0],), (weight[1],))[1],
        lambda call: torch.func.hessian(lambda y: call(y, weight[0]).square().sum())(x[0]),
        lambda call: torch.vmap(torch.func.grad(lambda w, y: call(y, w).square().sum()))(weight, x),
    ):
        torch.testing.assert_close(transform(op), transform(F.linear), rtol=1e-4, atol=1e-4)


def test_opcheck() -> None:
    leaves = [torch.randn(s, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,))]
    torch.library.opcheck(op, tuple(leaves))
    torch.library.opcheck(op, (leaves[0].detach(), leaves[1]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """The operator in a graph, backward included; and compiled autograd."""
    leaves = [torch.randn(s, requires_grad=True) for s in ((20, 40), (50, 40), (50,))]
    wanted = torch.autograd.grad(op(*leaves).square().sum(), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: op(*a).square().sum(), fullgraph=True, backend=backend)
    for found, expected in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        torch.testing.assert_close(found, expected)
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        op(*leaves).square().sum().backward()
    for leaf, expected in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.randn(4, 7)}, ValueError, r"input must be \[\.\.\., in_features\].*6"),
        ({"weight": torch.randn(5)}, ValueError, r"weight must be \[out_features, in_features\]"),
        ({"bias": torch.randn(6)}, ValueError, r"bias must be \[out_features\] = \[5\]"),
        ({"weight": torch.randn(5, 6).double()}, TypeError, "weight must have input's dtype"),
        ({"bias": torch.randn(5).double()}, TypeError, "bias must have input's dtype"),
        ({"input": torch.ones(4, 6).long()}, TypeError, "input must be of a floating dtype"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors(
    change: dict[str, Tensor], error: type[Exception], message: str, device: str
) -> None:
    args = {"input": torch.randn(4, 6), "weight": torch.randn(5, 6), "bias": torch.randn(5)}
    with pytest.raises(error, match=message) as raised:
        op(**{name: tensor.to(device) for name, tensor in (args | change).items()})
    assert "\n" not in str(raised.value).split("\nException raised")[0]


def test_is_a_linear(taken: mock.Mock) -> None:
    """Parameters, initialisation, state_dict either way, repr, deepcopy, pickle."""
    torch.manual_seed(1)
    fast = FastLinear(40, 50)
    torch.manual_seed(1)
    plain = nn.Linear(40, 50)
    assert isinstance(fast, nn.Linear) and repr(fast) == "FastLinear" + repr(plain)[len("Linear") :]
    for mine, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    x = torch.randn(3, 20, 40)
    other = FastLinear(40, 50)
    other.load_state_dict(plain.state_dict())
    nn.Linear(40, 50).load_state_dict(fast.state_dict())
    stored = io.BytesIO()
    torch.save(fast, stored)
    stored.seek(0)
    for copied in (other, copy.deepcopy(fast), torch.load(stored, weights_only=False)):
        assert torch.equal(copied(x), fast(x))
    torch.testing.assert_close(fast(x), plain(x))
    assert taken.call_count == 7
    meta = FastLinear(40, 50, bias=False, device="meta", dtype=torch.bfloat16)
    assert meta.bias is None and meta.weight.is_meta and meta.weight.dtype == torch.bfloat16


def test_tools_that_change_a_linear(taken: mock.Mock) -> None:
    """Hooks, weight norm, spectral norm, pruning, LoRA, shared parameters: as with nn.Linear."""
    x = torch.randn(20, 40)

    class LoRA(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.base, self.a, self.b = base, nn.Linear(40, 2), nn.Linear(2, 50)

        def forward(self, input: Tensor) -> Tensor:
            return self.base(input) + self.b(self.a(input))

    def shared(layer: nn.Linear) -> nn.Module:
        layer.weight = nn.Parameter(torch.eye(50, 40))
        twin = type(layer)(40, 50)
        twin.weight, twin.bias = layer.weight, layer.bias
        return nn.Sequential(layer, nn.Linear(50, 40), twin)

    def hooked(layer: nn.Linear) -> nn.Module:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        layer.register_forward_hook(lambda _, args, out: out + args[0][0, 0])
        return layer

    changes: list[Callable[[nn.Linear], nn.Module]] = [
        hooked,
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        LoRA,
        shared,
    ]
    for change in changes:
        results: list[Any] = []
        for kind in (FastLinear, nn.Linear):
            torch.manual_seed(2)
            layer = kind(40, 50)
            changed = change(layer)
            torch.manual_seed(4)
            out = changed(x)
            out.square().sum().backward()
            results.append((out, [p.grad for p in changed.parameters()]))
        (mine, my_grads), (theirs, their_grads) = results
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        for found, wanted in zip(my_grads, their_grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert taken.call_count == 7


class Subclass(Tensor):
    pass


def test_what_falls_through(taken: mock.Mock) -> None:
    """F.linear's own result, and no call of the kernel."""
    layer, x = FastLinear(40, 50), torch.randn(20, 40)
    layer(x)
    assert taken.call_count == 1
    assert layer(x[:15]).shape == (15, 50)
    assert FastLinear(40, 31)(x).shape == (20, 31)
    assert FastLinear(31, 50)(x[:, :31]).shape == (20, 50)
    for dtype in (torch.float64, torch.bfloat16):
        assert copy.deepcopy(layer).to(dtype)(x.to(dtype)).dtype == dtype
    assert isinstance(layer(x.as_subclass(Subclass)), Subclass)
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).is_meta
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    for bad in (x.double(), x[:, :39]):
        with pytest.raises(RuntimeError):  # PyTorch's own message
            layer(bad)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    program = torch.export.export(layer, (x,))
    assert "mha_ext" not in str(program.graph)
    torch.jit.trace(layer, x, check_trace=False)
    assert taken.call_count == 2  # the one beside compiled
    with mock.patch.object(module, "_decision", False):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert taken.call_count == 2


def test_the_decision() -> None:
    """MHA_EXT_FAST_LINEAR, then the vendor, then a measurement; once a process."""

    def never() -> float:
        raise AssertionError("measured")

    assert module._decide("1", "GenuineIntel", "avx512", never) is True
    assert module._decide("0", "AuthenticAMD", "avx2", never) is False
    assert module._decide("", "GenuineIntel", "avx512_bf16", never) is False
    for vendor, isa in (("AuthenticAMD", "avx512"), ("", "avx2"), ("GenuineIntel", "amx")):
        assert module._decide("", vendor, isa, lambda: 1.7) is True
        assert module._decide("", vendor, isa, lambda: 1.1) is False
    with pytest.raises(ValueError, match="MHA_EXT_FAST_LINEAR must be 0, 1 or unset, not 'yes'"):
        module._decide("yes", "", "avx2", never)
    with (
        mock.patch.object(module, "_decision", None),
        mock.patch.object(module, "_cpu_vendor", return_value="AuthenticAMD"),
        mock.patch.object(module, "_speed_up", return_value=2.0) as measured,
        mock.patch.dict("os.environ"),
    ):
        module.os.environ.pop("MHA_EXT_FAST_LINEAR", None)
        rows, width = module._least_sizes()
        layer = FastLinear(width, width + 1)
        layer(torch.randn(rows - 1, width))
        assert measured.call_count == 0  # nothing to decide yet
        layer(torch.randn(rows, width)), layer(torch.randn(rows, width))
        assert measured.call_count == 1 and module.kernel_is_faster() is True


@pytest.mark.parametrize("asked", ["", "0", "1"])
@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2"])
def test_where_the_kernel_is_asked_for_small_problems_take_it(isa: str, asked: str) -> None:
    with (
        mock.patch.object(module._C, "active_isa", return_value=isa),
        mock.patch.dict("os.environ", {"MHA_EXT_FAST_LINEAR": asked}),
    ):
        large = isa == "amx" and asked != "1"
        assert module._least_sizes.__wrapped__() == ((128, 192) if large else (16, 32))


def test_the_measurement_draws_nothing() -> None:
    state = torch.get_rng_state()
    assert module._speed_up(size=64, rounds=1) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert module._cpu_vendor() == module._cpu_vendor()


@pytest.mark.parametrize("kind", [mha_ext.MultiHeadAttention, mha_ext.AttentionBlock])
def test_layers(kind: Any, taken: mock.Mock) -> None:
    """fast_linear=True: four FastLinear, the same weights, and the plain layer's numbers."""
    torch.manual_seed(5)
    plain = kind(64, 4)
    torch.manual_seed(5)
    fast = kind(64, 4, fast_linear=True)
    assert sum(isinstance(m, FastLinear) for m in fast.modules()) == 4
    assert not any(isinstance(m, FastLinear) for m in plain.modules())
    assert "fast_linear=True" in repr(fast) and "fast_linear" not in repr(plain)
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(2, 33, 64)
    results = []
    for layer in (fast, plain):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, causal=True)
        out.backward(x)
        results.append((out, leaf.grad, *(p.grad for p in layer.parameters())))
    assert taken.call_count == 4
    # The gradient of k_proj's bias is zero but for rounding, so the largest gradient is the measure.
    scale = max(float(wanted.detach().abs().max()) for wanted in results[1])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * scale)
