"""Incremental decoding: the keys and values of the past, appended in place; and rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mha_ext.modules import MultiHeadAttention


class KVCache:
    """Preallocated keys and values of one layer, for sequences of different lengths.

        cache = KVCache.of(layer, batch=2, max_length=512)
        out = layer(prompt, cache=cache)       # [2, L, width]
        out = layer(next_token, cache=cache)   # [2, 1, width], attends to all before it

    ``layer(x, cache=cache)`` appends the keys and values of x and lets its queries see what was there before and,
    causally, x itself: the same result as the full pass. Prompts of different lengths are padded **on the left**, and
    ``new_lengths`` of the call says how many of the last tokens are real; each sequence grows by its own length.

    For inference: appending is in place, so gradients are refused.

    Args:
        batch: number of sequences.
        kv_heads: number of key and value heads.
        max_length: the most tokens that a sequence can have.
        head_dim, value_head_dim: width of a head in key and (by default the same) in value.
        device, dtype: of the buffers.

    Attributes:
        key: [batch, kv_heads, max_length, head_dim]; value: [..., value_head_dim].
        lengths: int64 [batch]: how many tokens of each sequence are there.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        value_head_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("batch", batch), ("kv_heads", kv_heads), ("max_length", max_length)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{name} must be an int of at least 0, but is {size!r}")
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        shape = (batch, kv_heads, max_length)
        self.key = torch.empty((*shape, head_dim), device=device, dtype=dtype)
        self.value = torch.empty((*shape, value_head_dim), device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._longest = 0  # of lengths (or more), known without asking the device
        self._same = True  # whether all lengths are _longest

    @classmethod
    def of(cls, layer: MultiHeadAttention, batch: int, max_length: int) -> KVCache:
        """One for a layer, on its device and in its dtype."""
        weight = layer.k_proj.weight
        return cls(
            batch,
            layer.num_kv_heads // (layer.parallel.head_ranks if layer.parallel else 1),
            max_length,
            layer.head_dim,
            layer.value_head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )

    @property
    def max_length(self) -> int:
        return self.key.shape[2]

    def append(
        self, key: Tensor, value: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the last ``lengths[b]`` tokens of key [B, Hkv, L, D] and value [B, Hkv, L, Dv]; all of them by default.

        Returns:
            What attention takes: all keys and values so far, views [B, Hkv, longest, D or Dv], and the lengths [B].

        Raises:
            ValueError: where shapes do not fit, or a sequence would grow beyond max_length.
            RuntimeError: where a gradient would be needed.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "key and value must not need gradients where they are cached, but do; call the layer under "
                "torch.no_grad(), or train on whole sequences with causal=True"
            )
        for name, new, kept in (("key", key, self.key), ("value", value, self.value)):
            wanted = [*kept.shape[:2], key.shape[2], kept.shape[3]]
            if list(new.shape) != wanted:
                raise ValueError(
                    f"{name} must be {wanted} for this cache, but is {list(new.shape)}; make one with "
                    "KVCache.of(layer, batch, max_length)"
                )
        count = key.shape[2]
        if lengths is not None:
            _check_lengths(lengths, len(self.lengths), count)
        if self._longest + count > self.max_length:
            # The bound may be too careful where lengths differ: ask.
            added = count if lengths is None else lengths
            self._longest = int(self.lengths.max()) if len(self.lengths) else 0
            longest = int((self.lengths + added).max()) if len(self.lengths) else count
            if longest > self.max_length:
                raise ValueError(
                    f"max_length must be at least {longest} for these tokens, but is {self.max_length}; make a larger "
                    "KVCache, or drop old tokens"
                )
        place = self.positions(count, lengths)
        kept_tokens = None
        if lengths is None:
            self.lengths = self.lengths + count
        else:
            kept_tokens = place >= self.lengths[:, None]  # [B, L]
            self.lengths = self.lengths + lengths.to(self.lengths)
        self._longest = min(self._longest + count, self.max_length)
        if self._same and lengths is None:  # all at the same place: slices
            end = self._longest
            self.key[:, :, end - count : end] = key
            self.value[:, :, end - count : end] = value
            return self.key[:, :, :end], self.value[:, :, :end], self.lengths
        self._same = False
        batch = torch.arange(len(self.lengths), device=self.lengths.device)[:, None].expand_as(
            place
        )
        if kept_tokens is not None:
            batch, place = batch[kept_tokens], place[kept_tokens]
        for buffer, new in ((self.key, key), (self.value, value)):
            rows = new.transpose(1, 2)  # [B, L, Hkv, D]
            buffer.transpose(1, 2)[batch, place] = (
                rows if kept_tokens is None else rows[kept_tokens]
            )
        return self.key[:, :, : self._longest], self.value[:, :, : self._longest], self.lengths

    def truncate(self, lengths: Tensor | int) -> None:
        """Forgets all tokens at or past ``lengths`` (one for all, or [B]), as after a rejected draft."""
        self.lengths = torch.minimum(
            self.lengths,
            torch.as_tensor(lengths, device=self.lengths.device).expand_as(self.lengths),
        )
        if isinstance(lengths, int):
            self._longest = min(self._longest, lengths)
        else:
            self._same = False

    def positions(self, count: int, new_lengths: Tensor | None = None) -> Tensor:
        """[B, count]: where the next ``count`` tokens stand; negative for padding on the left."""
        token = torch.arange(count, device=self.lengths.device)
        if new_lengths is not None:
            token = token + (new_lengths.to(self.lengths) - count)[:, None]
        return self.lengths[:, None] + token

    def reorder(self, indices: Tensor) -> None:
        """Sequence i becomes what sequence ``indices[i]`` was, as beam search needs it."""
        self.key, self.value = self.key[indices], self.value[indices]
        self.lengths = self.lengths[indices]


def _check_lengths(lengths: Tensor, batch: int, count: int) -> None:
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"new_lengths must be an integer tensor [{batch}], one for each sequence, but is {lengths.dtype} "
            f"{list(lengths.shape)}; it counts the real tokens, which stand at the end"
        )
    if (
        lengths.is_cpu
        and len(lengths)
        and not 0 <= int(lengths.min()) <= int(lengths.max()) <= count
    ):
        raise ValueError(
            f"new_lengths must be from 0 to the number of new tokens, {count}, but are {lengths.tolist()}; clamp them"
        )


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding: the pair (i, i + D/2) of each head is turned by position / base^(2i/D).

    The scores of rotated queries and keys depend on the distance of their positions alone.

    Args:
        x: [B, H, L, D], D even.
        positions: [L] or [B, L], integers.
        base: the slowest wavelength is 2 pi base.

    Returns:
        [B, H, L, D] in x's dtype and memory order; computed in float32 (float64 for float64).

    Source: Su et al., "RoFormer" (2021), equation 34, with halves in place of neighbours, as in LLaMA.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(
            f"head_dim must be even for rotary embedding, but is {width}; pass head_dim"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / -width
    angles = positions.to(wide)[..., None] * (base**steps).to(wide)  # [(B,) L, D/2]
    angles = angles[:, None] if positions.dim() == 2 else angles
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
