"""Rows that cannot be copied by 16 bytes: the kernels for compute capability 9.0 have copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from cases import Problem, make
from emulated import Described, Library
from test_emulator import REST, mutated
from test_hopper import gradients, results
from torch import Tensor

# of a problem of 260 queries and 300 keys, and how many of query, key, value and grad_out are copied
CASES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"head_dim": 50}, 4),
    ({"head_dim": 33, "value_dim": 64}, 2),  # not even pairs of elements stand together
    ({"head_dim": 64, "value_dim": 7, "heads": 4, "kv_heads": 2}, 2),
    ({"head_dim": 100, "layout": "heads", "batch": 2, "mask": "b1qk"}, 4),
    ({"head_dim": 36, "layout": "sliced", "batch": 2, "dropout_p": 0.3}, 4),
    ({"head_dim": 50, "layout": "expanded", "batch": 3, "key_lengths": "random"}, 4),
)


@pytest.fixture(scope="module")
def hopper() -> Library:
    library = Library(emulated.build())
    library.hopper = True
    return library


def in_pieces(rows: Tensor) -> Tensor:
    """The same numbers, where each row begins at a multiple of 16 bytes."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8))[..., : rows.shape[-1]]


def launches(library: Library) -> int:
    assert library.report.shared_bytes > 99 * 1024  # the kernels that want such rows
    return library.report.launches


@pytest.mark.parametrize("of,copies", CASES, ids=str)
def test_the_same_bits_as_from_aligned_rows(
    of: dict[str, Any], copies: int, hopper: Library
) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 260, "keys": 300}
    inputs = make(Problem(**sizes | {"dtype": torch.bfloat16} | of))
    rest = (inputs.mask, inputs.bias, inputs.key_lengths, inputs.seed)
    said = {"scale": 0.2, "dropout_p": inputs.options["dropout_p"]}
    given = inputs.query, inputs.key, inputs.value, inputs.grad_out
    found, counts = [], []
    for *operands, grad_out in (given, map(in_pieces, given)):
        kernels = Described(*operands, *rest, said)
        saved = hopper.forward(kernels)
        counts += [launches(hopper)]
        grads = hopper.backward(kernels, grad_out, inputs.grad_lse, saved, [True] * 3 + [False])
        counts += [launches(hopper)]
        found.append([*saved, *grads[:3]])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
    forward = copies - (copies == 4 or "value_dim" in of and of["value_dim"] % 8 != 0)
    assert [counts[0] - counts[2], counts[1] - counts[3]] == [forward, copies]


@pytest.mark.parametrize("of,_", CASES, ids=str)
def test_numbers(of: dict[str, Any], _: int, hopper: Library) -> None:
    of = {"queries": 260, "keys": 300} | of
    assert results(hopper, of, {}, poison=False, seed=0) == ""
    assert gradients(hopper, of, {}, poison=True, seed=1) == ""


def test_few_pairs_are_not_worth_copies(hopper: Library) -> None:
    inputs = make(Problem(queries=200, keys=300, head_dim=50, dtype=torch.bfloat16))
    operands = inputs.query, inputs.key, inputs.value, None, None, None, None
    hopper.forward(Described(*operands, {"scale": 0.2}))
    assert hopper.report.launches == 1 and hopper.report.shared_bytes < 99 * 1024


FORWARD = """
#include "forward_hopper.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention& a) { return aligned_bytes(a); }
const char* forward(const Attention& given, void* scratch, Stream stream) {
  Attention a = given;
  const char* error = align_rows(a, nullptr, scratch, stream);
  return error ? error : run_forward_hopper<HopperForward<BFloat16, 64, true>>(a, stream);
}
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention&, const AttentionGrad&, void*, Stream) { return "none"; }
}
"""
SOURCES: Mapping[str, str] = {
    "forward.cu": FORWARD,
    "aligned.cu": (emulated.KERNELS / "aligned.cu").read_text(),
    "rest.cu": REST,
}
FILE = "aligned.cu"
MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", ""),
    "head of the copy": (FILE, "h * to.head", "0 * to.head", "wrong"),
    "head that is copied": (FILE, "h * from.head", "0 * from.head", "wrong"),
    "batch of the copy": (FILE, "to.heads * head;", "head;", "wrong"),
    "one place": (FILE, "(of.batch ? batch : 1) * to.heads", "to.heads", "wrong|outside|past"),
    "scratch": (FILE, "scratch = (char*)scratch + to.bytes;", "", "wrong"),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, SOURCES), ["-O1"]))
    library.hopper = True
    of = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 200, "keys": 150, "head_dim": 50}
    found = results(library, of, {}, poison=False, seed=0)
    assert any(part in found for part in sign.split("|")) and bool(found) == bool(sign), found
