"""The cases that are measured, their inputs, and every implementation that runs them.

The peers run at their best setting: no gradients where none are asked for, `need_weights=False`
for nn.MultiheadAttention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext

MaskKind = Literal["none", "causal", "padding", "random", "bias", "blocks", "window"]
Level = Literal["attention", "layer"]
MASKS: tuple[MaskKind, ...] = get_args(MaskKind)
SQUARE_MASKS = ("causal", "window")  # they need as many keys as queries
BLOCK = 64  # the side of a block of a block-sparse mask
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One attention problem: a layer of width heads * head_dim on `queries` and `keys` tokens."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    kv_heads: int | None = None
    mask: MaskKind = "none"
    dropout: float = 0.0
    training: bool = True  # False: forward only
    layer: bool = True  # False: only the attention (a KV cache holds projected keys)
    value_dim: int | None = None  # of a head; other than head_dim only without a layer
    window: int = 128  # mask "window": the keys before a query's own position that it sees
    bias_gradient: bool = True  # mask "bias": whether the bias is differentiated too

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "queries", "keys", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.mask not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r}")
        if self.mask in SQUARE_MASKS and self.queries != self.keys:
            raise ValueError(
                f"mask {self.mask} needs as many keys as queries, "
                f"got {self.keys} and {self.queries}"
            )
        if self.window < 0:
            raise ValueError(f"window must be at least 0, got {self.window}")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"value_dim must be at least 1, got {self.value_dim}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Of a head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def scores(self) -> int:
        """The elements of the score matrices that eager PyTorch writes."""
        return self.batch * self.heads * self.queries * self.keys

    def lengths(self) -> Tensor:
        """[B] int64: the key lengths of a padded batch, from all the keys to a quarter of them."""
        shortest = max(1, self.keys // 4)
        return torch.linspace(self.keys, shortest, self.batch).round().to(torch.int64)

    def blocks(self) -> Tensor:
        """[Lq / BLOCK, Lk / BLOCK] bool: the blocks of mask "blocks", the diagonal and a quarter."""
        sides = (-(-self.queries // BLOCK), -(-self.keys // BLOCK))
        kept = torch.rand(sides, generator=torch.Generator().manual_seed(0)) < 0.25
        kept[:, 0] |= ~kept.any(1)  # no query without any key
        return kept | torch.eye(*sides, dtype=torch.bool)

    def block_mask(self) -> Tensor:
        """[Lq, Lk] bool: `blocks`, pair by pair."""
        mask = self.blocks().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return mask[: self.queries, : self.keys].contiguous()

    def visible(self) -> float:
        """The share of all pairs that count as useful work.

        Half of them under a causal mask, the keys that exist under a padding mask, what the blocks
        or the window show; all under a random mask, none of whose tiles is empty.
        """
        if self.mask == "causal":
            return 0.5
        if self.mask == "padding":
            return float(self.lengths().sum()) / (self.batch * self.keys)
        if self.mask == "blocks":
            return float(self.block_mask().double().mean())
        if self.mask == "window":
            width = min(self.window, self.keys - 1)
            shown = (width + 1) * self.keys - width * (width + 1) / 2
            return shown / self.keys**2
        return 1.0

    def flops(self, level: Level, backward: bool) -> float:
        """Useful floating-point operations: 2 per visible pair and column of a product.

        Forward multiplies by K and V once each. Backward makes five products: three over head_dim,
        two over value_dim. With `backward`: of both together.
        """
        pairs = 2 * self.heads * self.visible() * self.batch * self.queries * self.keys
        total = pairs * (self.head_dim + self.value_width)
        if backward:
            total += pairs * (3 * self.head_dim + 2 * self.value_width)
        if level == "layer":
            tokens = 2 * self.queries * self.width
            tokens += 2 * self.keys * self.key_heads * self.head_dim
            total += 2 * self.batch * tokens * self.width * (3 if backward else 1)
        return total


CASES = (
    Case("cross attention 64x(12|10)x300", 64, 6, 12, 10, 50),
    Case("BERT-base 8x128x768", 8, 12, 128, 128, 64),
    Case("MiniLM 32x64x384, padded", 32, 12, 64, 64, 32, mask="padding"),
    Case("GPT-2 1x1024x768, causal", 1, 12, 1024, 1024, 64, mask="causal"),
    Case("ViT-base 8x197x768", 8, 12, 197, 197, 64),
    Case("decode 1 over 4096, 32:8x128", 1, 32, 1, 4096, 128, 8, training=False, layer=False),
)


@dataclass
class Inputs:
    """The tensors of a case; heads lie as projections leave them: [B, H, L, D] in [B, L, H, D]."""

    case: Case
    tensors: dict[str, Tensor]  # query, key, value (attention); query and perhaps key (layer)
    bias: Tensor | None = None  # [1, H, Lq, Lk]
    lengths: Tensor | None = None  # [B]
    mask: Tensor | None = None  # [B or 1, 1, Lq, Lk] bool, True = attend: random or by blocks

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What is differentiated."""
        if self.bias is None or not self.case.bias_gradient:
            return self.tensors
        return {**self.tensors, "bias": self.bias}

    def keep(self, rows: Tensor | None = None) -> Tensor | None:
        """What may be attended to, as one bool tensor [B or 1, 1, Lq or 1, Lk], or None.

        rows: int64, the queries wanted; the tensor holds those alone.
        """
        case, device = self.case, self.tensors["query"].device
        keys = torch.arange(case.keys, device=device)
        if case.mask in SQUARE_MASKS:
            queries = torch.arange(case.queries, device=device) if rows is None else rows
            seen = keys <= queries[:, None]
            if case.mask == "window":
                seen &= keys >= queries[:, None] - case.window
            return seen[None, None]
        if self.lengths is not None:
            return (keys < self.lengths[:, None])[:, None, None]
        return self.mask if self.mask is None or rows is None else self.mask[:, :, rows]


def make_inputs(case: Case, level: Level, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Normal values, the same ones for every dtype and device."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float32)
        return values.to(device=device, dtype=dtype)

    tensors: dict[str, Tensor] = {}
    if level == "attention":
        for name, length, heads, width in (
            ("query", case.queries, case.heads, case.head_dim),
            ("key", case.keys, case.key_heads, case.head_dim),
            ("value", case.keys, case.key_heads, case.value_width),
        ):
            tensors[name] = normal(case.batch, length, heads, width).transpose(1, 2)
    else:
        tensors["query"] = normal(case.batch, case.queries, case.width)
        if case.queries != case.keys:
            tensors["key"] = normal(case.batch, case.keys, case.width)
    inputs = Inputs(case, tensors)
    if case.mask == "bias":
        inputs.bias = normal(1, case.heads, case.queries, case.keys)
    elif case.mask == "padding":
        inputs.lengths = case.lengths().to(device)
    elif case.mask == "random":
        mask = torch.rand(case.batch, 1, case.queries, case.keys, generator=generator) < 0.5
        mask[..., 0] = True  # a row without any key is NaN in eager PyTorch
        inputs.mask = mask.to(device)
    elif case.mask == "blocks":
        inputs.mask = case.block_mask()[None, None].to(device)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_(case.training)
    return inputs


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(Q K^T / sqrt(D) + bias) V, as everybody writes it. hidden: bool, True = masked."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = F.dropout(scores.softmax(-1), dropout)
    return weights @ value


Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def _eager_core(inputs: Inputs) -> Core:
    keep = inputs.keep()
    hidden = None if keep is None else ~keep
    return lambda q, k, v: eager_attention(q, k, v, hidden, inputs.bias, inputs.case.dropout)


def _sdpa_core(inputs: Inputs) -> Core:
    case = inputs.case
    causal = case.mask == "causal"
    mask = None if causal else inputs.keep()
    return lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask if inputs.bias is None else inputs.bias,
        dropout_p=case.dropout,
        is_causal=causal,
        enable_gqa=case.key_heads != case.heads,
    )


def _own_options(inputs: Inputs) -> dict[str, Any]:
    return {
        "mask": inputs.mask,
        "bias": inputs.bias,
        "key_lengths": inputs.lengths,
        "causal": inputs.case.mask == "causal",
    }


def _own_window(case: Case) -> tuple[int, int] | None:
    return (case.window, 0) if case.mask == "window" else None


def _own_core(inputs: Inputs) -> Core:
    case = inputs.case
    given = _own_options(inputs)  # what is not asked for is not passed
    options = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    if case.mask == "window":
        options["window"] = _own_window(case)
    if case.dropout:
        options["dropout_p"] = case.dropout
    return lambda q, k, v: mha_ext.attention(q, k, v, **options)


def _compiled_core(inputs: Inputs) -> Core:
    torch._dynamo.reset()  # graphs of earlier cases would count towards its limit
    keep, bias, dropout = inputs.keep(), inputs.bias, inputs.case.dropout
    hidden = None if keep is None else ~keep
    compiled = torch.compile(eager_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, hidden, bias, dropout)


class Projected(nn.Module):
    """Four nn.Linear around an attention function: what one writes without a ready-made layer."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.head_dim = case.head_dim
        width, kv_width = case.width, case.key_heads * case.head_dim
        self.q_proj = nn.Linear(width, width, dtype=dtype, device=device)
        self.k_proj = nn.Linear(width, kv_width, dtype=dtype, device=device)
        self.v_proj = nn.Linear(width, kv_width, dtype=dtype, device=device)
        self.out_proj = nn.Linear(width, width, dtype=dtype, device=device)

    def forward(self, query: Tensor, key: Tensor, core: Core) -> Tensor:
        """query [B, Lq, E], key (also the value) [B, Lk, E] -> [B, Lq, E]."""

        def heads(x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

        out = core(heads(self.q_proj(query)), heads(self.k_proj(key)), heads(self.v_proj(key)))
        merged: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return merged


@dataclass
class Run:
    """One implementation on one problem: call it, and differentiate it towards `leaves`."""

    name: str
    forward: Callable[[Inputs], Tensor]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    differentiable: bool = True
    floor: bool = False  # no attention, but what it cannot be faster than: not verified

    def call(self, inputs: Inputs) -> Tensor:
        """Forward only."""
        with torch.no_grad():
            return self.forward(inputs)

    def leaves(self, inputs: Inputs) -> dict[str, Tensor]:
        """What is differentiated: of the inputs, and parameters."""
        return {**inputs.leaves, **self.parameters}

    def gradients(self, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
        """Forward and backward."""
        leaves = self.leaves(inputs)
        grads = torch.autograd.grad(self.forward(inputs), list(leaves.values()), grad_out)
        return dict(zip(leaves, grads, strict=True))

    def tangent(self, inputs: Inputs, tangents: dict[str, Tensor]) -> Tensor:
        """Forward and its derivative in the direction of `tangents`, by forward mode."""
        names = list(inputs.tensors)

        def function(*tensors: Tensor) -> Tensor:
            return self.forward(replace(inputs, tensors=dict(zip(names, tensors, strict=True))))

        primals = tuple(tensor.detach() for tensor in inputs.tensors.values())
        directions = tuple(tangents[name] for name in names)
        tangent: Tensor = torch.func.jvp(function, primals, directions)[1]
        return tangent

    def hessian_vector(
        self, inputs: Inputs, grad_out: Tensor, tangents: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Forward, backward, and the derivative of backward in the direction of `tangents`."""
        leaves = list(inputs.leaves.values())
        directions = [tangents[name] for name in inputs.leaves]
        grads = torch.autograd.grad(self.forward(inputs), leaves, grad_out, create_graph=True)
        products = torch.autograd.grad(grads, leaves, directions)
        return dict(zip(inputs.leaves, products, strict=True))


CORES: dict[str, Callable[[Inputs], Core]] = {
    "eager": _eager_core,
    "SDPA": _sdpa_core,
    "torch.compile": _compiled_core,
    "mha_ext": _own_core,
}


def attention_run(name: str, core: Core) -> Run:
    """`core` on the tensors of an attention problem."""
    return Run(name, lambda x: core(x.tensors["query"], x.tensors["key"], x.tensors["value"]))


def attention_runs(
    inputs: Inputs, names: Sequence[str] = ("eager", "SDPA", "mha_ext")
) -> list[Run]:
    """The implementations of CORES that are named, on the same [B, H, L, D] tensors."""
    return [
        attention_run(name, make(inputs))
        for name, make in CORES.items()
        if name in names and _affordable(name, inputs.case)
    ]


def layer_runs(inputs: Inputs, dtype: torch.dtype, device: torch.device) -> list[Run]:
    """Whole layers with equal weights: eager, nn.MultiheadAttention, SDPA and mha_ext."""
    case = inputs.case
    plain = projected(case, dtype, device)
    runs = []
    for name, make in (("eager", _eager_core), ("SDPA", _sdpa_core)):
        if _affordable(name, case):
            runs.append(projected_run(name, plain, make(inputs)))
    if case.key_heads == case.heads and _affordable("nn.MultiheadAttention", case):
        runs.append(_torch_layer(inputs, plain))
    runs.append(_own_layer(inputs, plain))
    return runs


def projected(case: Case, dtype: torch.dtype, device: torch.device) -> Projected:
    """The layer whose weights all others take over: the same ones in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Projected(case, torch.float32, torch.device("cpu")).to(device=device, dtype=dtype)


def projected_run(name: str, plain: Projected, core: Core) -> Run:
    """The plain layer around `core`."""

    def forward(x: Inputs) -> Tensor:
        out: Tensor = plain(*tokens(x), core)
        return out

    return Run(name, forward, parameters(plain))


def tokens(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The queries and the tokens that are keys and values: the same ones in self-attention."""
    query = inputs.tensors["query"]
    return query, inputs.tensors.get("key", query)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """The leaves to differentiate towards, by name."""
    return dict(module.named_parameters())


def _own_layer(inputs: Inputs, plain: Projected) -> Run:
    case = inputs.case
    weight = plain.q_proj.weight
    layer = mha_ext.MultiHeadAttention(
        case.width,
        case.heads,
        num_kv_heads=case.key_heads,
        dropout=case.dropout,
        window=_own_window(case),
        dtype=weight.dtype,
        device=weight.device,
    )
    layer.load_state_dict(plain.state_dict())
    layer.train(case.dropout > 0)
    options = _own_options(inputs)

    def forward(x: Inputs) -> Tensor:
        query, key = tokens(x)
        out: Tensor = layer(query, None if key is query else key, **options)
        return out

    return Run("mha_ext", forward, parameters(layer))


def _torch_layer(inputs: Inputs, plain: Projected) -> Run:
    case = inputs.case
    weight = plain.q_proj.weight
    layer = nn.MultiheadAttention(
        case.width,
        case.heads,
        dropout=case.dropout,
        batch_first=True,
        dtype=weight.dtype,
        device=weight.device,
    )
    projections = (plain.q_proj, plain.k_proj, plain.v_proj)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        layer.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
    layer.out_proj.load_state_dict(plain.out_proj.state_dict())
    layer.train(case.dropout > 0)
    keep = inputs.keep()
    options: dict[str, Any] = {"need_weights": False, "is_causal": case.mask == "causal"}
    if keep is not None and case.mask == "padding":
        options["key_padding_mask"] = ~keep[:, 0, 0]
    elif keep is not None and case.mask in SQUARE_MASKS:
        options["attn_mask"] = ~keep[0, 0]
    elif keep is not None:
        options["attn_mask"] = (~keep).expand(case.batch, case.heads, -1, -1).flatten(0, 1)

    def forward(x: Inputs) -> Tensor:
        query, key = tokens(x)
        if x.bias is not None:
            options["attn_mask"] = x.bias.expand(case.batch, -1, -1, -1).flatten(0, 1)
        out: Tensor = layer(query, key, key, **options)[0]
        return out

    return Run("nn.MultiheadAttention", forward, parameters(layer))


def _affordable(name: str, case: Case) -> bool:
    """Whether the score matrices that `name` would write fit into half of the free memory."""
    quadratic = name in ("eager", "torch.compile") or (
        name != "mha_ext"
        and (case.dropout > 0 or case.mask == "bias" or case.value_width != case.head_dim)
    )
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix, or it does not say
        return True
    return not quadratic or 6 * case.scores * 4 < free / 2


def levels(case: Case) -> tuple[Level, ...]:
    """What is measured of a case."""
    both = case.layer and case.value_width == case.head_dim
    return ("attention", "layer") if both else ("attention",)


def prepare(
    case: Case, level: Level, dtype: torch.dtype, device: torch.device
) -> tuple[Inputs, list[Run]]:
    """The inputs and all implementations of one case."""
    inputs = make_inputs(case, level, dtype, device)
    if level == "attention":
        return inputs, attention_runs(inputs)
    return inputs, layer_runs(inputs, dtype, device)
