"""vmap over any argument without a loop, and the FLOP formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mha_ext
from mha_ext import reference

N, B, H, LQ, LK, D, DV = 3, 2, 2, 3, 4, 2, 3
NAMES = ("query", "key", "value", "mask", "bias", "key_lengths", "seed")

Function = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("error:There is a performance drop"),  # vmap's slow fallback
]


def make(*groups: int) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*groups, *shape, dtype=torch.float64)

    mask = torch.rand(*groups, B, 1, 1, LK) > 0.3
    return {
        "query": draw(B, H, LQ, D),
        "key": draw(B, 1, LK, D),
        "value": draw(B, 1, LK, DV),
        "mask": mask,
        "bias": draw(H, LQ, LK),
        "key_lengths": torch.randint(0, LK + 1, (*groups, B)),
        "seed": torch.randint(0, 2**32, (*groups, 2)),
    }


def bind(attention: Function, **options: Any) -> Function:
    """The tensors of NAMES, positionally, to (out, lse)."""

    def run(*args: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, mask, bias, key_lengths, seed = args
        out, lse = attention(
            *(query, key, value, mask),
            bias=bias,
            key_lengths=key_lengths,
            seed=seed,
            dropout_p=0.4,
            return_lse=True,
            **options,
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return run


OURS, RIGHT = bind(mha_ext.attention), bind(reference.attention)
LEAVES = (0, 1, 2, 4)  # query, key, value, bias


def loss(function: Function) -> Function:
    return lambda *args: sum((x.sin() * (i + 1)).sum() for i, x in enumerate(function(*args)))


def gradient(function: Function) -> Function:
    return torch.func.grad(loss(function), LEAVES)


def along(function: Function) -> Function:
    """The derivative in a direction that depends on the arguments, so that it is mapped as they are."""

    def run(*args: Tensor) -> Any:
        def move(*leaves: Tensor) -> Any:
            whole = list(args)
            for i, leaf in zip(LEAVES, leaves, strict=True):
                whole[i] = leaf
            return function(*whole)

        leaves = tuple(args[i] for i in LEAVES)
        return torch.func.jvp(move, leaves, tuple(x.cos() for x in leaves))[1]

    return run


# What is mapped over: a function, or one of its derivatives.
INNER: dict[str, Callable[[Function], Function]] = {
    "forward": lambda f: f,
    "grad": gradient,
    "jvp": along,
    "jvp of grad": lambda f: along(gradient(f)),
    "grad of grad": lambda f: gradient(gradient(f)),
    "jvp of jvp": lambda f: along(along(f)),
}
# Which arguments are mapped.
MAPPED: dict[str, tuple[str, ...]] = {
    "all": NAMES,
    "query": ("query",),
    "key": ("key",),
    "value": ("value",),
    "mask": ("mask",),
    "bias": ("bias",),
    "key_lengths": ("key_lengths",),
    "seed": ("seed",),
    "shared keys": ("query", "mask", "key_lengths"),
    "shared bias": ("query", "key", "value", "seed"),
}


@pytest.mark.isa
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(mapped: str, inner: str) -> None:
    many, one = make(N), make()
    dims = tuple(0 if name in MAPPED[mapped] else None for name in NAMES)
    args = [(one if dim is None else many)[n] for n, dim in zip(NAMES, dims, strict=True)]
    found = torch.vmap(INNER[inner](OURS), dims)(*args)
    torch.testing.assert_close(found, torch.vmap(INNER[inner](RIGHT), dims)(*args))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mapped", MAPPED)
def test_nested_vmap(mapped: str, inner: str) -> None:
    """The outer vmap maps what the inner one shares, but for half of the arguments."""
    inside = set(MAPPED[mapped])
    outside = {name for name in NAMES if name not in inside} | {"query", "bias"}
    sizes = {n: (2,) * (n in outside) + (N,) * (n in inside) for n in NAMES}
    args = [make(*sizes[name])[name] for name in NAMES]
    inner_dims = tuple(0 if name in inside else None for name in NAMES)
    outer_dims = tuple(0 if name in outside else None for name in NAMES)
    found, wanted = (
        torch.vmap(torch.vmap(INNER[inner](f), inner_dims), outer_dims)(*args)
        for f in (OURS, RIGHT)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("mapped", MAPPED)
def test_gradient_of_vmap(mapped: str) -> None:
    """Gradients of what is shared are sums over the mapped dimension."""
    many, one = make(N), make()
    dims = tuple(0 if name in MAPPED[mapped] else None for name in NAMES)
    args = [(one if dim is None else many)[n] for n, dim in zip(NAMES, dims, strict=True)]
    found, wanted = (gradient(torch.vmap(f, dims))(*args) for f in (OURS, RIGHT))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("in_dims", [(1, 2, 4, -1, -2, 1, -1), (-1, 0, 1, 2, 3, 0, 0)])
def test_dimensions_anywhere(in_dims: tuple[int, ...]) -> None:
    args = [x.movedim(0, d) for x, d in zip(make(N).values(), in_dims, strict=True)]
    found = torch.vmap(OURS, in_dims, out_dims=(2, -1))(*args)
    torch.testing.assert_close(found, torch.vmap(RIGHT, in_dims, out_dims=(2, -1))(*args))


@pytest.mark.parametrize("part", [{}, {"heads": [1, 0, 1], "rows": [2]}])
@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (0, None, None, 0), (None, 0, 0, None)])
def test_weights(dims: tuple[int | None, ...], part: dict[str, Any]) -> None:
    names = ("query", "key", "mask", "bias")
    many, one = make(N), make()
    args = [(one if d is None else many)[name] for name, d in zip(names, dims, strict=True)]

    def derivatives(weights: Function) -> Function:
        def run(query: Tensor, key: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
            shown: Tensor = weights(query, key, mask, bias=bias, **part)
            return shown.sin().sum()

        return lambda *a: (weights(*a[:3], bias=a[3], **part), torch.func.hessian(run, (0, 3))(*a))

    found = torch.vmap(derivatives(mha_ext.attention_weights), dims)(*args)
    torch.testing.assert_close(
        found, torch.vmap(derivatives(reference.attention_weights), dims)(*args)
    )


def test_jacobians() -> None:
    query, key, value, _, bias, *_ = make().values()

    def of(attention: Function) -> Function:
        return lambda *x: attention(*x[:3], bias=x[3], causal="lower_right")

    leaves, every = (query, key, value, bias), (0, 1, 2, 3)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        found, wanted = (jacobian(of(m.attention), every)(*leaves) for m in (mha_ext, reference))
        torch.testing.assert_close(found, wanted)
    for outer in (torch.func.jacrev, torch.func.jacfwd):
        for inner in (torch.func.jacrev, torch.func.jacfwd):
            found, wanted = (
                outer(inner(loss(lambda *x, m=m: (of(m.attention)(*x),)), every), every)(*leaves)
                for m in (mha_ext, reference)
            )
            torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize() -> None:
    query, key, value, *_ = make().values()
    out, push = torch.func.linearize(mha_ext.attention, query, key, value)
    wanted = torch.func.jvp(
        reference.attention, (query, key, value), (query, value[..., :D], value)
    )
    torch.testing.assert_close((out, push(query, value[..., :D], value)), wanted)


def test_randomness() -> None:
    """The seed is drawn outside of the operator, so vmap knows whether it may."""
    one = torch.randn(B, H, LQ, D)
    many = one.expand(5, -1, -1, -1, -1)

    def run(randomness: str) -> Tensor:
        attention = torch.vmap(
            lambda x: mha_ext.attention(x, x, x, dropout_p=0.5), randomness=randomness
        )
        found: Tensor = attention(many)
        return found

    same, different = run("same"), run("different")
    assert all(torch.equal(same[0], other) for other in same)
    assert not any(torch.equal(different[0], other) for other in different[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        run("error")


class Record(TorchDispatchMode):
    """The calls of the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mha_ext":
            self.calls.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))


def test_one_call_that_copies_nothing() -> None:
    many, one = make(N), make()
    dims = (0, None, None, 0, None, None, None)
    args = [(one if d is None else many)[n] for n, d in zip(NAMES, dims, strict=True)]
    with Record() as record:
        torch.vmap(gradient(OURS), dims)(*args)
    assert [name for name, _ in record.calls] == [
        "mha_ext::attention_forward",
        "mha_ext::attention_backward",
    ]
    query, key, value, mask, *_ = record.calls[0][1]
    for found, given in ((query, args[0]), (key, args[1]), (value, args[2]), (mask, args[3])):
        assert found.data_ptr() == given.data_ptr()
    assert key.shape[0] == value.shape[0] == N
    assert key.stride(0) == value.stride(0) == 0


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "causal": True, "bias": False}])
def test_gradients_of_each_sample(options: dict[str, Any]) -> None:
    """torch.func.functional_call: the parameters are shared, the samples mapped."""
    layer = mha_ext.MultiHeadAttention(8, 2, dtype=torch.float64, **options)
    parameters = dict(layer.named_parameters())
    samples, lengths = torch.randn(5, 2, 4, 8, dtype=torch.float64), torch.randint(1, 5, (5, 2))

    def loss(parameters: dict[str, Tensor], x: Tensor, length: Tensor) -> Tensor:
        padding = torch.arange(4) < length[:, None]
        out: Tensor = torch.func.functional_call(
            layer, parameters, (x,), {"key_padding_mask": padding}
        )
        return out.square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, samples, lengths)
    for i in range(5):
        wanted = torch.func.grad(loss)(parameters, samples[i], lengths[i])
        torch.testing.assert_close({name: grad[i] for name, grad in found.items()}, wanted)


def test_ensemble_of_layers() -> None:
    layers = [mha_ext.MultiHeadAttention(8, 2, dtype=torch.float64) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 8, dtype=torch.float64)

    def run(parameters: Any, buffers: Any) -> Any:
        state = (parameters, buffers)
        return torch.func.functional_call(layers[0], state, (x,), {"need_weights": True})

    found = torch.vmap(run)(parameters, buffers)
    for i, layer in enumerate(layers):
        torch.testing.assert_close((found[0][i], found[1][i]), layer(x, need_weights=True))


def test_errors_know_the_rank_without_the_mapped_dimension() -> None:
    x = torch.randn(N, B, H, LQ, D)
    with pytest.raises(ValueError, match=r"query must have 4 dimensions.*\[2, 3, 2\]"):
        torch.vmap(mha_ext.attention)(x[:, 0], x[:, 0], x[:, 0])
    with pytest.raises(ValueError, match="causal=True must have as many queries as keys"):
        torch.vmap(lambda q, k: mha_ext.attention(q, k, k, causal=True))(x, x[..., :2, :])
    with pytest.raises(ValueError, match="4 dimensions"):
        mha_ext.attention(x, x, x)
    layer = mha_ext.MultiHeadAttention(8, 2)
    with pytest.raises(ValueError, match=r"query must be \[B, Lq, 8\], not \[4, 8\]"):
        torch.vmap(layer)(torch.randn(3, 4, 8))


# FLOP formulas


def flops(function: Function, *args: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    counts = counter.get_flop_counts()["Global"]
    return {str(op).split("attention_")[-1].split(".")[0]: n for op, n in counts.items()}


PAIRS = 2 * B * H * LQ * LK


def plain(*leaves: Tensor) -> Tensor:
    out: Tensor = mha_ext.attention(*leaves)
    return out


def test_flops() -> None:
    leaves = tuple(make()[name] for name in ("query", "key", "value"))
    assert flops(plain, *leaves) == {"forward": PAIRS * (D + DV)}
    every = torch.func.grad(lambda *x: plain(*x).sum(), (0, 1, 2))
    assert flops(every, *leaves) == {
        "forward": PAIRS * (D + DV),
        "backward": PAIRS * (3 * D + 2 * DV),
    }
    only_value = torch.func.grad(lambda *x: plain(*x).sum(), 2)
    assert flops(only_value, *leaves)["backward"] == PAIRS * (D + DV)
    found = flops(lambda *x: torch.func.jvp(plain, x, x), *leaves)
    assert found["forward_tangent"] == PAIRS * (3 * D + 2 * DV)
    found = flops(lambda v: torch.func.jvp(lambda v: plain(*leaves[:2], v), (v,), (v,)), leaves[2])
    assert found["forward_tangent"] == PAIRS * (D + DV)
    found = flops(lambda *x: torch.func.jvp(every, x, x), *leaves)
    assert found["backward_tangent"] == PAIRS * (7 * D + 3 * DV)  # grad_out does not move


def test_flops_of_groups_and_weights() -> None:
    leaves = tuple(make(N)[name] for name in ("query", "key", "value"))
    assert flops(torch.vmap(plain), *leaves) == {"forward": N * PAIRS * (D + DV)}
    query, key = (make()[name] for name in ("query", "key"))

    def shown(query: Tensor, key: Tensor) -> Tensor:
        return mha_ext.attention_weights(query, key, heads=[1], rows=[0, 2])

    part = 2 * B * 1 * 2 * LK
    assert flops(shown, query, key)["weights"] == part * D
    grads = torch.func.grad(lambda *x: shown(*x).sin().sum(), (0, 1))
    assert flops(grads, query, key)["weights_backward"] == part * 2 * D
