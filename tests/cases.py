"""The one generator of cases, and the bound that every result must meet.

A `Problem` is a small description; `make` turns it into tensors; `PROBLEMS` goes through every
option, `random_problem` mixes them. `assert_accurate` is guarantee 5: maximum and RMS error against
float64 at most twice that of plain PyTorch in the same dtype, plus 4 ulp of the largest uncancelled
term.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

import mha_ext
from mha_ext import reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PAIR_SHAPES = tuple("".join(shape) for shape in itertools.product("b1", "h1", "q1", "k1"))
PAIR_SHAPES += ("hqk", "1qk", "qk", "1k", "q1", "k", "")
PAIR_LAYOUTS = ("contiguous", "expanded", "transposed", "sliced")
LAYOUTS = ("contiguous", "heads", "sliced", "expanded", "strided")
HEAD_DIMS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 48, 50, 63, 64, 65, 80, 96, 128, 197, 256, 512)
LENGTHS = (0, 1, 2, 7, 12, 63, 64, 65, 100, 129, 200)
LENGTH_KINDS = ("", "random", "edges", "int32")


@dataclass(frozen=True)
class Problem:
    """What to compute; `make` says with which numbers."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    queries: int = 12
    keys: int = 10
    head_dim: int = 16
    value_dim: int | None = None
    layout: str = "contiguous"  # of query, key, value and the cotangent of out: one of LAYOUTS
    mask: str | None = None  # one of PAIR_SHAPES
    mask_dtype: torch.dtype = torch.bool
    mask_layout: str = "contiguous"
    bias: str | None = None
    bias_dtype: torch.dtype | None = None  # None = dtype
    bias_layout: str = "contiguous"
    key_lengths: str = ""
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    empty_rows: str = "zero"
    numbers: int = 0  # the seed of the numbers

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        parts = (f"{f.name}={getattr(self, f.name)}".replace("torch.", "") for f in changed)
        return ",".join(parts).replace(" ", "") or "plain"


@dataclass
class Inputs:
    """The tensors and options of one problem, and the cotangents of its results."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)  # of a shard, for the operators

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get gradients."""
        found = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def seen(self) -> Tensor:
        """Which pairs are visible, [B, H, Lq, Lk]."""
        options = {name: self.options[name] for name in ("causal", "window")}
        pairs = (self.mask, self.bias, self.key_lengths)
        return reference.visible(self.query, self.key, *pairs, **options, origin=self.origin)

    def factor(self) -> Tensor | float:
        """What dropout multiplies P by, float64 [B, H, Lq, Lk]: 0 or 1 / (1 - p)."""
        dropout_p = self.options["dropout_p"]
        if dropout_p == 0:
            return 1.0
        assert self.seed is not None
        shape = (*self.query.shape[:3], self.key.shape[2])
        kept = reference.keep(self.seed, dropout_p, shape, self.origin)
        return kept.double() * reference.keep_scale(dropout_p)

    def scale(self) -> float:
        scale = self.options["scale"]
        return self.query.shape[-1] ** -0.5 if scale is None else scale

    def replaced(self, **changes: Any) -> Inputs:
        return replace(self, **changes)


def make(problem: Problem) -> Inputs:
    """The same numbers for the same problem, on every machine."""
    p = problem
    rng = torch.Generator().manual_seed(p.numbers)
    value_dim = p.head_dim if p.value_dim is None else p.value_dim
    kv_heads = p.heads if p.kv_heads is None else p.kv_heads
    size = {"b": p.batch, "h": p.heads, "q": p.queries, "k": p.keys}

    query = _rows(p.layout, (p.batch, p.heads, p.queries, p.head_dim), rng, p.dtype)
    key = _rows(p.layout, (p.batch, kv_heads, p.keys, p.head_dim), rng, p.dtype)
    value = _rows(p.layout, (p.batch, kv_heads, p.keys, value_dim), rng, p.dtype)
    grad_out = _rows(p.layout, (p.batch, p.heads, p.queries, value_dim), rng, p.dtype)
    lse_dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    grad_lse = torch.randn(p.batch, p.heads, p.queries, generator=rng).to(lse_dtype)

    mask = bias = key_lengths = seed = None
    if p.mask is not None:

        def draw_mask(shape: list[int]) -> Tensor:
            drawn = torch.rand(shape, generator=rng) < 0.7
            if len(shape) > 1 and shape[-2] > 2:
                drawn[..., 1, :] = False  # a query with nothing to attend to
            if p.mask_dtype == torch.bool:
                return drawn
            return (drawn * torch.randint(1, 100, shape, generator=rng)).to(p.mask_dtype)

        mask = _pairs(p.mask, p.mask_layout, size, draw_mask)
    if p.bias is not None:

        def draw_bias(shape: list[int]) -> Tensor:
            drawn = torch.randn(shape, generator=rng)
            drawn[torch.rand(shape, generator=rng) < 0.1] = -torch.inf
            return drawn.to(p.bias_dtype or p.dtype)

        bias = _pairs(p.bias, p.bias_layout, size, draw_bias)
    if p.key_lengths:
        key_lengths = torch.randint(0, p.keys + 1, (p.batch,), generator=rng)
        if p.key_lengths == "edges":
            key_lengths = torch.arange(p.batch).remainder(2) * p.keys  # 0, Lk, 0, ...
        if p.key_lengths == "int32":
            key_lengths = key_lengths.int()
    if p.dropout_p > 0:
        seed = torch.randint(0, 2**32, (2,), generator=rng)
    options = {
        "causal": p.causal,
        "window": p.window,
        "dropout_p": p.dropout_p,
        "scale": p.scale,
        "empty_rows": p.empty_rows,
    }
    return Inputs(query, key, value, mask, bias, key_lengths, seed, grad_out, grad_lse, options)


def _rows(
    layout: str, shape: tuple[int, int, int, int], rng: torch.Generator, dtype: torch.dtype
) -> Tensor:
    batch, heads, length, width = shape

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).to(dtype)

    if layout == "contiguous":
        return draw(*shape)
    if layout == "heads":  # split off the width of a [B, L, H·D] projection
        return draw(batch, length, heads * width).unflatten(2, (heads, width)).transpose(1, 2)
    if layout == "sliced":  # one of three packed projections
        return draw(batch, length, heads, 3, width + 1)[:, :, :, 1, 1:].transpose(1, 2)
    if layout == "expanded":  # one for the whole batch
        return draw(1, heads, length, width).expand(shape)
    if layout == "strided":  # a last stride that is not 1
        return draw(batch, heads, width, length).mT
    raise ValueError(layout)


def _pairs(
    shape: str, layout: str, size: dict[str, int], draw: Callable[[list[int]], Tensor]
) -> Tensor:
    sizes = [size.get(letter, 1) for letter in shape]
    if layout == "transposed" and len(sizes) > 1:
        return draw(sizes).mT.contiguous().mT
    if layout == "sliced" and sizes:
        wide = draw([*sizes[:-1], 2 * sizes[-1] + 1])
        return wide[..., 1::2]
    if layout == "expanded":
        return draw(sizes).expand(size["b"], size["h"], size["q"], size["k"])
    return draw(sizes)


def call(function: Callable[..., Any], inputs: Inputs, **changes: Any) -> Any:
    """`mha_ext.attention` or `reference.attention` on a problem: (out, lse)."""
    arguments: dict[str, Any] = {
        "bias": inputs.bias,
        "key_lengths": inputs.key_lengths,
        "seed": inputs.seed,
        "return_lse": True,
        **inputs.options,
        **changes,
    }
    return function(inputs.query, inputs.key, inputs.value, inputs.mask, **arguments)


def results(function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs) -> dict[str, Any]:
    """out, lse and every gradient, by name."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves().items()}
    out, lse = function(inputs.replaced(**leaves))
    cotangents = [inputs.grad_out.to(out.dtype), inputs.grad_lse.to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), cotangents, allow_unused=True)
    found = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"grad_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def to_double(inputs: Inputs) -> Inputs:
    """The same problem in float64."""
    names = ("query", "key", "value", "bias", "grad_out", "grad_lse")
    found = {name: getattr(inputs, name) for name in names}
    return inputs.replaced(**{n: None if t is None else t.double() for n, t in found.items()})


def forward_results(
    function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs
) -> dict[str, Any]:
    """out and lse, by name."""
    return dict(zip(("out", "lse"), function(inputs), strict=True))


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """The definition in float64."""
    return results(lambda i: call(reference.attention, i), to_double(inputs))


def plain(inputs: Inputs, seen: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """What one writes in PyTorch, in the dtype of the inputs: the accuracy to be compared with."""
    groups = inputs.query.shape[1] // max(inputs.key.shape[1], 1)
    key = inputs.key.repeat_interleave(groups, 1) if groups > 1 else inputs.key
    value = inputs.value.repeat_interleave(groups, 1) if groups > 1 else inputs.value
    scores = inputs.query @ key.mT * inputs.scale()
    if inputs.bias is not None:
        scores = scores + inputs.bias.masked_fill(inputs.bias == -torch.inf, 0)
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(empty, 0)
    fill = 1 / max(seen.shape[3], 1) if inputs.options["empty_rows"] == "uniform" else 0
    weights = scores.softmax(-1).masked_fill(~seen, 0).masked_fill(empty, fill)
    if isinstance(factor, Tensor):
        weights = weights * factor.to(weights.dtype)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return weights.to(value.dtype) @ value, lse


def plain_orders(
    inputs: Inputs, run: Callable[[Callable[[Inputs], Any], Inputs], Any]
) -> list[dict[str, Tensor]]:
    """``run(plain, inputs)`` with the sums of plain PyTorch in several orders.

    One order is one sample of its rounding error, which may be small by luck.
    """
    seen, factor = inputs.seen(), inputs.factor()
    rng = torch.Generator().manual_seed(0)

    def in_order(order: Callable[[int], Tensor]) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
        keys, width, value_width = (
            order(n) for n in (seen.shape[3], inputs.query.shape[3], inputs.value.shape[3])
        )

        def function(i: Inputs) -> tuple[Tensor, Tensor]:
            bias = i.bias
            if bias is not None and bias.dim() and bias.shape[-1] > 1:
                bias = bias[..., keys]
            turned = i.replaced(
                query=i.query[..., width],
                key=i.key[:, :, keys][..., width],
                value=i.value[:, :, keys][..., value_width],
                bias=bias,
            )
            kept = factor[..., keys] if isinstance(factor, Tensor) else factor
            out, lse = plain(turned, seen[..., keys], kept)
            return out[..., value_width.argsort()], lse

        return function

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=rng)

    orders = (torch.arange, shuffled, shuffled)
    return [run(in_order(order), inputs) for order in orders]


def largest_terms(inputs: Inputs) -> dict[str, float]:
    """The largest uncancelled term of each result: its formula over absolute values."""
    i = to_double(inputs)
    query, key, value, grad_out = (t.abs() for t in (i.query, i.key, i.value, i.grad_out))
    kv_heads = key.shape[1]
    groups = query.shape[1] // max(kv_heads, 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen, factor, scale = inputs.seen(), inputs.factor(), abs(inputs.scale())
    options = {name: i.options[name] for name in ("causal", "window", "scale", "empty_rows")}
    options |= {"bias": i.bias, "key_lengths": i.key_lengths, "origin": i.origin}
    weights = reference.attention_weights(i.query, i.key, i.mask, **options)
    dropped = weights * factor  # Z
    scores = scale * (query @ key.mT)  # |scale| |Q| |K|^T + |B|
    if i.bias is not None:
        scores = scores + torch.where(seen, i.bias.abs(), 0.0)
    grad_weights = grad_out @ value.mT * factor  # |dP|
    delta = (weights * grad_weights).sum(-1) + i.grad_lse.abs()
    grad_scores = (weights * (grad_weights + delta[..., None])).masked_fill(~seen, 0.0)

    def over_groups(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (kv_heads, groups)).sum(2) if groups > 1 else grad

    terms = {
        "out": dropped @ value,
        "lse": scores.masked_fill(~seen, 0.0) + math.log(max(seen.shape[3], 1)),
        "weights": weights,
        "grad_query": scale * grad_scores @ key,
        "grad_key": over_groups(scale * grad_scores.mT @ query),
        "grad_value": over_groups(dropped.mT @ grad_out),
    }
    if i.bias is not None:
        terms["grad_bias"] = grad_scores.sum_to_size(i.bias.shape)
    return {name: float(term.max()) if term.numel() else 0.0 for name, term in terms.items()}


def ulp(dtype: torch.dtype, value: float) -> float:
    """The spacing of the numbers of a dtype around a value."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(value, info.tiny)))


def assert_accurate(
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    plains: Sequence[dict[str, Tensor]],
    terms: dict[str, float],
    names: Sequence[str],
) -> None:
    """Guarantee 5, for the results of these names.

    The dtype is that of out, for the gradient of a float32 bias beside half-precision inputs too.
    For float64 the definition is as inexact as plain PyTorch, which is added once more.
    """
    dtype = found[names[0]].dtype
    times = 3 if dtype == torch.float64 else 2
    for name in names:
        ours, right = found[name], wanted[name]
        assert ours.shape == right.shape, name
        special = ~right.isfinite()
        assert torch.equal(ours[special].double(), right[special].double()), f"{name}: not finite"
        ours, right = ours.masked_fill(special, 0), right.masked_fill(special, 0)
        slack = 4 * ulp(ours.dtype if name == "lse" else dtype, terms[name])
        error = _errors(ours, right)
        plain = [_errors(p[name].masked_fill(special, 0), right) for p in plains]
        for which, ours_error, *plain_errors in zip(("maximum", "rms"), error, *plain, strict=True):
            plain_error = max((e for e in plain_errors if math.isfinite(e)), default=0.0)
            bound = times * plain_error + slack
            assert ours_error <= bound, (
                f"{name}: {which} error {ours_error:.3g} is above {bound:.3g} = "
                f"{times} x {plain_error:.3g} (plain PyTorch) + {slack:.3g} (4 ulp of "
                f"{terms[name]:.3g})"
            )


def assert_same_without_lse(inputs: Inputs, out: Tensor) -> None:
    """Where lse is not asked for, out has the same bits."""
    alone = call(mha_ext.attention, inputs, return_lse=False)
    assert alone.stride() == out.stride()
    torch.testing.assert_close(alone, out, rtol=0, atol=0, equal_nan=True)


def _errors(found: Tensor, right: Tensor) -> tuple[float, float]:
    if not right.numel():
        return 0.0, 0.0
    error = (found.double() - right).abs()
    return float(error.max()), float(error.square().mean().sqrt())


def _problems() -> Iterator[Problem]:
    dtypes = itertools.cycle(DTYPES)
    base = Problem(queries=13, keys=70)
    yield from (replace(base, dtype=t, head_dim=d) for d in HEAD_DIMS for t in DTYPES)
    for d, dv in ((1, 512), (64, 50), (50, 64), (128, 3), (16, 197), (96, 128), (512, 1)):
        yield replace(base, dtype=next(dtypes), head_dim=d, value_dim=dv, dropout_p=0.1)
        yield replace(base, dtype=next(dtypes), head_dim=d, value_dim=dv, bias="hqk")
    for queries, keys in itertools.product(LENGTHS, LENGTHS):
        sizes = replace(base, queries=queries, keys=keys, head_dim=20, dtype=next(dtypes))
        yield sizes
        yield replace(sizes, mask="b1qk", dtype=next(dtypes), empty_rows="uniform")
    for size, dtype in itertools.product((0, 1, 5), DTYPES):
        yield replace(base, batch=size, dtype=dtype)
        yield replace(base, heads=size, dtype=dtype)

    masks = itertools.cycle(MASK_DTYPES)
    masked = replace(base, queries=66, keys=77, head_dim=24)
    for shape, layout in itertools.product(PAIR_SHAPES, PAIR_LAYOUTS):
        kind = replace(masked, mask=shape, mask_layout=layout, mask_dtype=next(masks))
        yield replace(kind, dtype=next(dtypes))
    for shape, layout in itertools.product(PAIR_SHAPES, PAIR_LAYOUTS):
        dtype = next(dtypes)
        biased = replace(masked, dtype=dtype, bias=shape, bias_layout=layout)
        yield biased
        if dtype in (torch.bfloat16, torch.float16):
            yield replace(biased, bias_dtype=torch.float32)

    # Diagonals that meet bands of 16 queries by a single key, on either side.
    windows = (None, (0, 0), (3, None), (18, None), (None, 5), (20, 9), (200, 200))
    shapes = ((60, 60), (40, 150), (150, 40), (140, 150), (80, 97))
    for (queries, keys), window in itertools.product(shapes, windows):
        banded = replace(base, queries=queries, keys=keys, head_dim=32, window=window)
        for corner in ("upper_left", "lower_right"):
            yield replace(banded, causal=corner, dtype=next(dtypes))
            lengths = LENGTH_KINDS[1 + (queries + len(corner)) % 3]
            yield replace(banded, causal=corner, key_lengths=lengths, dtype=next(dtypes), batch=3)
        if queries == keys:
            yield replace(banded, causal=True, dtype=next(dtypes))
            yield replace(banded, dtype=next(dtypes))
            yield replace(banded, key_lengths="random", dtype=next(dtypes))
    for lengths, dtype in itertools.product(LENGTH_KINDS[1:], DTYPES):
        yield replace(masked, dtype=dtype, key_lengths=lengths, batch=4)

    for dropout_p, dtype in itertools.product((1e-5, 0.1, 0.5, 0.9, 0.99999), DTYPES):
        yield replace(masked, dtype=dtype, dropout_p=dropout_p)
        yield replace(masked, dtype=dtype, dropout_p=dropout_p, mask="b1qk", empty_rows="uniform")
    for scale, dtype in itertools.product((-0.3, 0.0, 0.01, 2.0), DTYPES):
        yield replace(masked, dtype=dtype, scale=scale)
    for (heads, kv_heads), dtype in itertools.product(((8, 2), (6, 1), (3, 3), (0, 0)), DTYPES):
        yield replace(masked, dtype=dtype, heads=heads, kv_heads=kv_heads)
        grouped = replace(masked, dtype=dtype, heads=heads, kv_heads=kv_heads)
        yield replace(grouped, bias="hqk", dropout_p=0.2, causal="lower_right")
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        yield replace(masked, dtype=dtype, layout=layout)
        yield replace(masked, dtype=dtype, layout=layout, heads=4, kv_heads=2, mask="b11k")
    for shape, dtype in itertools.product(("bhqk", "b1q1", "b11k"), DTYPES):
        uniform = replace(masked, dtype=dtype, mask=shape, empty_rows="uniform")
        yield replace(uniform, bias="hqk", dropout_p=0.3)
        yield replace(uniform, key_lengths="edges", causal="lower_right", heads=4, kv_heads=2)

    # Forward cuts the keys of few queries into ranges.
    lower_right, upper_left = {"causal": "lower_right"}, {"causal": "upper_left"}
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"mask": "b1qk", "bias": "hqk", "empty_rows": "uniform", "dropout_p": 0.2},
        {"mask": "bh1k", "key_lengths": "edges", "empty_rows": "uniform", "value_dim": 7},
        {"key_lengths": "random", "layout": "heads", **lower_right},
        {"window": (300, None), "bias": "1h1k", **lower_right},
        {"window": (2, 600), "mask": "qk", **upper_left},
    )
    for (queries, keys), cut in itertools.product(
        ((1, 1100), (3, 700), (7, 650), (9, 1300), (66, 1100)), cuts
    ):
        yield replace(
            base, queries=queries, keys=keys, heads=4, kv_heads=2, dtype=next(dtypes), **cut
        )
    for queries, dtype in itertools.product((1, 2, 4, 5, 8, 9, 64), DTYPES):
        yield replace(base, queries=queries, keys=1025, heads=6, kv_heads=1, dtype=dtype)
    # How few queries are few depends on the type, and on whether the keys are more than a tile.
    for queries, keys, dtype in itertools.product((5, 6, 7, 8), (64, 65), DTYPES):
        few = replace(base, queries=queries, keys=keys, heads=4, dtype=dtype)
        yield replace(few, bias="hqk", dropout_p=0.2)
        many = {"heads": 20, "kv_heads": 1}  # rows that share a key
        yield replace(few, **many, mask="b1qk", empty_rows="uniform", head_dim=40)


def random_problem(choose: Callable[[Sequence[Any]], Any], numbers: int = 0) -> Problem:
    """A problem whose every option is chosen by ``choose(values)``."""
    queries, keys = choose((0, 1, 3, 16, 33, 65, 96)), choose((0, 1, 5, 16, 40, 64, 97, 140))
    kv_heads = choose((1, 2, 3))
    causal = choose((False, False, "upper_left", "lower_right"))
    window = choose((None, (0, 3), (7, None), (None, 4), (40, 20)))
    if window is not None and causal is False:
        keys = queries
    dtype = choose(DTYPES)
    return Problem(
        dtype=dtype,
        batch=choose((1, 2, 3)),
        heads=kv_heads * choose((1, 2, 3)),
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=choose((1, 4, 7, 16, 33, 50, 64, 100)),
        value_dim=choose((None, None, 1, 6, 16, 40, 70)),
        layout=choose(LAYOUTS),
        mask=choose((None, *PAIR_SHAPES)),
        mask_dtype=choose(MASK_DTYPES),
        mask_layout=choose(PAIR_LAYOUTS),
        bias=choose((None, *PAIR_SHAPES)),
        bias_dtype=choose((None, torch.float32)),
        bias_layout=choose(PAIR_LAYOUTS),
        key_lengths=choose(LENGTH_KINDS),
        causal=causal,
        window=window,
        dropout_p=choose((0.0, 0.0, 0.1, 0.5)),
        scale=choose((None, None, -0.2, 0.5)),
        empty_rows=choose(("zero", "uniform")),
        numbers=numbers,
    )


def _random_problems(count: int) -> Iterator[Problem]:
    choose = random.Random(0).choice
    for number in range(count):
        yield random_problem(choose, number)


PROBLEMS = tuple(dict.fromkeys(_problems()))
RANDOM_PROBLEMS = tuple(_random_problems(120))
