"""All three gradients by one kernel of compute capability 9.0, on the emulator: at sizes at which
mha_ext takes two, too, since an emulator is slow; and mutations of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from cases import Problem, make
from emulated import Described, EmulatorError, Library
from test_emulator import REST, mutated
from test_hopper import CASES, Band, gradients

JOINT = """
#include "backward_hopper_joint.cuh"
namespace mha_ext::cuda {
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad&) {
  return packed_mask_bytes(a) + joint_scratch(a).all;
}
const char* backward(const Attention& given, const AttentionGrad& g, void* scratch, Stream stream) {
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  const char* error = run_delta<BFloat16>(a, g, stream);
  return error ? error : backward_joint<BFloat16>(a, g, scratch, stream);
}
int64_t forward_scratch_bytes(const Attention&) { return 0; }
const char* forward(const Attention&, void*, Stream) { return "none"; }
}
"""
MASK = (emulated.KERNELS / "mask.cu").read_text()


def sources(backward: str) -> Mapping[str, str]:
    return {"backward.cu": backward, "mask.cu": MASK, "rest.cu": REST}


def is_narrow(of: dict[str, Any]) -> bool:
    return max(of.get("head_dim", 64), of.get("value_dim", 0)) <= 128


PROBLEMS: tuple[tuple[dict[str, Any], Band], ...] = (
    *(({**of, "dtype": torch.bfloat16}, band) for of, band in CASES if is_narrow(of)),
    # so many heads that some are of another group of the order
    ({"queries": 70, "keys": 300, "batch": 9, "heads": 2, "kv_heads": 2}, {}),
    ({"queries": 200, "keys": 520, "head_dim": 128}, {"left": 100, "right": 60}),
    ({"queries": 300, "keys": 700, "key_lengths": "edges", "batch": 3, "head_dim": 96}, {"left": 40}),
    ({"queries": 500, "keys": 130, "mask": "b11k", "heads": 4, "kv_heads": 2}, {"right": 0}),
    ({"queries": 150, "keys": 300, "scale": -0.2, "dropout_p": 0.4, "head_dim": 128}, {}),
)  # fmt: skip


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("joint")
    kernels = mutated(folder, "tile.cuh", "row * kRowBytes", "kRowBytes * row", sources(JOINT))
    library = Library(emulated.build(kernels, ["-O1"]))
    library.hopper = True
    return library


@pytest.mark.parametrize("of,band", PROBLEMS, ids=str)
def test_gradients(of: dict[str, Any], band: Band, joint: Library) -> None:
    for seed in range(2):
        assert gradients(joint, of, band, bool(seed), seed) == ""


SAID = {"scale": 0.125, "origin": (0, 0, 0, 0), "corner": "upper_left", "dropout_p": 0.0}


def test_the_same_bits(joint: Library) -> None:
    """For any schedule, and of an entry alone as among others."""
    options = {"batch": 3, "heads": 4, "kv_heads": 2, "queries": 200, "keys": 390, "head_dim": 64}
    inputs = make(Problem(dtype=torch.bfloat16, mask="bhqk", **options))
    tensors = (inputs.query, inputs.key, inputs.value, inputs.mask)
    first = None
    for seed, entries in ((0, slice(0, 3)), (1, slice(0, 3)), (2, slice(1, 2))):
        operands = (*(t[entries] for t in tensors), None, None, None)
        saved = torch.ops.mha_ext.attention_forward(*operands, **SAID)
        joint.seed = seed
        grads = (inputs.grad_out[entries], inputs.grad_lse[entries])
        found = joint.backward(Described(*operands, SAID), *grads, saved, [True] * 3 + [False])[:3]
        first = first or found
        assert all(torch.equal(x[entries], y) for x, y in zip(first, found, strict=True))


@pytest.mark.parametrize("keys,values", [(True, False), (False, True)])
def test_what_is_wanted(keys: bool, values: bool, joint: Library) -> None:
    inputs = make(Problem(dtype=torch.bfloat16, batch=1, queries=100, keys=200, head_dim=64))
    operands = (inputs.query, inputs.key, inputs.value, None, None, None, None)
    saved = torch.ops.mha_ext.attention_forward(*operands, **SAID)
    described = Described(*operands, SAID)
    grads = (inputs.grad_out, inputs.grad_lse)
    every = joint.backward(described, *grads, saved, [True, True, True, False])
    some = joint.backward(described, *grads, saved, [True, keys, values, False])
    assert (some[1] is None, some[2] is None) == (not keys, not values)
    assert all(y is None or torch.equal(x, y) for x, y in zip(every[:3], some[:3], strict=True))


def spoilt(library: Library, seed: int = 0) -> str:
    """Keys, or queries and gradients, with NaN: the others' gradients are as without, for who does
    not see them."""
    inputs = make(
        Problem(dtype=torch.bfloat16, batch=1, heads=2, queries=300, keys=300, head_dim=64)
    )
    said = {**SAID, "window_right": 0}
    library.seed = seed
    found: list[list[torch.Tensor | None]] = []
    for poisoned in ("nothing", "keys", "queries"):
        query, key, grad = inputs.query.clone(), inputs.key.clone(), inputs.grad_out.clone()
        if poisoned == "keys":
            key[:, :, 130], key[:, :, 200] = torch.nan, torch.inf
        if poisoned == "queries":
            query[:, :, 10], grad[:, :, 80] = torch.nan, torch.nan
        operands = (query, key, inputs.value, None, None, None, None)
        saved = torch.ops.mha_ext.attention_forward(*operands, **said)
        described = Described(*operands, said)
        wanted = [True] * 3 + [False]
        try:
            found.append(library.backward(described, grad, inputs.grad_lse, saved, wanted)[:3])
        except EmulatorError as error:
            return str(error)
    clean, of_keys, of_queries = found
    every = torch.arange(300)
    seen = (every == 10) | (every == 80)
    # Queries see the keys up to them.
    for name, poison, rows in (
        ("query", of_keys, every < 130),
        ("query", of_queries, ~seen),
        ("key", of_queries, every > 80),
        ("value", of_queries, every > 80),
    ):
        at = ("query", "key", "value").index(name)
        x, y = clean[at], poison[at]
        assert x is not None and y is not None
        if not torch.allclose(x[:, :, rows], y[:, :, rows], rtol=0.02, atol=0.02):
            return f"wrong numbers in grad_{name}"
    query_grad, key_grad = of_keys[0], of_queries[1]
    assert query_grad is not None and key_grad is not None
    if not (query_grad[:, :, 130:].isnan().all() and key_grad[:, :, :81].isnan().all()):
        return "wrong numbers where NaN is seen"
    return ""


def low(library: Library, seed: int = 0) -> str:
    """Levels so low that exp(0 - lse), of a key that does not exist, is infinite."""
    rng = torch.Generator().manual_seed(seed)
    query, key = (torch.full((1, 2, n, 64), 4.0).bfloat16() for n in (100, 200))
    value, grad = (torch.randn(1, 2, n, 64, generator=rng).bfloat16() for n in (200, 100))
    operands = (query, -key, value, None, None, None, None)
    said = {**SAID, "scale": 1.0}
    saved = torch.ops.mha_ext.attention_forward(*operands, **said)
    library.seed = seed
    wanted = [True] * 3 + [False]
    try:
        found = library.backward(Described(*operands, said), grad, None, saved, wanted)
    except EmulatorError as error:
        return str(error)
    return "" if all(x is None or x.isfinite().all() for x in found) else "wrong: not finite"


def test_beside_what_is_not_finite(joint: Library) -> None:
    for seed in range(2):
        assert spoilt(joint, seed) == ""


def test_low_levels(joint: Library) -> None:
    assert low(joint) == ""


@pytest.fixture(scope="module")
def hopper() -> Library:
    library = Library(emulated.build())
    library.hopper = True
    library.watched = 50
    return library


@pytest.mark.parametrize(
    "of,band",
    [
        ({"head_dim": 128, "kv_heads": 2}, {}),
        ({"dtype": torch.float16, "dropout_p": 0.3, "value_dim": 20}, {"right": 0}),
        ({"head_dim": 50, "mask": "b1qk"}, {"left": 600}),
    ],
    ids=str,
)
def test_as_mha_ext_takes_it(of: dict[str, Any], band: Band, hopper: Library) -> None:
    """With packed masks, rows copied to where they can be, and both types."""
    assert gradients(hopper, {"queries": 1030, "keys": 1100, **of}, band, True, 0) == ""


def test_where_it_is_taken(hopper: Library) -> None:
    """From 1,024 queries and keys on, where more than 64 columns, a band or dropout make it faster."""

    def products(
        queries: int, keys: int, head_dim: int, wanted: list[bool], band: dict[str, Any]
    ) -> int:
        inputs = make(
            Problem(
                dtype=torch.bfloat16,
                batch=1,
                heads=1,
                kv_heads=1,
                queries=queries,
                keys=keys,
                head_dim=head_dim,
            )
        )
        operands = (inputs.query, inputs.key, inputs.value, None, None, None, None)
        said = SAID | band
        saved = torch.ops.mha_ext.attention_forward(*operands, **said)
        described = Described(*operands, said)
        hopper.backward(described, inputs.grad_out, inputs.grad_lse, saved, [*wanted, False])
        return hopper.report.products

    for queries, keys, head_dim, band, together in (
        (1024, 1024, 128, {}, True),
        (1024, 1024, 64, {}, False),
        (1024, 1024, 64, {"window_left": 900}, True),
        (1000, 1024, 128, {}, False),
        (1024, 1000, 128, {}, False),
    ):
        found = [
            products(queries, keys, head_dim, wanted, band)
            for wanted in ([True] * 3, [True, False, False], [False, True, True])
        ]
        assert (found[0] < found[1] + found[2]) == together, (queries, keys, head_dim, found)


FILE, TILES, OTHERS = (
    "backward_hopper_joint.cuh",
    "backward_hopper_tiles.cuh",
    "backward_hopper.cuh",
)
# file, what stands there, what shall stand there, what tells
MUTATIONS = {
    "none": (FILE, "constexpr uint32_t kRows = 16;", "constexpr uint32_t kRows = 2;", "nothing"),
    "order of the blocks": (FILE, "block = blocks - 1 - n / count;", "block = n / count;", "does not run"),
    "no wait for the block behind": (FILE, "at.tile >= behind.any &&", "at.tile < 0 &&", "wrong"),
    "whose signal": (FILE, "signal_of(block + 1, false) >> 1", "signal_of(block, false) >> 1", "not run"),
    "added to nothing": (FILE, "if (is_any(before))", "if (block + 1 < joint.blocks)", "wrong"),
    "nothing said of hidden tiles": (
        FILE,
        "    give_signal(joint.signals",
        "    if (!hidden) give_signal(joint.signals",
        "not run",
    ),
    "hidden tiles said to be there": (
        FILE,
        "signal_of(block, !hidden || is_any(before))",
        "signal_of(block, true)",
        "wrong",
    ),
    "a signal before the sum": (FILE, "      wait_numbers();\n", "", "signal is given"),
    "a place left early": (
        FILE,
        "      wait_numbers_read();\n      F::Outbox::left(turn);",
        "      F::Outbox::left(turn);\n      wait_numbers_read();",
        "no barrier|wrong",
    ),
    "keys that do not exist": (FILE, "  drop_missing_keys<F>(a, at, tile.dp);\n", "", "wrong"),
    "rows of the gradient": (
        FILE,
        "paneled<F::kRows>(row, 2 * k + lane / 16)",
        "paneled<F::kRows>(row, 2 * k)",
        "wrong|no barrier",
    ),
    "a gradient still being read": (FILE, "  F::Grads::wait_free(share.grad);\n", "", "no barrier"),
    "a gradient not all there": (FILE, "  F::Grads::wait_full(share.grad);\n", "", "no barrier|wrong"),
    "a gradient not left": (FILE, "  F::Grads::left(share.grad);\n", "", "deadlock"),
    "columns of a consumer": (FILE, "column % 64 * 2", "0", "wrong"),
    "sums from before": (FILE, "  clear_fragments(share.sums);  // no register holds them until here\n", "", "wrong"),
    "a place not free": (FILE, "  F::Outbox::wait_free(share.box);\n", "", "no barrier|has read|wrong"),
    "dK under way": (
        FILE,
        "      wait_products<0>();\n      pin_sums<F>(tile, sums);\n      leave<F>(turn);\n    }",
        "      leave<F>(turn);\n      wait_products<0>();\n      pin_sums<F>(tile, sums);\n    }",
        "which a product",
    ),
    "no care": (FILE, "    share_with_care<F>(a, at, F::own_scores(turn), share);\n", "", "wrong"),
    "keys of the care": (FILE, "key0 + 64 * part, 64)", "key0, 64)", "wrong"),
    "columns of the care": (FILE, "second ? sums[0][j + 8", "false ? sums[0][j + 8", "wrong"),
    "parts of dQ": (FILE, "to.data = (S*)to.data + F::kPartColumns * part;", "to.data = (S*)to.data;", "wrong"),
    "tiles without a sum": (FILE, "if (is_any(joint.signals[of]))", "if (true)", "wrong"),
    "own keys left early": (
        FILE,
        "  leave_own<F>(turn);\n  return partial;",
        "  turn.own.next();\n  return partial;",
        "deadlock",
    ),
    "copies of half the tile": (TILES, "kJoint ? kGroup / 2 : kGroup;", "kGroup;", "deadlock|wrong|no barrier"),
}  # fmt: skip
WIDE = ("a gradient still being read", "dK under way")  # with one place for the gradient
MUTATED: tuple[tuple[dict[str, Any], Band], ...] = (
    ({"queries": 150, "keys": 300, "heads": 2, "kv_heads": 1, "scale": -0.4}, {"right": 0}),
    ({"queries": 330, "keys": 400, "mask": "bhqk", "heads": 4, "squares": True}, {}),
    ({"queries": 70, "keys": 200, "heads": 2, "kv_heads": 2, "batch": 9, "key_lengths": "random"}, {}),
)  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations(name: str, tmp_path: Path) -> None:
    *change, sign = MUTATIONS[name]
    wide = name in WIDE
    of_width = sources(JOINT.replace("joint<BFloat16>", f"joint<BFloat16, {128 if wide else 64}>"))
    library = Library(emulated.build(mutated(tmp_path, *change, of_width), ["-O1"]))
    library.hopper = True
    found = ""
    for seed in range(2):
        for of, band in MUTATED:
            width = {"head_dim": 128} if wide else {}
            found = found or gradients(library, of | width, band, seed == 1, seed)
        found = found or spoilt(library, seed) or low(library, seed)
    if sign == "nothing":
        assert not found
    else:
        assert any(part in found for part in sign.split("|")) and found, f"caught as {found!r}"
