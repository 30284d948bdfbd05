"""The kernels for compute capability 9.0 on the emulator: the contract, and mutations of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from cases import Inputs, Problem, exact, make
from emulated import Described, EmulatorError, Library
from test_emulator import REST, mutated

BACKWARD = """
#include "backward.cuh"
namespace mha_ext::cuda {
template <>
const char* backward_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g, Stream stream);
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention& a, const AttentionGrad& g, void*, Stream stream) {
  if (!backward_hopper_takes(a, g)) return "not taken";
  const char* error = run_delta<BFloat16>(a, g, stream);
  return error ? error : backward_hopper_of<BFloat16>(a, g, stream);
}
int64_t forward_scratch_bytes(const Attention&) { return 0; }
const char* forward(const Attention&, void*, Stream) { return "none"; }
}
"""
NARROW = """
#include "backward_hopper.cuh"
namespace mha_ext::cuda {
template <>
const char* backward_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g, Stream stream) {
  return backward_hopper<BFloat16, 64, false>(a, g, stream);
}
}
"""
SOURCES: Mapping[str, str] = {"backward.cu": BACKWARD, "narrow.cu": NARROW, "rest.cu": REST}
DROPOUT_SOURCES = {**SOURCES, "narrow.cu": NARROW.replace("64, false>", "64, true>")}
WIDE_SOURCES = {**SOURCES, "narrow.cu": NARROW.replace("64, false>", "256, false>")}

# options of the problem, and of the operator
CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"queries": 150, "keys": 200}, {}),
    ({"queries": 260, "keys": 200, "heads": 4, "kv_heads": 2, "head_dim": 80}, {"right": 0}),
    ({"queries": 300, "keys": 170, "value_dim": 40}, {"left": 30, "right": 20}),
    ({"queries": 300, "keys": 80, "head_dim": 128, "dtype": torch.float16}, {"right": 0}),
    ({"queries": 70, "keys": 400, "head_dim": 72, "value_dim": 128}, {"left": 90}),
    ({"queries": 129, "keys": 300, "batch": 3, "key_lengths": "random"}, {}),
    ({"queries": 129, "keys": 200, "head_dim": 128, "key_lengths": "edges", "batch": 3}, {}),
    ({"queries": 150, "keys": 200, "mask": "bhqk"}, {}),
    ({"queries": 300, "keys": 260, "head_dim": 128, "mask": "b11k", "batch": 2}, {"right": 0}),
    ({"queries": 300, "keys": 260, "mask": "bhqk", "heads": 4, "squares": True}, {}),
    ({"queries": 400, "keys": 520, "head_dim": 128, "mask": "b1qk", "squares": True}, {"right": 0}),
    ({"queries": 150, "keys": 200, "head_dim": 256}, {}),
    ({"queries": 200, "keys": 170, "head_dim": 160, "value_dim": 96, "dropout_p": 0.3}, {"right": 0}),
    ({"queries": 130, "keys": 260, "head_dim": 40, "value_dim": 200, "heads": 4, "kv_heads": 2}, {"left": 70}),
    ({"queries": 260, "keys": 330, "head_dim": 256, "mask": "bhqk", "squares": True, "dtype": torch.float16}, {}),
    ({"queries": 150, "keys": 200, "dropout_p": 0.3}, {}),
    ({"queries": 260, "keys": 300, "heads": 4, "kv_heads": 2, "head_dim": 128, "dropout_p": 0.5}, {"right": 0}),
    ({"queries": 200, "keys": 260, "batch": 2, "mask": "bhqk", "dropout_p": 0.2, "value_dim": 40}, {}),
    # several rounds of each block of threads
    ({"queries": 150, "keys": 200, "batch": 5, "kv_heads": 2}, {}),
    ({"queries": 140, "keys": 90, "batch": 4, "heads": 4, "head_dim": 128, "dropout_p": 0.3}, {}),
    ({"queries": 70, "keys": 130, "batch": 4, "head_dim": 200}, {}),
)  # fmt: skip


# The sum of a bias that broadcasts goes by these kernels where an entry of it has 256 tiles of 64 x 64.
BIAS_CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"queries": 150, "keys": 200, "bias": "bhqk"}, {}),
    ({"queries": 150, "keys": 200, "bias": "1hqk", "batch": 2, "heads": 24, "kv_heads": 2}, {}),
    ({"queries": 150, "keys": 200, "bias": "b1qk", "batch": 6, "heads": 3, "head_dim": 128}, {"right": 0}),
    ({"queries": 260, "keys": 136, "bias": "b1qk", "batch": 5, "value_dim": 40}, {"left": 30, "right": 20}),
    ({"queries": 140, "keys": 264, "bias": "11qk", "heads": 3, "batch": 2, "head_dim": 80, "dtype": torch.float16}, {}),
    ({"queries": 330, "keys": 392, "bias": "1hqk", "batch": 3, "heads": 8, "key_lengths": "random"}, {}),
    (
        {"queries": 330, "keys": 392, "bias": "1hqk", "batch": 2, "heads": 8, "key_lengths": "edges", "head_dim": 128},
        {"left": 90},
    ),
    ({"queries": 400, "keys": 328, "bias": "1hqk", "mask": "bhqk", "squares": True, "batch": 2, "heads": 4}, {}),
    ({"queries": 150, "keys": 200, "bias": "bh1k", "heads": 4, "dtype": torch.float16}, {}),
    ({"queries": 260, "keys": 256, "bias": "bhqk", "head_dim": 50}, {}),
    # keys that the bias hides from all; levels far from zero
    ({"queries": 150, "keys": 200, "bias": "b11k", "batch": 2}, {}),
    ({"queries": 150, "keys": 200, "bias": "1hqk", "batch": 2, "heads": 24, "bias_from": 1000}, {}),
)  # fmt: skip


Band = dict[str, Any]
Case = tuple[dict[str, Any], Band]


def in_squares(mask: torch.Tensor) -> torch.Tensor:
    """Of the squares of 64 x 64 pairs half are hidden, some hide nothing; the others are as before."""
    *rest, queries, keys = mask.shape
    rng = torch.Generator().manual_seed(5)
    kind = torch.randint(4, (*rest, -(-queries // 64), -(-keys // 64)), generator=rng)
    kind[..., 1, :] = 0  # queries that see nothing
    kind = kind.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :queries, :keys]
    return torch.where(kind < 2, False, torch.where(kind == 2, True, mask))


def with_low_rows(bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Every fifth row has no other number, but what hides pairs."""
    low = bias.clone()
    low[..., ::5, :] = torch.where(bias[..., ::5, :] == -torch.inf, -torch.inf, lowest)
    return low


def described(of: dict[str, Any], band: Band, poison: bool) -> tuple[Inputs, Described, Any]:
    """A problem, how the kernels have it, and its operands and options.

    `poison`: keys that nobody sees hold what is not finite.
    """
    options = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": torch.bfloat16}
    options |= of
    squares, bias_from = options.pop("squares", False), options.pop("bias_from", 0)
    inputs = make(Problem(**options))
    if bias_from and inputs.bias is not None:
        lowest = torch.finfo(inputs.bias.dtype).min
        inputs.bias = (
            (inputs.bias + bias_from) if bias_from > 0 else with_low_rows(inputs.bias, lowest)
        )
    if squares:
        inputs.mask = in_squares(inputs.mask)
    if band:
        inputs.options |= {
            "causal": "upper_left" if band.get("right") == 0 else False,
            "window": (band.get("left"), band.get("right")),
        }
    scale = inputs.options.get("scale") or inputs.query.shape[-1] ** -0.5
    said: dict[str, Any] = {"scale": scale, "origin": (0, 0, 0, 0), "corner": "upper_left"}
    said |= {"dropout_p": inputs.options["dropout_p"]}
    said |= {f"window_{side}": size for side, size in band.items()}
    key, value = inputs.key.clone(), inputs.value.clone()
    if poison:
        seen = inputs.seen().any(2).any(1)  # [batch, key]
        for b in range(key.shape[0]):
            key[b, :, ~seen[b]], value[b, :, ~seen[b]] = torch.nan, torch.inf
    rest = (inputs.mask, inputs.bias, inputs.key_lengths, inputs.seed)
    kernels = Described(inputs.query, key, value, *rest, said)
    return inputs, kernels, ((inputs.query, inputs.key, inputs.value, *rest), said)


def gradients(library: Library, of: dict[str, Any], band: Band, poison: bool, seed: int) -> str:
    """What is wrong with the gradients, or nothing."""
    inputs, kernels, (operands, said) = described(of, band, poison)
    wanted = exact(inputs)
    saved = torch.ops.mha_ext.attention_forward(*operands, **said)
    library.seed = seed
    wants = [*[True] * 3, inputs.bias is not None]
    try:
        found = library.backward(kernels, inputs.grad_out, inputs.grad_lse, saved, wants)
    except EmulatorError as error:
        return str(error)
    for name, mine in zip(("query", "key", "value", "bias"), found, strict=True):
        if mine is None:
            assert name == "bias" and inputs.bias is None
            continue
        right = wanted[f"grad_{name}"].double()
        near = min(0.08, 0.04 * float(right.abs().max()))
        if not torch.allclose(mine.double(), right, rtol=0.05, atol=near):
            return f"wrong numbers in grad_{name}"
    return ""


OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *CASES,
    ({"queries": 140, "keys": 300, "mask": "b1qk", "dropout_p": 0.3}, {}),
    ({"queries": 200, "keys": 140, "head_dim": 128, "mask": "b11k"}, {"right": 0}),
    ({"queries": 70, "keys": 500, "scale": -0.2}, {}),
    ({"queries": 700, "keys": 90, "heads": 3, "kv_heads": 3}, {}),
    ({"queries": 700, "keys": 300, "heads": 6, "batch": 2}, {"right": 0}),
    ({"queries": 450, "keys": 150, "heads": 6, "head_dim": 128}, {"right": 0}),
    ({"queries": 200, "keys": 210, "head_dim": 256, "value_dim": 136}, {"right": 0}),
    ({"queries": 140, "keys": 500, "head_dim": 192, "mask": "b1qk", "squares": True}, {}),
    # lengths that choose four consumers, or three
    ({"queries": 250, "keys": 190, "heads": 4, "batch": 2}, {}),
    ({"queries": 700, "keys": 190, "heads": 4, "batch": 2, "dtype": torch.float16}, {"right": 0}),
    (
        {"queries": 200, "keys": 300, "batch": 3, "key_lengths": "random", "head_dim": 40},
        {"left": 90},
    ),
    ({"queries": 180, "keys": 2100}, {"left": 900}),
    # the same with what hides or drops pairs
    ({"queries": 250, "keys": 190, "heads": 4, "batch": 2, "mask": "b1qk"}, {}),
    ({"queries": 250, "keys": 500, "mask": "b1qk", "squares": True}, {"right": 0}),
    ({"queries": 250, "keys": 300, "head_dim": 40, "dropout_p": 0.3, "mask": "b11k"}, {}),
    ({"queries": 500, "keys": 190, "dropout_p": 0.2, "key_lengths": "random"}, {"left": 90}),
    ({"queries": 250, "keys": 200, "scale": -0.2, "dtype": torch.float16}, {}),
)


BIAS_OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *BIAS_CASES,
    # rows of the lowest number
    ({"queries": 150, "keys": 200, "bias": "bhqk", "dropout_p": 0.3, "bias_from": -math.inf}, {}),
    ({"queries": 150, "keys": 200, "bias": "1hqk", "batch": 2, "heads": 6, "bias_from": -math.inf}, {"right": 30}),
    ({"queries": 150, "keys": 136, "bias": "bhqk", "head_dim": 128, "bias_from": -math.inf}, {}),
    ({"queries": 150, "keys": 328, "bias": "11qk", "mask": "b1qk", "dropout_p": 0.3, "scale": -0.2}, {"right": 0}),
    ({"queries": 400, "keys": 392, "bias": "1hqk", "mask": "bhqk", "squares": True, "head_dim": 128}, {}),
)  # fmt: skip


def results(library: Library, of: dict[str, Any], band: Band, poison: bool, seed: int) -> str:
    """What is wrong with out, lse and lse_low, or nothing."""
    inputs, kernels, _ = described(of, band, poison)
    wanted = exact(inputs)
    library.seed = seed
    try:
        out, lse, lse_low = library.forward(kernels)
    except EmulatorError as error:
        return str(error)
    if not torch.allclose(out.double(), wanted["out"].double(), rtol=0.02, atol=0.02):
        return "wrong numbers in out"
    if not torch.allclose(lse.double() + lse_low.double(), wanted["lse"].double(), atol=1e-3):
        return "wrong numbers in lse"
    return ""


@pytest.fixture(scope="module")
def hopper() -> Library:
    library = Library(emulated.build())
    library.hopper = True
    return library


@pytest.mark.parametrize("of,band", [*OPTIONS, *BIAS_OPTIONS], ids=str)
def test_forward(of: dict[str, Any], band: dict[str, Any], hopper: Library) -> None:
    for seed in range(2):
        assert results(hopper, of, band, bool(seed), seed) == ""
        assert hopper.report.shared_bytes > 99 * 1024  # it was these kernels


@pytest.mark.parametrize("of,band", [*CASES, *BIAS_CASES], ids=str)
def test_backward(of: dict[str, Any], band: dict[str, Any], hopper: Library) -> None:
    for seed in range(2):
        assert gradients(hopper, of, band, bool(seed), seed) == ""
        assert hopper.report.shared_bytes > 99 * 1024  # it was these kernels


def test_a_finite_bias_stays_finite(hopper: Library) -> None:
    """Of the lowest number, where each score would make it -inf: no key is hidden."""
    query, key = (torch.full((1, 2, n, 64), 1e18, dtype=torch.bfloat16) for n in (130, 200))
    value = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.full((1, 2, 130, 200), lowest, dtype=torch.bfloat16)
    said = {"scale": 1.0, "origin": (0, 0, 0, 0), "corner": "upper_left", "dropout_p": 0.0}
    out, lse, _ = hopper.forward(Described(query, -key, value, None, bias, None, None, said))
    mean = value.double().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=0.02, atol=0.002)
    assert lse.isfinite().all()


def test_scores_and_biases_that_cancel(hopper: Library) -> None:
    """Each is a million, where a float has steps of 1/16 or, times log2 e, of 1/8; their sum is not."""
    rng = torch.Generator().manual_seed(0)
    query, key = (torch.full((1, 2, n, 64), 128.0, dtype=torch.bfloat16) for n in (130, 200))
    query[..., -1] = 1
    key[..., -1] = torch.randint(-3, 4, (1, 2, 200), generator=rng).bfloat16()
    value = torch.randn(1, 2, 200, 64, generator=rng).bfloat16()
    grad_out = torch.randn(1, 2, 130, 64, generator=rng).bfloat16()
    bias = torch.full((1, 2, 130, 200), -63.0 * 128 * 128, dtype=torch.bfloat16)
    said = {"scale": 1.0, "origin": (0, 0, 0, 0), "corner": "upper_left", "dropout_p": 0.0}
    kernels = Described(query, key, value, None, bias, None, None, said)
    saved = hopper.forward(kernels)
    grad = hopper.backward(kernels, grad_out, None, saved, [False, False, True, False])[2]
    scores = query.double() @ key.double().transpose(2, 3) + bias.double()
    weights = scores.softmax(-1)
    wanted = (weights @ value.double(), weights.transpose(2, 3) @ grad_out.double())
    for found, right in zip((saved[0], grad), wanted, strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), right, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("keys", [300, 304])
@pytest.mark.parametrize("bias", ["b11k", "bhqk"])
def test_an_entry_alone_has_the_bits_it_has_among_others(
    bias: str, keys: int, hopper: Library
) -> None:
    """Rows of 300 keys cannot be copied by 16 bytes, but those of the first entry, alone, could."""
    options = {"batch": 2, "heads": 2, "queries": 200, "keys": keys, "head_dim": 64}
    inputs = make(Problem(dtype=torch.bfloat16, bias=bias, **options))
    said = {"scale": 0.125, "origin": (0, 0, 0, 0), "corner": "upper_left", "dropout_p": 0.0}
    found = []
    for entries in (slice(0, 2), slice(0, 1)):
        parts = (t[entries] for t in (inputs.query, inputs.key, inputs.value, inputs.bias))
        query, key, value, of = parts
        kernels = Described(query, key, value, None, of, None, None, said)
        saved = hopper.forward(kernels)
        grads = (inputs.grad_out[entries], inputs.grad_lse[entries])
        grads = hopper.backward(kernels, *grads, saved, [True, True, True, False])
        found.append([*saved, *grads[:3]])
    assert all(torch.equal(x[:1], y) for x, y in zip(*found, strict=True))


def test_schedules_give_the_same_bits(hopper: Library) -> None:
    rng = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, 200, 64, generator=rng).bfloat16() for _ in range(4)
    )
    said = {"scale": 0.125, "origin": (0, 0, 0, 0), "corner": "upper_left", "window_right": 0}
    operands = (query, key, value, None, None, None, None)
    saved = torch.ops.mha_ext.attention_forward(*operands, **said, dropout_p=0.0)
    first: list[Any] | None = None
    for seed in range(4):
        hopper.seed = seed
        found = hopper.backward(
            Described(*operands, said), grad, None, saved, [True, True, True, False]
        )
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(first[:3], found[:3], strict=True))


FILE, TILES = "backward_hopper.cuh", "backward_hopper_tiles.cuh"
COPIES = "backward_hopper_copies.cuh"
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "a tile left early": (
        FILE,
        "      wait_products<0>();\n      pin_sums<F>(tile, sums);\n      leave<F>(before);",
        "      leave<F>(before);\n      wait_products<0>();\n      pin_sums<F>(tile, sums);",
        "which a product of warpgroup",
    ),
    "a tile not left": (FILE, "      leave<F>(before);\n      round", "      round", "deadlock"),
    "numbers still being read": (
        FILE,
        "F::Tiles::left_by_lane(turn);",
        "for (int lane = 0; lane_id() == 0 && lane < kWarp; lane++) F::Tiles::left(turn);",
        "has read: no barrier",
    ),
    "no fence": ("hopper.cuh", "    fence_products();\n", "", "no fence"),
    "scores read early": (FILE, "  wait_products<kLater + 1>();\n", "", "wrong|before its wait"),
    "dP read early": (FILE, "  wait_products<kLater>();\n", "", "wrong|before its wait"),
    "sums not waited for": (
        FILE,
        "      wait_products<0>();\n      pin_sums<F>(tile, sums);\n      leave<F>(before);",
        "      wait_products<1>();\n      pin_sums<F>(tile, sums);\n      leave<F>(before);",
        "which a product of warpgroup|before its wait",
    ),
    "stages": (
        FILE,
        "      const typename F::At before = turn;\n      turn.next();\n",
        "      const typename F::At before = turn;\n",
        "deadlock|wrong|no barrier|which a product",
    ),
    "sign of delta": (TILES, "(dp[0][j][e] - delta", "(dp[0][j][e] + delta", "wrong"),
    "hidden": (FILE, "  hide<F>(tile.pairs, tile.s);\n  wait", "  wait", "wrong"),
    "no care": (FILE, "partial && !finite;", "false;", "wrong"),
    "own rows left early": (
        FILE,
        "  bool partial = false;\n  if constexpr (F::kAhead) {",
        "  bool partial = false;\n  F::Own::left(turn.own);\n  if constexpr (F::kAhead) {",
        "which a product of warpgroup|no barrier|has not reached yet",
    ),
    "own rows not left": (FILE, "  F::Own::left(turn.own);\n", "", "deadlock"),
    "own rows of the last block": (FILE, "  turn.own.next();\n", "", "wrong|deadlock|no barrier"),
    "rounds": (FILE, "n / blocks), n % blocks", "n / blocks), round % blocks", "wrong"),
    "head of a group": (TILES, "    tile = first;\n    h++;", "    tile = first;", "wrong"),
}  # fmt: skip
DROPOUT_MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", ""),
    "dP of dropped pairs": (
        TILES,
        "drop_pairs<typename F::Part>(a, at.b,",
        "if (false) drop_pairs<typename F::Part>(a, at.b,",
        "wrong numbers in grad_query",
    ),
    "factor of dP": (TILES, "  scale_fragments((float)a.dropout.keep_scale, dp);\n", "", "wrong numbers in grad_query"),
    "factor of dP, owner of keys": (
        TILES,
        "factor * dp[0][j][e], -all",
        "dp[0][j][e], -all",
        "wrong numbers in grad_key",
    ),
    "P before it is dropped": (
        TILES,
        "-all);",
        "-p[0][j][e] * delta.at[e % 2]);",
        "wrong numbers in grad_key",
    ),
    "factor of grad_value": (
        FILE,
        "F::kDropout ? (float)a.dropout.keep_scale : 1;",
        "1;",
        "wrong numbers in grad_value",
    ),
    "Z of dropped pairs": (
        TILES,
        "if (!is_found(kept, j, e))",
        "if (false)",
        "wrong numbers in grad_key|wrong numbers in grad_value",
    ),
    "second part": (
        TILES,
        "at.tile * F::kOthers + 64 * part, part_of(dp, part)",
        "at.tile * F::kOthers, part_of(dp, part)",
        "wrong numbers in grad_query",
    ),
    "head of a group": (
        FILE,
        "kept_words_across<typename F::Part, FastWord>(a, at.b, at.h,",
        "kept_words_across<typename F::Part, FastWord>(a, at.b, 0,",
        "wrong numbers in grad_key|wrong numbers in grad_value",
    ),
    "words of the four lanes": (
        "half.cuh",
        "step == 1 ? 2 * n + 1 : n + 2",
        "step == 1 ? 2 * n + 1 : 3 - n",
        "wrong numbers in grad_query",
    ),
    "row of a lane's bit": ("half.cuh", ">> lane / 4;", ">> (lane / 4 ^ 1);", "wrong numbers in grad_key"),
    "half of a fragment": ("half.cuh", "+ e / 2 * 8)", "+ (1 - e / 2) * 8)", "wrong numbers in grad_key"),
    "half of a word": (
        "pairs.cuh",
        "float_of(word.bits >> 16 | kUnit)",
        "float_of((word.bits & 0xffff) | kUnit)",
        "wrong",
    ),
    "threshold": ("pairs.cuh", "a.dropout.threshold) - 1;", "a.dropout.threshold) + 999;", "wrong"),
}  # fmt: skip

WIDE_MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", ""),
    "half that is stored": (FILE, "first = 64 * F::first_panel();", "first = 0;", "wrong"),
    "half that is summed": (TILES, "first_panel() * kOthers * kPanelBytes", "0", "wrong"),
    "rows of a warp": (TILES, "kHalves ? warp_id() % 4 * 16", "kHalves ? warp_id() % 2 * 16", "wrong"),
    "places of pieces": (COPIES, "(i % 2 ? 96 : 32)", "32", "wrong"),
}  # fmt: skip


FORWARD = """
#include "forward_hopper.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention&) { return 0; }
const char* forward(const Attention& a, void*, Stream stream) {
  return run_forward_hopper<HopperForward<BFloat16, 128, true>>(a, stream);
}
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention&, const AttentionGrad&, void*, Stream) { return "none"; }
}
"""
FORWARD_SOURCES: Mapping[str, str] = {"forward.cu": FORWARD, "rest.cu": REST}
AHEAD, FORWARD_TILES = "forward_hopper.cuh", "forward_hopper_tiles.cuh"
FORWARD_MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "nothing"),
    "values left early": (
        AHEAD,
        "    pin(p[0]);\n    Values::left(before);",
        "    pin(p[0]);",
        "deadlock",
    ),
    "keys left early": (
        AHEAD,
        "    Values::wait_full(before);\n    start_across",
        "    Keys::left(turn);\n    Values::wait_full(before);\n    start_across",
        "deadlock|has not reached yet",
    ),
    "queries not left": (
        AHEAD,
        "    if (tiles.is_last()) F::Queries::left(turns.queries);\n    const Rise",
        "    const Rise",
        "deadlock",
    ),
    "queries taken twice": (
        FORWARD_TILES,
        "tile = round % 2 ? first : tiles - 1 - first;\n      return",
        "tile = first;\n      return",
        "wrong",
    ),
    "heads in pairs": (FORWARD_TILES, "row = paired + (", "row = (", "wrong"),
    "lanes that have not seen a tile": (
        AHEAD,
        "    sync_warp();  // all of its lanes have seen them\n",
        "",
        "deadlock|no barrier",
    ),
    "tiles that are passed": (AHEAD, "before = tiles.at + 1 - of.first;", "before = 0;", "wrong|deadlock"),
    "order of copies": (
        FORWARD_TILES,
        "copy_wait<F::kLate>();",
        "copy_wait<F::kLate + 1>();",
        "a wait is missing|is under way|no barrier",
    ),
    "P rounded early": (
        AHEAD,
        "    wait_products<0>();\n    pin(rows.out[0]);\n    pin(p[0]);",
        "    wait_products<1>();\n    pin(rows.out[0]);\n    pin(p[0]);",
        "wrong|before its wait|which a product",
    ),
    "no care": (AHEAD, "ballot(!all_finite<F>(rows))", "false", "wrong"),
    "lanes that still read": (
        AHEAD,
        "    sync_warp();  // its lanes have read the values\n",
        "",
        "has read: no barrier",
    ),
    "band": (AHEAD, "8 * j + e % 2 >= end[e / 2]", "8 * j + e % 2 > end[e / 2]", "wrong"),
    "pieces of a row": ("half.cuh", "+ i * to.row + lane % 4 * 8;", "+ i * to.row + lane % 4 * 4;", "wrong"),
    "exponent of a sum": ("softmax.cuh", "return exponent * 0.693", "return exponent * 0.69", "wrong numbers in lse"),
    "row of a warpgroup": (
        AHEAD,
        "const int row = (group_id() - 1) * 64",
        "const int row = (group_id() - 1) * 32",
        "wrong",
    ),
}  # fmt: skip
FORWARD_CASES = (
    CASES[0],
    CASES[5],
    ({"queries": 300, "keys": 400, "heads": 4}, {"right": 0}),
    ({"queries": 700, "keys": 300, "heads": 4}, {"right": 0}),
    ({"queries": 300, "keys": 700}, {"left": 40, "right": 20}),
)


@pytest.mark.parametrize("name", FORWARD_MUTATIONS)
@pytest.mark.slow
def test_mutations_of_forward(name: str, tmp_path: Path) -> None:
    *change, sign = FORWARD_MUTATIONS[name]
    kernels = mutated(tmp_path, *change, FORWARD_SOURCES)
    library = Library(emulated.build(kernels, ["-O1"]))
    library.hopper = True
    found = ""
    for seed in range(4):
        for of, band in FORWARD_CASES:
            found = found or results(library, of, band, seed % 2 == 1, seed)
    if sign == "nothing":
        assert not found
    else:
        assert any(part in found for part in sign.split("|")) and found, f"caught as {found!r}"


MASKED_FORWARD = """
#include "forward_hopper.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention& a) { return packed_mask_bytes(a); }
const char* forward(const Attention& given, void* scratch, Stream stream) {
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  return run_forward_hopper<HopperForward<BFloat16, 64, false>>(a, stream);
}
}
"""
MASKED_BACKWARD = """
#include "backward_hopper.cuh"
namespace mha_ext::cuda {
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad&) {
  return packed_mask_bytes(a);
}
const char* backward(const Attention& given, const AttentionGrad& g, void* scratch, Stream stream) {
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  const char* error = run_delta<BFloat16>(a, g, stream);
  return error ? error : backward_hopper<BFloat16, 64, false>(a, g, stream);
}
}
"""
MASKED_SOURCES: Mapping[str, str] = {
    "forward.cu": MASKED_FORWARD,
    "backward.cu": MASKED_BACKWARD,
    "mask.cu": (emulated.KERNELS / "mask.cu").read_text(),
    "rest.cu": REST,
}
MASK, ANY = "mask.cuh", "any[i * step + square / 64]"
MASKED_MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "nothing"),
    "queries of a tile": (MASK, ANY, "any[square / 64]", "wrong"),
    "tiles of two squares": (MASK, "(found | found >> 1) &", "found &", "wrong"),
    "all for any": (MASK, "h, q0) + mask_shape(a).block_words + k0", "h, q0) + k0", "wrong"),
    "queries in backward": (MASK, "found |= any[i * step] >>", "found |= any[0] >>", "wrong"),
    "a note of the other warpgroup": (
        FORWARD_TILES,
        "note >> (kClearBit - 1 + group_id()) & 1",
        "note >> (kClearBit + 2 - group_id()) & 1",
        "wrong",
    ),
    "a note still being read": (
        FORWARD_TILES,
        "shuffle(lane_id() == 0 ? load_shared<int>(from) : 0, 0);",
        "load_shared<int>(from);",
        "has read: no barrier",
    ),
    "the end not left": (
        AHEAD,
        "  int before = 0, after = 1;  // the end of the notes",
        "  int before = 0, after = 0;",
        "deadlock|no barrier|wrong",
    ),
    "a mark of the other warpgroup": (
        TILES,
        "kAllMark << (F::kHalves ? 0 : group_id() - 1)",
        "kAllMark << (2 - group_id())",
        "wrong",
    ),
    "squares of a block": (TILES, "other0, 1, of.block0, kOwn)", "other0, 1, of.block0, 1)", "wrong"),
    "a block that sees nothing": (
        FILE,
        "const int head = rounds.head<F>(a, round);",
        "const int head = F::kOwnsKeys ? kv_head(a, at.h) : at.h;",
        "wrong",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED_MUTATIONS)
@pytest.mark.slow
def test_mutations_under_a_mask(name: str, tmp_path: Path) -> None:
    *change, sign = MASKED_MUTATIONS[name]
    kernels = mutated(tmp_path, *change, MASKED_SOURCES)
    library = Library(emulated.build(kernels, ["-O1"]))
    library.hopper = True
    found = ""
    of = {"queries": 400, "keys": 330, "mask": "bhqk", "heads": 4, "squares": True}
    for seed in range(3):
        for band in ({}, {"right": 0}):
            found = found or results(library, of, band, seed % 2 == 1, seed)
            found = found or gradients(library, of, band, seed % 2 == 1, seed)
    if sign == "nothing":
        assert not found
    else:
        assert any(part in found for part in sign.split("|")) and found, f"caught as {found!r}"


@pytest.mark.parametrize("consumers", [2, 4])
@pytest.mark.parametrize("old,new", [("", ""), ("kClearBit = 28", "kClearBit = 29")])
def test_notes_for_each_consumer(consumers: int, old: str, new: str, tmp_path: Path) -> None:
    """Those of four consumers have one bit each beside the number of the tile."""
    kind = {2: "false>", 4: "false, 4, 64>"}[consumers]
    forward = MASKED_FORWARD.replace("false>", kind)
    sources = {**MASKED_SOURCES, "forward.cu": forward}
    kernels = mutated(
        tmp_path, FORWARD_TILES, old or "kNoTile = -1", new or "kNoTile = -1", sources
    )
    library = Library(emulated.build(kernels, ["-O1"]))
    library.hopper = True
    of = {"queries": 400, "keys": 330, "mask": "bhqk", "heads": 4, "squares": True}
    found = [results(library, of, band, False, 0) for band in ({}, {"right": 0})]
    assert any(found) == bool(old and consumers == 4), found


def verdict(
    library: Library, cases: Sequence[Case] = (CASES[0], CASES[2], CASES[5], CASES[18])
) -> str:
    library.hopper = True
    for seed in range(3):
        for of, band in cases:
            found = gradients(library, of, band, seed == 1, seed)
            if found:
                return found
    return ""


def test_the_kernels_themselves_pass(tmp_path: Path) -> None:
    kernels = mutated(tmp_path, "tile.cuh", "row * kRowBytes", "kRowBytes * row", SOURCES)
    assert verdict(Library(emulated.build(kernels, ["-O1"]))) == ""


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, SOURCES), ["-O1"]))
    found = verdict(library)
    assert any(part in found for part in sign.split("|")), f"caught as {found!r}"


@pytest.mark.parametrize("name", DROPOUT_MUTATIONS)
@pytest.mark.slow
def test_mutations_of_dropout(name: str, tmp_path: Path) -> None:
    file, old, new, sign = DROPOUT_MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, DROPOUT_SOURCES), ["-O1"]))
    case = ({"queries": 200, "keys": 260, "heads": 4, "kv_heads": 2, "dropout_p": 0.4}, {})
    found = verdict(library, [case])
    assert any(part in found for part in sign.split("|")) and bool(found) == bool(sign), found


@pytest.mark.parametrize("name", WIDE_MUTATIONS)
@pytest.mark.slow
def test_mutations_of_wide_heads(name: str, tmp_path: Path) -> None:
    file, old, new, sign = WIDE_MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, WIDE_SOURCES), ["-O1"]))
    case = ({"queries": 100, "keys": 130, "head_dim": 200, "value_dim": 136, "mask": "bhqk"}, {})
    found = verdict(library, [case])
    assert any(part in found for part in sign.split("|")) and bool(found) == bool(sign), found


BIAS_BACKWARD = """
#include "bias_hopper.cuh"
namespace mha_ext::cuda {
template <>
const char* backward_hopper_bias_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                              Stream stream) {
  return backward_hopper<BFloat16, 64, false, true>(a, g, stream);
}
int64_t backward_scratch_bytes(const Attention&, const AttentionGrad&) { return 0; }
const char* backward(const Attention& a, const AttentionGrad& g, void*, Stream stream) {
  if (!backward_hopper_takes(a, g)) return "not taken";
  const char* error = run_delta<BFloat16>(a, g, stream);
  if (!error) error = backward_hopper_bias_of<BFloat16>(a, g, stream);
  if (error || bias_is_dense(a, g.grad_bias)) return error;
  const BiasPlan plan = bias_plan(a, g.grad_bias);
  return bias_in_chunks(a, plan, g.grad_bias) ? "in chunks" : bias_hopper<BFloat16, 64>(a, g, plan, stream);
}
}
"""
BIAS_FORWARD = FORWARD.replace("128, true>>", "64, true, 2, 128, true>>").split("int64_t backward")[
    0
]
BIAS_SOURCES: Mapping[str, str] = {
    "forward.cu": BIAS_FORWARD + "}\n",
    "backward.cu": BIAS_BACKWARD,
    "rest.cu": REST,
}
SHARED, SUM = "hopper.cuh", "bias_hopper.cuh"
BIAS_MUTATIONS = {
    "none": ("tile.cuh", "row * kRowBytes", "kRowBytes * row", "nothing"),
    "halves of the owner of keys": (
        SHARED,
        "F::warp_row() / 8 + half",
        "F::warp_row() / 8",
        "wrong",
    ),
    "halves of the owner of queries": (
        SHARED,
        "F::warp_row() + 8 * half + r",
        "F::warp_row() + r",
        "wrong",
    ),
    "numbers of a word": (SHARED, ">> 16 * (e % 2))", ">> 16 * (e / 2))", "wrong"),
    "bits of hidden pairs": (SHARED, "(16 * (i % 2) + 2", "(16 * (i / 2) + 2", "wrong"),
    "hidden pairs not looked for": (
        SHARED,
        "(uint16_t)bits}) == -INFINITY;",
        "(uint16_t)bits}) == INFINITY;",
        "wrong",
    ),
    "panels of the bias": (
        FORWARD_TILES,
        "(word * F::kRows + row) * kPanelBytes",
        "(word * F::kRows) * kPanelBytes",
        "wrong",
    ),
    "a bias left early": (
        AHEAD,
        "  sync_warp();  // its lanes have read the bias\n",
        "",
        "no barrier",
    ),
    "a bias left early, owner of queries": (
        FILE,
        "    if constexpr (F::kBias) sync_warp();  // its lanes have read the bias\n",
        "",
        "no barrier",
    ),
    "logarithm": (TILES, "scale, j, e), kLog2E, -lower)", "scale, j, e), 1.4f, -lower)", "wrong"),
    "far from zero": (
        TILES,
        "above = bias.clamped(s[0][j][e], scale, j, e) -",
        "above = s[0][j][e] * scale -",
        "wrong",
    ),
    "halves of the producer": (COPIES, "at.own * 16 + (first ? 0 : 64);", "at.own * 16;", "wrong"),
    "order of the heads": (
        FILE,
        "return row<F>(a, number(round) / blocks) %",
        "return number(round) / blocks %",
        "wrong",
    ),
    "gradient of each pair": (
        FILE,
        "(int64_t)at.tile * F::kOthers + 64 * part,",
        "(int64_t)at.tile * F::kOthers + 64 * part + 8,",
        "wrong",
    ),
    "sum of the terms": (
        SUM,
        "sum[0][j][e] += tile.dp[0][j][e];",
        "sum[0][j][e] = tile.dp[0][j][e];",
        "wrong numbers in grad_bias",
    ),
    "numbers of the next term": (
        SUM,
        "hopper_numbers(next[1])}",
        "hopper_numbers(next[0])}",
        "wrong numbers in grad_bias",
    ),
    "a bias written over": (
        SUM,
        "        F::Own::wait_free(turn.own);\n",
        "",
        "no barrier|wrong|has not reached yet",
    ),
    "a bias not left": (SUM, "  leave_own<F>(turn);\n", "  turn.own.next();\n", "deadlock"),
    "heads that share a tile": (
        SUM,
        "h = first_h() + term % shared;",
        "h = first_h();",
        "wrong numbers in grad_bias",
    ),
    "tiles of keys": (
        SUM,
        "(int64_t)at.key_tile * F::kOthers + 64 * part,",
        "(int64_t)at.key_tile * F::kOthers,",
        "wrong numbers in grad_bias",
    ),
}


@pytest.mark.parametrize("name", BIAS_MUTATIONS)
@pytest.mark.slow
def test_mutations_of_a_bias(name: str, tmp_path: Path) -> None:
    *change, sign = BIAS_MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, *change, BIAS_SOURCES), ["-O1"]))
    library.hopper = True
    cases = (
        {"queries": 150, "keys": 200, "bias": "1hqk", "batch": 2, "heads": 6, "bias_from": 1000},
        {"queries": 530, "keys": 520, "bias": "b1qk", "batch": 2, "heads": 2},
        {"queries": 150, "keys": 200, "bias": "bhqk"},
    )
    forward_cases = (
        {"queries": 150, "keys": 200, "bias": "bhqk", "bias_from": -math.inf},
        {"queries": 150, "keys": 200, "bias": "b11k"},
    )
    found = ""
    for seed in range(2):
        for of in cases:
            found = found or results(library, of, {}, seed == 1, seed)
            found = found or gradients(library, of, {}, seed == 1, seed)
        for of in forward_cases:
            found = found or results(library, of, {}, True, seed)
    if sign == "nothing":
        assert not found
    else:
        assert any(part in found for part in sign.split("|")) and found, f"caught as {found!r}"
