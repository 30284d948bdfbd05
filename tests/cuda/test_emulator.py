"""The emulator bites: what a GPU would get wrong, and often silently, is caught."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import emulated
import pytest
import torch
from cases import Problem, call, exact, make, to_double
from emulated import Described, EmulatorError, Library

from mha_ext import reference

# Forward and backward for bfloat16 up to 64 wide alone: they compile in seconds.
FORWARD = """
#include "forward_half.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention&) { return 0; }
const char* forward(const Attention& a, void* scratch, Stream stream) {
  return forward_half<BFloat16, 64>(a, scratch, stream);
}
}
"""
BACKWARD = """
#include "backward_half_bias.cuh"
namespace mha_ext::cuda {
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream) {
  return backward_half<BFloat16, 64>(a, g, scratch, stream);
}
}
"""
REST = """
#include "kernels.h"
namespace mha_ext::cuda {
const char* weights(const Attention&, const Selection&, void*, Stream) { return "none"; }
const char* upload(const int64_t*, int64_t, int64_t*, Stream) { return "none"; }
const char* forward_tangent(const Attention&, const AttentionTangent&, Stream) { return "none"; }
const char* backward_tangent(const Attention&, const AttentionGrad&, const AttentionTangent&, void*,
                             Stream) {
  return "none";
}
}
"""
SOURCES = {"forward.cu": FORWARD, "backward.cu": BACKWARD, "rest.cu": REST}
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "barrier": (
        "forward_half.cuh",
        "cleaning.sync(looks, nonfinite);",
        "looks && !nonfinite;",
        "no barrier is between|a wait is missing|is under way",
    ),
    "wait": (
        "forward_half.cuh",
        "    copy_wait<0>();\n    const bool looks",
        "    copy_wait<1>();\n    const bool looks",
        "a wait is missing",
    ),
    "fragment": (
        "fragments.cuh",
        "lane = lane_id();\n  left += swizzled<kRowBytes>(left_row + lane % 16, lane / 16)",
        "lane = lane_id();\n  left += swizzled<kRowBytes>(left_row + lane % 16, lane / 8 % 2)",
        "wrong",
    ),
    "rounded fragment": (
        "fragments.cuh",
        "x[m][k][2 + half] =",
        "x[m][k][3 - half] =",
        "wrong",
    ),
    "lane": ("half.cuh", "16 * m + lane / 4 + 8)", "16 * m + lane % 4 + 8)", "wrong"),
    "divergence": (
        "forward_half.cuh",
        "  if (ballot(far)) {",
        "  if (lane_id() < 16 && ballot(far)) {",
        "different things|waits for its warp",
    ),
    "swizzle": ("tile.cuh", "(piece ^ (row & 7)) << 4", "piece << 4", "conflicts"),
    "hidden": ("forward_half.cuh", "  if (!partial) {", "  if (true) {", "wrong"),
    "not finite": ("half.cuh", "return found & 0x80008000", "return found & 0x80000000", "wrong"),
    "place": ("tile.cuh", "row * kRowBytes", "(row + 1) * kRowBytes", "shared memory"),
}
# The same for backward.
BACKWARD_MUTATIONS = {
    "barrier": (
        "backward_half.cuh",
        "cleaning.sync(looks, nonfinite);",
        "looks && !nonfinite;",
        "no barrier is between|a wait is missing|is under way",
    ),
    "wait": (
        "backward_half.cuh",
        "    copy_wait<0>();\n    at.stage",
        "    copy_wait<1>();\n    at.stage",
        "a wait is missing",
    ),
    "numbers of the queries": (
        "backward_half.cuh",
        "4 * (8 * j + 2 * (lane_id() % 4))",
        "4 * (8 * j + 2 * (lane_id() / 8))",
        "wrong",
    ),
    "bits of the other half": ("half.cuh", "(both >> 8 & 1)", "(both >> 7 & 1)", "wrong"),
    "sign of delta": (
        "backward_half.cuh",
        "(ds[0][j][e] - q.delta)",
        "(ds[0][j][e] + q.delta)",
        "wrong",
    ),
    "tile of the values": (
        "backward_half.cuh",
        "Address value_tile(int stage) { return score_tile(stage) + kTileBytes; }",
        "Address value_tile(int stage) { return score_tile(stage); }",
        "wrong|no barrier|under way",
    ),
    "a dropped pair": (
        "half.cuh",
        "kept_half_word<Word>(a, b, h, q0 + r, k0)",
        "kept_half_word<Word>(a, b, h, q0 + r, k0 + 8)",
        "wrong",
    ),
    "queries that see a key": (
        "pairs.cuh",
        "offset + keys + band.left)",
        "offset + band.left)",
        "wrong",
    ),
    "hidden": ("backward_half.cuh", "  if (!partial) {", "  if (true) {", "wrong"),
}
PROBLEM = Problem(torch.bfloat16, 1, 1, queries=70, keys=200, head_dim=64, mask="qk")


def mutated(
    folder: Path, file: str, old: str, new: str, sources: Mapping[str, str] = SOURCES
) -> Path:
    """A copy of the headers, and these sources; `old`, which must be there once, is `new`."""
    kernels = folder / "csrc/cuda"
    kernels.mkdir(parents=True)
    (folder / "csrc/spec").symlink_to(emulated.ROOT / "csrc/spec")
    headers = {path.name: path.read_text() for path in emulated.KERNELS.glob("*.*h")}
    for name, text in (headers | dict(sources)).items():
        if name == file:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
            text = text.replace(old, new)
        (kernels / name).write_text(text)
    return kernels


def verdict(library: Library) -> str:
    """What is wrong with these kernels, over a few schedules; empty if nothing is."""
    inputs = make(PROBLEM)
    value = inputs.value.clone()
    value[:, :, 130, 0] = torch.nan  # in a tile after those that met hidden pairs
    seen = inputs.seen()
    for seed in range(4):
        library.seed = seed
        for found in (inputs, inputs.replaced(value=value)):
            described = Described(
                found.query, found.key, found.value, found.mask, None, None, None, {"scale": 0.125}
            )
            try:
                out = library.forward(described)[0].double()
            except EmulatorError as error:
                return str(error)
            right = call(reference.attention, to_double(inputs))[0]
            clean = ~seen[..., 130] if found is not inputs else torch.ones_like(seen[..., 130])
            if not torch.allclose(out[clean], right[clean], rtol=0.02, atol=0.02):
                return "wrong numbers"
    traffic = library.report.matrices
    return f"{traffic.conflicts} conflicts" if traffic.conflicts else ""


def backward_verdict(library: Library) -> str:
    """The same for the gradients, of grouped heads under a band, a mask and dropout."""
    inputs = make(replace(PROBLEM, heads=2, kv_heads=1, queries=100, dropout_p=0.2))
    inputs.options |= {"causal": "upper_left", "window": (60, None)}
    seen = inputs.seen()
    grad_out = inputs.grad_out.clone()
    grad_out[:, :, 3, 0] = torch.nan
    blind = ~seen[0, :, 3].any(0)  # keys that do not see that row
    wanted = exact(inputs)
    options = {"scale": 0.125, "corner": "upper_left", "window_left": 60, "window_right": 0}
    options |= {"dropout_p": 0.2, "origin": (0, 0, 0, 0)}
    operands = (inputs.query, inputs.key, inputs.value, inputs.mask, None, None, inputs.seed)
    saved = torch.ops.mha_ext.attention_forward(*operands, **options)
    for seed in range(2):
        library.seed = seed
        for cotangent in (inputs.grad_out, grad_out):
            try:
                found = library.backward(
                    Described(*operands, options), cotangent, inputs.grad_lse, saved, [True] * 4
                )
            except EmulatorError as error:
                return str(error)
            for name, mine in zip(("query", "key", "value"), found, strict=False):
                right = wanted[f"grad_{name}"]
                if cotangent is grad_out:
                    rows = torch.arange(100) != 3 if name == "query" else blind
                    mine, right = mine[:, :, rows], right[:, :, rows]
                if not torch.allclose(mine.double(), right, rtol=0.05, atol=0.08):
                    return f"wrong numbers in grad_{name}"
    return ""


def test_the_kernels_themselves_pass(tmp_path: Path) -> None:
    kernels = mutated(tmp_path, "tile.cuh", "row * kRowBytes", "kRowBytes * row")
    library = Library(emulated.build(kernels, ["-O1"]))
    assert verdict(library) == "" and backward_verdict(library) == ""


@pytest.mark.parametrize("name", BACKWARD_MUTATIONS)
@pytest.mark.slow
def test_mutations_of_backward_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = BACKWARD_MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new), ["-O1"]))
    found = backward_verdict(library)
    assert any(part in found for part in sign.split("|")), f"caught as {found!r}"


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    found = verdict(Library(emulated.build(mutated(tmp_path, file, old, new), ["-O1"])))
    assert any(part in found for part in sign.split("|")), f"caught as {found!r}"


ON_THE_EDGE = """
import sys
sys.path[:0] = {path!r}
import torch, emulated
library = emulated.Library(emulated.Path({library!r}))
rng = torch.Generator().manual_seed(0)
def draw(*shape):
    return torch.randn(shape, generator=rng).to(torch.bfloat16)
for queries, keys, head_dim, value_dim in ((13, 70, 20, 33), (70, 65, 64, 64), (5, 3, 7, 9)):
    mask = torch.rand(1, 1, queries, keys, generator=rng) < 0.6
    described = emulated.Described(
        draw(1, 2, queries, head_dim), draw(1, 1, keys, head_dim), draw(1, 1, keys, value_dim),
        mask, draw(1, 2, queries, keys), torch.tensor([keys - 1]), torch.tensor([1, 2]),
        dict(scale=0.1, dropout_p=0.1, uniform_empty_rows=True))
    library.forward(described)
print("clean")
"""
READS = {
    "": "clean",
    "rows": "AddressSanitizer: heap-",
    "mask": "AddressSanitizer: heap-",
    "out": "AddressSanitizer: heap-",
}
PAST_THE_END = {
    "rows": ("rows.cuh", "const int n = r < rows ? valid : 0;", "const int n = valid;"),
    "mask": (
        "pairs.cuh",
        "const bool low_exists = lane < exist,",
        "const bool low_exists = true,",
    ),
    "out": (
        "half.cuh",
        "      if (i >= rows) continue;\n      S* out",
        "      S* out",
    ),
}


def sanitized(program: str, folder: Path) -> str:
    """What a program says under AddressSanitizer."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("there is no libasan.so beside g++")
    environment = dict(os.environ, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("name", READS)
@pytest.mark.slow
def test_accesses_past_the_end_are_caught(name: str, tmp_path: Path) -> None:
    """The kernels under AddressSanitizer: they stay within their tensors, and it would tell."""
    change = PAST_THE_END.get(name, ("tile.cuh", "row * kRowBytes", "kRowBytes * row"))
    library = emulated.build(mutated(tmp_path, *change), ["-O1", *emulated.SANITIZE])
    program = ON_THE_EDGE.format(path=[str(emulated.HERE)], library=str(library))
    answer = sanitized(program, tmp_path)
    assert READS[name] in answer, answer[-2000:]


@pytest.mark.parametrize("limit", ["shared_limit", "grid_limit"])
def test_launches_over_the_limits_are_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulated.library()
    monkeypatch.setattr(library, limit, 3)
    inputs = make(replace(PROBLEM, heads=12))
    described = Described(
        inputs.query, inputs.key, inputs.value, None, None, None, None, {"scale": 1.0}
    )
    with pytest.raises(EmulatorError, match="over the limits"):
        library.forward(described)
