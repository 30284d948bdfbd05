"""The tangents of forward and backward against the derivative of the definition in float64, through every option."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
    make,
    plain_orders,
    to_double,
)
from sizes import fewer, size
from test_guarantees import (
    assert_same,
    assert_untouched,
    can_measure_memory,
    leaks,
    onto_bias,
    put,
    reach,
    run,
    some,
)
from torch import Tensor

from mha_ext import _C, reference

pytestmark = pytest.mark.isa

OPS = torch.ops.mha_ext
NAMES = ("query", "key", "value", "bias", "grad_out", "grad_lse")
Direction = dict[str, Tensor | None]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(problem: Problem) -> tuple[Inputs, Direction]:
    """A problem, and a direction of the same layouts."""
    inputs, other = make(problem), make(replace(problem, numbers=problem.numbers + 1000))
    direction: Direction = {name: getattr(other, name) for name in NAMES}
    if other.bias is not None:
        direction["bias"] = other.bias.masked_fill(other.bias == -torch.inf, 0.5)
    return inputs, direction


def options_of(inputs: Inputs) -> dict[str, Any]:
    o = inputs.options
    left, right = o["window"] or (None, None)
    if o["causal"]:
        right = 0 if right is None else min(right, 0)
    return {
        "corner": o["causal"] if isinstance(o["causal"], str) else None,
        "window_left": left,
        "window_right": right,
        "dropout_p": o["dropout_p"],
        "scale": inputs.scale() if inputs.query.shape[-1] else 1.0,
        "uniform_empty_rows": o["empty_rows"] == "uniform",
        "origin": inputs.origin,
    }


def tangents(
    inputs: Inputs, direction: Direction, wanted: Sequence[bool] = (True,) * 4
) -> dict[str, Tensor]:
    """What the two operators give, by name; without what is not wanted."""
    options = options_of(inputs)
    saved = (inputs.query, inputs.key, inputs.value)
    rest = (inputs.mask, inputs.bias, inputs.key_lengths, inputs.seed)
    out, lse, lse_low = OPS.attention_forward(*saved, *rest, **options)
    moved = [direction[name] for name in NAMES[:4]]
    out_tangent, lse_tangent = OPS.attention_forward_tangent(
        *saved, out, lse, lse_low, *moved, *rest, **options
    )
    moves = any(tangent is not None for tangent in moved)
    cached = (out_tangent, lse_tangent) if moves else (None, None)
    grads = OPS.attention_backward_tangent(
        *(inputs.grad_out, inputs.grad_lse, *saved, out, lse, lse_low, *cached, *moved),
        *(direction["grad_out"], direction["grad_lse"], *rest),
        **options,
        output_mask=list(wanted),
    )
    found = {"out": out_tangent, "lse": lse_tangent}
    for name, grad, keep in zip(NAMES, grads, wanted, strict=False):
        if keep and getattr(inputs, name) is not None:
            found[f"grad_{name}"] = grad
        else:
            assert grad.shape == (0,)
    return found


def derivative(
    function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, direction: Direction
) -> dict[str, Tensor]:
    """The same by torch.func, of any function."""
    names = [name for name in NAMES if getattr(inputs, name) is not None]
    # torch.func writes tangents in place: nothing may be expanded
    primals = tuple(getattr(inputs, name).contiguous() for name in names)
    moved = [None if (t := direction[name]) is None else t.contiguous() for name in names]
    directions = tuple(
        torch.zeros_like(p) if t is None else t for p, t in zip(primals, moved, strict=True)
    )

    def everything(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        leaves = [name for name in names if not name.startswith("grad")]

        def results(*leaf: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = function(inputs.replaced(**dict(zip(leaves, leaf, strict=True))))
            return out, lse.masked_fill(lse == -torch.inf, 0)  # a constant

        (out, lse), pull = torch.func.vjp(results, *(given[name] for name in leaves))
        return out, lse, *pull((given["grad_out"].to(out.dtype), given["grad_lse"].to(lse.dtype)))

    _, found = torch.func.jvp(everything, primals, directions)
    results = ["out", "lse", *(f"grad_{name}" for name in names[:-2])]
    return dict(zip(results, found, strict=True))


def terms_of(inputs: Inputs, direction: Direction) -> dict[str, Tensor]:
    """The uncancelled terms of each result, added up: its formula over absolute values."""
    i = to_double(inputs)
    options = {n: i.options[n] for n in ("causal", "window", "scale", "empty_rows")}
    options |= {"bias": i.bias, "key_lengths": i.key_lengths, "origin": i.origin}
    weights = reference.attention_weights(i.query, i.key, i.mask, **options)
    kv_heads, groups = i.key.shape[1], i.query.shape[1] // max(i.key.shape[1], 1)

    def size(tensor: Tensor) -> Tensor:  # heads repeated
        shared = tensor.dim() == 4 and tensor.shape[1] == kv_heads and groups > 1
        return tensor.abs().repeat_interleave(groups, 1) if shared else tensor.abs()

    def moved(name: str) -> Tensor:
        tensor = direction[name]
        like = getattr(i, name)
        return size(torch.zeros_like(like) if tensor is None else tensor.double())

    query, key, value, grad_out = i.query.abs(), size(i.key), size(i.value), i.grad_out.abs()
    seen, factor, scale = i.seen(), i.factor(), abs(i.scale())
    scores = scale * (moved("query") @ key.mT + query @ moved("key").mT)  # |S'|
    if i.bias is not None:
        scores = scores + moved("bias")
    scores = scores.masked_fill(~seen, 0)
    mu = (weights * scores).sum(-1, keepdim=True)
    moved_weights = (weights * (scores + mu)).masked_fill(~seen, 0)  # |P'|
    out = (moved_weights * factor) @ value + (weights * factor) @ moved("value")
    grads = grad_out @ value.mT * factor
    moved_grads = (moved("grad_out") @ value.mT + grad_out @ moved("value").mT) * factor
    delta = (weights * grads).sum(-1, keepdim=True) + i.grad_lse.abs()[..., None]
    moved_delta = (moved("grad_out") * ((weights * factor) @ value) + grad_out * out).sum(-1, True)
    moved_delta = moved_delta + moved("grad_lse")[..., None]
    ds = (weights * (grads + delta)).masked_fill(~seen, 0)
    dst = moved_weights * (grads + delta) + weights * (moved_grads + moved_delta)
    dst = dst.masked_fill(~seen, 0)

    def over_groups(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (kv_heads, groups)).sum(2) if groups > 1 else grad

    terms = {
        "out": out,
        "lse": mu,
        "grad_query": scale * (dst @ key + ds @ moved("key")),
        "grad_key": over_groups(scale * (dst.mT @ query + ds.mT @ moved("query"))),
        "grad_value": over_groups(
            (moved_weights * factor).mT @ grad_out + (weights * factor).mT @ moved("grad_out")
        ),
    }
    if i.bias is not None:
        terms["grad_bias"] = dst.sum_to_size(i.bias.shape)
    return terms


def largest_terms(inputs: Inputs, direction: Direction) -> dict[str, float]:
    terms = terms_of(inputs, direction)
    return {name: float(term.max()) if term.numel() else 0.0 for name, term in terms.items()}


def check(problem: Problem, missing: Sequence[str] = (), unwanted: Sequence[int] = ()) -> None:
    inputs, direction = draw(problem)
    for name in missing:
        direction[name] = None
    found = tangents(inputs, direction, [i not in unwanted for i in range(4)])
    double = {n: None if t is None else t.double() for n, t in direction.items()}
    exact = derivative(lambda i: call(reference.attention, i), to_double(inputs), double)
    plains = plain_orders(inputs, lambda f, i: derivative(f, i, direction))
    terms = largest_terms(inputs, direction)
    assert_accurate(found, exact, plains, terms, list(found))
    for name in ("query", "key", "value", "bias"):
        if f"grad_{name}" in found:
            tensor = getattr(inputs, name)
            grad = found[f"grad_{name}"]
            assert grad.dtype == tensor.dtype and grad.shape == tensor.shape


APART = pytest.mark.cpu_alone("forward's scores come from the tensor cores, the tangents' do not")


@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=APART) if p.scale == 2.0 else p for p in PROBLEMS[::3]],
    ids=str,
)
def test_every_option(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("problem", RANDOM_PROBLEMS[::2], ids=lambda p: f"random-{p.numbers}")
def test_options_together(problem: Problem) -> None:
    check(problem)


SUBSETS = [c for n in range(len(NAMES)) for c in itertools.combinations(NAMES, n)]
OPTIONS = fewer(Problem(
    heads=4, kv_heads=2, queries=70, keys=90, head_dim=24, value_dim=17, mask="b1qk", bias="1hqk",
    causal="lower_right", dropout_p=0.3, empty_rows="uniform",
))  # fmt: skip


@pytest.mark.parametrize("missing", SUBSETS, ids=lambda names: "-".join(names) or "none")
def test_a_missing_direction_is_zero(missing: tuple[str, ...]) -> None:
    """To the sign of a zero: the products that are left out would add zeros."""
    inputs, direction = draw(OPTIONS)
    zeros = direction | {name: torch.zeros_like(getattr(inputs, name)) for name in missing}
    gone = direction | dict.fromkeys(missing)
    found, wanted = tangents(inputs, gone), tangents(inputs, zeros)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_no_direction_at_all() -> None:
    inputs, direction = draw(OPTIONS)
    found = tangents(inputs, dict.fromkeys(direction))
    assert not any(tensor.any() for tensor in found.values())


@dtypes
@pytest.mark.parametrize(
    "unwanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 2, 3), (0, 1, 2)], ids=str
)
def test_only_what_is_wanted(unwanted: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, direction = draw(replace(OPTIONS, dtype=dtype))
    wanted = tangents(inputs, direction)
    found = tangents(inputs, direction, [i not in unwanted for i in range(4)])
    assert len(found) == len(wanted) - len(unwanted)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("numbers", range(6))
def test_scores_that_all_move_alike(numbers: int) -> None:
    """lse moves by that constant, as plain PyTorch has it to the bit: a long chain of sums has not."""
    shape = Problem(heads=4, kv_heads=2, queries=33, keys=97, head_dim=7, value_dim=1)
    pairs = replace(shape, mask="", mask_dtype=torch.uint8, bias="", numbers=numbers)
    check(replace(pairs, dtype=torch.bfloat16), ("query", "key"))


@dtypes
def test_scores_that_move_by_a_large_constant(dtype: torch.dtype) -> None:
    """P does not move: what is left is rounding, no more than plain PyTorch's."""
    inputs, direction = draw(Problem(dtype=dtype, queries=70, keys=300, head_dim=32))
    inputs.key = inputs.key + (torch.arange(32) == 3).to(dtype) * 4
    direction = dict.fromkeys(direction)
    direction["query"] = ((torch.arange(32) == 3) * 16.0).to(dtype).expand(inputs.query.shape)
    found = tangents(inputs, direction)
    double = {n: None if t is None else t.double() for n, t in direction.items()}
    exact = derivative(lambda i: call(reference.attention, i), to_double(inputs), double)
    plains = plain_orders(inputs, lambda f, i: derivative(f, i, direction))
    assert_accurate(found, exact, plains, largest_terms(inputs, direction), list(found))


@dtypes
@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_finite_differences_of_the_operators(dtype: torch.dtype, empty_rows: str) -> None:
    """The tangents are those of the numbers that the operators give; float64 only says so sharply."""
    if dtype != torch.float64:
        pytest.skip("too coarse for differences")
    inputs, direction = draw(
        replace(OPTIONS, dtype=dtype, empty_rows=empty_rows, queries=9, keys=11)
    )
    options = options_of(inputs)

    def everything(step: float) -> list[Tensor]:
        at = {}
        for name in NAMES:
            tangent = direction[name]
            assert tangent is not None
            at[name] = getattr(inputs, name) + step * tangent
        i = inputs.replaced(**at)
        tensors = (i.query, i.key, i.value)
        rest = (i.mask, i.bias, i.key_lengths, i.seed)
        out, lse, low = OPS.attention_forward(*tensors, *rest, **options)
        grads = OPS.attention_backward(
            i.grad_out,
            i.grad_lse,
            *tensors,
            out,
            lse,
            low,
            *rest,
            **options,
            output_mask=[True] * 4,
        )
        return [out, lse.masked_fill(lse == -torch.inf, 0), *grads]

    step = 1e-6
    pairs = zip(everything(step), everything(-step), strict=True)
    for (name, found), (high, low) in zip(tangents(inputs, direction).items(), pairs, strict=True):
        torch.testing.assert_close(
            found,
            (high - low) / (2 * step),
            rtol=1e-6,
            atol=1e-7,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    "options", [{}, {"mask": "b1qk"}, {"dropout_p": 0.3, "causal": "lower_right"}], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, n) for n in (-100, 16, 17, 40)] + [(torch.float16, n) for n in (-10, 12)],
    ids=str,
)
@pytest.mark.parametrize("moved", [False, True], ids=["itself", "its direction"])
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse"])
def test_numbers_of_every_size(
    where: str, moved: bool, dtype: torch.dtype, exponent: int, options: dict[str, Any]
) -> None:
    """A few that are much larger or smaller than the rest: as exact as their own terms, and no others suffer."""
    if dtype == torch.float16 and exponent > 0 and (moved or where in ("value", "grad_out")):
        pytest.skip("what they are multiplied into is beyond float16")
    problem = Problem(batch=1, queries=size(300, emulated=150), keys=330, head_dim=33, **options)
    inputs, direction = draw(replace(problem, dtype=dtype))
    rows = [3, 70, 129]

    def with_large(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, :, rows] *= 2.0**exponent
        return tensor

    if moved:
        tensor = direction[where]
        assert tensor is not None
        direction[where] = with_large(tensor)
    elif where in ("query", "key"):  # one column, and scores stay as they were
        tensor, other = inputs.query.clone(), inputs.key.clone()
        if where == "key":
            tensor, other = other, tensor
        tensor[:, :, rows, 4] *= 2.0**exponent
        other[..., 4] *= 2.0 ** -max(exponent, 0)
        inputs = inputs.replaced(**{where: tensor, "key" if where == "query" else "query": other})
        for name in ("query", "key"):
            tangent = direction[name]
            assert tangent is not None
            direction[name] = tangent.clone()
            direction[name][..., 4] *= 2.0 ** -max(exponent, 0)
    else:
        inputs = inputs.replaced(**{where: with_large(getattr(inputs, where))})
    found = tangents(inputs, direction)
    double = {n: None if t is None else t.double() for n, t in direction.items()}
    exact = derivative(lambda i: call(reference.attention, i), to_double(inputs), double)
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    for name, terms in terms_of(inputs, direction).items():
        allowed = (8 if dtype == torch.float16 else 64) * eps * terms.reshape(exact[name].shape)
        error = (found[name].double() - exact[name]).abs()
        worst = (error / (allowed + 64 * smallest)).max()
        assert worst <= 1, f"{name}: {worst:.3g} of what is allowed"


def test_terms_that_outgrow_their_factors() -> None:
    """Cotangents of lse, which no product limits: where these are large dS and dS' are, and no others suffer."""
    problem = Problem(batch=1, heads=1, queries=100, keys=320, head_dim=24)
    inputs, direction = draw(problem)
    wanted = tangents(inputs, direction)
    for large in ("itself", "its direction"):
        for power in (1e15, 1e25, 1e30):
            row = (slice(None), slice(None), 37)
            changed, moved = inputs, direction
            if large == "itself":
                changed = inputs.replaced(grad_lse=put(inputs.grad_lse, row, power))
            else:
                moved = direction | {"grad_lse": put(direction["grad_lse"], row, power)}
            found = tangents(changed, moved)
            double = {n: None if t is None else t.double() for n, t in moved.items()}
            exact = derivative(lambda i: call(reference.attention, i), to_double(changed), double)
            for name, terms in terms_of(changed, moved).items():
                error = (found[name].double() - exact[name]).abs()
                assert (error <= 64 * torch.finfo(torch.float32).eps * terms).all(), name
            others = torch.arange(100) != 37
            assert torch.equal(
                found["grad_query"][:, :, others], wanted["grad_query"][:, :, others]
            )


# What is hidden contributes nothing, whatever it holds.


@leaks
@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e6])
def test_hidden_keys(problem: Problem, dtype: torch.dtype, poison: float) -> None:
    """K', V', K and V of a key reach the queries that see it, and through them the keys that those see."""
    inputs, direction = draw(replace(problem, dtype=dtype))
    seen, kv_heads = inputs.seen(), inputs.key.shape[1]
    wanted = tangents(inputs, direction)
    for j in some(7, problem.keys):
        at = (slice(None), slice(None), j)
        to = reach(seen, seen[..., j], kv_heads)
        touched = dict.fromkeys(("out", "lse", "grad_query"), to["row"])
        touched |= dict.fromkeys(("grad_key", "grad_value"), to["key"])
        if inputs.bias is not None:
            touched["grad_bias"] = onto_bias(to["row"], inputs)
        moved = direction | {n: put(direction[n], (*at, 1), poison) for n in ("key", "value")}
        assert_untouched(tangents(inputs, moved), wanted, touched)
        bad = inputs.replaced(
            **{n: put(getattr(inputs, n), (*at, 1), poison) for n in ("key", "value")}
        )
        assert_untouched(tangents(bad, direction), wanted, touched)


@leaks
@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e6])
def test_rows_keep_to_themselves(problem: Problem, dtype: torch.dtype, poison: float) -> None:
    """Q', dO', dL' and Q, dO of a row reach that row and the keys that it sees; an empty row nothing."""
    inputs, direction = draw(replace(problem, dtype=dtype))
    seen, kv_heads = inputs.seen(), inputs.key.shape[1]
    wanted = tangents(inputs, direction)
    for i in some(5, problem.queries):
        row = torch.zeros_like(seen[..., 0])
        row[:, :, i] = seen[:, :, i].any(-1)
        to = reach(seen, row, kv_heads)
        touched = dict.fromkeys(("out", "lse", "grad_query"), row)
        touched |= dict.fromkeys(("grad_key", "grad_value"), to["key"])
        if inputs.bias is not None:
            touched["grad_bias"] = onto_bias(row, inputs)
        for name in ("query", "grad_out", "grad_lse"):
            at = (slice(None), slice(None), i, 0)[: 3 if name == "grad_lse" else 4]
            moved = direction | {name: put(direction[name], at, poison)}
            assert_untouched(tangents(inputs, moved), wanted, touched)
            bad = inputs.replaced(**{name: put(getattr(inputs, name), at, poison)})
            assert_untouched(tangents(bad, direction), wanted, touched)


@dtypes
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_hidden_elements_of_the_bias_and_its_direction(
    dtype: torch.dtype, dropout_p: float
) -> None:
    problem = Problem(
        queries=70, keys=80, head_dim=5, mask="b1qk", bias="bhqk", dropout_p=dropout_p
    )
    inputs, direction = draw(replace(problem, dtype=dtype))
    assert inputs.bias is not None
    inputs.bias = inputs.bias.masked_fill(inputs.bias == -torch.inf, 0.25)
    seen, wanted = inputs.seen(), tangents(inputs, direction)
    assert not wanted["grad_bias"][~seen].any()
    tangent = direction["bias"]
    assert tangent is not None
    for poison in (torch.nan, torch.inf, -torch.inf):
        hidden = direction | {"bias": tangent.masked_fill(~seen, poison)}
        assert_same(tangents(inputs, hidden), wanted)
        everywhere = inputs.replaced(bias=inputs.bias.masked_fill(~seen, poison))
        assert_same(tangents(everywhere, hidden), wanted)


# Determinism, memory, sizes.


@dtypes
def test_any_number_of_threads(dtype: torch.dtype) -> None:
    queries, keys, batch = size((300, 700, 3), emulated=(70, 200, 2))
    problem = replace(OPTIONS, dtype=dtype, queries=queries, keys=keys, bias="1hqk", batch=batch)
    for one in (problem, replace(problem, bias="1k"), replace(problem, bias=None, queries=3)):
        inputs, direction = draw(one)
        torch.set_num_threads(1)
        wanted = tangents(inputs, direction)
        for threads in size((2, 3, 8), emulated=(2,)):
            torch.set_num_threads(threads)
            assert_same(tangents(inputs, direction), wanted)


@dtypes
def test_any_place_in_the_batch(dtype: torch.dtype) -> None:
    queries, keys = size((130, 600), emulated=(70, 200))
    inputs, direction = draw(Problem(dtype=dtype, batch=3, queries=queries, keys=keys, mask="b1qk"))
    wanted = tangents(inputs, direction)
    names = (*NAMES, "mask")
    for index in ([1], [2, 0]):
        part = {n: t[index] for n in names if (t := getattr(inputs, n)) is not None}
        moved = {n: None if t is None else t[index] for n, t in direction.items()}
        found = tangents(inputs.replaced(**part), moved)
        assert all(torch.equal(found[name], wanted[name][index]) for name in found)


@dtypes
def test_a_shard_of_the_heads_and_of_the_sequence(dtype: torch.dtype) -> None:
    """The origin says where a part stands: the same pairs are dropped and seen."""
    problem = Problem(dtype=dtype, heads=4, queries=200, keys=200, causal="upper_left")
    inputs, direction = draw(replace(problem, dropout_p=0.4))
    wanted = tangents(inputs, direction)
    queries, heads = slice(37, 180), slice(1, 3)  # enough for the kernel of the whole
    at = (slice(None), heads, queries)
    whole = ("key", "value")

    def part(tensor: Tensor, name: str) -> Tensor:
        return tensor[:, heads] if name in whole else tensor[at]

    names = [name for name in NAMES if name != "bias"]
    given = inputs.replaced(**{n: part(getattr(inputs, n), n) for n in names}, origin=(0, 1, 37, 0))
    moved: Direction = {"bias": None}
    for name in names:
        tangent = direction[name]
        assert tangent is not None
        moved[name] = part(tangent, name)
    found = tangents(given, moved)
    for name in ("out", "lse", "grad_query"):
        torch.testing.assert_close(found[name], wanted[name][at])


@dtypes
@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
def test_empty_dimensions(empty: str, dtype: torch.dtype) -> None:
    problem = replace(OPTIONS, dtype=dtype, **{empty: 0})
    if empty == "heads":
        problem = replace(problem, kv_heads=0)
    inputs, direction = draw(problem)
    for name, tensor in tangents(inputs, direction).items():
        assert not tensor.any() if empty == "keys" else tensor.isfinite().all(), name


MEMORY = """
import sys, torch, mha_ext
ops = torch.ops.mha_ext

def peak():  # kB: the high-water mark since it was last cleared
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

length, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
torch.set_num_threads(2)

def problem(length):
    return [torch.randn(1, 2, length, 32).to(dtype) for _ in range(8)]

def both(tensors):
    q, k, v, grad, *moved = tensors
    options = {"scale": 0.2, "dropout_p": 0.1}
    none = (None, None, None, torch.tensor([1, 2]))
    saved = ops.attention_forward(q, k, v, *none, **options)
    out, lse = ops.attention_forward_tangent(q, k, v, *saved, *moved[:3], None, *none, **options)
    ops.attention_backward_tangent(
        grad, None, q, k, v, *saved, out, lse, *moved[:3], None, moved[3], None, *none, **options,
        output_mask=[True] * 4)

both(problem(256))  # what is allocated once
tensors = problem(length)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
before = peak()
both(tensors)
print(peak() - before)
"""


@pytest.mark.own_process
@pytest.mark.skipif(not can_measure_memory(), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear(dtype: str) -> None:
    length, heads, width = 6144, 2, 32
    used = 1024 * int(run(MEMORY, str(length), dtype))
    rows = 4 * heads * length * width  # one [H, L, D] tensor in float32
    assert (
        used <= 7 * rows + 8 * rows + 2**24
    )  # out, two of out', three gradients, lse and the like
    assert used < 4 * length * length / 4, "a quarter of one head's scores"


# The operators as PyTorch sees them.


def arguments() -> tuple[Any, ...]:
    inputs, direction = draw(replace(OPTIONS, queries=5, keys=6))
    options = options_of(inputs)
    tensors = (inputs.query, inputs.key, inputs.value)
    rest = (inputs.mask, inputs.bias, inputs.key_lengths, inputs.seed)
    saved = OPS.attention_forward(*tensors, *rest, **options)
    moved = [direction[name] for name in NAMES]
    forward = (*tensors, *saved, *moved[:4], *rest)
    results = OPS.attention_forward_tangent(*forward, **options)
    backward = (*(inputs.grad_out, inputs.grad_lse, *tensors, *saved, *results, *moved, *rest),)
    return forward, backward, options


@pytest.mark.parametrize("which", ["schema", "faketensor"])
def test_opcheck(which: str) -> None:
    forward, backward, options = arguments()
    torch.library.opcheck(
        OPS.attention_forward_tangent.default, forward, options, test_utils=f"test_{which}"
    )
    torch.library.opcheck(
        OPS.attention_backward_tangent.default,
        backward,
        options | {"output_mask": [True, False, True, True]},
        test_utils=f"test_{which}",
    )


def test_the_pybind11_functions() -> None:
    forward, backward, options = arguments()
    more = {"output_mask": [True] * 4}
    found = _C.attention_forward_tangent(*forward, **options)
    assert all(map(torch.equal, found, OPS.attention_forward_tangent(*forward, **options)))
    found = _C.attention_backward_tangent(*backward, **options, **more)
    wanted = OPS.attention_backward_tangent(*backward, **options, **more)
    assert all(map(torch.equal, found, wanted))
    found = _C.attention_forward_tangent(*forward[:5])
    assert not found[0].any() and not found[1].any()


@pytest.mark.parametrize(
    "name, of",
    [("query_tangent", "query"), ("key_tangent", "key"), ("value_tangent", "value"),
     ("bias_tangent", "bias"), ("out_tangent", "out"), ("lse_tangent", "lse"),
     ("grad_out_tangent", "out"), ("grad_lse_tangent", "lse")],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True])
def test_messages(name: str, of: str, backward: bool) -> None:
    *both, options = arguments()
    tensors = both[backward]
    operator = OPS.attention_forward_tangent.default
    if backward:
        operator = OPS.attention_backward_tangent.default
        options["output_mask"] = [True] * 4
    names = [argument.name for argument in operator._schema.arguments]
    if name not in names:
        pytest.skip("not an argument")
    place = names.index(name)
    tangent = tensors[place]

    def expect(wrong: Tensor, error: type[Exception], message: str) -> None:
        for device in ("cpu", "meta"):
            changed = [*tensors[:place], wrong, *tensors[place + 1 :]]
            moved = [t.to(device) if isinstance(t, Tensor) else t for t in changed]
            with pytest.raises(error) as raised:
                operator(*moved, **options)
            assert str(raised.value) == message

    short = tangent[..., :-1]
    expect(
        short,
        ValueError,
        f"{name} must have {of}'s shape {list(tangent.shape)}, but has {list(short.shape)}; pass one "
        f"number for each of {of}, or None for zero",
    )
    expect(
        tangent.bfloat16(),
        TypeError,
        f"{name} must have {of}'s dtype float32, but is bfloat16; pass {name}.to({of}.dtype)",
    )


def test_a_direction_of_a_missing_bias() -> None:
    forward, _, options = arguments()
    without = [*forward[:11], None, *forward[12:]]
    with pytest.raises(ValueError) as raised:
        OPS.attention_forward_tangent(*without, **options)
    assert str(raised.value) == (
        "bias_tangent must be None where bias is None, but is a tensor; pass both, or neither"
    )
