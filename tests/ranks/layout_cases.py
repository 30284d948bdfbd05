"""What else a layout must do: masks of a shard, types, seeds that are drawn, uneven shards, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mha_ext
from mha_ext.distributed import (
    parallelize_attention,
    ring_attention,
    sequence_parallel_attention,
    shard_sequence,
    tensor_parallel_plan,
    unshard_sequence,
)
from ranks.failure_cases import last, refused
from ranks.sequence_cases import PLAIN
from ranks.tensor_cases import TIGHT, layer, numbers, whole

LENGTH = 16


def spread(**options: Any) -> tuple[mha_ext.MultiHeadAttention, mha_ext.MultiHeadAttention]:
    """A layer, and its twin on shards of the sequence."""
    one = layer(**options)
    twin = copy.deepcopy(one)
    parallelize_attention(twin, sequence=dist.group.WORLD, method="ring")
    return one, twin


def padding() -> None:
    """key_padding_mask of this rank's keys; and the same as a mask of the function."""
    one, many = spread(causal=True, dropout=0.2)
    x = numbers(2, LENGTH, 32)
    seen = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 5 != 0
    torch.manual_seed(1)
    wanted = one(x, key_padding_mask=seen)
    torch.manual_seed(1)
    out = many(shard_sequence(x), key_padding_mask=shard_sequence(seen))
    torch.testing.assert_close(unshard_sequence(out), wanted.detach(), **TIGHT)


def padding_and_mask() -> None:
    """key_padding_mask of this rank's keys, beside a mask that has all of them."""
    one, many = spread()
    x = numbers(2, LENGTH, 32)
    seen = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 5 != 0
    mask = torch.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH) % 3 != 0
    wanted = one(x, mask=mask, key_padding_mask=seen).detach()
    rows, keys = shard_sequence(mask, dim=0), shard_sequence(seen)
    for out in (
        many(shard_sequence(x), mask=rows, key_padding_mask=keys),
        many(shard_sequence(x), None, None, rows, key_padding_mask=keys.int()),
    ):
        torch.testing.assert_close(unshard_sequence(out), wanted, **TIGHT)

    def call(mask: Tensor | None, padding: Tensor | None) -> Tensor:
        found: Tensor = many(shard_sequence(x), mask=mask, key_padding_mask=padding)
        return found

    wrong = keys[:, 1:] if last() else keys
    refused(ValueError, "key_padding_mask must be [B, Lk / ranks]", lambda: call(rows, wrong))
    wrong = rows[None, None].expand(3, 1, -1, -1) if last() else rows
    refused(ValueError, "mask must be [Lq, Lk] or broadcast", lambda: call(wrong, keys))
    refused(ValueError, "the same arguments", lambda: call(rows if last() else None, keys))
    refused(ValueError, "the same arguments", lambda: call(rows, keys if last() else None))
    torch._dynamo.reset()
    found = torch.compile(call, backend="aot_eager")(rows, keys)
    torch.testing.assert_close(unshard_sequence(found), wanted, **TIGHT)


def one_key_each() -> None:
    """A mask of rows that is the same for all keys is not one of this rank's key."""
    ranks = dist.get_world_size()
    q, k = numbers(1, ranks, 2 * ranks, 8), numbers(1, ranks, ranks, 8, seed=3)
    mask = torch.arange(2 * ranks)[:, None] % 3 != 0
    cut = partial(shard_sequence, order="contiguous")
    for method in ("ring", "all_to_all"):
        out = sequence_parallel_attention(
            cut(q, dim=2),
            cut(k, dim=2),
            cut(k, dim=2),
            cut(mask, dim=0),
            order="contiguous",
            method=method,  # type: ignore[arg-type]
        )
        out = unshard_sequence(out, dim=2, order="contiguous")
        torch.testing.assert_close(out, mha_ext.attention(q, k, k, mask), **TIGHT)
    one = layer()
    many = parallelize_attention(
        copy.deepcopy(one), sequence=dist.group.WORLD, order="contiguous", method="ring"
    )
    x, seen = numbers(1, ranks, 32), torch.arange(ranks) != 1
    padding = torch.ones(1, ranks, dtype=torch.bool)
    out = many(cut(x), mask=cut(seen, dim=0), key_padding_mask=cut(padding))
    out = unshard_sequence(out, order="contiguous")
    torch.testing.assert_close(out, one(x, mask=seen).detach(), **TIGHT)


def given_back() -> None:
    """Told again without a group, a layer sees whole sequences again."""
    one, many = spread(rotary_base=100.0, causal=True)
    x = numbers(2, LENGTH, 32)
    parallelize_attention(many)
    torch.testing.assert_close(many(x), one(x), **TIGHT)
    cache = mha_ext.KVCache.of(many, batch=2, max_length=LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(many(x, cache=cache), one(x), **TIGHT)
    parallelize_attention(many, sequence=dist.group.WORLD)
    torch.testing.assert_close(unshard_sequence(many(shard_sequence(x))), one(x).detach(), **TIGHT)


def cross() -> None:
    one, many = spread()
    x, y = numbers(2, LENGTH, 32), numbers(2, 2 * LENGTH, 32)
    out = many(shard_sequence(x), shard_sequence(y))
    torch.testing.assert_close(unshard_sequence(out), one(x, y).detach(), **TIGHT)


def sequence_refusals() -> None:
    _, many = spread(causal=True, rotary_base=100.0)
    x = shard_sequence(numbers(2, LENGTH, 32))
    cache = mha_ext.KVCache.of(many, batch=2, max_length=LENGTH)
    refused(ValueError, "cache must be None", lambda: many(x, cache=cache))
    refused(ValueError, "key must be None", lambda: many(x, x))
    _, plain = spread()
    refused(ValueError, "need_weights must be False", lambda: plain(x, need_weights=True))
    refused(TypeError, "layer must be", lambda: tensor_parallel_plan(nn.Linear(2, 2)))  # type: ignore[arg-type]
    refused(ValueError, "order must be", lambda: parallelize_attention(plain, order="any"))  # type: ignore[arg-type]
    refused(ValueError, "method must be", lambda: parallelize_attention(plain, method="foo"))  # type: ignore[arg-type]
    refused(ValueError, "length must be a multiple", lambda: shard_sequence(numbers(1, 3, 2)))


def drawn_seed() -> None:
    """Ranks with other generators: the first rank's seed counts."""
    q, k, v = (numbers(2, 4, LENGTH, 8, seed=i) for i in range(3))
    torch.manual_seed(0)
    seed = torch.randint(0, 2**32, (2,))
    wanted = mha_ext.attention(q, k, v, dropout_p=0.4, seed=seed)
    torch.manual_seed(dist.get_rank())
    out = ring_attention(*(shard_sequence(x, dim=2) for x in (q, k, v)), dropout_p=0.4)
    torch.testing.assert_close(unshard_sequence(out, dim=2), wanted, **TIGHT)


def types(method: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Results and gradients of other types, beside one process in float64."""
    inputs = cases.make(replace(PLAIN, dtype=dtype, causal=True, dropout_p=0.2))
    leaves = [inputs.query, inputs.key, inputs.value]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    shards = (shard_sequence(leaf, dim=2) for leaf in leaves)
    options = {**inputs.options, "seed": inputs.seed}
    out = sequence_parallel_attention(*shards, method=method, **options)
    assert out.dtype == dtype
    out.backward(shard_sequence(inputs.grad_out, dim=2))
    plain = cases.results(
        partial(cases.call, mha_ext.attention),
        cases.to_double(inputs).replaced(grad_lse=torch.zeros_like(inputs.grad_lse).double()),
    )
    near = {"atol": tolerance, "rtol": tolerance}
    found = unshard_sequence(out, dim=2).double()
    torch.testing.assert_close(found, plain["out"], **near)
    for name, leaf in zip(("query", "key", "value"), leaves):
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        grad = leaf.grad.double()
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, plain[f"grad_{name}"], **near)


def autocast() -> None:
    q, k, v = (numbers(2, 4, LENGTH, 8, seed=i).float() for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = mha_ext.attention(q, k, v)
        for method in ("ring", "all_to_all"):
            shards = (shard_sequence(x, dim=2) for x in (q, k, v))
            out = sequence_parallel_attention(*shards, method=method)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(unshard_sequence(out, dim=2), wanted, atol=2e-2, rtol=2e-2)


def hidden_numbers() -> None:
    """NaN behind a mask reaches no rank's results or gradients."""
    q, k, v = (numbers(1, 2, LENGTH, 8, seed=i) for i in range(3))
    k[:, :, LENGTH - 3 :] = torch.nan
    leaves = [shard_sequence(x, dim=2).requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, key_lengths=torch.tensor([LENGTH - 3]))
    out.sum().backward()
    assert out.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


def compiled(groups: bool) -> None:
    """A layer on shards in a compiled model: attention itself is left to eager PyTorch."""
    one, many = spread(causal=True, rotary_base=100.0, dropout=0.2)
    if groups:  # and of the batch, each of one rank
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        parallelize_attention(many, sequence=dist.group.WORLD, batch=alone[dist.get_rank()])
    call = torch.compile(many, backend="aot_eager")
    x = numbers(2, LENGTH, 32)
    torch.manual_seed(1)
    one(x).square().sum().backward()
    torch.manual_seed(1)
    call(shard_sequence(x)).square().sum().backward()
    for wanted, found in zip(one.parameters(), many.parameters(), strict=True):
        dist.all_reduce(found.grad)
        torch.testing.assert_close(found.grad, wanted.grad, **TIGHT)


def two_dimensions(batch: int) -> None:
    """Batch and heads of DTensors over a mesh of two dimensions, with an uneven batch."""
    inputs = cases.make(
        replace(PLAIN, batch=batch, dropout_p=0.3, bias="b1qk", key_lengths="random")
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    place = [Shard(0), Shard(1)]
    leaves = [inputs.query, inputs.key, inputs.value]
    one = mha_ext.attention(
        *leaves,
        bias=inputs.bias,
        key_lengths=inputs.key_lengths,
        seed=inputs.seed,
        dropout_p=0.3,
    )
    out = mha_ext.attention(
        *(distribute_tensor(leaf, mesh, place) for leaf in leaves),
        bias=inputs.bias,
        key_lengths=inputs.key_lengths,
        seed=inputs.seed,
        dropout_p=0.3,
    )
    assert isinstance(out, DTensor) and out.stride() == one.stride()
    torch.testing.assert_close(whole(out), one, **TIGHT)


def weights_of_dtensors() -> None:
    inputs = cases.make(replace(PLAIN, mask="b1qk", bias="1h1k"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = mha_ext.attention_weights(inputs.query, inputs.key, inputs.mask, bias=inputs.bias)
    spread_out: list[Tensor] = [
        distribute_tensor(x, mesh, [Shard(1)]) for x in (inputs.query, inputs.key)
    ]
    found = mha_ext.attention_weights(*spread_out, inputs.mask, bias=inputs.bias)
    assert isinstance(found, DTensor) and found.placements == (Shard(1),)
    torch.testing.assert_close(whole(found), one, **TIGHT)


def undivided_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    few = distribute_tensor(numbers(1, 1, 4, 8), mesh, [Shard(1)])
    many = distribute_tensor(numbers(1, 4, 4, 8), mesh, [Shard(1)])
    refused(ValueError, "must have heads that", lambda: mha_ext.attention(many, few, few))


CASES: dict[str, Callable[[], Any]] = {
    "padding": padding,
    "padding and mask": padding_and_mask,
    "one key each": one_key_each,
    "given back": given_back,
    "cross": cross,
    "refusals": sequence_refusals,
    "drawn seed": drawn_seed,
    "autocast": autocast,
    "hidden numbers": hidden_numbers,
    "compiled": partial(compiled, False),
    "compiled, two groups": partial(compiled, True),
    "DTensor, two dimensions": partial(two_dimensions, 4),
    "DTensor, two dimensions, uneven": partial(two_dimensions, 5),
    "DTensor, weights": weights_of_dtensors,
    "DTensor, heads that do not divide": undivided_dtensors,
}
for _method in ("ring", "all_to_all"):
    for _dtype, _tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 6e-2), (torch.half, 1e-2)):
        CASES[f"{_method}, {_dtype}"] = partial(types, _method, _dtype, _tolerance)
