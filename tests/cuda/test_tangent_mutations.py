"""Small errors in the tangents of 16-bit types: each of them is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import emulated
import pytest
import torch
from cases import Inputs, make
from emulated import EmulatorError, Library
from test_emulator import PROBLEM, mutated
from torch import Tensor

NAMES = ("query", "key", "value", "bias", "grad_out", "grad_lse")
SOURCES = {
    "tangent.cu": """
#include "backward_tangent_half.cuh"
namespace mha_ext::cuda {
int64_t forward_scratch_bytes(const Attention&) { return 0; }
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad& g) {
  const BiasPlan plan = bias_plan(a, g.grad_bias);
  return owner_count(plan) * plan.chunks * kTile * kTile * 4;
}
const char* forward_tangent(const Attention& a, const AttentionTangent& t, Stream stream) {
  return forward_tangent_half<BFloat16, 64>(a, t, stream);
}
const char* backward_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                             void* scratch, Stream stream) {
  return backward_tangent_half<BFloat16, 64>(a, g, t, scratch, stream);
}
}
""",
    "rest.cu": """
#include "kernels.h"
namespace mha_ext::cuda {
const char* forward(const Attention&, void*, Stream) { return "none"; }
const char* backward(const Attention&, const AttentionGrad&, void*, Stream) { return "none"; }
const char* weights(const Attention&, const Selection&, void*, Stream) { return "none"; }
const char* upload(const int64_t*, int64_t, int64_t*, Stream) { return "none"; }
}
""",
}
UNORDERED = "no barrier is between|a wait is missing|is under way"
FORWARD, BACKWARD = "tangent_half.cuh", "backward_tangent_half.cuh"
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "barrier before the values": (FORWARD, "    sync_block();  // the keys are there", "    //", UNORDERED),
    "barrier before the keys": (FORWARD, "    sync_block();  // the values are there", "    //", UNORDERED),
    "wait for the keys": (
        FORWARD,
        "    copy_wait<0>();\n    sync_block();  // the keys",
        "    copy_wait<1>();\n    sync_block();  // the keys",
        UNORDERED,
    ),
    "wait for the values": (
        FORWARD,
        "    copy_wait<0>();\n    sync_block();  // the values",
        "    copy_wait<1>();\n    sync_block();  // the values",
        UNORDERED,
    ),
    "tangent of what is owned": ("fragments.cuh", "stepped(left, k) + step +", "stepped(left, k) +", "wrong"),
    "fragment of the tangent": (
        "fragments.cuh",
        "multiply_add(S{}, moved[m][j + 1], x_moved[m], y[2], y[3])",
        "multiply_add(S{}, moved[m][j + 1], x_moved[m], y[3], y[2])",
        "wrong",
    ),
    "tangent of the tile": (FORWARD, "tile + F::kTileBytes, columns, moved)", "tile, columns, moved)", "wrong"),
    "terms swapped": (FORWARD, "tile + term * F::kTileBytes", "tile + (1 - term) * F::kTileBytes", "wrong"),
    "first term twice": (FORWARD, "term ? second[0][k][i]", "false ? second[0][k][i]", "wrong"),
    "bias of another key": ("half.cuh", "from + 8 * j * right", "from", "wrong"),
    "mean of the tangent": (FORWARD, "to -= mu[half]", "to += mu[half]", "wrong lse|wrong out"),
    "half of the mean": (FORWARD, "    mu[half] += shuffle_xor(mu[half], 2);\n", "", "wrong"),
    "hidden": (FORWARD, "    select_tile<F>(pairs.visible, 0, moved);\n", "", "wrong"),
    "barrier of backward": (BACKWARD, "    sync_block();  // the tile before", "    //", UNORDERED),
    "wait of backward": (
        BACKWARD,
        "    copy_wait<0>();\n    sync_block();  // the tile before",
        "    copy_wait<1>();\n    sync_block();  // the tile before",
        UNORDERED,
    ),
    "numbers of the queries": (
        BACKWARD,
        "from + 4 * (8 * j + 2 * (lane_id() % 4))",
        "from + 4 * (8 * j + 2 * (lane_id() / 8))",
        "wrong",
    ),
    "numbers of the rows": (
        BACKWARD,
        "warp_id() * 16 + 8 * half + lane_id() / 4));",
        "warp_id() * 16 + lane_id() / 4));",
        "wrong",
    ),
    "sign of mu": (BACKWARD, "(moved[0][j][e] - q.mu)", "(moved[0][j][e] + q.mu)", "wrong"),
    "delta of the other": (BACKWARD, "keep_scale, -q.moved)", "keep_scale, -q.delta)", "wrong"),
    "hidden in backward": (BACKWARD, "      select_tile<F>(pairs.visible, 0, moved_ds);\n", "", "wrong"),
    "a dropped pair": (BACKWARD, "      select_tile<F>(kept, 0, moved_ds);\n", "", "wrong"),
    "rows of a bias": (BACKWARD, "row0 + warp_id() * 16 + 8", "row0 + warp_id() * 16 + 4", "wrong"),
    "no change": (FORWARD, "term * F::kTileBytes", "F::kTileBytes * term", ""),
}  # fmt: skip


def problem() -> tuple[Inputs, dict[str, Tensor]]:
    """Grouped heads under a band, a mask, dropout and a bias that broadcasts; a direction of it."""
    inputs = make(replace(PROBLEM, heads=2, kv_heads=1, queries=90, bias="b1qk", dropout_p=0.2))
    inputs.options |= {"causal": "upper_left", "window": (60, None)}
    rng = torch.Generator().manual_seed(5)
    direction = {
        name: torch.randn(t.shape, generator=rng).to(t.dtype)
        for name in NAMES
        if (t := getattr(inputs, name)) is not None
    }
    return inputs, direction


def verdict(library: Library) -> str:
    """What is wrong with these tangents, beside those of the CPU; empty if nothing is."""
    i, direction = problem()
    options = {"scale": 0.125, "corner": "upper_left", "window_left": 60, "window_right": 0}
    options |= {"dropout_p": 0.2, "origin": (0, 0, 0, 0)}
    pairs = (i.mask, i.bias, i.key_lengths, i.seed)
    operands = (i.query, i.key, i.value)
    ops, leaves = torch.ops.mha_ext, [direction[name] for name in NAMES[:4]]
    saved = ops.attention_forward(*operands, *pairs, **options)
    moved = ops.attention_forward_tangent(*operands, *saved, *leaves, *pairs, **options)
    everything = {**direction, "out": moved[0], "lse": moved[1]}
    wanted = ops.attention_backward_tangent(
        *(i.grad_out, i.grad_lse, *operands, *saved, *moved, *leaves),
        *(direction["grad_out"], direction["grad_lse"], *pairs),
        **options,
        output_mask=[True] * 4,
    )
    right = dict(zip(("out", "lse", *NAMES), (*moved, *wanted), strict=False))
    poisoned = i.value.clone()
    poisoned[:, :, 0, 0] = torch.nan  # seen by some: the others keep what they have
    unseen = ~i.seen()[..., 0]
    for seed in range(2):
        library.seed = seed
        described = [
            emulated.Described(i.query, i.key, value, *pairs, options)
            for value in (i.value, poisoned, i.value)
        ]
        try:
            found = dict(
                zip(
                    ("out", "lse"),
                    library.forward_tangent(described[0], saved, direction),
                    strict=True,
                )
            )
            dirty = library.forward_tangent(described[1], saved, direction)[0]
            grads = library.backward_tangent(
                described[2], i.grad_out, i.grad_lse, saved, everything, [True] * 4
            )
        except EmulatorError as error:
            return str(error)
        found |= dict(zip(NAMES, grads, strict=False))  # type: ignore[arg-type]
        if not torch.equal(dirty[unseen], found["out"][unseen]):
            return "wrong numbers where nothing is seen"
        for name, tensor in right.items():
            largest = float(tensor.abs().max())
            if not torch.allclose(found[name], tensor, rtol=0.05, atol=0.02 * largest):
                return f"wrong {name}"
    return ""


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations_of_the_tangents_are_caught(name: str, tmp_path: Path) -> None:
    file, old, new, sign = MUTATIONS[name]
    library = Library(emulated.build(mutated(tmp_path, file, old, new, SOURCES), ["-O1"]))
    found = verdict(library)
    assert found == sign or (sign and any(part in found for part in sign.split("|"))), found
