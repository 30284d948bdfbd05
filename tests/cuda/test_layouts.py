"""Masks and biases as they lie in memory: however the 16-bit kernels read them, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import emulated
import pytest
import torch
from emulated import HALF, Described
from torch import Tensor

import mha_ext  # noqa: F401

ON_CPU = torch.ops.mha_ext
# Few pairs, whose mask is read as it is, and many, whose mask is packed. Whole pieces and tiles, or not.
SIZES = [(70, 128), (70, 131), (64, 1040), (130, 509)]


def placed(x: Tensor, offset: int, pad: int, step: int = 1) -> Tensor:
    """The same values, `offset` items behind the start of memory, rows `pad` longer, `step` apart."""
    rows = torch.Size((*x.shape[:-1], x.shape[-1] * step + pad))
    memory = torch.ones(offset + rows.numel(), dtype=x.dtype)
    found = memory[offset:].view(rows)[..., : x.shape[-1] * step : step]
    found.copy_(x)
    return found


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "16": lambda x: placed(x, 16, -x.shape[-1] % 16),
    "8": lambda x: placed(x, 8, -x.shape[-1] % 8 + 8),
    "4": lambda x: placed(x, 4, -x.shape[-1] % 4 + 4),
    "2": lambda x: placed(x, 2, -x.shape[-1] % 2 + 2),
    "1": lambda x: placed(x, 1, x.shape[-1] % 2 + 1),
    "two apart": lambda x: placed(x, 0, 3, 2),
    "queries first": lambda x: x.mT.contiguous().mT,
}
BROADCAST = {"all": (), "keys": (3,), "queries": (2,), "heads": (1,), "batch, heads": (0, 1)}


@cache
def tensors(dtype: torch.dtype, queries: int, keys: int, width: int) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(queries * keys)
    draw = lambda *shape: torch.randn(shape, generator=rng).to(dtype)  # noqa: E731
    return draw(2, 2, queries, width), *(draw(2, 1, keys, width) for _ in range(2))


def results(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    mask: Tensor | None,
    bias: Tensor | None,
    **more: int,
) -> list[Tensor | None]:
    """out, lse and the gradients on the emulator; out is compared with that of the CPU."""
    q, k, v = tensors(dtype, *sizes, more.get("width", 24))
    options = {"scale": 0.25}
    library = emulated.library()
    operands = (q, k, v, mask, bias, None, None)
    saved = library.forward(Described(*operands, options))
    right = ON_CPU.attention_forward(*operands, **options)[0]
    torch.testing.assert_close(saved[0], right, rtol=0.02, atol=0.02)
    with_bias = bias is not None
    grads = library.backward(
        Described(*operands, options), q + 1, None, saved, [True] * 3 + [with_bias]
    )
    return [*saved[:2], *grads]


def assert_same(ours: list[Tensor | None], right: list[Tensor | None]) -> None:
    for mine, other in zip(ours, right, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def values(sizes: tuple[int, int], broadcast: tuple[int, ...]) -> Tensor:
    shape = [2, 2, *sizes]
    for dim in broadcast:
        shape[dim] = 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str, sizes: tuple[int, int]) -> None:
    for kind in (torch.bool, torch.int16, torch.int32, torch.int64)[: 4 if sizes[1] == 131 else 1]:
        mask = values(sizes, (1,)) < 0.8
        mask[:, :, 3:20, 64:128] = False  # a warp, or a row, sees nothing of a tile
        if kind != torch.bool:
            mask = mask.to(kind) << kind.itemsize * 8 - 2  # only the last byte is not zero
        right = results(torch.bfloat16, sizes, mask != 0, None)
        assert_same(results(torch.bfloat16, sizes, LAYOUTS[layout](mask), None), right)


@pytest.mark.parametrize("sizes", SIZES[1:3], ids=str)
@pytest.mark.parametrize("broadcast", BROADCAST)
def test_broadcast_masks(broadcast: str, sizes: tuple[int, int]) -> None:
    mask = values(sizes, BROADCAST[broadcast]) < 0.8
    whole = mask.expand(2, 2, *sizes).contiguous()
    right = results(torch.float16, sizes, whole, None)
    assert_same(results(torch.float16, sizes, mask, None), right)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("width", [24, 72, 136])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases(layout: str, width: int, dtype: torch.dtype) -> None:
    sizes = SIZES[width == 24]
    bias = values(sizes, ()).to(dtype)
    bias[values(sizes, ()) > 1.5] = -torch.inf
    bias[0, 0, 5, 7] = torch.finfo(dtype).min  # with its score: finite all the same
    right = results(dtype, sizes, None, bias, width=width)
    assert_same(results(dtype, sizes, None, LAYOUTS[layout](bias), width=width), right)
    if width == 24:
        wide = results(dtype, sizes, None, bias.float(), width=width)
        assert_same([*wide[:2], *wide[2:5]], [*right[:2], *right[2:5]])


@pytest.mark.parametrize("broadcast", list(BROADCAST)[1:])
def test_broadcast_biases(broadcast: str) -> None:
    sizes = SIZES[0]
    bias = values(sizes, BROADCAST[broadcast]).to(torch.bfloat16)
    whole = bias.expand(2, 2, *sizes).contiguous()
    right = results(torch.bfloat16, sizes, None, whole)
    ours = results(torch.bfloat16, sizes, None, bias)
    assert_same(ours[:5], right[:5])
    summed = right[5].float()
    for dim in BROADCAST[broadcast]:
        summed = summed.sum(dim, keepdim=True)
    torch.testing.assert_close(ours[5].float(), summed, rtol=0.05, atol=0.05)
