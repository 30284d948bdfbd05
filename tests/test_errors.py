"""Bad tensors and options raise before any work: one line with the argument, what it must be, what it was, the fix."""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_ext import _C

B, H, HKV, LQ, LK, D, DV = 2, 6, 3, 4, 5, 8, 7


def good() -> dict[str, Any]:
    return {
        "query": torch.randn(B, H, LQ, D),
        "key": torch.randn(B, HKV, LK, D),
        "value": torch.randn(B, HKV, LK, DV),
        "mask": None,
        "bias": None,
        "key_lengths": None,
        "seed": None,
        "scale": 0.5,
    }


def forward(**arguments: Any) -> Any:
    tensors = [arguments.pop(name) for name in list(good())[:7]]
    return torch.ops.mha_ext.attention_forward(*tensors, **arguments)


def zeros(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


# what is changed, the exception, and its whole message
CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"query": zeros(LQ, D)},
        ValueError,
        "query must have 4 dimensions [batch, heads, length, head_dim], but has shape [4, 8]; split the "
        "heads with query.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
    ),
    (
        {"key": zeros(B, LK, HKV * D)},
        ValueError,
        "key must have 4 dimensions [batch, heads, length, head_dim], but has shape [2, 5, 24]; split the "
        "heads with key.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
    ),
    (
        {"value": zeros(1, B, HKV, LK, D)},
        ValueError,
        "value must have 4 dimensions [batch, heads, length, head_dim], but has shape [1, 2, 3, 5, 8]; "
        "split the heads with value.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
    ),
    (
        {"key": zeros(3, HKV, LK, D)},
        ValueError,
        "key must have query's batch size 2, but has shape [3, 3, 5, 8]; expand or repeat the smaller of "
        "the two",
    ),
    (
        {"value": zeros(1, HKV, LK, D)},
        ValueError,
        "value must have key's batch size 2, but has 1 (shape [1, 3, 5, 8]); expand or repeat the smaller "
        "of the two",
    ),
    (
        {"key": zeros(B, 4, LK, D), "value": zeros(B, 4, LK, D)},
        ValueError,
        "key must have a number of heads that divides query's 6, but has 4; repeat its heads, e.g. "
        "key.repeat_interleave(n, 1)",
    ),
    (
        {"key": zeros(B, 0, LK, D), "value": zeros(B, 0, LK, D)},
        ValueError,
        "key must have a number of heads that divides query's 6, but has 0; repeat its heads, e.g. "
        "key.repeat_interleave(n, 1)",
    ),
    (
        {"value": zeros(B, 6, LK, D)},
        ValueError,
        "value must have key's number of heads 3, but has 6 (shape [2, 6, 5, 8]); give both the same heads",
    ),
    (
        {"value": zeros(B, HKV, 6, D)},
        ValueError,
        "value must have key's length 5, but has 6 (shape [2, 3, 6, 8]); give each key one value",
    ),
    (
        {"key": zeros(B, HKV, LK, 16)},
        ValueError,
        "key must have query's head_dim 8, but has 16; project both to the same width",
    ),
    (
        {"query": zeros(B, H, LQ, 1025), "key": zeros(B, HKV, LK, 1025)},
        ValueError,
        "query must have a head_dim from 1 to 1024, but has 1025; split the width over another number of "
        "heads",
    ),
    (
        {"query": zeros(B, H, LQ, 0), "key": zeros(B, HKV, LK, 0)},
        ValueError,
        "query must have a head_dim from 1 to 1024, but has 0; split the width over another number of heads",
    ),
    (
        {"value": zeros(B, HKV, LK, 2000)},
        ValueError,
        "value must have a head_dim of at most 1024, but has 2000; split the width over another number of "
        "heads",
    ),
    (
        {"query": zeros(B, H, LQ, D, dtype=torch.int64)},
        TypeError,
        "query must be float64, float32, bfloat16 or float16, but is int64; pass query.float()",
    ),
    (
        {"query": zeros(B, H, LQ, D, dtype=torch.complex64)},
        TypeError,
        "query must be float64, float32, bfloat16 or float16, but is complex64; pass its real part, "
        "query.real",
    ),
    (
        {"query": zeros(B, H, LQ, D).to(torch.float8_e4m3fn)},
        TypeError,
        "query must be float64, float32, bfloat16 or float16, but is float8_e4m3fn; pass query.float()",
    ),
    (
        {"key": zeros(B, HKV, LK, D, dtype=torch.float16)},
        TypeError,
        "key must have query's dtype float32, but is float16; pass key.to(query.dtype)",
    ),
    (
        {"value": zeros(B, HKV, LK, D, dtype=torch.bfloat16)},
        TypeError,
        "value must have query's dtype float32, but is bfloat16; pass value.to(query.dtype)",
    ),
    (
        {"key": meta(B, HKV, LK, D)},
        ValueError,
        "key must be on query's device cpu, but is on meta; pass key.to(query.device)",
    ),
    (
        {"bias": meta(LK)},
        ValueError,
        "bias must be on query's device cpu, but is on meta; pass bias.to(query.device)",
    ),
    (
        {"mask": meta(LK).bool()},
        ValueError,
        "mask must be on query's device cpu, but is on meta; pass mask.to(query.device)",
    ),
    (
        {"mask": zeros(LQ, LK)},
        TypeError,
        "mask must be bool or integer (nonzero = attend), but is float32; pass mask.bool() to keep nonzero "
        "positions, or bias=mask to add it",
    ),
    (
        {"mask": zeros(LQ, LK, dtype=torch.complex64)},
        TypeError,
        "mask must be bool or integer (nonzero = attend), but is complex64; pass mask != 0",
    ),
    (
        {"mask": zeros(B, LK, dtype=torch.bool)},
        ValueError,
        "mask must broadcast to [batch, heads, queries, keys] = [2, 6, 4, 5], but has shape [2, 5]; give it "
        "dimensions of size 1, e.g. mask[:, None, None, :] for [batch, keys]",
    ),
    (
        {"mask": zeros(1, B, 1, 1, LK, dtype=torch.bool)},
        ValueError,
        "mask must broadcast to [batch, heads, queries, keys] = [2, 6, 4, 5], but has shape [1, 2, 1, 1, 5]; "
        "give it dimensions of size 1, e.g. mask[:, None, None, :] for [batch, keys]",
    ),
    (
        {"mask": zeros(0, dtype=torch.bool)},
        ValueError,
        "mask must broadcast to [batch, heads, queries, keys] = [2, 6, 4, 5], but has shape [0]; give it "
        "dimensions of size 1, e.g. mask[:, None, None, :] for [batch, keys]",
    ),
    (
        {"bias": zeros(H, LQ, 1 + LK)},
        ValueError,
        "bias must broadcast to [batch, heads, queries, keys] = [2, 6, 4, 5], but has shape [6, 4, 6]; give "
        "it dimensions of size 1, e.g. bias[:, None, None, :] for [batch, keys]",
    ),
    (
        {"bias": zeros(LK, dtype=torch.float64)},
        TypeError,
        "bias must have query's dtype float32, but is float64; pass bias.to(query.dtype)",
    ),
    (
        {"bias": zeros(LK, dtype=torch.bool)},
        TypeError,
        "bias must have query's dtype float32, but is bool; pass mask=bias if nonzero means attend",
    ),
    (
        {"key_lengths": zeros(B)},
        TypeError,
        "key_lengths must be an integer tensor, but is float32; pass key_lengths.long(), or mask=... for a "
        "mask",
    ),
    (
        {"key_lengths": zeros(B, dtype=torch.bool)},
        TypeError,
        "key_lengths must be an integer tensor, but is bool; pass key_lengths.long(), or mask=... for a mask",
    ),
    (
        {"key_lengths": zeros(3, dtype=torch.int32)},
        ValueError,
        "key_lengths must have shape [batch] = [2], but has [3]; pass one length for each batch entry",
    ),
    (
        {"key_lengths": zeros(B, 1, dtype=torch.int64)},
        ValueError,
        "key_lengths must have shape [batch] = [2], but has [2, 1]; pass one length for each batch entry",
    ),
    (
        {"dropout_p": 1.0, "seed": torch.tensor([1, 2])},
        ValueError,
        "dropout_p must be at least 0 and less than 1, but is 1; pass the fraction to drop, e.g. 0.1",
    ),
    (
        {"dropout_p": -0.1, "seed": torch.tensor([1, 2])},
        ValueError,
        "dropout_p must be at least 0 and less than 1, but is -0.1; pass the fraction to drop, e.g. 0.1",
    ),
    (
        {"dropout_p": math.nan, "seed": torch.tensor([1, 2])},
        ValueError,
        "dropout_p must be at least 0 and less than 1, but is nan; pass the fraction to drop, e.g. 0.1",
    ),
    (
        {"dropout_p": 0.1},
        ValueError,
        "seed must be given where dropout_p is greater than 0, but is None; draw it with torch.randint(0, "
        "2**32, (2,), device=query.device)",
    ),
    (
        {"seed": torch.tensor([1, 2], dtype=torch.int32)},
        TypeError,
        "seed must be an int64 tensor, but is int32; draw it with torch.randint(0, 2**32, (2,), "
        "device=query.device)",
    ),
    (
        {"seed": torch.tensor(1)},
        ValueError,
        "seed must have shape [2], but has []; draw it with torch.randint(0, 2**32, (2,), "
        "device=query.device)",
    ),
    (
        {"scale": math.nan},
        ValueError,
        "scale must be finite, but is nan; pass head_dim ** -0.5, the usual one",
    ),
    (
        {"scale": -math.inf},
        ValueError,
        "scale must be finite, but is -inf; pass head_dim ** -0.5, the usual one",
    ),
    (
        {"corner": "upper left"},
        ValueError,
        'corner must be None, "upper_left" or "lower_right", but is "upper left"; name the corner that the '
        "diagonal runs through",
    ),
    (
        {"window_left": -1},
        ValueError,
        "window_left must be None (unbounded) or at least 0, but is -1; pass None for no bound",
    ),
    (
        {"window_right": -1},
        ValueError,
        "window_right must be None (unbounded) or at least 0, but is -1; pass None for no bound",
    ),
    (
        {"origin": [0, -1, 0, 0]},
        ValueError,
        "origin must hold positions from 0 to 2**60, but is [0, -1, 0, 0]; pass (0, 0, 0, 0) for the whole",
    ),
    (
        {"origin": [0, 0, 0]},
        ValueError,
        "origin must be the 4 positions (batch, head, query, key), but is [0, 0, 0]; pass (0, 0, 0, 0) for "
        "the whole",
    ),
]


def expect(error: type[Exception], message: str, function: Callable[..., Any], **args: Any) -> None:
    with pytest.raises(error) as raised:
        function(**args)
    assert type(raised.value) is error
    assert str(raised.value) == message
    assert "\n" not in message


@pytest.mark.parametrize("change, error, message", CASES)
def test_message(change: dict[str, Any], error: type[Exception], message: str) -> None:
    expect(error, message, forward, **good() | change)


@pytest.mark.parametrize("change, error, message", CASES)
def test_same_message_without_data(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Fake tensors, and so compiled code, are checked alike."""
    arguments = good() | change
    if any(isinstance(x, Tensor) and x.is_meta for x in change.values()):
        pytest.skip("on another device")
    moved = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    expect(error, message, forward, **moved)


@pytest.mark.parametrize("change, error, message", CASES)
def test_same_message_from_pybind11(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    if len(change.get("origin", range(4))) != 4:
        pytest.skip("pybind11 refuses it: the type is 4 ints")
    expect(error, message, _C.attention_forward, **good() | change)


def test_lengths_out_of_range() -> None:
    for lengths, entry, value in (([5, 6], 1, 6), ([-1, 2], 0, -1)):
        message = (
            f"key_lengths must be from 0 to the length of key, 5, but entry {entry} is {value}; pass "
            "key_lengths.clamp(0, 5)"
        )
        for dtype in (torch.int64, torch.int8):
            arguments = good() | {"key_lengths": torch.tensor(lengths, dtype=dtype)}
            expect(ValueError, message, forward, **arguments)
        lse = torch.zeros(B, H, LQ)
        for given in (lse, None):
            with pytest.raises(ValueError, match="key_lengths must be from 0"):
                torch.ops.mha_ext.attention_weights(
                    arguments["query"], arguments["key"], given, None, None, None,
                    arguments["key_lengths"], scale=1.0,
                )  # fmt: skip


def test_what_is_not_an_error() -> None:
    """Scalars and short shapes broadcast; sizes may be 0; a seed without dropout is not used."""
    fine: list[dict[str, Any]] = [
        {"mask": torch.tensor(True)},
        {"mask": zeros(LK, dtype=torch.uint8)},
        {"mask": zeros(B, 1, LQ, 1, dtype=torch.int16)},
        {"bias": torch.tensor(0.5)},
        {"bias": zeros(H, 1, LK)},
        {"key_lengths": torch.tensor([0, LK], dtype=torch.uint8)},
        {"seed": torch.tensor([-1, 2**40]), "dropout_p": 0.5},
        {"seed": torch.tensor([1, 2])},
        {"scale": 0.0},
        {"window_left": 2**62, "window_right": 2**63 - 1},
        {"window_left": 2**62, "corner": "lower_right"},
        {"value": zeros(B, HKV, LK, 0)},
        {"query": zeros(B, H, 0, D)},
        {"key": zeros(B, HKV, 0, D), "value": zeros(B, HKV, 0, DV)},
        {"query": zeros(B, 0, LQ, D), "key": zeros(B, 0, LK, D), "value": zeros(B, 0, LK, DV)},
        {"query": zeros(B, 0, LQ, D)},
        {"query": zeros(0, H, LQ, D), "key": zeros(0, HKV, LK, D), "value": zeros(0, HKV, LK, DV)},
    ]
    for change in fine:
        arguments = good() | change
        out, lse, lse_low = forward(**arguments)
        query, value = arguments["query"], arguments["value"]
        assert out.shape == (*query.shape[:3], value.shape[3])
        assert lse.shape == lse_low.shape == query.shape[:3] and lse.dtype == lse_low.dtype


def test_a_bias_of_float32_beside_half_precision() -> None:
    arguments = {n: x.bfloat16() if isinstance(x, Tensor) else x for n, x in good().items()}
    forward(**arguments | {"bias": zeros(LK)})
    message = "bias must have query's dtype bfloat16 or float32, but is float16; pass bias.to(query.dtype)"
    expect(TypeError, message, forward, **arguments | {"bias": zeros(LK, dtype=torch.float16)})


# The operators that take what others returned


def saved() -> dict[str, Any]:
    arguments = good()
    out, lse, lse_low = forward(**arguments)
    results = {"out": out, "lse": lse, "lse_low": lse_low}
    return {"grad_out": out, "grad_lse": lse, **arguments, **results}


def backward(**arguments: Any) -> Any:
    names = ("grad_out", "grad_lse", "query", "key", "value", "out", "lse", "lse_low")
    names += ("mask", "bias", "key_lengths", "seed")
    tensors = [arguments.pop(name) for name in names]
    return torch.ops.mha_ext.attention_backward(*tensors, **arguments, output_mask=[True] * 4)


@pytest.mark.parametrize("name", ["grad_out", "grad_lse", "out", "lse", "lse_low"])
def test_backward(name: str) -> None:
    arguments = saved()
    tensor = arguments[name]
    fix = "; pass what the forward returned or gave a gradient to"
    for wrong in (tensor[..., :-1], tensor[..., None], tensor[0]):
        shape, wanted = list(wrong.shape), list(tensor.shape)
        message = f"{name} must have shape {wanted}, but has {shape}{fix}"
        expect(ValueError, message, backward, **arguments | {name: wrong})
    message = f"{name} must be float32, but is float64{fix}"
    expect(TypeError, message, backward, **arguments | {name: tensor.double()})
    with pytest.raises(ValueError, match="key must have query's head_dim 8, but has 7"):
        backward(**arguments | {"key": arguments["key"][..., :-1]})


@pytest.mark.parametrize("name", ["heads", "rows"])
def test_selections(name: str) -> None:
    arguments = good()
    count = {"heads": H, "rows": LQ}[name]

    def weights(indices: list[int]) -> Tensor:
        found: Tensor = torch.ops.mha_ext.attention_weights(
            arguments["query"], arguments["key"], None, None, None, None, None,
            scale=1.0, **{name: indices},
        )  # fmt: skip
        return found

    for wrong in ([0, count], [-1]):
        message = (
            f"{name} must be indices from 0 to below {count}, but are {wrong}; leave it out for all of "
            "them"
        )
        expect(ValueError, message, weights, indices=wrong)
    assert weights([]).numel() == 0


def test_lse_of_the_weights() -> None:
    query, key = good()["query"], good()["key"]

    def weights(lse: Tensor | None, lse_low: Tensor | None) -> None:
        torch.ops.mha_ext.attention_weights(
            query, key, lse, lse_low, None, None, None, scale=1.0, rows=[0]
        )

    lse = zeros(B, H, LQ)
    weights(lse, lse)
    weights(lse, None)
    fix = "pass what the forward returned or gave a gradient to"
    message = f"lse_low must have shape [2, 6, 4], but has [6, 4]; {fix}"
    expect(ValueError, message, weights, lse=lse, lse_low=lse[0])
    message = f"lse_low must be float32, but is float64; {fix}"
    expect(TypeError, message, weights, lse=lse, lse_low=lse.double())
    message = "lse_low must be None where lse is None, but is a tensor; pass both, or neither to compute them"
    expect(ValueError, message, weights, lse=None, lse_low=lse)


def test_weights_backward() -> None:
    query, key = good()["query"], good()["key"]
    shown = torch.ops.mha_ext.attention_weights(
        query, key, None, None, None, None, None, scale=1.0, rows=[0]
    )
    for name, pair in (("grad_weights", (shown[:, 1:], shown)), ("weights", (shown, shown[:, 1:]))):
        with pytest.raises(ValueError, match=f"^{name} must have shape .2, 6, 1, 5., but has"):
            torch.ops.mha_ext.attention_weights_backward(
                *(*pair, query, key, None, None, None, None, None),
                **{"scale": 1.0, "rows": [0], "output_mask": [True] * 3},
            )
