"""Small errors in the kernels of the weights of 16-bit types, each of which must be caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import emulated
import pytest
import torch
from cases import Problem
from emulated import EmulatorError, Library
from test_emulator import FORWARD, mutated, sanitized
from test_half_weights import Case, cotangent

# For bfloat16 and up to 128 columns alone: they compile in seconds.
WEIGHTS = """
#include "backward_half_bias.cuh"
#include "weights_half.cuh"
namespace mha_ext::cuda {
const char* weights(const Attention& a, const Selection& selected, void* out, Stream stream) {
  return weights_half<BFloat16>(a, selected, out, stream);
}
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream) {
  return weights_backward_half<BFloat16, 128>(a, g, scratch, stream);
}
const char* upload(const int64_t*, int64_t, int64_t*, Stream) { return "none"; }
const char* forward_tangent(const Attention&, const AttentionTangent&, Stream) { return "none"; }
const char* backward_tangent(const Attention&, const AttentionGrad&, const AttentionTangent&, void*,
                             Stream) {
  return "none";
}
}
"""
SOURCES = {"forward.cu": FORWARD, "weights.cu": WEIGHTS}
RACE = "no barrier is between|a wait is missing|is under way"
HEADER, BACKWARD = "weights_half.cuh", "backward_half.cuh"
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "nothing"),
    "barrier": (HEADER, "        sync_block();  // this slice", "        // this slice", RACE),
    "wait": (HEADER, "copy_wait<F::kStages - 2>", "copy_wait<F::kStages - 1>", "a wait is missing"),
    "ring": (HEADER, "next_stage + 1 == F::kStages ?", "next_stage + 1 == 2 ?", RACE + "|wrong"),
    "rows on their way": (HEADER, "  sync_warp();  // what stood", "  // what stood", RACE),
    "rows that are there": (HEADER, "  sync_warp();\n  const int low", "  const int low", RACE),
    "fragment": (HEADER, "lane / 4, j) + lane", "lane / 4, j ^ 1) + lane", "wrong weights"),
    "last row of a run": (
        HEADER,
        "rows.count - warp_id()",
        "rows.count - 1 - warp_id()",
        "wrong weights",
    ),
    "first row of a run": (
        HEADER,
        "head_rows<S>(a.query, b, h), rows.query,",
        "head_rows<S>(a.query, b, h), rows.query / 2 * 2,",
        "wrong weights",
    ),
    "columns of the last slice": (
        HEADER,
        "columns - slice * F::kSlice, s",
        "columns, s",
        "wrong weights",
    ),
    "tiles that are partly seen": (
        HEADER,
        "min_of(end, seen.any_end)",
        "min_of(end, seen.all_end)",
        "wrong weights",
    ),
    "rows without a key": (HEADER, "1 / (float)a.keys", "0", "wrong weights"),
    "the low half of lse": (HEADER, " - rows[e / 2].low", "", "wrong weights"),
    "the other half": (
        "half.cuh",
        "2 * own + half)",
        "2 * own + 1 - half)",
        "wrong gradient of key",
    ),
    "the next fragment": (
        "half.cuh",
        "half + r, j + next)",
        "half + r, j + 1 - next)",
        "wrong gradient of query",
    ),
    "a row of the cotangent": (
        BACKWARD,
        "F::kOwnsKeys ? other0 : own0,",
        "F::kOwnsKeys ? other0 + 1 : own0 + 1,",
        "wrong gradient",
    ),
    "the head of the cotangent": ("half.cuh", "from.head, from", "0, from", "wrong gradient"),
    "keys past the last": (
        "half.cuh",
        "(F::kKeys, a.keys - k0) * 2",
        "(F::kKeys, a.keys - k0 - 1) * 2",
        "wrong gradient",
    ),
}
PROBLEM = Problem(
    torch.bfloat16, 1, 2, 1, queries=100, keys=203, head_dim=100, mask="qk", bias="1h1k"
)
OPTIONS = {"causal": "lower_right", "window": (80, None), "empty_rows": "uniform"}


def verdict(library: Library) -> str:
    """What is wrong with these kernels, over a few schedules and alignments."""
    for seed, keys in enumerate((203, 202, 208)):
        library.seed = seed
        case = Case(replace(PROBLEM, keys=keys, **OPTIONS))
        if keys == 202:  # far from zero
            bias = torch.where(case.inputs.bias == -torch.inf, -torch.inf, -1e30).bfloat16()
            case = Case(replace(PROBLEM, keys=keys, **OPTIONS), bias=bias)
        grad = cotangent(case)
        runs, rows = [(7, 21, 0), (99, 1, 21), (30, 2, 22)], [*range(7, 28), 99, 30, 31]
        try:
            found = library.weights(case.described(), None, None)
            some = library.weights(case.described(), [1], runs)
            grads = case.backward(grad, (True, True, False), library)
        except EmulatorError as error:
            return str(error)
        wanted = case.weights_on_cpu()
        for mine, right in ((found, wanted), (some, wanted[:, 1:, rows])):
            if not torch.allclose(mine.double(), right.double(), rtol=0.02, atol=0.002):
                return "wrong weights"
        for name, mine, right in zip(("query", "key"), grads, case.backward_on_cpu(grad)):
            if not torch.allclose(
                mine.double(), right.double(), rtol=0.05, atol=0.02 * float(right.abs().max())
            ):
                return f"wrong gradient of {name}"
    return "nothing"


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    kernels = mutated(tmp_path, file, old, new, SOURCES)
    found = verdict(Library(emulated.build(kernels, ["-O1"])))
    assert any(part in found for part in sign.split("|")), f"caught as {found!r}"


ON_THE_EDGE = """
import sys
sys.path[:0] = {path!r}
import emulated, test_half_weights_mutations
print(test_half_weights_mutations.verdict(emulated.Library(emulated.Path({library!r}))))
"""
PAST_THE_END = {
    "": (*MUTATIONS["none"][:3], "nothing"),
    "keys of the cotangent": (
        "half.cuh",
        "(int)min_of(F::kKeys, a.keys - k0) * 2",
        "F::kKeys * 2",
        "AddressSanitizer: heap-",
    ),
    "rows of the weights": (
        HEADER,
        "min_of(16, rows.count -",
        "min_of(16, 64 -",
        "AddressSanitizer: heap-",
    ),
    "keys of the weights": (HEADER, "if (c < columns)", "", "AddressSanitizer: heap-"),
}


@pytest.mark.parametrize("name", PAST_THE_END)
@pytest.mark.slow
def test_accesses_past_the_end_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = PAST_THE_END[name]
    kernels = mutated(tmp_path, file, old, new, SOURCES)
    library = emulated.build(kernels, ["-O1", *emulated.SANITIZE])
    path = [str(emulated.HERE), str(emulated.ROOT / "tests")]
    answer = sanitized(ON_THE_EDGE.format(path=path, library=str(library)), tmp_path)
    assert sign in answer, answer[-2000:]
