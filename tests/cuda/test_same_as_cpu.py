"""The kernels of both devices on the same operands: the same dropout and masks, other rounding."""

from __future__ import annotations

from dataclasses import replace

import emulated
import pytest
import torch
from cases import Inputs, Problem, make
from test_forward import DTYPES
from torch import Tensor

SIZES = Problem(None, 2, 4, 2, queries=40, keys=75, head_dim=24, value_dim=30)
KINDS = (
    {"mask": "bh1k", "bias": "hqk", "empty_rows": "uniform", "dropout_p": 0.4},
    {"key_lengths": "edges", "bias": "1h1k", "empty_rows": "uniform"},
)
ON_CPU = torch.ops.mha_ext


def close(found: Tensor, wanted: Tensor) -> None:
    """The same but for rounding, beside the largest of the numbers."""
    loose = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 0.01}.get(found.dtype, 0.05)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=loose, atol=loose * max(largest, 1.0))


def made(dtype: torch.dtype, kind: dict[str, str]) -> tuple[Inputs, dict[str, object]]:
    """A problem, and the options of its operators."""
    inputs = make(replace(SIZES, dtype=dtype, **kind))
    options = {"dropout_p": kind.get("dropout_p", 0.0), "scale": 24**-0.5}
    return inputs, {**options, "uniform_empty_rows": True, "origin": (1, 2, 3, 5)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype: torch.dtype, kind: dict[str, str]) -> None:
    i, options = made(dtype, kind)
    pairs = (i.mask, i.bias, i.key_lengths, i.seed)
    forward = ON_CPU.attention_forward(i.query, i.key, i.value, *pairs, **options)
    saved = (i.grad_out, i.grad_lse, i.query, i.key, i.value, *forward, *pairs)
    options["output_mask"] = [True] * 4
    found = emulated.attention_backward(*saved, **options)
    for mine, theirs in zip(found, ON_CPU.attention_backward(*saved, **options), strict=True):
        close(mine, theirs)
