"""explain(): what a call of `attention` would do, told by the functions that decide it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mha_ext import _C, transforms
from mha_ext.arguments import (
    Causal,
    EmptyRows,
    Window,
    changed_options,
    check_all_tensors,
    resolved,
    scale_of,
)
from mha_ext.report import plain_table


@dataclass(frozen=True)
class Tiles:
    """How many tiles see every pair, some of them, and none; the last are skipped, and ``skipped`` says by what."""

    full: int
    partial: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class Pass:
    """One pass over the problem.

    Attributes:
        kernel: ``"few queries"``, ``"grouped"``, ``"one tile"``, ``"tiled"``, ``"CUDA"``, or ``""`` where the device
            has none.
        why: the reasons of the kernel, the cuts and the threads, one sentence each.
        tile: (rows, keys). The rows are queries of a head; with few queries or grouped, of all heads that share K
            and V.
        tiles: None where a mask or lengths without values (on the meta device, or fake) decide.
        key_ranges: into how many ranges the keys are cut, whose sums are added in order.
        tasks, threads: what is handed to how many threads; 0 on other devices than the CPU.
        flops: two for each multiply-add of the products, over all pairs, as `torch.utils.flop_counter` has it.
        visible_flops: the share of the visible pairs; None as ``tiles``.
        memory: bytes by name: the results, then what the pass works in. Up to 4 MiB of scratch are kept for the
            next call.
    """

    name: str
    kernel: str
    why: tuple[str, ...]
    tile: tuple[int, int]
    tiles: Tiles | None
    key_ranges: int
    tasks: int
    threads: int
    flops: int
    visible_flops: int | None
    memory: dict[str, int]


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``str()`` makes a table of it.

    Attributes:
        problem: shapes and dtype in words.
        device: of the tensors.
        isa: the instruction set of the CPU's kernels, None on other devices.
        pairs: B · H · Lq · Lk.
        hidden: how many of them are hidden, by what; None as their tiles.
        copied: bytes of inputs that are copied first, because their strides cannot be read in place.
        forward, backward, forward_tangent, backward_tangent: the passes. The tangents are those of derivatives of
            second order: all inputs move.
    """

    problem: str
    device: torch.device
    isa: str | None
    pairs: int
    hidden: dict[str, int] | None
    copied: int
    forward: Pass
    backward: Pass
    forward_tangent: Pass
    backward_tangent: Pass

    @property
    def visible_pairs(self) -> int | None:
        return None if self.hidden is None else self.pairs - sum(self.hidden.values())

    def passes(self) -> Iterator[Pass]:
        yield from (self.forward, self.backward, self.forward_tangent, self.backward_tangent)

    def __str__(self) -> str:
        where = f"{self.device.type}, {self.isa}" if self.isa else self.device.type
        lines = [f"{self.problem}; {where}"]
        if self.hidden is None:
            lines.append(f"{self.pairs} pairs; what is hidden depends on values that are not there")
        else:
            by = "".join(f"; {name} hides {count}" for name, count in self.hidden.items())
            lines.append(f"{self.visible_pairs} of {self.pairs} pairs are visible{by}")
        if self.copied:
            lines.append(f"{self.copied} bytes of inputs are copied: their strides are not read")
        passes = list(self.passes())
        rows: list[list[str] | None] = [
            ["kernel", *(p.kernel or "none" for p in passes)],
            ["tile", *(f"{p.tile[0]} x {p.tile[1]}" for p in passes)],
            ["tiles: full", *(_cell(p.tiles, lambda t: t.full) for p in passes)],
            ["partial", *(_cell(p.tiles, lambda t: t.partial) for p in passes)],
            ["skipped", *(_cell(p.tiles, lambda t: sum(t.skipped.values())) for p in passes)],
            ["ranges of keys", *(str(p.key_ranges) for p in passes)],
            ["tasks", *(str(p.tasks) for p in passes)],
            ["threads", *(str(p.threads) for p in passes)],
            ["MFLOP", *(f"{p.flops * 1e-6:.3f}" for p in passes)],
            ["of visible pairs", *(_millions(p.visible_flops) for p in passes)],
            None,
        ]
        for name in dict.fromkeys(name for p in passes for name in p.memory):
            rows.append([f"bytes: {name}", *(str(p.memory.get(name, "")) for p in passes)])
        lines += ["", plain_table(["", *(p.name for p in passes)], rows)]
        for p in passes:
            lines += ["", p.name, *(f"  {reason}" for reason in p.why)]
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    return_lse: bool = False,
) -> Explanation:
    """What `attention` would do with these arguments: kernels, tiles, tasks, threads, FLOPs, memory, and why.

    The answer comes from the functions that cut the work, for this machine, its active instruction set and
    `torch.get_num_threads()`. Nothing is computed and no seed is drawn; masks and lengths are read, to count what
    they hide. Backward is that of the arguments that require a gradient, or of all where none does.

    Args:
        query, key, value, mask, bias, key_lengths, causal, window, dropout_p, seed, scale, empty_rows, return_lse:
            as in `attention`. Tensors may be on the meta device, where they stand for ones on the CPU, or fake. A bias
            of -inf hides pairs too, but is not read.

    Returns:
        An `Explanation`; print it.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    if seed is None and isinstance(query, Tensor):
        seed = torch.zeros(2, dtype=torch.int64, device=query.device)
    check_all_tensors(query, key, value, mask, bias, key_lengths, seed)
    _, corner, left, right, scale, uniform = resolved(
        query, key, key_lengths, causal, window, dropout_p, seed, scale, empty_rows, False
    )
    options = changed_options(corner, left, right, uniform, dropout_p, scale_of(query, scale))
    inputs = (query, key, value, bias)
    wanted = [x is not None and x.requires_grad for x in inputs]
    if not any(wanted):
        wanted = [x is not None for x in inputs]
    with torch.no_grad():
        found = _C.explain(
            *map(_without_values, (query, key, value, mask, bias, key_lengths, seed)),
            output_mask=[wanted[0], wanted[3]],
            **options,
        )
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    pairs = batch * heads * queries * keys
    hidden = found["hidden"]
    seen = None if hidden is None else pairs - sum(hidden.values())
    flops, results = _flops(query, key, value, bias, wanted), _results(query, value, inputs, wanted)
    passes = {
        name: Pass(
            name=name,
            kernel=one["kernel"],
            why=tuple(one["why"]),
            tile=one["tile"],
            tiles=one["tiles"] and Tiles(**one["tiles"]),
            key_ranges=one["key_ranges"],
            tasks=one["tasks"],
            threads=one["threads"],
            flops=flops[name],
            visible_flops=None if seen is None else flops[name] // max(pairs, 1) * seen,
            memory=results[name] | {what: count for what, count in one["memory"] if count},
        )
        for one in found["passes"]
        for name in [one["name"]]
    }
    grouped = f" over {kv_heads}" if kv_heads != heads else ""
    width = f"{head_dim}" if head_dim == value_dim else f"{head_dim} and {value_dim}"
    return Explanation(
        problem=f"batch {batch}, {heads} heads{grouped} of width {width}, {queries} queries, {keys} keys, "
        + str(query.dtype).removeprefix("torch."),
        device=query.device,
        isa=_C.active_isa() if query.device.type in ("cpu", "meta") else None,
        pairs=pairs,
        hidden=hidden,
        copied=found["copied"],
        **passes,
    )


def _without_values(x: Any) -> Any:
    """A fake tensor says that it lies on the CPU, but there is nothing to read: on the meta device that is known."""
    if not isinstance(x, FakeTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _flops(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wanted: list[bool]
) -> dict[str, int]:
    q, k, v = query.shape, key.shape, value.shape
    b = None if bias is None else bias.shape
    out, lse = (*q[:-1], v[-1]), q[:-1]
    saved = (out, lse, q, k, v, out, lse, lse)
    return {
        "forward": transforms.forward_flops(q, k, v),
        "backward": transforms.backward_flops(*saved[:5], output_mask=wanted),
        "forward_tangent": transforms.forward_tangent_flops(q, k, v, out, lse, lse, q, k, v, b),
        "backward_tangent": transforms.backward_tangent_flops(
            *saved, out, lse, q, k, v, b, out, output_mask=wanted
        ),
    }


def _results(
    query: Tensor, value: Tensor, inputs: tuple[Tensor | None, ...], wanted: list[bool]
) -> dict[str, dict[str, int]]:
    """Bytes of what each pass returns; delta is the row sum of dO ∘ O that backward starts from."""
    rows = query[..., 0].numel()
    out = rows * value.shape[-1] * query.element_size()
    lse = rows * (8 if query.dtype == torch.float64 else 4)
    grads = {
        f"grad_{name}": x.numel() * x.element_size()
        for name, x, is_wanted in zip(
            ("query", "key", "value", "bias"), inputs, wanted, strict=True
        )
        if x is not None and is_wanted
    }
    return {
        "forward": {"out": out, "lse": lse, "lse_low": lse},
        "backward": {**grads, "delta": lse},
        "forward_tangent": {"out": out, "lse": lse},
        "backward_tangent": {**grads, "delta": 2 * lse},
    }


def _cell(tiles: Tiles | None, count: Any) -> str:
    return "?" if tiles is None else str(count(tiles))


def _millions(flops: int | None) -> str:
    return "?" if flops is None else f"{flops * 1e-6:.3f}"
