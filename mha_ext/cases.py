"""The cases that are measured, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

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


def levels(case: Case) -> tuple[Level, ...]:
    """What is measured of a case."""
    both = case.layer and case.value_width == case.head_dim
    return ("attention", "layer") if both else ("attention",)
