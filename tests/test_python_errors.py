"""Guarantee 8 for the checks made in Python: one line: the argument, what it must be, was, the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import mha_ext

QUERY = torch.zeros(2, 4, 6, 8)
SHORT = torch.zeros(2, 4, 5, 8)
LENGTHS = torch.tensor([3, 6])


def attend(key: Any = QUERY, **options: Any) -> Any:
    return mha_ext.attention(QUERY, key, key, **options)


def weigh(key: Any = QUERY, **options: Any) -> Any:
    return mha_ext.attention_weights(QUERY, key, **options)


BOTH = [
    ({"causal": True, "key": SHORT}, ValueError, ["causal", "Lq = 6", "Lk = 5", "lower_right"]),
    (
        {"causal": True, "key_lengths": LENGTHS},
        ValueError,
        ["causal", "key_lengths", "lower_right"],
    ),
    ({"key": QUERY.to_sparse()}, TypeError, ["key must be dense", "sparse_coo", "key.to_dense()"]),
    (
        {"mask": torch.eye(6).bool().to_sparse()},
        TypeError,
        ["mask must be dense", "mask.to_dense()"],
    ),
    (
        {"key_lengths": LENGTHS.to_sparse()},
        TypeError,
        ["key_lengths must be dense", "key_lengths.to_dense()"],
    ),
    (
        {"bias": causal_upper_left(6, 6)},
        TypeError,
        ["bias must hold values", "CausalBias", 'causal="upper_left"'],
    ),
    (
        {"mask": causal_lower_right(6, 6)},
        TypeError,
        ["mask must hold values", "CausalBias", 'causal="lower_right"'],
    ),
    ({"causal": "lower-right"}, ValueError, ["causal", "'lower-right'", "lower_right"]),
    ({"causal": 1}, TypeError, ["causal", "int 1", "lower_right"]),
    ({"causal": None}, TypeError, ["causal", "NoneType", "False"]),
    ({"causal": torch.ones(6, 6)}, TypeError, ["causal", "Tensor"]),
    ({"window": 3}, TypeError, ["window", "int 3", "(left, right)"]),
    ({"window": (1, 2, 3)}, ValueError, ["window", "3 values"]),
    ({"window": (-1, 2)}, ValueError, ["window left", "-1", "None"]),
    ({"window": (None, 2**63)}, ValueError, ["window right", "2**63 - 1", str(2**63)]),
    ({"scale": 1e39}, ValueError, ["scale", "finite in float32", "1e+39"]),
    ({"scale": 10**400}, ValueError, ["scale", "finite"]),
    ({"window": (0, 2.0)}, TypeError, ["window right", "float 2.0", "int"]),
    ({"window": (True, 2)}, TypeError, ["window left", "bool True", "int"]),
    ({"window": (1, 2), "key": SHORT}, ValueError, ["window", "Lq = 6", "Lk = 5", "lower_right"]),
    ({"scale": float("inf")}, ValueError, ["scale", "finite", "inf"]),
    ({"scale": float("nan")}, ValueError, ["scale", "finite", "nan"]),
    ({"scale": "1"}, TypeError, ["scale", "str '1'", "float"]),
    ({"scale": torch.ones(())}, TypeError, ["scale", "Tensor", "multiply query"]),
    ({"empty_rows": "mean"}, ValueError, ["empty_rows", "'mean'", "uniform"]),
    ({"empty_rows": None}, TypeError, ["empty_rows", "NoneType", "uniform"]),
    ({"key": [1.0]}, TypeError, ["key", "list [1.0]", "tensor"]),
    ({"mask": True}, TypeError, ["mask", "bool True", "tensor"]),
    ({"bias": 1.0}, TypeError, ["bias", "float 1.0", "tensor"]),
    ({"key_lengths": [3, 6]}, TypeError, ["key_lengths", "list [3, 6]", "tensor"]),
]
ATTENTION = [
    ({"dropout_p": 1.0}, ValueError, ["dropout_p", "[0, 1)", "1.0"]),
    ({"dropout_p": -0.1}, ValueError, ["dropout_p", "[0, 1)", "-0.1"]),
    ({"dropout_p": float("nan")}, ValueError, ["dropout_p", "[0, 1)", "nan"]),
    ({"dropout_p": "0.1"}, TypeError, ["dropout_p", "str '0.1'", "float"]),
    ({"dropout_p": True}, TypeError, ["dropout_p", "bool", "float"]),
    ({"seed": 42}, TypeError, ["seed", "int64", "int 42", "torch.tensor"]),
]
WEIGHTS = [
    ({"heads": [4]}, ValueError, ["heads", "[0, 4)", "4"]),
    ({"heads": [-1]}, ValueError, ["heads", "[0, 4)", "-1"]),
    ({"rows": [0, 6]}, ValueError, ["rows", "[0, 6)", "6"]),
    ({"rows": 3}, TypeError, ["rows", "int 3", "list"]),
    ({"rows": [1.5]}, TypeError, ["rows", "float 1.5", "ints"]),
    ({"heads": torch.tensor([1])}, TypeError, ["heads", "Tensor", "list"]),
]


def check(call: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert type(raised.value) is error
    assert "\n" not in message, message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("options, error, words", BOTH + ATTENTION)
def test_attention(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    check(lambda: attend(**options), error, words)


@pytest.mark.parametrize("options, error, words", BOTH + WEIGHTS)
def test_weights(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    check(lambda: weigh(**options), error, words)


def test_a_seed_must_be_dense() -> None:
    seed = torch.tensor([1, 2]).to_sparse()
    check(
        lambda: mha_ext.attention(QUERY, QUERY, QUERY, dropout_p=0.1, seed=seed),
        TypeError,
        ["seed must be dense", "seed.to_dense()"],
    )


def test_query_and_value_must_be_tensors() -> None:
    check(lambda: mha_ext.attention(None, QUERY, QUERY), TypeError, ["query", "NoneType"])
    check(lambda: mha_ext.attention(QUERY, QUERY, 3), TypeError, ["value", "int 3"])
    check(lambda: mha_ext.attention_weights(None, QUERY), TypeError, ["query", "NoneType"])


def test_no_random_number_is_drawn_by_a_refused_call() -> None:
    state = torch.get_rng_state()
    check(lambda: attend(dropout_p=0.5, causal="left"), ValueError, ["causal"])
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_not_refused() -> None:
    """Spellings that look unusual and mean something."""
    assert torch.equal(attend(dropout_p=0), attend(dropout_p=0.0))
    assert torch.equal(attend(window=(None, None)), attend())
    assert torch.equal(attend(SHORT, window=(None, None)), attend(SHORT))
    assert torch.equal(attend(window=[2, 1]), attend(window=(2, 1)))
    assert torch.equal(attend(scale=1), attend(scale=1.0))
    assert torch.equal(attend(window=(2, 1), key_lengths=LENGTHS)[1], attend(window=(2, 1))[1])
    assert attend(SHORT, causal="upper_left").shape == QUERY.shape


MODULES = [
    ((300, 7), {}, ValueError, ["embed_dim", "300", "7", "head_dim"]),
    ((300.0, 6), {}, TypeError, ["embed_dim", "float", "int"]),
    ((300, 0), {}, ValueError, ["num_heads", "0"]),
    ((300, 6), {"num_kv_heads": 4}, ValueError, ["num_heads", "6", "4", "num_kv_heads"]),
    ((300, 6), {"key_dim": -1}, ValueError, ["key_dim", "-1"]),
    ((300, 6), {"value_head_dim": 0}, ValueError, ["value_head_dim", "0"]),
    ((300, 6), {"out_dim": "300"}, TypeError, ["out_dim", "str", "int"]),
    ((300, 6), {"dropout": 1.0}, ValueError, ["dropout", "[0, 1)", "1.0"]),
    ((300, 6), {"causal": "left"}, ValueError, ["causal", "'left'"]),
    ((300, 6), {"window": (-1, 0)}, ValueError, ["window", "-1"]),
    ((300, 6), {"empty_rows": "nan"}, ValueError, ["empty_rows", "'nan'"]),
    ((300, 6), {"bias": "no"}, TypeError, ["bias", "True or False", "'no'"]),
    ((300, 6), {"fast_linear": None}, TypeError, ["fast_linear", "True or False", "None"]),
    ((300, 6), {"num_kv_heads": True}, TypeError, ["num_kv_heads", "bool", "int"]),
    ((300, 6), {"dtype": torch.int64}, TypeError, ["dtype", "torch.float32", "torch.int64"]),
    ((300, 6), {"dtype": "float32"}, TypeError, ["dtype", "torch.float32", "'float32'"]),
]


@pytest.mark.parametrize("module", [mha_ext.MultiHeadAttention, mha_ext.AttentionBlock])
@pytest.mark.parametrize("sizes, options, error, words", MODULES)
def test_module_options(
    module: type, sizes: tuple, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    check(lambda: module(*sizes, **options), error, words)


def test_sizes_of_other_libraries() -> None:
    layer = mha_ext.MultiHeadAttention(numpy.int64(12), numpy.int64(3), key_dim=numpy.int32(10))
    assert layer.extra_repr() == "embed_dim=12, num_heads=3, key_dim=10"
    cache = mha_ext.KVCache(numpy.int64(2), 3, numpy.int64(5), 4)
    assert cache.key.shape == (2, 3, 5, 4)


def test_a_cache_of_what_is_no_attention_layer() -> None:
    make = mha_ext.KVCache.of
    check(lambda: make(torch.nn.Linear(3, 3), 2, 5), TypeError, ["layer", "Linear"])


def test_block_options() -> None:
    block = mha_ext.AttentionBlock
    check(lambda: block(64, 4, out_dim=32), ValueError, ["out_dim", "query_dim", "32", "64"])
    check(lambda: block(64, 4, hidden_dropout=2.0), ValueError, ["hidden_dropout", "[0, 1)"])
    with pytest.raises(TypeError):
        block(64, 4, droput=0.1)


X = torch.zeros(2, 5, 16)
FORWARD = [
    ((X[0],), {}, ValueError, ["query", "[B, Lq, 16]", "[5, 16]", "query[None]"]),
    ((torch.zeros(2, 5, 17),), {}, ValueError, ["query", "[B, Lq, 16]", "[2, 5, 17]", "query_dim"]),
    ((None,), {}, TypeError, ["query", "tensor", "NoneType"]),
    ((X, torch.zeros(3, 5, 16)), {}, ValueError, ["key", "batch", "2", "3"]),
    ((X, X, X[:, :4]), {}, ValueError, ["value", "[2, 5]", "[2, 4]"]),
    ((X,), {"mask": torch.ones(2, 5, 5).bool()}, ValueError, ["mask[:, None]", "mask[None]"]),
    ((X,), {"mask": torch.ones(5, 5)}, TypeError, ["mask", "float32", "mask.bool()", "bias=mask"]),
    ((X,), {"mask": [1]}, TypeError, ["mask", "list"]),
    ((X,), {"mask": causal_upper_left(5, 5)}, TypeError, ["CausalBias", 'causal="upper_left"']),
    ((X,), {"bias": causal_upper_left(5, 5)}, TypeError, ["CausalBias", 'causal="upper_left"']),
    (
        (X,),
        {"key_padding_mask": torch.ones(2, 4).bool()},
        ValueError,
        ["key_padding_mask", "[2, 5]", "[2, 4]"],
    ),
    ((X,), {"key_padding_mask": torch.ones(2, 5)}, TypeError, ["key_padding_mask", ".bool()"]),
    ((X,), {"key_padding_mask": [1]}, TypeError, ["key_padding_mask", "list"]),
    ((X,), {"causal": "left"}, ValueError, ["causal", "'left'"]),
    (
        (torch.nested.nested_tensor([X[0]]),),
        {},
        TypeError,
        ["query must be dense", "nested", "lengths"],
    ),
    (
        (X.double(),),
        {},
        TypeError,
        ["query", "layer's dtype torch.float32", "torch.float64", "query.to("],
    ),
    (
        (X, X.long()),
        {},
        TypeError,
        ["key", "layer's dtype torch.float32", "torch.int64", "key.to("],
    ),
    (
        (X,),
        {"mask": torch.ones(5, 4).bool(), "key_padding_mask": torch.ones(2, 5).bool()},
        ValueError,
        ["mask", "[B, H, Lq, Lk]", "Lk = 5", "[5, 4]"],
    ),
    (
        (X,),
        {
            "mask": torch.ones(1, 1, 5, 5).bool().expand(3, -1, -1, -1),
            "key_padding_mask": torch.ones(2, 5).bool(),
        },
        ValueError,
        ["mask", "B = 2", "[3, 1, 5, 5]"],
    ),
    ((X, X[:, :4]), {"causal": True}, ValueError, ["causal", "Lq = 5", "Lk = 4"]),
    ((X.to_sparse(),), {}, TypeError, ["query must be dense", "query.to_dense()"]),
    (
        (X,),
        {
            "mask": torch.eye(5).bool().to_sparse(),
            "key_padding_mask": torch.ones(2, 5).bool(),
        },
        TypeError,
        ["mask must be dense", "mask.to_dense()"],
    ),
    (
        (X,),
        {"key_padding_mask": torch.ones(2, 5).bool().to_sparse()},
        TypeError,
        ["key_padding_mask must be dense", "key_padding_mask.to_dense()"],
    ),
    ((X,), {"need_weights": "no"}, TypeError, ["need_weights must be True or False", "'no'"]),
    ((X,), {"average_weights": 1}, TypeError, ["average_weights must be True or False", "int 1"]),
]


@pytest.mark.parametrize("inputs, options, error, words", FORWARD)
def test_module_inputs(
    inputs: tuple, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    layer = mha_ext.MultiHeadAttention(16, 2)
    check(lambda: layer(*inputs, **options), error, words)


def test_devices_of_a_layer() -> None:
    layer = mha_ext.MultiHeadAttention(16, 2)
    x = torch.randn(2, 5, 16)
    there = x.to("meta")
    seen = torch.ones(2, 5, dtype=torch.bool)
    words = ["layer's device cpu", "not meta", "layer.to("]
    check(lambda: layer(there), ValueError, ["query", *words])
    check(lambda: layer(x, there), ValueError, ["key", *words])
    check(lambda: layer(x, x, there), ValueError, ["value", *words])
    words = ["query's device cpu", "not meta"]
    check(
        lambda: layer(x, key_padding_mask=seen.to("meta")), ValueError, ["key_padding_mask", *words]
    )
    square = torch.ones(5, 5, dtype=torch.bool, device="meta")
    check(lambda: layer(x, mask=square, key_padding_mask=seen), ValueError, ["mask", *words])


def test_tokens_in_place_of_their_embeddings() -> None:
    layer = mha_ext.MultiHeadAttention(16, 2)
    tokens = torch.zeros(2, 5, 16, dtype=torch.int64)
    check(lambda: layer(tokens), TypeError, ["query", "torch.float32", "embed the tokens first"])


def test_leading_dimensions() -> None:
    """The operators take them for vmap; whoever passes them meant something else."""
    more = QUERY[None]
    for function in (
        lambda: mha_ext.attention(more, more, more),
        lambda: mha_ext.attention_weights(more, more),
    ):
        with pytest.raises(
            ValueError, match=r"^query must have 4 dimensions .* \[1, 2, 4, 6, 8\]; flatten"
        ):
            function()
