"""Padding: what lengths hide is as if it were not there, and a mask that hides the same is lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    MASK_DTYPES,
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
from sizes import size
from torch import Tensor

import mha_ext

pytestmark = pytest.mark.isa

# Keys of one tile and of several; few queries, a vector of them, a tile, and more.
SHAPES = size(
    ((12, 10), (12, 64), (40, 24), (64, 64), (100, 50), (3, 200), (12, 130), (70, 330)),
    emulated=((12, 10), (20, 70)),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uniform": {"empty_rows": "uniform"},
    "causal": {"causal": "upper_left"},
    "window": {"causal": "upper_left", "window": (40, None), "empty_rows": "uniform"},
    "bias": {"bias": "1hqk"},
    "own bias": {"bias": "bhqk"},
    "dropout": {"dropout_p": 0.3},
    "shared heads": {"heads": 4, "kv_heads": 2},
    "negative scale": {"scale": -0.7},  # zeros have signs
    "last corner": {"causal": "lower_right"},  # there lengths would move the diagonal
}
# Where operands are cut into limbs, tiles that lengths cut have bits of their own.
LIMBS = mha_ext._C.active_isa() == "amx"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def every_result(inputs: Inputs) -> dict[str, Tensor]:
    # What is given back here is likely to be what the results are written to.
    tensors = (inputs.query, inputs.key, inputs.value, inputs.grad_lse)
    poison = [torch.full_like(tensor, torch.nan) for tensor in tensors * 2]
    del poison
    return results(lambda i: call(mha_ext.attention, i), inputs)


def padded(dtype: torch.dtype, shape: tuple[int, int], **options: Any) -> Inputs:
    sizes = {"batch": size(4, emulated=2), "queries": shape[0], "keys": shape[1], "head_dim": 24}
    return make(Problem(**{"dtype": dtype, "layout": "heads", **sizes, **options}))


def mask_of(lengths: Tensor, keys: int) -> Tensor:
    """[B, 1, 1, Lk]"""
    return (torch.arange(keys) < lengths[:, None])[:, None, None, :]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], entry: int = -1) -> None:
    for name, tensor in wanted.items():
        same = found[name]
        if entry >= 0:  # of the batch; what belongs to all of it has other terms
            if tensor.shape[0] == 1:
                continue
            tensor, same = tensor[entry], same[entry]
        bits = BITS[tensor.element_size()]
        assert torch.equal(same.contiguous().view(bits), tensor.contiguous().view(bits)), name


@pytest.mark.parametrize("lengths", ("edges", "random"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_and_lengths(
    dtype: torch.dtype, shape: tuple[int, int], options: dict[str, Any], lengths: str
) -> None:
    inputs = padded(dtype, shape, key_lengths=lengths, **options)
    assert inputs.key_lengths is not None
    mask = mask_of(inputs.key_lengths, shape[1])
    masked = inputs.replaced(mask=mask, key_lengths=None)
    of_mask = every_result(masked)
    assert_accurate(
        of_mask, exact(masked), plain_orders(masked, results), largest_terms(masked), tuple(of_mask)
    )
    if options.get("causal") != "lower_right" and not LIMBS:
        assert_same(of_mask, every_result(inputs))
    hidden = ~mask.expand(-1, inputs.key.shape[1], -1, -1)[:, :, 0]
    if options.get("empty_rows") == "uniform":
        hidden = hidden & masked.seen().any(-1).all((1, 2))[:, None, None]
    for name in ("grad_key", "grad_value"):
        assert not of_mask[name][hidden].any(), name


# Padding on the left; keys hidden in between, also so that each tile shows its first keys; a mask of
# pairs that happens to be one of keys; one entry for all of the batch.
def others(shape: tuple[int, int], batch: int) -> dict[str, Tensor]:
    keys = shape[1]
    lengths = torch.randint(0, keys + 1, (batch,))
    holes = mask_of(lengths, keys).clone()
    holes[..., keys // 3] = False
    end, start = (torch.ones(batch, 1, 1, keys, dtype=torch.bool) for _ in range(2))
    end[..., 60:64] = False
    start[..., :64] = False
    return {
        "left": mask_of(lengths, keys).flip(-1),
        "holes": holes,
        "the end of a tile": end,
        "a whole tile": start,
        "pairs": mask_of(lengths, keys).repeat(1, 1, shape[0], 1),
        "one for all": mask_of(lengths[:1], keys),
        "heads": mask_of(lengths, keys).repeat(1, 2, 1, 1),
        "nothing": mask_of(lengths * 0, keys),
        "everything": mask_of(lengths * 0 + keys, keys),
    }


@pytest.mark.parametrize("kind", list(others((1, 1), 1)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_masks(shape: tuple[int, int], kind: str) -> None:
    inputs = padded(torch.float32, shape)
    masked = inputs.replaced(mask=others(shape, inputs.query.shape[0])[kind])
    found = every_result(masked)
    assert_accurate(
        found, exact(masked), plain_orders(masked, results), largest_terms(masked), tuple(found)
    )


@pytest.mark.parametrize("name", ("plain", "uniform", "causal", "own bias", "negative scale"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_mates_change_nothing(dtype: torch.dtype, shape: tuple[int, int], name: str) -> None:
    """Whether a mask is one of padding is known of the whole batch only."""
    inputs = padded(dtype, shape, **OPTIONS[name])
    keys = shape[1]
    lengths = torch.randint(1, keys + 1, (inputs.query.shape[0],))
    lengths[0], lengths[-1] = keys // 2 + 1, keys
    mask = mask_of(lengths, keys)
    broken = mask.clone()
    broken[-1, ..., 0] = False
    wanted, found = (every_result(inputs.replaced(mask=m)) for m in (mask, broken))
    for entry in range(inputs.query.shape[0] - 1):
        assert_same(found, wanted, entry)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_rows_of_others(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """An entry without any key has all of them, and changes nothing for others."""
    inputs = padded(dtype, shape, empty_rows="uniform")
    lengths = torch.randint(1, shape[1] + 1, (inputs.query.shape[0],))
    lengths[1] = 0
    together = every_result(inputs.replaced(key_lengths=lengths))
    names = ("query", "key", "value", "grad_out", "grad_lse")
    for b in range(len(lengths)):
        alone = {name: getattr(inputs, name)[b : b + 1] for name in names}
        found = every_result(inputs.replaced(key_lengths=lengths[b : b + 1], **alone))
        assert_same({n: t[b : b + 1] for n, t in together.items()}, found)


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "sliced", "transposed"))
def test_every_type_of_mask(dtype: torch.dtype, layout: str) -> None:
    shape = size((20, 150), emulated=(20, 70))
    inputs = padded(torch.float32, shape, key_lengths="random")
    assert inputs.key_lengths is not None
    shown = mask_of(inputs.key_lengths, shape[1])
    mask = shown if dtype == torch.bool else shown.to(dtype) * 3
    if layout == "sliced":
        mask = mask.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed":
        mask = mask.mT.contiguous().mT
    assert_same(every_result(inputs.replaced(mask=mask)), every_result(inputs))


def test_both() -> None:
    """The shorter of the two counts."""
    shape = size((20, 150), emulated=(20, 70))
    inputs = padded(torch.float32, shape, key_lengths="random")
    assert inputs.key_lengths is not None
    shorter = inputs.key_lengths // 2
    mixed = torch.where(torch.arange(len(shorter)) % 2 == 0, shorter, shape[1])
    found = every_result(inputs.replaced(mask=mask_of(mixed, shape[1])))
    wanted = torch.minimum(mixed, inputs.key_lengths)
    assert_same(found, every_result(inputs.replaced(key_lengths=wanted)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_hidden_is_read(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs = padded(dtype, shape)
    lengths = torch.randint(0, shape[1] + 1, (inputs.query.shape[0],))
    masked = inputs.replaced(mask=mask_of(lengths, shape[1]))
    clean = every_result(masked)
    beyond = ~masked.mask.mT if masked.mask is not None else torch.tensor(True)
    key, value = (t.masked_fill(beyond, torch.nan) for t in (inputs.key, inputs.value))
    assert_same(every_result(masked.replaced(key=key, value=value)), clean)


@pytest.mark.parametrize("broken", (False, True))
def test_groups(broken: bool) -> None:
    """vmap: each group has lengths of its own, or, where one has none, its mask."""
    batch, queries, keys = 2, *size((30, 100), emulated=(10, 30))
    query = torch.randn(3, batch, 2, queries, 16)
    key, value = torch.randn(2, 3, batch, 2, keys, 16)
    mask = torch.stack([mask_of(torch.randint(0, keys + 1, (batch,)), keys) for _ in range(3)])
    if broken:
        mask[1, 0, ..., 0] = False

    def gradients(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            out = mha_ext.attention(tensors[0], tensors[1], tensors[2], mask)
            return out.square().sum(), out

        return torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    (grads, out) = torch.func.vmap(gradients)(query, key, value, mask)
    for i in range(3):
        (wanted, alone) = gradients(query[i], key[i], value[i], mask[i])
        assert torch.equal(out[i], alone)
        for found, grad in zip(grads, wanted, strict=True):
            assert torch.equal(found[i], grad)


def test_derivatives_and_weights() -> None:
    """Tangents, double backward and P take such masks, too."""
    inputs = padded(torch.float64, size((12, 20), emulated=(5, 8)), key_lengths="random")
    assert inputs.key_lengths is not None
    mask = mask_of(inputs.key_lengths, inputs.key.shape[2])
    tensors = tuple(t.requires_grad_() for t in (inputs.query, inputs.key, inputs.value))
    tangents = tuple(torch.randn_like(t) for t in tensors)

    def every(**hidden: Any) -> list[Tensor]:
        def out(*given: Tensor) -> Tensor:
            return mha_ext.attention(*given, **hidden)

        found = [*torch.func.jvp(out, tensors, tangents)]
        first = torch.autograd.grad(out(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.stack([grad.square().sum() for grad in first]).sum()
        found += torch.autograd.grad(second, tensors)
        weights = mha_ext.attention_weights(*tensors[:2], **hidden)
        found += [weights, *torch.autograd.grad(weights.square().sum(), tensors[:2])]
        return found

    for found, wanted in zip(every(mask=mask), every(key_lengths=inputs.key_lengths), strict=True):
        assert torch.equal(found, wanted)
