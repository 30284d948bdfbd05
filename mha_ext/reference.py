"""Multi-head attention by its definition, in plain PyTorch: every option of `mha_ext.attention`, quadratic.

    S = scale Q K^T + bias      P = softmax(S)      Z = P * keep / (1 - p)      O = Z V      lse = logsumexp(S)

It computes in the dtype of its inputs: pass ``.double()`` tensors for the exact answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: str = "zero",
    return_lse: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    pairwise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mha_ext.attention` as the formula reads; what it is given is not checked, and dropout needs a ``seed``.

    Beyond the arguments of `mha_ext.attention`: ``origin`` = (b, h, q, k), the global position of the first element,
    for the diagonal and for dropout; ``pairwise`` = multiply pair by pair, on selected operands, so that NaN or Inf
    behind a mask reaches no result and no gradient (a matrix product would compute 0 * NaN). It takes D times the
    memory. Without it the inputs must be finite.
    """
    seen = visible(query, key, mask, bias, key_lengths, causal, window, origin)
    weights, lse = _softmax(query, key, bias, seen, scale, empty_rows, pairwise)
    if dropout_p > 0:
        assert seed is not None, "the definition draws no random numbers: pass seed"
        kept = keep(seed, dropout_p, weights.shape, origin)
        weights = weights * kept.to(weights.dtype) * keep_scale(dropout_p)
    weights, value = weights.to(value.dtype), _share_heads(value, query)
    if pairwise:
        used = seen | ~seen.any(-1, keepdim=True) if empty_rows == "uniform" else seen
        out = (weights[..., None] * torch.where(used[..., None], value[:, :, None], 0.0)).sum(-2)
    else:
        out = weights @ value
    return (out, lse) if return_lse else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    empty_rows: str = "zero",
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    origin: Sequence[int] = (0, 0, 0, 0),
    pairwise: bool = False,
) -> Tensor:
    """The probabilities P [B, H, Lq, Lk] (or those of the heads and rows asked for), before dropout."""
    seen = visible(query, key, mask, bias, key_lengths, causal, window, origin)
    weights, _ = _softmax(query, key, bias, seen, scale, empty_rows, pairwise)
    weights = weights if heads is None else weights[:, list(heads)]
    weights = weights if rows is None else weights[:, :, list(rows)]
    return weights.to(query.dtype)


def visible(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    origin: Sequence[int] = (0, 0, 0, 0),
) -> Tensor:
    """Which keys each query may attend to: bool [B, H, Lq, Lk]."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    j = torch.arange(keys, device=device)
    length = torch.full((query.shape[0],), keys, device=device)
    if key_lengths is not None:
        length = key_lengths.long().clamp(0, keys)
    length = length[:, None, None, None]  # [B, 1, 1, 1]
    seen = j < length
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    start = length - queries if causal == "lower_right" else origin[2] - origin[3]
    position = torch.arange(queries, device=device)[:, None] + start  # where query i stands
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    if mask is not None:
        seen = seen & (mask != 0)
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    return seen.expand(*query.shape[:3], keys)


def _softmax(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    seen: Tensor,
    scale: float | None,
    empty_rows: str,
    pairwise: bool,
) -> tuple[Tensor, Tensor]:
    """P [B, H, Lq, Lk] and lse [B, H, Lq]; what is hidden is selected away, never multiplied by zero."""
    key, pair = _share_heads(key, query), seen[..., None]
    if pairwise:
        scores = torch.where(pair, query[:, :, :, None], 0.0) * torch.where(
            pair, key[:, :, None], 0.0
        )
        scores = scores.sum(-1)
    else:
        scores = query @ key.mT
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + torch.where(seen, bias, 0.0)
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)  # only a bias of -inf masks
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0)
    fill = 1 / max(key.shape[2], 1) if empty_rows == "uniform" else 0.0
    weights = scores.softmax(-1).masked_fill(~seen, 0.0).masked_fill(empty, fill)
    return weights, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def _share_heads(key: Tensor, query: Tensor) -> Tensor:
    """[B, Hkv, Lk, D] -> [B, H, Lk, D]: query heads h H/Hkv .. (h + 1) H/Hkv - 1 read key head h."""
    heads, kv_heads = query.shape[1], key.shape[1]
    return key if heads == kv_heads else key.repeat_interleave(heads // kv_heads, 1)


def drop_threshold(dropout_p: float) -> int:
    """A pair is dropped where its 16 random bits are below this."""
    return min(round(65536 * dropout_p), 65535)


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied by: the inverse of the probability of being kept."""
    return 65536 / (65536 - drop_threshold(dropout_p))


def keep(
    seed: Tensor, dropout_p: float, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0, 0)
) -> Tensor:
    """Which pairs dropout keeps: bool ``shape`` = [B, H, Lq, Lk], a pure function of the seed and the position.

    Counter (k >> 3, q, h, b) gives eight 16-bit lanes; key k has lane k & 7, low half of a word first.
    """
    b, h, q, k = (
        first + torch.arange(size, device=seed.device)
        for first, size in zip(origin, shape, strict=True)
    )
    blocks = torch.unique(k >> 3)
    words = philox(seed, blocks, q[:, None], h[:, None, None], b[:, None, None, None])
    lanes = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], -1).flatten(-2)
    return lanes[..., k - 8 * blocks[:1].sum()] >= drop_threshold(dropout_p)


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words for every counter, as int64 tensors.

    The key is the two words of ``seed``, the counters broadcast against each other; all are taken mod 2^32.
    """
    words = 0xFFFFFFFF
    k0, k1 = seed[0] & words, seed[1] & words
    c0, c1, c2, c3 = torch.broadcast_tensors(*(c & words for c in (c0, c1, c2, c3)))
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & words, (k1 + 0xBB67AE85) & words
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b for 32-bit words, by halves: no step leaves int64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & 0xFFFFFFFF
