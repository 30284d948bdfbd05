"""Small errors in the kernel of few queries (decode_half.cuh), each of which must be caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import emulated
import pytest
import torch
from cases import Problem, call, make, to_double
from emulated import Described, EmulatorError, Library
from test_emulator import REST, mutated, sanitized

from mha_ext import reference

# For bfloat16, up to 64 columns and 16 rows alone: it compiles in seconds.
DECODE = """
#include "decode_half.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention& a) {
  return a.batch * a.heads * key_parts(a).count * a.queries * (a.value_dim + 2) * 4;
}
const char* forward(const Attention& a, void* scratch, Stream stream) {
  return decode_half<BFloat16, 64, 1>(a, scratch, stream);
}
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention&, const AttentionGrad&, void*, Stream) { return "none"; }
}
"""
SOURCES = {"forward.cu": DECODE, "rest.cu": REST}
RACE = "no barrier is between|a wait is missing|is under way"
HEADER, PAIRS = "decode_half.cuh", "decode_pairs.cuh"
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "nothing"),
    "a tile that is still read": (HEADER, "    sync_warp();  // the tile before", "    //", RACE),
    "wait": (
        HEADER,
        "    copy_wait<F::kStages - 1>();\n    sync_warp();",
        "    copy_wait<F::kStages>();\n    sync_warp();",
        "a wait is missing",
    ),
    "place": (HEADER, "stage == 0 ? F::kStages - 1 : stage - 1", "stage", RACE + "|wrong"),
    "barrier of the sums": (HEADER, "  sync_block();\n  merge_warps", "  merge_warps", RACE),
    "barrier of the levels": (
        HEADER,
        "  sync_block();\n  const int64_t group",
        "  const int64_t group",
        RACE,
    ),
    "head": (PAIRS, "row / queries, (int)", "row % queries, (int)", "wrong"),
    "last row": (PAIRS, "r < place.rows ? r : place.rows - 1", "0", "wrong"),
    "a level": (HEADER, "Softmax<S>::power(rows.level[m][half] - level)", "1", "wrong"),
    "l of the warps": (
        HEADER,
        "          l += other * Softmax",
        "          l = other * Softmax",
        "wrong",
    ),
    "end of a part": (HEADER, "(part + 1) * parts.size", "part * parts.size + F::kKeys", "wrong"),
    "whole tiles": (HEADER, "k0 + F::kKeys <= all.end", "k0 < all.end", "wrong"),
    "hidden": (HEADER, "  if (!partial) {", "  if (true) {", "wrong"),
    "bits of the mask": (PAIRS, "n / 2 * 8 + n % 2) * step", "n) * step", "wrong"),
    "a part that has seen nothing": (
        "forward.cuh",
        "p0 + lane < count && part[1] != 0",
        "p0 + lane < count",
        "wrong",
    ),
    "a part": ("forward.cuh", "seen >> p & 1", "seen >> (p ^ 1) & 1", "wrong"),
    "weight of a part": (
        "forward.cuh",
        "power(part[0] - level) : (T)0",
        "power(part[0] - part[0]) : (T)0",
        "wrong",
    ),
}


def verdict(library: Library) -> str:
    """What is wrong with this kernel, over a few schedules and problems."""
    sizes = Problem(torch.bfloat16, 2, 6, 2, queries=3, keys=1300, head_dim=64, value_dim=50)
    for seed, problem in enumerate(
        (
            sizes,
            replace(sizes, key_lengths="random"),
            replace(sizes, mask="hqk"),
            replace(sizes, heads=3, kv_heads=1, keys=140, mask="b11k"),
        )
    ):
        library.seed = seed
        inputs = make(problem)
        inputs.key.mul_(2)
        if problem.key_lengths:
            inputs = inputs.replaced(key_lengths=torch.tensor([1299, 370]))
        seen = inputs.seen()
        value = inputs.value.clone()
        value.transpose(1, 2)[~seen.any(2).any(1)] = torch.nan
        operands = (inputs.query, inputs.key, value, inputs.mask, None, inputs.key_lengths, None)
        try:
            out, lse, _ = library.forward(Described(*operands, {"scale": 0.125}))
        except EmulatorError as error:
            return str(error)
        right = call(reference.attention, to_double(inputs), scale=0.125)
        for mine, theirs, bound in zip((out, lse), right, (0.02, 1e-3), strict=False):
            if not torch.allclose(mine.double(), theirs, rtol=bound, atol=bound):
                return "wrong numbers"
    return "nothing"


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, SOURCES), ["-O1"]))
    found = verdict(library)
    assert any(part in found for part in sign.split("|")), f"caught as {found!r}"


ON_THE_EDGE = """
import sys
sys.path[:0] = {path!r}
import torch, emulated
library = emulated.Library(emulated.Path({library!r}))
rng = torch.Generator().manual_seed(0)
def draw(*shape):
    return torch.randn(shape, generator=rng).to(torch.bfloat16)
for queries, keys, head_dim, value_dim in ((3, 700, 20, 33), (4, 65, 64, 64), (2, 3, 7, 9)):
    mask = torch.rand(1, 1, queries, keys, generator=rng) < 0.6
    for corner in ("upper_left", "lower_right"):
        described = emulated.Described(
            draw(1, 4, queries, head_dim), draw(1, 1, keys, head_dim), draw(1, 1, keys, value_dim),
            mask, draw(1, 4, queries, keys), torch.tensor([keys - 1]), torch.tensor([1, 2]),
            dict(scale=0.1, dropout_p=0.1, corner=corner, window_left=keys, window_right=2))
        library.forward(described)
print("clean")
"""
PAST_THE_END = {
    "": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "clean"),
    "keys": (HEADER, "min_of(F::kKeys, end - k0)", "F::kKeys", "AddressSanitizer: heap-"),
    "queries": (PAIRS, "r < place.rows ? r : place.rows - 1", "r", "AddressSanitizer: heap-"),
    "mask": (PAIRS, "bool one = bits >> n & 1;", "bool one = true;", "AddressSanitizer: heap-"),
    "out": (HEADER, "      if (d >= columns) break;", "", "AddressSanitizer: heap-"),
}


@pytest.mark.parametrize("name", PAST_THE_END)
@pytest.mark.slow
def test_accesses_past_the_end_are_caught(name: str, tmp_path: Path) -> None:
    *change, sign = PAST_THE_END[name]
    kernels = mutated(tmp_path, *change, SOURCES)
    library = emulated.build(kernels, ["-O1", *emulated.SANITIZE])
    answer = sanitized(
        ON_THE_EDGE.format(path=[str(emulated.HERE)], library=str(library)), tmp_path
    )
    assert sign in answer, answer[-2000:]
