"""First derivatives in reverse mode. test_derivatives.py has the others, test_transforms.py has vmap."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sizes import on_emulator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mha_ext
from mha_ext import reference

B, H, LQ, LK, D, DV = 2, 4, 5, 7, 3, 4

forward = torch.ops.mha_ext.attention_forward
weights = torch.ops.mha_ext.attention_weights


def tensors(kv_heads: int = H, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
    shapes = (B, H, LQ, D), (B, kv_heads, LK, D), (B, kv_heads, LK, DV)
    return [torch.randn(shape, dtype=dtype, requires_grad=True, **options) for shape in shapes]


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def some_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    return mask


# Each gives (number of key/value heads, options of attention).
CASES: dict[str, Callable[[], tuple[int, dict[str, Any]]]] = {
    "plain": lambda: (H, {}),
    "grouped": lambda: (2, {}),
    "one key head": lambda: (1, {"scale": -0.7}),
    "mask": lambda: (2, {"mask": some_mask(B, 1, LQ, LK)}),
    "integer mask": lambda: (2, {"mask": some_mask(LK).long()}),
    "full bias": lambda: (2, {"bias": leaf(B, H, LQ, LK)}),
    "head bias": lambda: (2, {"bias": leaf(1, H, 1, 1)}),
    "key bias": lambda: (2, {"bias": leaf(B, 1, 1, LK)}),
    "query bias": lambda: (2, {"bias": leaf(LQ, 1)}),
    "one bias": lambda: (2, {"bias": leaf()}),
    "expanded bias": lambda: (2, {"bias": leaf(LQ, LK).expand(B, H, LQ, LK)}),
    "key lengths": lambda: (2, {"key_lengths": torch.tensor([LK, 3])}),
    "upper left": lambda: (2, {"causal": "upper_left"}),
    "lower right": lambda: (2, {"causal": "lower_right", "key_lengths": torch.tensor([6, 5])}),
    "window": lambda: (2, {"causal": "upper_left", "window": (2, None)}),
    "both windows": lambda: (2, {"causal": "lower_right", "window": (1, 1)}),
    "dropout": lambda: (2, {"dropout_p": 0.4, "seed": torch.tensor([7, 8])}),
    "empty rows": lambda: (2, {"mask": (torch.arange(LQ) % 2 == 0)[:, None]}),
    "uniform rows": lambda: (
        2,
        {
            "mask": (torch.arange(LQ) % 2 == 0)[:, None],
            "empty_rows": "uniform",
            "dropout_p": 0.3,
            "seed": torch.tensor([1, 2]),
        },
    ),
    "everything": lambda: (
        2,
        {
            "mask": some_mask(1, H, LQ, LK),
            "bias": leaf(1, H, LQ, LK),
            "key_lengths": torch.tensor([6, 4]),
            "causal": "lower_right",
            "window": (3, None),
            "dropout_p": 0.2,
            "seed": torch.tensor([3, 4]),
            "scale": 0.6,
            "empty_rows": "uniform",
        },
    ),
}


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse is -inf in an empty row: no number to differentiate."""
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def grads_of(function: Callable[..., Any], leaves: list[Tensor], *args: Any, **options: Any) -> Any:
    out, lse = finite(*function(*args, return_lse=True, **options))
    torch.manual_seed(1)
    loss = (out * torch.randn(out.shape).double()).sum() + (lse * torch.randn(lse.shape)).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.isa
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: str) -> None:
    kv_heads, options = CASES[case]()
    inputs = tensors(kv_heads)
    bias = options.pop("bias", None)
    if bias is None:

        def function(*args: Tensor) -> tuple[Tensor, Tensor]:
            return finite(*mha_ext.attention(*args, return_lse=True, **options))

    else:
        inputs.append(bias.detach().clone().requires_grad_())

        def function(*args: Tensor) -> tuple[Tensor, Tensor]:
            out = mha_ext.attention(*args[:3], bias=args[3], return_lse=True, **options)
            return finite(*out)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=on_emulator)


@pytest.mark.isa
@pytest.mark.parametrize("case", CASES)
def test_same_gradients_as_the_definition(case: str) -> None:
    kv_heads, options = CASES[case]()
    inputs = tensors(kv_heads)
    leaves = [*inputs, options["bias"]] if "bias" in options else inputs
    ours = grads_of(mha_ext.attention, leaves, *inputs, **options)
    right = grads_of(reference.attention, leaves, *inputs, **options)
    for found, wanted, tensor in zip(ours, right, leaves, strict=True):
        assert found.shape == tensor.shape and found.dtype == tensor.dtype
        torch.testing.assert_close(found, wanted)


@pytest.mark.isa
@pytest.mark.parametrize("given_lse", [False, True])
@pytest.mark.parametrize("part", [{}, {"heads": [2, 0]}, {"heads": [1, 3, 1], "rows": [4, 0, 4]}])
def test_gradcheck_weights(part: dict[str, Any], given_lse: bool) -> None:
    query, key, value = tensors(2)
    bias, mask = leaf(1, H, 1, LK), some_mask(B, 1, 1, LK)
    lse = lse_low = None
    if given_lse:
        _, lse, lse_low = forward(
            query, key, value, mask, bias, None, None, scale=0.5, window_right=0
        )

    def function(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        # The lse of these very inputs, or none: a cache, through which nothing is differentiated.
        return weights(query, key, None, None, mask, bias, None, scale=0.5, window_right=0, **part)

    assert torch.autograd.gradcheck(function, (query, key, bias), fast_mode=on_emulator)
    if lse is None:
        return
    found = weights(query, key, lse, lse_low, mask, bias, None, scale=0.5, window_right=0, **part)
    wanted = function(query, key, bias)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn_like(found)
    leaves = (query, key, bias)
    ours = torch.autograd.grad(found, leaves, cotangent)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted, leaves, cotangent))


def test_gradients_lie_in_memory_as_the_output_does() -> None:
    """But where a tensor is contiguous, its gradient is (tests/test_backward.py)."""
    inputs = [
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors(2)
    ]
    out = mha_ext.attention(*inputs)
    for tensor in (out, *torch.autograd.grad(out.sum(), inputs)):
        assert tensor.transpose(1, 2).is_contiguous()


def test_gradient_of_a_float32_bias() -> None:
    query, key, value = tensors(dtype=torch.bfloat16)
    bias = leaf(1, H, 1, LK, dtype=torch.float32)
    mha_ext.attention(query, key, value, bias=bias).float().square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32 and bias.grad.shape == bias.shape
    assert query.grad is not None and query.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2, 3]])
def test_only_what_is_asked_for(wanted: list[int]) -> None:
    inputs = [*tensors(2), leaf(H, LQ, LK)]

    def run() -> tuple[Tensor, ...]:
        out, lse, _ = forward(*inputs[:3], None, inputs[3], None, None, scale=0.4)
        asked = [inputs[i] for i in wanted]
        return torch.autograd.grad(out.sin().sum() + lse.sin().sum(), asked)

    everything = torch.autograd.grad(
        sum(
            x.sin().sum() for x in forward(*inputs[:3], None, inputs[3], None, None, scale=0.4)[:2]
        ),
        inputs,
    )
    torch.testing.assert_close(run(), tuple(everything[i] for i in wanted))
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i in wanted)
    torch.testing.assert_close(run(), tuple(everything[i] for i in wanted))


def test_either_result_alone() -> None:
    inputs = tensors(2)
    for i in (0, 1):
        ours = forward(*inputs, None, None, None, None, scale=0.5)[i]
        right = reference.attention(*inputs, scale=0.5, return_lse=True)[i]
        options = {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(ours.sin().sum(), inputs, **options)
        wanted = torch.autograd.grad(right.sin().sum(), inputs, **options)
        torch.testing.assert_close(found, wanted)


def test_one_tensor_in_three_roles() -> None:
    x = torch.randn(B, H, LQ, D, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(mha_ext.attention(x, x, x).sin().sum(), x)
    (wanted,) = torch.autograd.grad(reference.attention(x, x, x).sin().sum(), x)
    torch.testing.assert_close(found, wanted)


def test_no_graph_where_none_is_wanted() -> None:
    inputs = tensors(2)
    with torch.no_grad():
        assert mha_ext.attention(*inputs).grad_fn is None
    with torch.inference_mode():
        out = mha_ext.attention(*inputs)
        assert out.is_inference() and not out.requires_grad
        assert mha_ext.attention_weights(out, out).is_inference()
    for tensor in inputs:
        tensor.requires_grad_(False)
    assert not mha_ext.attention(*inputs).requires_grad


def test_a_mask_has_no_gradient() -> None:
    out = mha_ext.attention(*tensors(), some_mask(LK))
    assert out.grad_fn is not None and out.grad_fn.name() == "AttentionBackward"
    edges = [edge is not None for edge, _ in out.grad_fn.next_functions]
    assert edges == [True, True, True, False]  # query, key, value, bias


INPLACE = ("query", "key", "value", "mask", "bias", "key_lengths", "seed", "out", "lse", "lse_low")


@pytest.mark.parametrize("name", INPLACE)
def test_an_edit_in_place_before_backward_raises(name: str) -> None:
    args = [*tensors(), some_mask(LQ, LK), leaf(LQ, LK)]
    args += [torch.tensor([5, 6]), torch.tensor([1, 2])]
    results = forward(*args, dropout_p=0.2, scale=1.0)
    edited = dict(zip(INPLACE, [*args, *results], strict=True))[name]
    with torch.no_grad():
        edited.copy_(torch.zeros_like(edited))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (results[0] + 0).sum().backward()


def test_lse_low_is_a_cache() -> None:
    """It has no derivative of its own, and backward reads it as it reads lse."""
    inputs = tensors(2)
    out, lse, lse_low = forward(*inputs, None, None, None, None, scale=0.5)
    assert out.requires_grad and lse.requires_grad
    assert not lse_low.requires_grad and lse_low.is_leaf
    shown = weights(*inputs[:2], lse, lse_low.requires_grad_(), None, None, None, scale=0.5)
    assert torch.autograd.grad(shown.sum(), lse_low, allow_unused=True) == (None,)

    args = (torch.ones_like(out), None, *inputs, out, lse)
    options = {"scale": 0.5, "output_mask": [True] * 4}
    rest = (None, None, None, None)
    shift = torch.full_like(lse_low, 0.125)
    with torch.no_grad():
        moved = torch.ops.mha_ext.attention_backward(*args, shift, *rest, **options)
        wanted = torch.ops.mha_ext.attention_backward(
            *args[:-1], lse + shift, None, *rest, **options
        )
    torch.testing.assert_close(moved, wanted)


def test_backward_twice() -> None:
    inputs = tensors(2)
    out = mha_ext.attention(*inputs, some_mask(LK))
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), inputs)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_saved_tensors_can_live_elsewhere() -> None:
    inputs, mask = tensors(2), some_mask(LQ, LK)
    wanted = grads_of(mha_ext.attention, inputs, *inputs, mask)
    with torch.autograd.graph.save_on_cpu():
        found = grads_of(mha_ext.attention, inputs, *inputs, mask)
    torch.testing.assert_close(found, wanted)


def test_a_result_keeps_no_cycle_alive() -> None:
    gc.disable()
    try:
        results = forward(*tensors(), None, None, None, None, scale=1.0)
        gone = [weakref.ref(result) for result in results]
        del results
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_its_dropout(reentrant: bool) -> None:
    inputs = tensors(2)

    def block(*args: Tensor) -> Tensor:
        return mha_ext.attention(*args, dropout_p=0.5)

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        for tensor in inputs:
            tensor.grad = None
        function(*inputs).sin().sum().backward()
        return tuple(tensor.grad.clone() for tensor in inputs if tensor.grad is not None)

    plain = run(block)
    repeated = run(lambda *args: checkpoint(block, *args, use_reentrant=reentrant))
    assert len(plain) == 3 and all(map(torch.equal, plain, repeated))


# torch.func, first order


def loss_of(attention: Callable[..., Any]) -> Callable[..., Tensor]:
    def loss(*args: Tensor) -> Tensor:
        out, lse = attention(*args, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    return loss


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(loss_of(f), (0, 1, 2)),
    "vjp": lambda f: lambda *a: torch.func.vjp(f, *a)[1](torch.ones(B, H, LQ, DV).double()),
    "jacrev": lambda f: torch.func.jacrev(f, (0, 1, 2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms(name: str) -> None:
    inputs = [tensor.detach() for tensor in tensors(2)]
    found = TRANSFORMS[name](mha_ext.attention)(*inputs)
    torch.testing.assert_close(found, TRANSFORMS[name](reference.attention)(*inputs))


def test_create_graph_without_second_use() -> None:
    inputs = [*tensors(2), leaf(LQ, LK)]
    out, lse, _ = forward(*inputs[:3], None, inputs[3], None, None, scale=0.5)
    loss = out.sin().sum() + lse.sin().sum()
    found = torch.autograd.grad(loss, inputs, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(loss, inputs))
    assert all(grad.requires_grad for grad in found)
