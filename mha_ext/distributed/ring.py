"""Ring attention: keys and values travel from rank to rank, and partial results are merged through lse.

Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023); the merge is that of Dao et al.,
"FlashAttention" (2022), section 3.1; the balanced order of a causal mask that of Brandon et al., "Striped Attention"
(2023), with two chunks a rank in place of stripes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha_ext.distributed.order import Chunk, chunks
from mha_ext.distributed.problem import Problem

_forward = torch.ops.mha_ext.attention_forward.default
_backward = torch.ops.mha_ext.attention_backward.default


def ring(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    found: tuple[Tensor, Tensor] = _RingAttention.apply(query, key, value, bias, problem)
    return found


def steps(problem: Problem) -> int:
    """How many shards of the keys a rank has to see: fewer than there are where the band hides the rest from all."""
    if problem.uniform:
        return problem.size

    def needed(step: int) -> bool:
        return any(
            problem.sees(query, key)
            for rank in range(problem.size)
            for query in _chunks(problem, rank, problem.queries)
            for key in _chunks(problem, (rank - step) % problem.size, problem.keys)
        )

    return 1 + max((step for step in range(1, problem.size) if needed(step)), default=0)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = _run_forward(query, key, value, bias, problem)
        lse_type = torch.float64 if query.dtype == torch.float64 else torch.float32
        high = lse.to(lse_type)
        low = (lse - high).nan_to_num(0.0).to(lse_type)  # -inf - -inf
        ctx.save_for_backward(query, key, value, bias, out, high, low)
        ctx.problem = problem
        return out, high

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, bias, out, lse, lse_low = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        gradients = _Gradients(
            ctx.problem, query, key, value, bias, out, lse, lse_low, grad_out, grad_lse
        )
        return *gradients.run(ctx.needs_input_grad[3]), None


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """out in query's dtype over [B, L, H, Dv] memory, and lse in float64."""
    batch, heads, count, _ = query.shape
    shape = (batch, count, heads, value.shape[-1])
    out = query.new_zeros(shape, dtype=_sum_type(query)).transpose(1, 2)
    lse = query.new_full((batch, heads, count), -torch.inf, dtype=torch.float64)
    means = torch.zeros_like(out) if problem.uniform else None
    pair, total = _Pair(key, value), steps(problem)
    for step in range(total):
        travelling = pair.shift(problem) if step + 1 < total else None
        owner = (problem.rank - step) % problem.size
        _add_shard(query, pair, owner, bias, problem, out, lse, means)
        if travelling is not None:
            pair, travelling = travelling.arrived(), None
    if means is not None:
        out = torch.where((lse == -torch.inf)[..., None], means, out)
    return out.to(query.dtype), lse


def _add_shard(
    query: Tensor,
    pair: _Pair,
    owner: int,
    bias: Tensor | None,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    means: Tensor | None,
) -> None:
    """Adds what this rank's queries see of one shard of the keys to out and lse, in place.

    ``means``: likewise the mean of all values, for rows that have seen nothing yet; those that never do take it.
    """
    for q in _chunks(problem, problem.rank, problem.queries):
        for k in _chunks(problem, owner, problem.keys):
            key, value = pair.key[:, :, k.rows], pair.value[:, :, k.rows]
            for rows, options in problem.parts(q, k):
                of_bias = problem.pairs(bias, rows, k)
                part = _call_forward(query[:, :, rows.rows], key, value, of_bias, options)
                _merge(out[:, :, rows.rows], lse[:, :, rows.rows], *part)
            if means is not None and k.length and (lse[:, :, q.rows] == -torch.inf).any():
                options = problem.every_key(q, k, query)
                mean, _, _ = _call_forward(query[:, :, q.rows], key, value, None, options)
                means[:, :, q.rows] += mean.to(means.dtype) * (k.length / problem.keys)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, part_low: Tensor) -> None:
    """Adds a part of the keys to the rows that out and lse have of the others, in place.

    out = (out · e^lse + part · e^part_lse) / e^both, with both = log(e^lse + e^part_lse).
    """
    other = part_lse.double() + part_low.double().masked_fill(part_lse == -torch.inf, 0.0)
    both = torch.logaddexp(lse, other)
    empty = both == -torch.inf
    share, other_share = (
        (x - both).exp().masked_fill(empty, 0.0).to(out.dtype)[..., None] for x in (lse, other)
    )
    out.mul_(share).add_(part.to(out.dtype) * other_share)
    lse.copy_(both)


class _Gradients:
    """One backward pass: keys and values go round again, and the sums of their gradients behind them."""

    def __init__(
        self,
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> None:
        self.problem = problem
        self.query, self.key, self.value, self.bias = query, key, value, bias
        self.out, self.lse, self.lse_low = out, lse, lse_low
        self.grad_out, self.grad_lse = grad_out, grad_lse
        sums = _sum_type(query)
        self.grad_query = torch.zeros_like(query, dtype=sums)
        self.grad_bias = None if bias is None else torch.zeros_like(bias, dtype=sums)

    def run(self, for_bias: bool) -> tuple[Tensor | None, ...]:
        p, pair, total = self.problem, _Pair(self.key, self.value), steps(self.problem)
        # A bias that is constant along the keys moves all scores of a row alike: its gradient is that of lse.
        constant = self.bias is None or not self.bias.dim() or self.bias.shape[-1] == 1 < p.keys
        self.sum_bias = for_bias and not constant
        coming: _Travelling | None = None
        for step in range(total):
            travelling = pair.shift(p) if step + 1 < total else None
            mine = self._step(pair, (p.rank - step) % p.size)
            if coming is not None:
                mine.flat += coming.arrived().flat
                coming = None
            if step + 1 < total:
                coming = mine.shift(p)
            elif total > 1:
                mine = mine.shift(p, 1 - total).arrived()
            if travelling is not None:
                pair, travelling = travelling.arrived(), None
        if for_bias and constant and self.bias is not None and self.grad_lse is not None:
            of_lse = self.grad_lse.masked_fill(self.lse == -torch.inf, 0.0)[..., None]
            self.grad_bias = (
                of_lse.to(_sum_type(self.query))
                .sum_to_size([1] * (4 - self.bias.dim()) + list(self.bias.shape))
                .reshape(self.bias.shape)
            )
        return (
            self.grad_query.to(self.query.dtype),
            mine.key.to(self.key.dtype),
            mine.value.to(self.value.dtype),
            self.grad_bias.to(self.bias.dtype)
            if for_bias and self.bias is not None and self.grad_bias is not None
            else None,
        )

    def _step(self, pair: _Pair, owner: int) -> _Pair:
        """This rank's part of the gradients of one shard of the keys and values."""
        p = self.problem
        sums = _Pair.zeros(self.key, self.value, _sum_type(self.query))
        for q in _chunks(p, p.rank, p.queries):
            for k in _chunks(p, owner, p.keys):
                for rows, options in p.parts(q, k):
                    bias = p.pairs(self.bias, rows, k)
                    grads = self._call(rows, pair, k, bias, options, self.grad_out)
                    self.grad_query[:, :, rows.rows] += grads[0]
                    sums.key[:, :, k.rows] += grads[1]
                    sums.value[:, :, k.rows] += grads[2]
                    if self.sum_bias:
                        part = p.pairs(self.grad_bias, rows, k)
                        assert part is not None
                        part += grads[3]
                if p.uniform and k.length and (self.lse[:, :, q.rows] == -torch.inf).any():
                    empty = (self.lse == -torch.inf)[..., None]
                    grad_out = torch.where(empty, self.grad_out * (k.length / p.keys), 0.0)
                    options = {**p.every_key(q, k, self.query), "only_value": True}
                    grads = self._call(q, pair, k, None, options, grad_out)
                    sums.value[:, :, k.rows] += grads[2]
        return sums

    def _call(
        self,
        q: Chunk,
        pair: _Pair,
        k: Chunk,
        bias: Tensor | None,
        options: dict[str, Any],
        grad_out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, options = q.rows, dict(options)
        scores = not options.pop("only_value", False)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _backward(
            grad_out[:, :, rows],
            self.grad_lse[:, :, rows] if self.grad_lse is not None and scores else None,
            self.query[:, :, rows],
            pair.key[:, :, k.rows],
            pair.value[:, :, k.rows],
            self.out[:, :, rows],
            self.lse[:, :, rows],
            self.lse_low[:, :, rows],
            options.pop("mask", None),
            bias,
            options.pop("key_lengths"),
            options.pop("seed"),
            output_mask=[scores, scores, True, scores and self.sum_bias],
            **options,
        )
        return found


class _Pair:
    """Keys and values (or their gradients) of one shard, in one flat buffer: one message a step."""

    def __init__(self, key: Tensor, value: Tensor, flat: Tensor | None = None) -> None:
        self.flat = torch.cat([key.reshape(-1), value.reshape(-1)]) if flat is None else flat
        cut = key.numel()
        self.key = self.flat[:cut].view(key.shape)
        self.value = self.flat[cut:].view(value.shape)

    @classmethod
    def zeros(cls, key: Tensor, value: Tensor, dtype: torch.dtype) -> _Pair:
        return cls(key, value, key.new_zeros(key.numel() + value.numel(), dtype=dtype))

    def shift(self, problem: Problem, by: int = 1) -> _Travelling:
        """Sends it ``by`` ranks on, and receives that of the rank as far before. It must not change meanwhile."""
        return _Travelling(self, problem, by)


class _Travelling:
    """A send and a receive in flight."""

    def __init__(self, sent: _Pair, problem: Problem, by: int) -> None:
        group, size, rank = problem.group, problem.size, problem.rank
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (by, -by))
        self.sent, self.received = sent, torch.empty_like(sent.flat)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent.flat, to, group),
                dist.P2POp(dist.irecv, self.received, source, group),
            ]
        )

    def arrived(self) -> _Pair:
        for work in self.works:
            work.wait()
        return _Pair(self.sent.key, self.sent.value, self.received)


def _call_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    options = dict(options)
    positional = (options.pop("mask", None), bias, options.pop("key_lengths"), options.pop("seed"))
    found: tuple[Tensor, Tensor, Tensor] = _forward(query, key, value, *positional, **options)
    return found


def _chunks(problem: Problem, rank: int, length: int) -> list[Chunk]:
    return chunks(problem.order, rank, problem.size, length // problem.size)


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
