"""mha_ext.compat.scaled_dot_product_attention has torch's signature and semantics; sdpa_override routes to it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext.compat import scaled_dot_product_attention, sdpa_override

# One ulp of dP, whose entries reach 50 in PyTorch's samples: what the gradients cancel to may be much smaller.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.25, torch.float16: 0.03}


def plain(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def sdpa_info() -> Any:
    pytest.importorskip("expecttest", reason="pip install expecttest (the extra [test])")
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return info


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pytorchs_own_sample_inputs(dtype: torch.dtype) -> None:
    """Their scores go up to 200, and a rounding error of a score is a relative one of P: so PyTorch's own error in
    the same dtype, twice, is allowed too. (Dropout, which draws other numbers there, is tested below.)"""
    count = 0
    for sample in sdpa_info().sample_inputs("cpu", dtype, requires_grad=True):
        mask = sample.kwargs.pop("attn_mask", None)
        inputs = [sample.input, *sample.args, mask]
        exact = [
            x.detach().double().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for x in inputs
        ]
        results = []
        for function, tensors in (
            (scaled_dot_product_attention, inputs),
            (plain, inputs),
            (plain, exact),
        ):
            out = function(*tensors, **{**sample.kwargs, "dropout_p": 0.0})
            wanted = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
            torch.manual_seed(count)
            cotangent = torch.randn(out.shape, dtype=torch.float64).to(out)
            results.append([out, *torch.autograd.grad(out, wanted, cotangent)])
        for ours, theirs, expected in zip(*results, strict=True):
            size = max(1.0, expected.abs().max().item())
            allowed = 2 * (theirs - expected).abs().max().item() + size * TOLERANCE[dtype]
            assert_close(ours.double(), expected, atol=allowed, rtol=0)
        count += 1
    assert count >= 20


def test_signature_is_torchs() -> None:
    parameters = list(inspect.signature(scaled_dot_product_attention).parameters)
    documented = (F.scaled_dot_product_attention.__doc__ or "").split("(", 1)[1].split(")", 1)[0]
    names = [part.split("=")[0].strip() for part in documented.split(",") if part.strip() != "*"]
    assert parameters == names


@pytest.mark.parametrize(
    "query, key, value, mask",
    [
        ((5, 8), (7, 8), (7, 6), None),
        ((5, 8), (7, 8), (7, 6), (5, 7)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6), (3, 1, 7)),
        ((3, 5, 8), (7, 8), (3, 7, 6), (1, 7)),
        ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6), (2, 1, 5, 7)),
        ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 6), (3, 5, 1)),
        ((2, 1, 3, 5, 8), (4, 3, 7, 8), (2, 4, 3, 7, 6), (4, 1, 5, 7)),
        ((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 6), (2, 1, 3, 5, 7)),
        ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 6), None),
        ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 6), None),
    ],
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_leading_dimensions_broadcast(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    mask: tuple[int, ...] | None,
    kind: str,
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (query, key, value)]
    attn_mask = None
    if mask is not None and kind == "bool":
        attn_mask = torch.rand(mask) < 0.7
    elif mask is not None:
        attn_mask = torch.randn(mask, dtype=torch.float64, requires_grad=True)
        inputs.append(attn_mask)
    ours, theirs = (f(*inputs[:3], attn_mask) for f in (scaled_dot_product_attention, plain))
    assert ours.shape == theirs.shape
    assert_close(ours, theirs)
    cotangent = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, cotangent),
        torch.autograd.grad(theirs, inputs, cotangent),
        strict=True,
    ):
        assert_close(a, b)


@pytest.mark.parametrize("heads", [(6, 2, 2), (6, 3, 2), (6, 6, 1), (6, 1, 1)])
def test_grouped_queries(heads: tuple[int, int, int]) -> None:
    query, key, value = (
        torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in zip(heads, (5, 7, 7), strict=True)
    )
    ours = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert_close(ours, plain(query, key, value, enable_gqa=True))
    ours = scaled_dot_product_attention(query[0], key[0], value[0], enable_gqa=True)
    assert_close(ours, plain(query[0], key[0], value[0], enable_gqa=True))


@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
def test_causal_bias(corner: Any) -> None:
    query, key, value = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    with sdpa_override():
        ours = F.scaled_dot_product_attention(query, key, value, corner(5, 7))
    assert_close(ours, plain(query, key, value, corner(5, 7)))
    assert_close(scaled_dot_product_attention(query, key, value, corner(5, 7)), ours)


def test_dropout_keeps_the_mean_and_all_of_it_drops_everything() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    runs = [scaled_dot_product_attention(query, key, value, dropout_p=0.3) for _ in range(400)]
    assert not torch.equal(runs[0], runs[1])
    mean = torch.stack(runs).mean(0)
    assert_close(mean, plain(query, key, value), atol=0.12, rtol=0)
    gone = scaled_dot_product_attention(query, key, value, dropout_p=1.0)
    assert gone.abs().max() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(gone.sum(), (query, key, value)))


def test_errors() -> None:
    q = torch.randn(2, 3, 5, 8)
    corner = torch.nn.attention.bias.causal_upper_left(5, 5)
    with pytest.raises(ValueError, match="is_causal must be False where attn_mask is a CausalBias"):
        scaled_dot_product_attention(q, q, q, corner, is_causal=True)
    for mask in (torch.ones(3, 4) > 0, torch.zeros(3, 4)):
        with pytest.raises(
            ValueError, match=r"attn_mask must broadcast to .* = \[.*\], but has shape \[3, 4\]"
        ):
            scaled_dot_product_attention(q[0], q[0], q[0], mask)
    with pytest.raises(
        TypeError, match=r"attn_mask must be bool, .* but is torch.int64; pass attn_m"
    ):
        scaled_dot_product_attention(q, q, q, torch.ones(5, 5).long())
    with pytest.raises(TypeError, match="value must be a tensor, not NoneType None"):
        scaled_dot_product_attention(q, q, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"query must have at least 2 dimensions.* \[8\]"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)
    with pytest.raises(ValueError, match="leading dimensions that broadcast"):
        scaled_dot_product_attention(q, q[:, :2], q)
    with pytest.raises(ValueError, match="number of heads that divides query's 3, but has 2"):
        scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_override_reaches_unmodified_models(grad: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
    layer.train(grad)
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 9, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    with torch.set_grad_enabled(grad), Recorder() as operators:
        expected = layer(x, memory, tgt_mask=causal)
        assert not any("mha_ext" in name for name in operators.names)
        with sdpa_override():
            found = layer(x, memory, tgt_mask=causal)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "mha_ext.attention_forward.default" in operators.names


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", ["backward", "grad", "context"])
def test_override_and_checkpoints(reentrant: bool, backward: str) -> None:
    """What a checkpoint computes again is ours, too, with the same pairs dropped."""
    if reentrant and backward != "backward":
        pytest.skip("such a checkpoint takes no context_fn, and knows backward() alone")
    leaf = torch.randn(2, 3, 40, 8, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    torch.manual_seed(3)
    with sdpa_override():
        (expected,) = torch.autograd.grad(attend(leaf).square().sum(), leaf)
    torch.manual_seed(3)
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if backward == "context":
        options["context_fn"] = lambda: (contextlib.nullcontext(), sdpa_override())
    with sdpa_override():
        loss = checkpoint(attend, leaf, **options).square().sum()
        if backward == "backward":
            loss.backward()
        elif backward == "grad":
            (leaf.grad,) = torch.autograd.grad(loss, leaf)
    if backward == "context":
        loss.backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)


def test_is_causal_beside_a_mask() -> None:
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    mask = torch.rand(5, 5) < 0.7
    mask.fill_diagonal_(True)
    expected = plain(q, q, q, mask & torch.ones(5, 5).bool().tril())
    assert_close(scaled_dot_product_attention(q, q, q, mask, is_causal=True), expected)
    bias = torch.where(mask, 0.0, -torch.inf)
    assert_close(scaled_dot_product_attention(q, q, q, bias, is_causal=True), expected)


def test_override_under_compile() -> None:
    query, key, value = (torch.randn(2, 3, 5, 8) for _ in range(3))

    def f(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True) + 1

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    with sdpa_override():
        assert_close(compiled(query, key, value), f(query, key, value))
    assert any("mha_ext" in name for name in seen)
    seen.clear()
    assert_close(compiled(query, key, value), f(query, key, value))  # outside: PyTorch's again
    assert seen and not any("mha_ext" in name for name in seen)


def test_override_leaves_what_it_cannot_do_to_pytorch() -> None:
    wide = torch.randn(1, 1, 2, 1500)
    with sdpa_override():
        assert_close(F.scaled_dot_product_attention(wide, wide, wide), plain(wide, wide, wide))
        whole = [torch.randn(2, 3, length, 8) for length in (3, 5)]
        ragged = torch.nested.nested_tensor([x.squeeze(0) for x in (whole[0][:1], whole[1][:1])])
        found = F.scaled_dot_product_attention(ragged, ragged, ragged).unbind()
        for ours, x in zip(found, (whole[0][0], whole[1][0]), strict=True):
            assert_close(ours, plain(x, x, x))
    sparse = torch.ones(3, 3).to_sparse()  # as a mask: whatever PyTorch says of it
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*[whole[0]] * 3, sparse)
    with sdpa_override(), pytest.raises(theirs.type) as ours:
        F.scaled_dot_product_attention(*[whole[0]] * 3, sparse)
    assert str(ours.value) == str(theirs.value)
    assert mha_ext.compat.sdpa_override is sdpa_override


@pytest.mark.parametrize(
    "shapes, options",
    [
        (((1, 2, 3, 0), (1, 2, 3, 0), (1, 2, 3, 4)), {}),
        (((2, 0, 3, 4), (2, 1, 3, 4), (2, 0, 3, 4)), {}),
        (((2, 0, 3, 4), (2, 0, 3, 4), (2, 0, 3, 4)), {"enable_gqa": True}),
    ],
)
def test_empty_sizes(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    with sdpa_override():
        found = F.scaled_dot_product_attention(*tensors, **options)
    assert_close(found, plain(*tensors, **options))


def test_a_float_mask_under_autocast() -> None:
    """What a layer gives is of autocast's dtype, and the query may still be float32: PyTorch takes both."""
    query = torch.randn(2, 2, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bias = F.linear(torch.randn(5, 3), torch.randn(5, 3))
        found = scaled_dot_product_attention(query, query, query, bias)
        theirs = plain(query, query, query, bias)
    assert bias.dtype == found.dtype == theirs.dtype == torch.bfloat16
    rounded = query.bfloat16().double()
    exact = plain(rounded, rounded, rounded, bias.double())
    error, plain_error = ((x.double() - exact).abs().max() for x in (found, theirs))
    assert error <= 2 * plain_error + 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    with pytest.raises(TypeError, match="attn_mask must be bool, torch.float32, but is torch.bf"):
        scaled_dot_product_attention(query, query, query, bias)
    with pytest.raises(TypeError, match="attn_mask must be dense, but is torch.sparse_coo"):
        scaled_dot_product_attention(query, query, query, bias.float().to_sparse())


def test_override_knows_how_wide_a_head_may_be_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for one: 256 columns are the most."""
    module = sys.modules[sdpa_override.__module__]
    monkeypatch.setattr(module, "_DEVICES", ("cpu", "cuda"))
    calls: list[int] = []
    monkeypatch.setattr(
        module, "scaled_dot_product_attention", lambda query, *_: calls.append(query.shape[-1])
    )
    with FakeTensorMode(), sdpa_override():
        for device, width in (("cuda", 256), ("cuda", 257), ("cpu", 257), ("cpu", 1024)):
            x = torch.empty(1, 1, 2, width, device=device)
            F.scaled_dot_product_attention(x, x, x)
    assert calls == [256, 257, 1024]
