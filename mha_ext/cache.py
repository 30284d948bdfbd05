"""Incremental decoding: the keys and values of the past, appended in place; and rotary position embedding."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mha_ext import _C
from mha_ext.arguments import Causal, check_dense, describe, is_integer, not_a_tensor
from mha_ext.layer_arguments import check_device, check_parameter_dtype

if TYPE_CHECKING:
    from mha_ext.block import AttentionBlock
    from mha_ext.modules import MultiHeadAttention


class Extension(NamedTuple):
    """What attention takes of a cache to which tokens are added, and what the cache is afterwards."""

    key: Tensor
    value: Tensor
    lengths: Tensor
    longest: int
    same: bool


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
        longest: the largest of them. On another device than the CPU, and in a compiled call, it may be more after
            ``new_lengths``, since the number itself would have to be waited for. A mask, bias or key_padding_mask of
            the next L tokens has longest + L keys: column j is of the key at position j of each sequence.

    Raises:
        ValueError: where a size is not an int of at least 0.
        TypeError: where dtype is not one that a layer may have.
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
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        sizes = {"batch": batch, "kv_heads": kv_heads, "max_length": max_length}
        for name, size in (
            sizes | {"head_dim": head_dim, "value_head_dim": value_head_dim}
        ).items():
            if not is_integer(size) or size < 0:
                raise ValueError(f"{name} must be an int of at least 0, but is {size!r}")
        check_parameter_dtype(dtype)
        shape = (batch, kv_heads, max_length)
        self.key = _buffer((*shape, head_dim), device, dtype)
        self.value = _buffer((*shape, value_head_dim), device, dtype)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest = 0
        self._same = True  # whether all lengths are `longest`

    @classmethod
    def of(cls, layer: MultiHeadAttention | AttentionBlock, batch: int, max_length: int) -> KVCache:
        """One for a layer, or for that of a block, on its device and in its dtype.

        Raises:
            TypeError: where ``layer`` is neither.
        """
        inner: Any = getattr(layer, "attention", layer)
        if not hasattr(inner, "k_proj"):
            raise TypeError(
                f"layer must be a MultiHeadAttention or an AttentionBlock, not {type(layer).__name__}; pass one of its "
                "attention layers"
            )
        weight = next(inner.k_proj.parameters())  # of what wraps it, too
        return cls(
            batch,
            inner.num_kv_heads // (inner.parallel.head_ranks if inner.parallel else 1),
            max_length,
            inner.head_dim,
            inner.value_head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )

    @property
    def max_length(self) -> int:
        """The most tokens that a sequence can have."""
        return self.key.shape[2]

    def __repr__(self) -> str:
        batch, heads, length, width = self.key.shape
        known = _has_numbers(self.lengths)
        return (
            f"KVCache(batch={batch}, kv_heads={heads}, max_length={length}, head_dim={width}, "
            f"value_head_dim={self.value.shape[3]}, device={str(self.key.device)!r}, dtype={self.key.dtype}, "
            + (f"lengths={self.lengths.tolist()})" if known else f"longest={self.longest})")
        )

    def append(
        self, key: Tensor, value: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the last ``lengths[b]`` tokens of key [B, Hkv, L, D] and value [B, Hkv, L, Dv]; all of them by default.

        Returns:
            What attention takes: all keys and values so far, views [B, Hkv, longest, D or Dv], and the lengths [B].

        Raises:
            ValueError, TypeError: where shapes or ``lengths`` do not fit, or a sequence would grow beyond max_length.
            RuntimeError: where a gradient would be needed.
        """
        extension = self.extension(key, value, lengths)
        self.commit(extension)
        return extension[:3]

    def extension(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> Extension:
        """`append` up to `commit`: the tokens are written, but behind the end, where nobody sees them."""
        for name, new, kept in (("key", key, self.key), ("value", value, self.value)):
            if not isinstance(new, Tensor):
                raise TypeError(not_a_tensor(name, new))
            check_dense(name, new)
            wanted = (*kept.shape[:2], key.shape[-2] if key.dim() > 1 else 1, kept.shape[3])
            if new.shape != wanted:
                raise ValueError(
                    f"{name} must be {list(wanted)} for this cache, but is {list(new.shape)}; make one with "
                    "KVCache.of(layer, batch, max_length)"
                )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "key and value must not need gradients where they are cached, but do; call the layer under "
                "torch.no_grad(), or train on whole sequences with causal=True"
            )
        count = key.shape[2]
        if lengths is not None:
            check_lengths("new_lengths", lengths, len(self.lengths), count)
        grown = self.lengths + (count if lengths is None else lengths.to(self.lengths))
        same = self._same and lengths is None
        longest = self.longest + count
        if longest > self.max_length or not same:
            longest = self._longest_of(grown, longest)
        if longest > self.max_length:
            raise ValueError(
                f"max_length must be at least {longest} for these tokens, but is {self.max_length}; make a larger "
                "KVCache, or drop old tokens"
            )
        if same:  # all at the same place: slices
            self.key[:, :, longest - count : longest] = key
            self.value[:, :, longest - count : longest] = value
        elif self.max_length:
            self._scatter(key, value, lengths)
        return Extension(self.key[:, :, :longest], self.value[:, :, :longest], grown, longest, same)

    def _scatter(self, key: Tensor, value: Tensor, new_lengths: Tensor | None) -> None:
        """Writes each sequence's tokens behind its own end. No shape depends on the lengths: nothing is waited for."""
        batch = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        place = self.positions(key.shape[2], new_lengths)  # [B, L]
        if new_lengths is not None:
            # In the place of padding stands the first token that is real, where one is.
            new = new_lengths.to(self.lengths)[:, None]
            last = key.shape[2] - 1
            token = (place - self.lengths[:, None]).clamp_min(0) + (last + 1 - new)
            place = torch.maximum(place, self.lengths[:, None]).clamp_max(self.max_length - 1)
        for buffer, rows in ((self.key, key), (self.value, value)):
            kept, rows = buffer.transpose(1, 2), rows.transpose(1, 2).to(buffer.dtype)
            if new_lengths is not None:
                rows = rows[batch, token.clamp(0, last)]
                rows = torch.where((new > 0)[..., None, None], rows, kept[batch, place])
            kept[batch, place] = rows

    def commit(self, extension: Extension) -> None:
        """The tokens of an `extension` are part of the past."""
        self.lengths, self.longest, self._same = extension[2:]

    def _longest_of(self, lengths: Tensor, bound: int) -> int:
        """The largest of the lengths, or, rather than wait for a device, a bound that the buffers hold."""
        needed = bound > self.max_length and len(lengths) and _has_numbers(lengths)
        if needed or _can_be_read(lengths):
            return int(lengths.max())
        return bound

    def truncate(self, lengths: Tensor | int) -> None:
        """Forgets all tokens at or past ``lengths`` (one for all, or [B]), as after a rejected draft.

        Raises:
            TypeError, ValueError: where ``lengths`` is not an integer of at least 0, or an integer tensor [B].
        """
        if isinstance(lengths, Tensor):
            check_lengths("lengths", lengths, len(self.lengths))
            lengths = lengths.to(self.lengths)
            self.lengths = torch.minimum(self.lengths, lengths.clamp_min(0))
            self.longest, self._same = self._longest_of(self.lengths, self.longest), False
            return
        if isinstance(lengths, bool) or not isinstance(lengths, int):
            raise TypeError(
                f"lengths must be an int or an integer tensor [{len(self.lengths)}], but is {describe(lengths)}"
            )
        if lengths < 0:
            raise ValueError(
                f"lengths must be at least 0, but is {lengths}; truncate(0) forgets everything"
            )
        self.lengths = self.lengths.clamp_max(lengths)
        self.longest = min(self.longest, lengths)

    def positions(self, count: int, new_lengths: Tensor | None = None) -> Tensor:
        """[B, count]: where the next ``count`` tokens stand; negative for padding on the left."""
        token = torch.arange(count, device=self.lengths.device)
        if new_lengths is not None:
            token = token + (new_lengths.to(self.lengths) - count)[:, None]
        return self.lengths[:, None] + token

    def reorder(self, indices: Tensor) -> None:
        """Sequence i becomes what sequence ``indices[i]`` was, as beam search needs it.

        Raises:
            TypeError, ValueError, IndexError: where ``indices`` is not an integer tensor [n] of sequences.
        """
        _check_indices(indices, len(self.lengths))
        indices = indices.long()  # PyTorch takes uint8 for a mask
        self.key, self.value = self.key[indices], self.value[indices]
        self.lengths = self.lengths[indices]
        self.longest = self._longest_of(self.lengths, self.longest)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether there is more than a shape; a fake tensor lies on the CPU, but has none."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _buffer(
    shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """Zeros, since rows without any visible key may average over what no token has written yet.

    On a CPU in huge pages, as far as the system gives them: each token reads all that there is.
    """
    made = torch.empty(shape, device=device, dtype=dtype)
    if _can_be_read(made):
        _C.ask_huge_pages(made)
    return made.zero_()


def _can_be_read(tensor: Tensor) -> bool:
    """Whether it has numbers that can be looked at without waiting for a device, or leaving a graph."""
    there = tensor.is_cpu and len(tensor) > 0 and not torch.compiler.is_compiling()
    return there and _has_numbers(tensor)


def _holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_incremental(
    query: Tensor,
    is_self: bool,
    key_lengths: Tensor | None,
    causal: Causal | None,
    rotary_base: float | None,
    positions: Tensor | None,
    cache: KVCache | None,
    new_lengths: Tensor | None,
) -> None:
    """Raises where what a layer is given beside a cache, or for rotary embedding, does not fit."""
    if positions is not None:
        if rotary_base is None:
            raise ValueError(
                "positions must be None without rotary embedding, but is a tensor; build the layer with "
                "rotary_base=10000.0"
            )
        if not is_self:
            raise ValueError(
                "positions must be None with a key of its own, but is a tensor; they count 0, 1, 2 ... there"
            )
        check_positions(positions, query.shape[0], query.shape[1])
        check_device("positions", positions, query)
    if cache is None:
        if new_lengths is not None:
            raise ValueError(
                "new_lengths must be None without a cache, but is a tensor; pass key_lengths for padding"
            )
        return
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache must be a mha_ext.KVCache, not {type(cache).__name__}; make one with KVCache.of(layer, batch, "
            "max_length)"
        )
    if not is_self:
        raise ValueError(
            "key must be None with a cache, but is a tensor; the cache holds the past of query itself"
        )
    if key_lengths is not None:
        raise ValueError(
            "key_lengths must be left out with a cache, which counts its own tokens; pass new_lengths for prompts "
            "of different lengths"
        )
    if causal is not None and causal not in (True, "lower_right"):
        raise ValueError(
            f'causal must be True, "lower_right" or left out with a cache, which is causal, but is {causal!r}'
        )
    if cache.key.shape[0] != query.shape[0]:
        raise ValueError(
            f"cache must have query's batch size {query.shape[0]}, but has {cache.key.shape[0]}; make one with "
            "KVCache.of(layer, batch, max_length)"
        )
    if cache.key.device != query.device:
        raise ValueError(
            f"cache must be on query's device {query.device}, not {cache.key.device}; make one with "
            "KVCache.of(layer, batch, max_length)"
        )
    if new_lengths is not None:
        check_lengths("new_lengths", new_lengths, query.shape[0], query.shape[1])


def check_lengths(name: str, lengths: object, batch: int, count: int | None = None) -> None:
    """Raises unless they are integers [batch], from 0 to ``count`` where that can be seen without waiting."""
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"{name} must be an integer tensor [{batch}], but is {describe(lengths)}; pass torch.tensor({name})"
        )
    check_dense(name, lengths)
    if lengths.shape != (batch,) or not _holds_integers(lengths):
        raise ValueError(
            f"{name} must be an integer tensor [{batch}], one for each sequence, but is {lengths.dtype} "
            f"{list(lengths.shape)}"
        )
    if not _can_be_read(lengths):
        return
    least, most = lengths.long().aminmax()  # some integer types have no aminmax
    if int(least) < 0 or count is not None and int(most) > count:
        allowed = "at least 0" if count is None else f"from 0 to the number of new tokens, {count}"
        raise ValueError(f"{name} must be {allowed}, but are {lengths.tolist()}; clamp them")


def _check_indices(indices: object, batch: int) -> None:
    """Raises unless they are integers [n], of sequences where that can be seen without waiting."""
    if not isinstance(indices, Tensor):
        raise TypeError(
            f"indices must be an integer tensor [n], but is {describe(indices)}; pass torch.tensor(indices)"
        )
    check_dense("indices", indices)
    if indices.dim() != 1 or not _holds_integers(indices):
        raise ValueError(
            f"indices must be an integer tensor [n], one for each new sequence, but is {indices.dtype} "
            f"{list(indices.shape)}"
        )
    if not _can_be_read(indices):
        return
    least, most = indices.long().aminmax()
    if int(least) < 0 or int(most) >= batch:
        raise IndexError(
            f"indices must be from 0 to {batch - 1}, sequences of this cache, but are {indices.tolist()}"
        )


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding: the pair (i, i + D/2) of each head is turned by position / base^(2i/D).

    The scores of rotated queries and keys depend on the distance of their positions alone.

    Args:
        x: [B, H, L, D], D even.
        positions: [L] or [B, L], integers.
        base: pair i turns once in 2 pi base^(2i/D) positions.

    Returns:
        [B, H, L, D] in x's dtype, contiguous; computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: where an argument is not so.

    Source: Su et al., "RoFormer" (2021), equation 34, with halves in place of neighbours, as in LLaMA.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(
            f"x must be a floating tensor [B, H, L, D], but is {x.dtype if isinstance(x, Tensor) else describe(x)}"
        )
    if x.dim() != 4:
        raise ValueError(f"x must be [B, H, L, D], but is {list(x.shape)}; split the heads first")
    check_positions(positions, x.shape[0], x.shape[2])
    if (
        isinstance(base, bool)
        or not isinstance(base, int | float)
        or not (0 < base <= sys.float_info.max)
    ):
        raise ValueError(
            f"base must be a positive number, but is {base!r}; 10000.0 is the usual one"
        )
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


def check_positions(positions: object, batch: int, length: int) -> None:
    """Raises unless they are integers [L] or [B, L]."""
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"positions must be an integer tensor [{length}] or [{batch}, {length}], but is {describe(positions)}; "
            "pass torch.as_tensor(positions)"
        )
    check_dense("positions", positions)
    if not _holds_integers(positions):
        raise TypeError(
            f"positions must be integers, but are {positions.dtype}; pass positions.long()"
        )
    if positions.shape not in ((length,), (batch, length), (1, length)):
        raise ValueError(
            f"positions must be [{length}] or [{batch}, {length}], but are {list(positions.shape)}"
        )
