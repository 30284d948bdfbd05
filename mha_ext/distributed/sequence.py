"""Sequence (context) parallel attention: each rank holds L / ranks rows, and computes what one process would."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mha_ext.arguments import (
    Causal,
    EmptyRows,
    Window,
    check_dense,
    check_holds_values,
    diagonal,
    is_integer,
    scale_of,
)
from mha_ext.distributed import costs
from mha_ext.distributed.agree import agree, check_member, shared_seed
from mha_ext.distributed.alltoall import all_to_all
from mha_ext.distributed.order import Order, check_order, natural
from mha_ext.distributed.problem import Problem
from mha_ext.distributed.ring import ring, steps
from mha_ext.functional import attention_with_lse

Method: TypeAlias = Literal["auto", "ring", "all_to_all"]


def check_method(method: object) -> None:
    """Raises unless ``method`` is one of the three."""
    if method not in ("auto", "ring", "all_to_all"):
        raise ValueError(f'method must be "auto", "ring" or "all_to_all", not {method!r}')


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def sequence_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    method: Method = "auto",
    order: Order = "zigzag",
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    scale: float | None = None,
    empty_rows: EmptyRows = "zero",
    return_lse: bool = False,
    origin: tuple[int, int] = (0, 0),
    check: bool = True,
) -> Any:
    """`mha_ext.attention` of a sequence that is spread over the ranks of a group: every rank calls it with its shard.

    Args:
        query: [B, H, Lq / ranks, D], the rows that ``order`` gives this rank (`shard_sequence` cuts them out).
        key, value: [B, Hkv, Lk / ranks, D or Dv], likewise.
        mask: bool or integer, nonzero = attend: this rank's queries (or 1) by **all** Lk keys in their natural order,
            broadcastable to [B, H, Lq / ranks, Lk]. Or of this rank's keys alone, if it has no rows:
            [B or 1, H or 1, 1, Lk / ranks], as padding is (also where that is 1: one key on each rank).
        group: the ranks; the default group when omitted.
        method: "ring": keys and values go round, overlapped with the kernel. "all_to_all": heads against sequence;
            ranks must divide H and Hkv. "auto": whichever sends fewer bytes (`mha_ext.distributed.costs.cheapest`);
            the ring where the heads do not divide, or where mask or bias has rows of its own.
        order: "zigzag": the sequence is cut into 2 · ranks chunks, and rank r holds r and 2 · ranks - 1 - r, which
            balances a causal mask. "contiguous": the r-th part; with a window shorter than a part the ring then stops
            early.
        bias: as the first form of mask; added to the scaled scores. Its gradient is that of **this rank's** rows, as
            for every tensor that ranks share: what DDP or FSDP adds up.
        key_lengths: integer [B], lengths of the whole sequence, the same on every rank.
        causal, window, scale, empty_rows: as in `mha_ext.attention`, for the whole sequence.
        dropout_p, seed: the same positions are dropped as by one process. ``seed`` must be the same on every rank; when
            omitted, it is drawn, and that of the group's first rank is taken.
        return_lse: also return the logsumexp of this rank's rows.
        origin: the global positions of the first batch entry and the first head, where those are sharded too: for
            dropout.
        check: let the ranks compare their shapes and options first (one exchange of a few hundred bytes), so that a
            mismatch is an error on every rank. Without it a mismatch may hang until the group's timeout.

    Returns:
        out [B, H, Lq / ranks, Dv], or with ``return_lse`` (out, lse [B, H, Lq / ranks]). First derivatives only for the
        ring, and by autograd, not `torch.func`; all of them for all-to-all. Memory: O(L / ranks) on each rank, but a
        mask or bias with rows is what it is.

    Raises:
        ValueError, TypeError: on every rank, before any work, where any rank's arguments are refused or differ.
        RuntimeError: where torch.distributed is not initialised, or a rank is gone, or does not answer within the
            group's timeout.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError(
            "group must be a process group, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first, or run under torchrun"
        )
    check_member(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "mask": mask,
        "bias": bias,
        "key_lengths": key_lengths,
        "seed": seed,
    }
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "dropout_p": dropout_p,
        "scale": scale,
        "empty_rows": empty_rows,
    }

    def describe() -> dict[str, Any]:
        check_method(method)
        check_order(order)
        _check_origin(origin)
        _check_whole(size, order, tensors, options)
        if method == "all_to_all" and (query.shape[1] % size or key.shape[1] % size):
            raise ValueError(
                f'method must be "ring" where {size} ranks do not divide the heads, not "all_to_all" with '
                f"{query.shape[1]} query and {key.shape[1]} key heads"
            )
        return {
            "query": list(query.shape),
            "key": list(key.shape),
            "value": list(value.shape),
            "dtype": str(_autocast_dtype(query)),
            "mask": _form(mask),
            "bias": _form(bias),
            "key_lengths": None if key_lengths is None else key_lengths.tolist(),
            "seed": None if seed is None else seed.tolist(),
            "method": method,
            "order": order,
            "origin": tuple(int(x) for x in origin),
            "needing a gradient": _needs_gradient(query, key, value, bias),
            "return_lse": bool(return_lse),
            **options,
            "window": None if window is None else tuple(window),
        }

    if check:
        agree(group, describe)
    else:
        describe()
    query, key, value = (x.to(_autocast_dtype(x)) for x in (query, key, value))
    queries, keys = query.shape[2] * size, key.shape[2] * size
    if mask is not None and is_of_own_keys(mask, key.shape[2], size):
        mask = whole_keys(mask, group, order)
    if seed is None and dropout_p > 0:
        seed = shared_seed(query.device, [group])
    corner, left, right = diagonal(query, key, key_lengths, causal, window)
    problem = Problem(
        group=group,
        rank=rank,
        size=size,
        order=order,
        queries=queries,
        keys=keys,
        mask=mask,
        key_lengths=None if key_lengths is None else key_lengths.long(),
        seed=seed,
        lower_right=corner == "lower_right",
        left=left,
        right=right,
        dropout_p=float(dropout_p),
        scale=scale_of(query, scale),
        uniform=empty_rows == "uniform",
        first=(int(origin[0]), int(origin[1])),
    )
    if method == "auto":
        method = _choose(query, key, value, bias, problem)
    with torch.autocast(query.device.type, enabled=False):
        if method == "ring":
            found: tuple[Tensor, Tensor | None] = ring(query, key, value, bias, problem)
        else:
            found = all_to_all(query, key, value, bias, problem, return_lse)
    return found if return_lse else found[0]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Any:
    """`sequence_parallel_attention` with ``method="ring"``: any number of heads; keys and values go round."""
    return sequence_parallel_attention(query, key, value, mask, method="ring", **options)


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Any:
    """`sequence_parallel_attention` with ``method="all_to_all"``: heads against sequence, and back."""
    return sequence_parallel_attention(query, key, value, mask, method="all_to_all", **options)


def _choose(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, problem: Problem
) -> Method:
    """The same on every rank, because it depends on what all ranks have in common."""
    for pairs in (problem.mask, bias):
        if pairs is not None and pairs.dim() > 1 and pairs.shape[-2] != 1:
            return "ring"
    batch, heads, _, head_dim = query.shape
    shape = costs.Shape(
        batch,
        heads,
        key.shape[1],
        problem.queries,
        problem.keys,
        head_dim,
        value.shape[3],
        query.element_size(),
    )
    backward = any(_needs_gradient(query, key, value, bias))
    found: Any = costs.cheapest(shape, problem.size, steps(problem), backward=backward)
    return found


def _check_whole(
    size: int,
    order: Order,
    tensors: dict[str, Tensor | None],
    options: dict[str, Any],
) -> None:
    """All checks of `mha_ext.attention`, on tensors without data that have the whole problem's shapes."""
    query, key = tensors["query"], tensors["key"]
    for name, tensor in tensors.items():
        if tensor is None and name not in ("query", "key", "value"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        check_dense(name, tensor)
        check_holds_values(name, tensor)
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} must be this rank's shard, a plain tensor, not a DTensor; pass {name}.to_local()"
            )
        if isinstance(query, Tensor) and tensor.device != query.device:
            raise ValueError(
                f"{name} must be on query's device {query.device}, but is on {tensor.device}; pass "
                f"{name}.to(query.device)"
            )
        sharded = name in ("query", "key", "value") and tensor.dim() == 4
        if sharded and order == "zigzag" and tensor.shape[2] % 2:
            raise ValueError(
                f"{name} must have an even number of rows on each rank in zigzag order, not {tensor.shape[2]}; pad the "
                'sequence, or pass order="contiguous"'
            )
    assert query is not None and key is not None
    keys = key.shape[2] * size if key.dim() == 4 else 0

    def whole(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        shape = list(tensor.shape)
        if name in ("query", "key", "value") and len(shape) == 4:
            shape[2] *= size
        if name in ("mask", "bias") and len(shape) > 1 and shape[-2] != 1:
            shape[-2] *= size
        elif name == "mask" and key.dim() == 4 and is_of_own_keys(tensor, key.shape[2], size):
            shape[-1] = keys
        inputs = name in ("query", "key", "value")
        dtype = _autocast_dtype(tensor) if inputs else tensor.dtype  # meta has no autocast
        return torch.empty(shape, dtype=dtype, device="meta")

    given = {name: whole(name, tensor) for name, tensor in tensors.items()}
    if given["seed"] is None:
        given["seed"] = torch.empty(2, dtype=torch.int64, device="meta")
    attention_with_lse(**given, **options)  # type: ignore[arg-type]
    lengths = tensors["key_lengths"]
    if lengths is not None and len(lengths):
        least, most = lengths.long().aminmax()
        if not 0 <= int(least) <= int(most) <= keys:
            raise ValueError(
                f"key_lengths must be from 0 to the length of the whole key, {keys}, but are {lengths.tolist()}; pass "
                f"key_lengths.clamp(0, {keys})"
            )


def _form(pairs: Tensor | None) -> tuple[list[int], str] | None:
    return None if pairs is None else (list(pairs.shape), str(pairs.dtype))


def _check_origin(origin: Any) -> None:
    if not (
        isinstance(origin, tuple | list)
        and len(origin) == 2
        and all(is_integer(x) and x >= 0 for x in origin)
    ):
        raise ValueError(
            "origin must be two integers from 0, the global positions of the first batch entry and the first head, "
            f"not {origin!r}"
        )


def _needs_gradient(*tensors: Tensor | None) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in tensors]


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    """What the operators make of query, key and value under autocast: float64 stays."""
    device = tensor.device.type
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return (
        torch.get_autocast_dtype(device)
        if casts and torch.is_autocast_enabled(device)
        else tensor.dtype
    )


def is_of_own_keys(mask: Tensor, keys: int, size: int) -> bool:
    """Whether a mask has no rows, and the ``keys`` of one rank."""
    rows = mask.dim() > 1 and mask.shape[-2] != 1
    return size > 1 and mask.dim() > 0 and not rows and mask.shape[-1] == keys


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def whole_keys(mask: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    """A mask of every rank's own keys, put together in their natural order."""
    mine = (mask != 0).to(torch.uint8).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return natural(torch.cat(parts, -1), -1, order, len(parts)).bool()
