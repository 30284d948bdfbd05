"""What one wants to know of the attention weights, without the quadratic matrix.

Each function makes the probabilities of a few queries at a time with the kernel behind `attention_weights`, reduces
them, and lets them go: memory is linear in the lengths, also for the gradients, which make them again. (Not so the
gradients of `torch.func`, which knows no checkpoints: there the probabilities are kept, and memory is quadratic.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mha_ext.arguments import check_tensors, describe, is_integer
from mha_ext.functional import attention_with_lse, weights_from_lse

_ROWS = 64  # queries at a time: one block of the kernel


def attention_received(
    query: Tensor, key: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """How much attention each key gets: the sum of its probabilities over all queries; differentiable.

    Args:
        query, key, mask: as in `mha_ext.attention`.
        options: bias, key_lengths, causal, window, scale and empty_rows of `mha_ext.attention_weights`.

    Returns:
        [B, H, Lk], float32 (float64 for float64). Summed over the keys it is the number of queries that see any
        (of all, with ``empty_rows="uniform"``).

    Raises:
        ValueError, TypeError: as `mha_ext.attention_weights`; TypeError for another option.
    """
    _check(query, key, mask, options)
    parts = _chunks(lambda p: p.sum(2), query, key, mask, options)
    return torch.stack([*parts]).sum(0) if query.shape[2] else _empty(query, key.shape[2])


def attention_entropy(
    query: Tensor, key: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The entropy of each query's probabilities, in nats: 0 where it looks at one key, log n at n alike;
    differentiable.

    Args:
        query, key, mask, options: as in `attention_received`.

    Returns:
        [B, H, Lq], float32 (float64 for float64); 0 for a query that may attend to nothing (log Lk with
        ``empty_rows="uniform"``).

    Raises:
        ValueError, TypeError: as `attention_received`.

    Source: Shannon (1948).
    """
    _check(query, key, mask, options)
    parts = _chunks(_entropy, query, key, mask, options)
    return torch.cat([*parts], -1) if query.shape[2] else _empty(query, 0)


class TopKeys(NamedTuple):
    """The largest probabilities of each query, and the keys that they belong to."""

    weights: Tensor  # [B, H, Lq, k], query's dtype
    keys: Tensor  # [B, H, Lq, k], int64


def attention_topk(
    query: Tensor, key: Tensor, k: int, mask: Tensor | None = None, **options: Any
) -> TopKeys:
    """The ``k`` keys that each query attends to most, best first; the weights are differentiable.

    Args:
        query, key, mask, options: as in `attention_received`.
        k: from 1 to Lk. Keys whose weight is 0 come last, in no order: those that a query may not see, and those
            whose probability is too small for the dtype.

    Returns:
        The weights and the keys, [B, H, Lq, k].

    Raises:
        TypeError, ValueError: where k is not an int, or not from 1 to Lk.
    """
    _check(query, key, mask, options)
    if not is_integer(k):
        raise TypeError(f"k must be an int, not {describe(k)}; it stands before mask")
    k = k if isinstance(k, int | torch.SymInt) else operator.index(k)
    if not 1 <= k <= key.shape[2]:
        raise ValueError(
            f"k must be from 1 to the number of keys, {key.shape[2]}, but is {k}; pass min(k, key.shape[2])"
        )
    if not query.shape[2]:
        weights = query.flatten(3).sum(-1, keepdim=True).expand(-1, -1, -1, k)
        return TopKeys(weights, weights.long())
    parts = [*_chunks(lambda p: torch.topk(p, k), query, key, mask, options, widen=False)]
    return TopKeys(*(torch.cat(list(part), 2) for part in zip(*parts, strict=True)))


def _entropy(weights: Tensor) -> Tensor:
    smallest = torch.finfo(weights.dtype).tiny  # x log x is 0 at 0, and so is what reaches it
    return -(weights * weights.clamp_min(smallest).log()).sum(-1)


def _empty(query: Tensor, length: int) -> Tensor:
    """Zeros, which depend on query, as everything else does."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.to(dtype).sum((2, 3))[..., None].expand(-1, -1, length)


_OPTIONS = ("bias", "key_lengths", "causal", "window", "scale", "empty_rows")


def _check(query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
    if "heads" in options or "rows" in options:
        raise TypeError(
            "heads and rows must be left out here: select them from query, as in query[:, [0, 3]]"
        )
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name} must be left out: the options are {', '.join(_OPTIONS)}")
    check_tensors(query, key, mask, options.get("bias"), options.get("key_lengths"))
    if key.dim() != 4:
        raise ValueError(
            f"key must have 4 dimensions [batch, heads, length, head_dim], but has shape {list(key.shape)}"
        )


def _chunks(
    reduce: Callable[[Tensor], Any],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    widen: bool = True,
) -> Iterator[Any]:
    """reduce(P [B, H, rows, Lk]) for the queries, a few at a time."""
    value = key.new_empty((*key.shape[:3], 0))  # lse alone is wanted
    _, lse, lse_low = attention_with_lse(query, key, value, mask, **options)

    def part(rows: list[int], query: Tensor, key: Tensor, bias: Tensor | None) -> Any:
        given = options | {"bias": bias}
        p = weights_from_lse(query, key, lse.detach(), lse_low, mask, rows=rows, **given)
        return reduce(p.float() if widen and p.dtype in (torch.float16, torch.bfloat16) else p)

    bias = options.get("bias")
    differentiable = (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (query, key, bias))
        and not torch._C._are_functorch_transforms_active()
    )
    for first in range(0, query.shape[2], _ROWS):
        rows = [*range(first, min(first + _ROWS, query.shape[2]))]
        if differentiable:
            yield checkpoint(
                partial(part, rows), query, key, bias, use_reentrant=False, preserve_rng_state=False
            )
        else:
            yield part(rows, query, key, bias)
