"""Derivatives of second and higher order, and forward mode: the operators are closed under differentiation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from sizes import on_emulator
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mha_ext
from mha_ext import reference

B, H, LQ, LK, D, DV = 2, 2, 3, 4, 2, 3

ops = torch.ops.mha_ext
Function = Callable[..., Any]
Leaves = tuple[Tensor, ...]

pytestmark = [
    # PyTorch scripts its own decompositions when forward mode is first used; make_fx of linearize
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def mask(*shape: int) -> Tensor:
    drawn = torch.rand(shape) > 0.4
    drawn[..., 0] = True
    return drawn


def emptying_mask() -> Tensor:
    return (torch.arange(LQ) % 2 == 0)[:, None]


# The shape of the bias (None: no bias), the number of key/value heads, and the options.
CASES: dict[str, Callable[[], tuple[tuple[int, ...] | None, int, dict[str, Any]]]] = {
    "plain": lambda: (None, H, {}),
    "grouped": lambda: (None, 1, {"scale": -0.7}),
    "mask": lambda: (None, 1, {"mask": mask(B, 1, LQ, LK)}),
    "dense bias": lambda: ((B, H, LQ, LK), 1, {}),
    "shared bias": lambda: ((H, 1, LK), 1, {}),
    "row bias": lambda: ((H, LQ, 1), 1, {}),
    "one bias": lambda: ((), 1, {}),
    "key lengths": lambda: (None, 1, {"key_lengths": torch.tensor([LK, 2])}),
    "upper left": lambda: (None, 1, {"causal": "upper_left"}),
    "window": lambda: (None, 1, {"causal": "lower_right", "window": (1, None)}),
    "dropout": lambda: (None, 1, {"dropout_p": 0.4, "seed": torch.tensor([7, 8])}),
    "empty rows": lambda: ((LQ, LK), 1, {"mask": emptying_mask()}),
    "uniform rows": lambda: (
        (LQ, LK),
        1,
        {
            "mask": emptying_mask(),
            "empty_rows": "uniform",
            "dropout_p": 0.3,
            "seed": torch.tensor([1, 2]),
        },
    ),
    "everything": lambda: (
        (1, H, LQ, LK),
        1,
        {
            "mask": mask(1, H, LQ, LK),
            "key_lengths": torch.tensor([4, 2]),
            "causal": "lower_right",
            "window": (2, None),
            "dropout_p": 0.2,
            "seed": torch.tensor([3, 4]),
            "scale": 0.6,
            "empty_rows": "uniform",
        },
    ),
}


def draw(bias: tuple[int, ...] | None, kv_heads: int, dtype: torch.dtype = torch.float64) -> Leaves:
    shapes = [(B, H, LQ, D), (B, kv_heads, LK, D), (B, kv_heads, LK, DV)]
    shapes += [] if bias is None else [bias]
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def bind(attention: Function, options: dict[str, Any]) -> Function:
    """(query, key, value, bias) -> (out, lse), without the lse of empty rows: -inf has no derivative."""

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Leaves:
        out, lse = attention(query, key, value, bias=bias, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return function


def problem(case: str) -> tuple[Function, Function, Leaves]:
    """Ours, the definition, and the leaves."""
    bias, kv_heads, options = CASES[case]()
    leaves = draw(bias, kv_heads)
    return bind(mha_ext.attention, options), bind(reference.attention, options), leaves


def requiring(leaves: Leaves) -> Leaves:
    return tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)


def like(leaves: Leaves) -> Leaves:
    return tuple(torch.randn_like(leaf) for leaf in leaves)


def total(results: Any) -> Tensor:
    return sum((x.sin() * (i + 1)).sum() for i, x in enumerate(results))  # type: ignore[return-value]


# PyTorch's own checks, against finite differences


@pytest.mark.isa
@pytest.mark.parametrize("case", CASES)
def test_gradgradcheck(case: str) -> None:
    function, _, leaves = problem(case)
    assert gradgradcheck(function, requiring(leaves), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.isa
@pytest.mark.parametrize("case", CASES)
def test_gradcheck_in_forward_mode(case: str) -> None:
    function, _, leaves = problem(case)
    assert gradcheck(
        function,
        requiring(leaves),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=True,
    )


@pytest.mark.isa
@pytest.mark.parametrize("part", [{}, {"heads": [1, 0, 1], "rows": [2, 0]}])
def test_gradcheck_of_weights(part: dict[str, Any]) -> None:
    query, key, _, bias = requiring(draw((H, LQ, LK), 1))

    def function(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        return mha_ext.attention_weights(query, key, bias=bias, causal="lower_right", **part)

    assert gradcheck(
        function,
        (query, key, bias),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=on_emulator,
    )
    assert gradgradcheck(function, (query, key, bias), check_fwd_over_rev=True, fast_mode=True)


# Against the definition, which PyTorch differentiates itself


def gradient(function: Function) -> Function:
    return lambda *leaves: torch.func.grad(
        lambda *x: total(function(*x)), tuple(range(len(leaves)))
    )(*leaves)


def along(function: Function, direction: Leaves) -> Function:
    return lambda *leaves: torch.func.jvp(function, leaves, direction)[1]


def vjp_of(function: Function) -> Function:
    def run(*leaves: Tensor) -> Any:
        results, pull = torch.func.vjp(function, *leaves)
        return pull(tuple(x.cos() for x in results))

    return run


# Each makes of a function one of its derivatives; d and e are directions.
NESTS: dict[str, Callable[[Function, Leaves, Leaves], Function]] = {
    "jvp": lambda f, d, e: along(f, d),
    "jvp of vjp": lambda f, d, e: along(vjp_of(f), d),
    "grad of jvp": lambda f, d, e: gradient(along(f, d)),
    "grad of grad": lambda f, d, e: gradient(gradient(f)),
    "jvp of jvp": lambda f, d, e: along(along(f, d), e),
    "jvp of jvp of grad": lambda f, d, e: along(along(gradient(f), d), e),
    "grad of jvp of grad": lambda f, d, e: gradient(along(gradient(f), d)),
    "grad of jvp of jvp": lambda f, d, e: gradient(along(along(f, d), e)),
    "grad of grad of grad": lambda f, d, e: gradient(gradient(gradient(f))),
}
FOURTH: dict[str, Callable[[Function, Leaves, Leaves], Function]] = {
    "four times grad": lambda f, d, e: gradient(gradient(gradient(gradient(f)))),
    "four times jvp": lambda f, d, e: along(along(along(along(f, d), e), d), e),
}


@pytest.mark.isa
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_the_definition(case: str, nest: str) -> None:
    ours, right, leaves = problem(case)
    d, e = like(leaves), like(leaves)
    torch.testing.assert_close(NESTS[nest](ours, d, e)(*leaves), NESTS[nest](right, d, e)(*leaves))


@pytest.mark.parametrize("nest", FOURTH)
def test_fourth_order(nest: str) -> None:
    ours, right, leaves = problem("everything")
    d, e = like(leaves), like(leaves)
    torch.testing.assert_close(
        FOURTH[nest](ours, d, e)(*leaves), FOURTH[nest](right, d, e)(*leaves)
    )


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("part", [{}, {"heads": [1, 0, 1], "rows": [2, 0]}])
def test_weights_are_the_same_as_the_definition(part: dict[str, Any], nest: str) -> None:
    query, key, _, bias = draw((LQ, LK), 1)
    leaves = (query, key, bias)
    options = {"mask": emptying_mask(), "empty_rows": "uniform", **part}

    def bound(weights: Function) -> Function:
        return lambda query, key, bias: (weights(query, key, bias=bias, **options),)

    d, e = like(leaves), like(leaves)
    found = NESTS[nest](bound(mha_ext.attention_weights), d, e)(*leaves)
    wanted = NESTS[nest](bound(reference.attention_weights), d, e)(*leaves)
    torch.testing.assert_close(found, wanted)


def test_functional_interface() -> None:
    ours, right, leaves = problem("everything")
    d = like(leaves)
    for name in ("hvp", "vhp"):
        run = getattr(torch.autograd.functional, name)
        torch.testing.assert_close(
            run(lambda *x: total(ours(*x)), leaves, d), run(lambda *x: total(right(*x)), leaves, d)
        )
    for strategy in ({}, {"vectorize": True, "outer_jacobian_strategy": "forward-mode"}):
        found, wanted = (
            torch.autograd.functional.hessian(lambda *x, f=f: total(f(*x)), leaves, **strategy)
            for f in (ours, right)
        )
        torch.testing.assert_close(found, wanted)


def test_dual_numbers() -> None:
    ours, _, leaves = problem("everything")
    d = like(leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, d, strict=True)]
        results = [forward_ad.unpack_dual(x) for x in ours(*duals)]
    primals, tangents = zip(*results, strict=True)
    wanted = torch.func.jvp(ours, leaves, d)
    torch.testing.assert_close((tuple(primals), tuple(tangents)), wanted)
    assert tangents[0].transpose(1, 2).is_contiguous()


def test_dual_numbers_that_require_gradients() -> None:
    """Both modes on one level: reverse over forward, and forward over reverse."""
    ours, _, leaves = problem("everything")
    leaves, d = requiring(leaves), like(leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, d, strict=True)]
        loss = total(ours(*duals))
        slope = forward_ad.unpack_dual(loss).tangent
        over = torch.autograd.grad(slope, leaves, retain_graph=True)
        grads = torch.autograd.grad(loss, duals, create_graph=True)
        under = [forward_ad.unpack_dual(grad).tangent for grad in grads]
    plain = tuple(leaf.detach() for leaf in leaves)
    wanted = torch.func.jvp(gradient(ours), plain, d)[1]
    torch.testing.assert_close(over, wanted)
    torch.testing.assert_close(tuple(under), wanted)


@pytest.mark.parametrize(
    "moved", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)]
)
def test_only_what_moves(moved: tuple[int, ...]) -> None:
    """What does not move has no tangent and no gradient: None, not a tensor of zeros."""
    ours, right, leaves = problem("everything")
    d = tuple(torch.randn_like(leaves[i]) for i in moved)

    def part(function: Function) -> Function:
        def run(*some: Tensor) -> Any:
            whole = list(leaves)
            for i, x in zip(moved, some, strict=True):
                whole[i] = x
            return function(*whole)

        return run

    some = tuple(leaves[i] for i in moved)
    for nest in ("jvp", "jvp of vjp", "grad of jvp", "grad of grad", "jvp of jvp of grad"):
        found = NESTS[nest](part(ours), d, d)(*some)
        torch.testing.assert_close(found, NESTS[nest](part(right), d, d)(*some))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("result", range(2))
def test_one_gradient_of_one_result(result: int, which: int) -> None:
    """Undefined gradients reach the Nodes of forward and of backward."""
    found = []
    for function in problem("everything")[:2]:
        torch.manual_seed(5)
        leaves = requiring(draw((1, H, LQ, LK), 1))
        loss = function(*leaves)[result].sin().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        if grads[which] is None or not grads[which].requires_grad:  # lse knows no value
            assert (result, which) == (1, 2)
            return
        again = torch.autograd.grad(
            grads[which].cos().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        found.append(again)
    torch.testing.assert_close(*found)


def test_a_direct_call_of_backward() -> None:
    """out and lse are caches: the derivatives are total without them."""
    query, key, value = draw(None, 1)
    out, *lse = ops.attention_forward(query, key, value, None, None, None, None, scale=0.5)

    def run(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Leaves:
        rest = (None, None, None, None)
        grads = ops.attention_backward(
            *(grad_out, None, query, key, value, out, *lse, *rest),
            **{"scale": 0.5, "output_mask": [True, True, True, False]},
        )
        return tuple(grads[:3])

    def right(grad_out: Tensor, *leaves: Tensor) -> Leaves:
        pull = torch.func.vjp(lambda *x: reference.attention(*x, scale=0.5), *leaves)[1]
        return tuple(pull(grad_out))

    leaves = (torch.randn_like(out), query, key, value)
    d = like(leaves)
    for nest in ("jvp", "grad of jvp", "jvp of jvp"):
        found, wanted = (NESTS[nest](f, d, d)(*leaves) for f in (run, right))
        torch.testing.assert_close(found, wanted)


# Which kernel runs (the table of docs/derivatives.md)


class Record(TorchDispatchMode):
    """Names of the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def ours_only(names: list[str]) -> list[str]:
    return [n.removeprefix("mha_ext.attention_") for n in names if n.startswith("mha_ext")]


F, G, FT, GT = "forward", "backward", "forward_tangent", "backward_tangent"
KERNELS: dict[str, tuple[Callable[[Function, Leaves], Any], list[str]]] = {
    "grad": (lambda f, x: gradient(f)(*x), [F, G]),
    "jvp": (lambda f, x: along(f, x)(*x), [F, FT]),
    "jvp of grad": (lambda f, x: along(gradient(f), x)(*x), [F, FT, G, GT]),
    "grad of grad": (lambda f, x: gradient(gradient(f))(*x), [F, G, FT, GT, G]),
    "grad of jvp": (lambda f, x: gradient(along(f, x))(*x), [F, FT, GT]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_first_and_second_order_run_fused(name: str) -> None:
    """No matrix of scores: no matrix product and no softmax of PyTorch's own."""
    ours, _, leaves = problem("everything")
    run, kernels = KERNELS[name]
    with Record() as record:
        run(ours, leaves)
    assert sorted(ours_only(record.names)) == sorted(kernels)
    quadratic = ("mm", "matmul", "softmax", "einsum")
    assert not [n for n in record.names if any(word in n for word in quadratic)]


def test_gradient_penalty_runs_fused() -> None:
    ours, _, leaves = problem("everything")
    leaves = requiring(leaves)
    with Record() as record:
        grads = torch.autograd.grad(ours(*leaves)[0].sin().sum(), leaves, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    assert sorted(ours_only(record.names)) == sorted([F, G, FT, GT, G])
    assert not [n for n in record.names if "mm" in n or "softmax" in n]


# Guarantees


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("nest", NESTS)
def test_poison_behind_a_mask(nest: str, poison: float) -> None:
    """The hidden half of the keys holds NaN or Inf, and so do an empty row's query and direction."""
    query, key, value = draw(None, 1)
    seen = torch.tensor([True, True, False, False])
    rows = torch.tensor([True, False, True])[:, None]
    ours = bind(mha_ext.attention, {"mask": seen & rows})
    right = bind(reference.attention, {"mask": seen & rows})

    def poisoned(leaves: Leaves) -> Leaves:
        query, key, value = (leaf.clone() for leaf in leaves)
        query[:, :, 1] = key[:, :, 2:] = value[:, :, 2:] = poison
        return query, key, value

    leaves = (query, key, value)
    d, e = like(leaves), like(leaves)
    found = NESTS[nest](ours, poisoned(d), poisoned(e))(*poisoned(leaves))
    torch.testing.assert_close(found, NESTS[nest](right, d, e)(*leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nest", NESTS)
def test_dtypes(nest: str, dtype: torch.dtype) -> None:
    function = bind(mha_ext.attention, {})
    leaves, d, e = (tuple(x.to(dtype) for x in draw((LQ, LK), 1)) for _ in range(3))
    found = NESTS[nest](function, d, e)(*leaves)
    wide = [tuple(x.double() for x in xs) for xs in (leaves, d, e)]
    wanted = NESTS[nest](bind(reference.attention, {}), *wide[1:])(*wide[0])
    lse = torch.float32
    kinds = (dtype, lse) if len(found) == 2 else (dtype,) * 4
    assert tuple(x.dtype for x in found) == kinds
    size = max(float(x.abs().max()) for x in wanted)
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    for x, y in zip(found, wanted, strict=True):
        assert float((x.double() - y).abs().max()) <= bound * size


def test_a_float32_bias() -> None:
    query, key, value = (x.bfloat16() for x in draw(None, 1))
    bias = torch.randn(LQ, LK)
    leaves = (query, key, value, bias)
    for nest in NESTS:
        d, e = like(leaves), like(leaves)
        found = NESTS[nest](bind(mha_ext.attention, {}), d, e)(*leaves)
        assert all(x.isfinite().all() for x in found)
        if len(found) == 4:
            assert [x.dtype for x in found] == [x.dtype for x in leaves]


@pytest.mark.parametrize("empty", ["B", "H", "Lq", "Lk"])
def test_empty_dimensions(empty: str) -> None:
    sizes = {"B": B, "H": H, "Lq": LQ, "Lk": LK, empty: 0}
    batch, heads, queries, keys = sizes.values()
    leaves = (
        torch.randn(batch, heads, queries, D),
        torch.randn(batch, heads, keys, D),
        torch.randn(batch, heads, keys, DV),
    )
    for nest in NESTS.values():
        found = nest(bind(mha_ext.attention, {}), like(leaves), like(leaves))(*leaves)
        assert all(x.isfinite().all() for x in found)
        if len(found) == 3:
            assert [x.shape for x in found] == [x.shape for x in leaves]


def test_an_edit_in_place_before_the_second_backward_raises() -> None:
    ours, _, leaves = problem("plain")
    leaves = requiring(leaves)
    grads = torch.autograd.grad(total(ours(*leaves)), leaves, create_graph=True)
    with torch.no_grad():
        leaves[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads[0].sum().backward()


# Checkpoints and autocast


def test_checkpoint_of_a_second_derivative() -> None:
    ours, _, leaves = problem("everything")

    def penalty(wrap: Function) -> Leaves:
        x = requiring(leaves)
        out = wrap(lambda *y: ours(*y)[0], *x)
        grads = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    found = penalty(lambda f, *x: checkpoint(f, *x, use_reentrant=False))
    torch.testing.assert_close(found, penalty(lambda f, *x: f(*x)))


def test_checkpoint_of_a_direction() -> None:
    ours, _, leaves = problem("everything")
    d = like(leaves)

    def slope(*x: Tensor) -> Tensor:
        return total(torch.func.jvp(ours, x, d)[1])

    for reentrant in (False, True):
        x = requiring(leaves)
        checkpoint(slope, *x, use_reentrant=reentrant).backward()
        wanted = torch.autograd.grad(slope(*(y := requiring(leaves))), y)
        torch.testing.assert_close(tuple(leaf.grad for leaf in x), wanted)


def test_selective_checkpoint_keeps_the_attention() -> None:
    ours, _, leaves = problem("everything")

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is ops.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    x = requiring(leaves)
    out = checkpoint(
        lambda *y: ours(*y)[0].sin(),
        *x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    with Record() as record:
        out.sum().backward()
    assert ours_only(record.names) == [G]
    wanted = torch.autograd.grad(ours(*(y := requiring(leaves)))[0].sin().sum(), y)
    torch.testing.assert_close(tuple(leaf.grad for leaf in x), wanted)


@pytest.mark.parametrize("nest", NESTS)
def test_autocast_at_every_order(nest: str) -> None:
    leaves = tuple(x.float() for x in draw((LQ, LK), 1))
    d, e = like(leaves), like(leaves)

    def cast(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        return bind(mha_ext.attention, {})(*(x.bfloat16() for x in (query, key, value)), bias)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = NESTS[nest](bind(mha_ext.attention, {}), d, e)(*leaves)
    wanted = NESTS[nest](cast, d, e)(*leaves)
    # The products of a composition are PyTorch's, and under torch.func they follow autocast.
    exact = nest not in ("jvp of jvp", "jvp of jvp of grad", "grad of jvp of jvp")
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            x, y, **({} if exact else {"rtol": 0.1, "atol": 0.1 * float(y.abs().max())})
        )
    assert found[-1].dtype == torch.float32  # lse, or the gradient of the bias


# torch.compile and torch.export

COMPILED: dict[str, Callable[[Function, Leaves], Function]] = {
    "jvp": lambda f, d: along(f, d),
    "grad": lambda f, d: gradient(f),
    "jvp of grad": lambda f, d: along(gradient(f), d),
    "hessian": lambda f, d: lambda *x: torch.func.hessian(lambda *y: total(f(*y)), (0, 3))(*x),
    "vmap of grad": lambda f, d: (
        lambda *x: torch.vmap(gradient(f), (None, None, None, 0))(
            *x[:3], torch.stack([x[3], x[3] + 1])
        )
    ),
    "jvp of jvp": lambda f, d: along(along(f, d), d),
}


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_compile(name: str) -> None:
    ours, _, leaves = problem("everything")
    run = COMPILED[name](ours, like(leaves))
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(found, run(*leaves))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["jvp", "jvp of grad"])
def test_compile_with_dynamic_shapes(name: str) -> None:
    compiled: dict[str, Any] = {}
    for keys in (4, 6, 9):
        leaves = (
            torch.randn(B, H, LQ, D).double(),
            *(torch.randn(B, 1, keys, n).double() for n in (D, DV)),
            torch.randn(LQ, keys).double(),
        )

        def run(*x: Tensor) -> Any:
            return COMPILED[name](
                bind(mha_ext.attention, {"window": (2, 2), "causal": "upper_left"}), x
            )(*x)

        compiled.setdefault(
            "it", torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
        )
        torch.testing.assert_close(compiled["it"](*leaves), run(*leaves))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_a_gradient_penalty() -> None:
    """func.grad inside, backward outside: the second derivative is in the compiled backward."""
    ours, _, leaves = problem("everything")

    def penalty(*x: Tensor) -> Tensor:
        return total(gradient(ours)(*x))

    found, wanted = (
        torch.autograd.grad(f(*(x := requiring(leaves))), x)
        for f in (torch.compile(penalty, backend="aot_eager", fullgraph=True), penalty)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("_fresh_compiler")
def test_dual_numbers_through_compiled_code() -> None:
    ours, _, leaves = problem("everything")
    d = like(leaves)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, d, strict=True)]
        tangents = tuple(forward_ad.unpack_dual(x).tangent for x in compiled(*duals))
    torch.testing.assert_close(tangents, along(ours, d)(*leaves))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_compiled_autograd(order: int) -> None:
    ours, _, leaves = problem("grouped")

    def grads(compile_it: bool) -> list[Tensor | None]:
        x = requiring(leaves)
        loss = total(ours(*x))
        for _ in range(order - 1):
            loss = total(torch.autograd.grad(loss, x, create_graph=True))
        if compile_it:
            with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                loss.backward()
        else:
            loss.backward()
        return [leaf.grad for leaf in x]

    torch.testing.assert_close(grads(True), grads(False))


class Derivative(torch.nn.Module):
    """The derivative along the leaves themselves, or the gradient."""

    def __init__(self, attention: Function, derivative: str) -> None:
        super().__init__()
        self.function = bind(attention, {"causal": "upper_left", "window": (2, None)})
        self.derivative = derivative

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        leaves = (query, key, value, bias)
        return NESTS[self.derivative](self.function, leaves, leaves)(*leaves)


@pytest.mark.parametrize("decompose", [False, True])
def test_export_with_dynamic_shapes(decompose: bool) -> None:
    def make(batch: int, keys: int) -> Leaves:
        shapes = [(batch, H, LQ, D), (batch, 1, keys, D), (batch, 1, keys, DV), (LQ, keys)]
        return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)

    batch, keys = torch.export.Dim("b", min=2, max=99), torch.export.Dim("k", min=2, max=99)
    rows = {0: batch, 2: keys}
    program = torch.export.export(
        Derivative(mha_ext.attention, "jvp"),
        make(3, 5),
        dynamic_shapes=({0: batch}, rows, rows, {1: keys}),
        strict=False,
    )
    if decompose:
        program = program.run_decompositions()
    leaves = make(4, 7)
    found = program.module()(*leaves)
    torch.testing.assert_close(tuple(found), Derivative(mha_ext.attention, "jvp")(*leaves))


# What PyTorch itself cannot do (docs/derivatives.md quotes these messages)


@pytest.mark.usefixtures("_fresh_compiler")
def test_pytorch_has_no_double_backward_through_compiled_code() -> None:
    ours, right, leaves = problem("plain")
    limit = "does not currently support double backward"
    # PyTorch copies a gradient that lies in memory otherwise than the output, and trips over itself.
    layout = "a leaf Variable that requires grad is being used in an in-place operation"

    def loss(function: Function) -> Function:
        return lambda *x: total(function(*x))

    for function, message in ((loss(ours), limit), (loss(right), limit), (ours, layout)):
        torch._dynamo.reset()
        x = requiring(leaves)
        found = torch.compile(function, backend="aot_eager")(*x)
        result = found if isinstance(found, Tensor) else total(found)
        with pytest.raises(RuntimeError, match=message):
            total(torch.autograd.grad(result, x, create_graph=True)).backward()


@pytest.mark.usefixtures("_fresh_compiler")
def test_pytorch_has_no_jvp_of_compiled_code() -> None:
    ours, right, leaves = problem("plain")
    for function in (ours, right):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"torch.func.jvp\(compiled_fn\).*is not supported"):
            torch.func.jvp(compiled, leaves, leaves)


def test_pytorch_does_not_export_func_grad() -> None:
    leaves = draw((LQ, LK), 1)
    for attention in (mha_ext.attention, reference.attention):
        with pytest.raises(Exception, match="Cannot access (storage|data pointer)"):
            torch.export.export(Derivative(attention, "grad of jvp"), leaves, strict=False)


# PyTorch's checks of an operator


@pytest.mark.parametrize("full", [False, True])
def test_opcheck(full: bool) -> None:
    query, key, value, bias = draw((H, LQ, LK), 1)
    pairs = (mask(B, 1, 1, LK), bias, torch.tensor([4, 2])) if full else (None, None, None)
    rest = (*pairs, torch.tensor([5, 6]) if full else None)
    options: dict[str, Any] = {"scale": 0.4}
    if full:
        options |= {"dropout_p": 0.3, "corner": "lower_right", "window_left": 2}
        options |= {"uniform_empty_rows": True, "origin": [0, 1, 2, 3]}
    with torch.no_grad():
        out, *lse = ops.attention_forward(query, key, value, *rest, **options)
        moved = [torch.randn_like(x) for x in (query, key, value)]
        moved.append(torch.randn_like(bias) if full else None)  # type: ignore[arg-type]
        first = ops.attention_forward_tangent(
            query, key, value, out, *lse, *moved, *rest, **options
        )
    # Gradients too, but not of backward_tangent: its composition takes long to trace.
    args = (*requiring((query, key, value)), out, *lse, *moved, *rest)
    torch.library.opcheck(ops.attention_forward_tangent.default, args, options)

    grad_lse = torch.randn_like(lse[0]) if full else None
    turned = (torch.randn_like(out), torch.randn_like(lse[0]) if full else None)
    args = (out, grad_lse, query, key, value, out, *lse, *first, *moved, *turned, *rest)
    for output_mask in ([True, True, True, full], [False, True, False, False])[: 1 + full]:
        torch.library.opcheck(
            ops.attention_backward_tangent.default, args, {**options, "output_mask": output_mask}
        )
