"""Every gradient against the definition in float64, through every option (guarantee 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    PROBLEMS,
    RANDOM_PROBLEMS,
    Inputs,
    Problem,
    assert_accurate,
    call,
    exact,
    largest_terms,
    make,
    plain_orders,
    results,
)
from sizes import fewer, on_emulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext

pytestmark = pytest.mark.isa


def ours(inputs: object) -> dict[str, Tensor]:
    return results(lambda i: call(mha_ext.attention, i), inputs)


def check(problem: Problem) -> None:
    check_inputs(make(problem))


def check_inputs(inputs: Inputs, found: dict[str, Tensor] | None = None) -> None:
    """`found`: what is to be right for them, if it is not theirs."""
    found = ours(inputs) if found is None else found
    for name, leaf in inputs.leaves().items():
        assert found[f"grad_{name}"].dtype == leaf.dtype, name
    names = ["out", *(name for name in found if name.startswith("grad_"))]
    plains = plain_orders(inputs, results)
    assert_accurate(found, exact(inputs), plains, largest_terms(inputs), names)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_option(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("problem", RANDOM_PROBLEMS, ids=lambda p: f"random-{p.numbers}")
def test_options_together(problem: Problem) -> None:
    check(problem)


OTHERS: tuple[dict[str, Any], ...] = (
    {"head_dim": 64},
    {"head_dim": 40, "value_dim": 70, "heads": 4, "kv_heads": 2, "dropout_p": 0.2},
)


@pytest.mark.parametrize("second", ["all", "some", "none", "not finite"])
@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_queries_that_see_different_keys(
    dtype: torch.dtype, others: dict[str, Any], second: str
) -> None:
    """Of a tile of keys one block of 64 queries sees all, its neighbour something else: what may be added together is
    not what is."""
    inputs = make(Problem(dtype=dtype, batch=1, queries=256, keys=192, mask="11qk", **others))
    mask = torch.ones(256, 192, dtype=torch.bool)
    some = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.5
    for first_query, first_key in ((64, 64), (128, 0), (192, 128)):
        tile = mask[first_query : first_query + 64, first_key : first_key + 64]
        tile[:] = {"all": True, "none": False}.get(second, some)
    hidden = [70, 130]
    if second == "not finite":
        mask[hidden] = False
    inputs.mask = mask[None, None]
    given = inputs.replaced(query=inputs.query.clone())
    if second == "not finite":
        given.query[:, :, hidden] = torch.inf
    check_inputs(inputs, ours(given))


class MaybeMoreKeys(TorchDispatchMode):
    """Backward does not hear that out and lse are the results for its keys alone."""

    unsaid = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.unsaid += (kwargs or {}).pop("all_keys", False)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if max(p.queries, p.keys) <= 64], ids=str)
def test_every_option_where_keys_may_be_a_part(problem: Problem) -> None:
    """The calls that ring attention makes: delta comes out of what may be the output of more keys."""
    with MaybeMoreKeys() as mode:
        check(problem)
    assert mode.unsaid == 1


BIASED = Problem(heads=4, kv_heads=2, queries=33, keys=70, bias="1hqk", dropout_p=0.2)


UNIFORM = Problem(queries=9, mask="11qk", bias="1hqk", empty_rows="uniform")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "query value", "key bias"])
@pytest.mark.parametrize(
    "problem",
    [BIASED, UNIFORM, replace(UNIFORM, keys=70), replace(UNIFORM, queries=4, keys=5)],
    ids=str,
)
def test_only_the_gradients_asked_for(problem: Problem, dtype: torch.dtype, wanted: str) -> None:
    """Any subset of the inputs may need a gradient; each is what it is beside the others."""
    inputs = make(replace(problem, dtype=dtype))
    everything = ours(inputs)
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.leaves().items()}
    out, lse = call(mha_ext.attention, inputs.replaced(**leaves))
    used = [(out, inputs.grad_out), (lse, inputs.grad_lse)][: 2 if lse.requires_grad else 1]
    torch.autograd.backward(*zip(*used, strict=True))
    for name, leaf in leaves.items():
        if name not in wanted:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, everything[f"grad_{name}"]), name


SHARED_BIASES = {
    "shares": Problem(batch=9, heads=3, bias="hqk"),
    "shares, the last one smaller": Problem(batch=70, heads=3, queries=5, keys=7, bias="1hqk"),
    "few queries": Problem(batch=20, heads=6, kv_heads=2, queries=2, bias="1hqk"),
    "shares of one": Problem(batch=9, heads=4, kv_heads=2, queries=70, keys=130, bias="qk"),
    "one share": Problem(batch=2, heads=8, queries=260, keys=260, head_dim=8, bias="1hqk"),
    "shares and ranges": Problem(batch=7, heads=1, queries=200, keys=1100, head_dim=8, bias="qk"),
    "ranges": Problem(batch=2, queries=9, keys=4100, head_dim=8, bias="b1qk"),
    "ranges of few queries": Problem(batch=2, queries=3, keys=4100, head_dim=8, bias="b1qk"),
}


@pytest.mark.cpu_alone("how sums are cut is each device's own")
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHARED_BIASES)
def test_a_bias_that_many_share(
    name: str, dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    """Its gradient is added up in turns, maybe beside it; on any number of threads, the same bits."""
    problem = replace(SHARED_BIASES[name], dtype=dtype, bias_dtype=bias_dtype, dropout_p=0.2)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(ours(make(problem)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    check(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_in_several_calls(dtype: torch.dtype) -> None:
    """On one thread, where the ranges of a wide head's keys take more than one call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(fewer(Problem(dtype=dtype, queries=70, keys=300, head_dim=256, causal="lower_right")))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cpu_alone("how sums are cut is each device's own")
@pytest.mark.parametrize("queries, keys", [(64, 8192), (8192, 64)])
def test_long_sums_round_like_short_ones(queries: int, keys: int) -> None:
    """Sums over thousands of tokens have the errors of PyTorch's products, not of a running sum."""
    inputs = make(Problem(batch=1, heads=1, queries=queries, keys=keys))
    found, wanted = ours(inputs), exact(inputs)
    plains = plain_orders(inputs, results)
    for name in ("out", "grad_query", "grad_key", "grad_value"):

        def error(of: dict[str, Tensor], name: str = name) -> float:
            return float((of[name].double() - wanted[name]).square().mean().sqrt())

        assert error(found) <= 2 * max(map(error, plains)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("length", [3, 12, 40, 150])
def test_a_part_of_the_keys(length: int, kv_heads: int, dtype: torch.dtype) -> None:
    """With the output and lse of all keys: its part of each sum, as a ring of processes adds them."""
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 1, 2, length, 16, dtype=dtype)
    key, value = torch.randn(2, 1, kv_heads, length, 16, dtype=dtype)
    ops, rest = torch.ops.mha_ext, (None, None, None, None)
    out, *lse = ops.attention_forward(query, key, value, *rest, scale=0.25)

    def gradients(keys: slice) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = ops.attention_backward(
            *(grad_out, None, query, key[:, :, keys], value[:, :, keys], out, *lse, *rest),
            **{"scale": 0.25, "output_mask": [True, True, True, False]},
        )
        return found[:3]

    first, second = gradients(slice(0, length // 3)), gradients(slice(length // 3, length))
    found = (first[0] + second[0], *(torch.cat(x, 2) for x in zip(first[1:], second[1:])))
    torch.testing.assert_close(found, gradients(slice(0, length)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_keys_needs_the_low_part_of_lse(dtype: torch.dtype) -> None:
    """The sum of P is 1 to the last bits only with it; without it delta comes out of the output."""
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 1, 2, 12, 16, dtype=dtype)
    ops, rest = torch.ops.mha_ext, (None, None, None, None)
    out, lse, _ = ops.attention_forward(30 * query, key, value, *rest, scale=1.0)
    given = (grad_out, None, 30 * query, key, value, out, lse, None, *rest)
    options = {"scale": 1.0, "output_mask": [True, True, True, False]}
    found = ops.attention_backward(*given, **options, all_keys=True)
    for mine, wanted in zip(found, ops.attention_backward(*given, **options), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("length", [16, 80])
def test_a_dropped_pair_counts_as_visible(length: int) -> None:
    """What is not finite there reaches the gradients of its row, as it reaches the output."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, length, 8)
    seed = torch.tensor([3, 4])
    kept = mha_ext.reference.keep(seed, 0.5, (1, 1, length, length))
    assert not kept[..., 3].all()
    value[:, :, 3] = torch.nan
    query.requires_grad_()
    out = mha_ext.attention(query, key, value, dropout_p=0.5, seed=seed)
    assert out.isnan().all()
    assert torch.autograd.grad(out.sum(), query)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_or_lse_alone(dtype: torch.dtype) -> None:
    """The gradient of one result, when the other is not used, is that of a zero cotangent."""
    inputs = make(Problem(dtype=dtype, queries=33, keys=70, mask="b1qk", bias="hqk"))
    for used, unused in (("grad_out", "grad_lse"), ("grad_lse", "grad_out")):
        zeroed = inputs.replaced(**{unused: torch.zeros_like(getattr(inputs, unused))})
        wanted = ours(zeroed)
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.leaves().items()}
        result = call(mha_ext.attention, inputs.replaced(**leaves))[used == "grad_lse"]
        result.backward(getattr(inputs, used))
        for name, leaf in leaves.items():
            got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert torch.equal(got, wanted[f"grad_{name}"]), (used, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cotangent_of_any_strides(dtype: torch.dtype) -> None:
    """out.sum().backward() sends one element expanded; a merge of heads sends a transposed view."""
    inputs = make(Problem(dtype=dtype, queries=33, keys=70, heads=3, value_dim=20))
    one = torch.ones((), dtype=dtype).expand(inputs.grad_out.shape)
    merged = inputs.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    strided = inputs.grad_out.mT.contiguous().mT
    for cotangent in (one, merged, strided):
        found = ours(inputs.replaced(grad_out=cotangent))
        wanted = ours(inputs.replaced(grad_out=cotangent.contiguous()))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_bias_keeps_its_shape_and_dtype() -> None:
    """A float32 bias of half-precision attention gets a float32 gradient of its own shape."""
    for dtype in (torch.bfloat16, torch.float16):
        for shape, sizes in {"1hqk": (1, 2, 12, 10), "b1q1": (2, 1, 12, 1), "k": (10,)}.items():
            inputs = make(Problem(dtype=dtype, bias=shape, bias_dtype=torch.float32))
            grad = ours(inputs)["grad_bias"]
            assert grad.shape == sizes and grad.dtype == torch.float32


def test_gradients_have_the_layout_of_a_projection() -> None:
    """[B, L, H, D] memory, so that splitting the heads costs nothing in backward either."""
    inputs = make(Problem(heads=4, kv_heads=2, value_dim=9, layout="heads"))
    found = ours(inputs)
    for name in ("grad_query", "grad_key", "grad_value"):
        assert found[name].transpose(1, 2).is_contiguous(), name


def test_gradients_of_contiguous_tensors_are_contiguous() -> None:
    """Then autograd keeps them as those of the leaves, where it would copy others."""
    inputs = make(Problem(heads=4, kv_heads=2, value_dim=9))
    leaves = [t.contiguous().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    out = mha_ext.attention(*leaves)
    assert all(grad.is_contiguous() for grad in torch.autograd.grad(out.sum(), leaves))

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
            return func(*args, **(kwargs or {}))

    grad_out = torch.ones_like(out)
    with Copies() as copies:
        mha_ext.attention(*leaves).backward(grad_out)
    assert copies.count == 0


@pytest.mark.parametrize("length", [70, 130, 260])
@pytest.mark.parametrize("heads, width", [(1, 64), (3, 64), (3, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_a_mask_hides_in_rows_that_products_read(
    length: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    """Rows in one piece and far apart, whole vectors and parts, few blocks of queries and many: whether
    a kernel reads them where they are or packs them, what is hidden changes no bit."""
    generator = torch.Generator().manual_seed(length + width)

    def random() -> Tensor:
        return torch.randn(1, length, heads, width, dtype=dtype, generator=generator)

    mask = torch.rand(length, length, generator=generator) < 0.6
    mask[:, [5, length - 1]] = False
    mask[[7, length - 2]] = False
    given = [random() for _ in range(4)]

    def gradients(hidden: float) -> list[Tensor]:
        query, key, value, grad_out = (t.clone() for t in given)
        for rows in (query, grad_out):
            rows[:, [7, length - 2]] = hidden
        for rows in (key, value):
            rows[:, [5, length - 1]] = hidden
        leaves = [t.transpose(1, 2).requires_grad_() for t in (query, key, value)]
        out = mha_ext.attention(*leaves, mask=mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.transpose(1, 2))]

    expected = gradients(0.0)
    for hidden in (torch.nan, torch.inf):
        for found, wanted in zip(gradients(hidden), expected):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_finite_differences(empty_rows: str) -> None:
    """The gradients are those of the numbers that forward gives."""
    problem = Problem(
        dtype=torch.float64,
        batch=2,
        kv_heads=1,
        queries=5,
        keys=6,
        head_dim=3,
        value_dim=2,
        mask="b1qk",
        bias="1hqk",
        key_lengths="random",
        causal="lower_right",
        dropout_p=0.3,
        empty_rows=empty_rows,
    )
    inputs = make(problem)
    bias = inputs.bias.masked_fill(inputs.bias == -torch.inf, 0.5)
    leaves = [t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value, bias)]

    def finite(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        given = inputs.replaced(query=query, key=key, value=value, bias=bias)
        out, lse = call(mha_ext.attention, given)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(finite, leaves, fast_mode=on_emulator)
