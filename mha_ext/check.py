"""Whether the kernels compute attention: `mha-ext check`.

Every instruction set this machine has, every dtype, a spread of options: output, logsumexp,
gradients and weights against `mha_ext.reference` in float64. An error counts as a multiple of the
tolerance: twice the error of plain PyTorch in the same dtype, plus 4 ulp of the largest sum of
absolute terms behind the result (|P| |V| for the output, and so on).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import mha_ext
from mha_ext import _C, reference
from mha_ext.cases import DTYPES
from mha_ext.report import Row, print_table, progress


@dataclass(frozen=True)
class Check:
    """Shapes and options of one comparison."""

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 70
    keys: int = 70
    head_dim: int = 64
    value_dim: int | None = None
    mask: bool = False  # random, with a row that sees nothing
    bias: tuple[int, ...] | None = None  # its shape
    padded: bool = False  # key_lengths
    options: dict[str, Any] = field(default_factory=dict)  # causal, window, scale, ...


CHECKS = (
    Check("plain"),
    Check("one key", keys=1),
    Check("one query", queries=1, keys=300, head_dim=128, heads=8, kv_heads=2),
    Check("head_dim 50", batch=3, heads=6, kv_heads=6, queries=12, keys=10, head_dim=50),
    Check("head_dim 1", head_dim=1, value_dim=3),
    Check("value width", head_dim=40, value_dim=72),
    Check("grouped heads", heads=6, kv_heads=2, head_dim=32),
    Check("long", batch=1, heads=2, kv_heads=2, queries=200, keys=333, head_dim=80),
    Check("random mask", mask=True),
    Check("uniform empty rows", mask=True, options={"empty_rows": "uniform"}),
    Check("causal", options={"causal": True}),
    Check("lower right", queries=50, keys=90, options={"causal": "lower_right"}),
    Check("window", options={"window": (9, 4)}),
    Check("padding", padded=True),
    Check("padding, causal", padded=True, options={"causal": "lower_right"}),
    Check("bias", bias=(2, 4, 70, 70)),
    Check("shared bias", bias=(1, 4, 1, 70)),
    Check("scale", options={"scale": -0.3}),
    Check("dropout", options={"dropout_p": 0.1}),
    Check(
        "everything",
        heads=6,
        kv_heads=3,
        queries=75,
        keys=99,
        head_dim=48,
        value_dim=56,
        mask=True,
        bias=(1, 6, 75, 99),
        padded=True,
        options={"causal": "lower_right", "window": (60, 0), "dropout_p": 0.3},
    ),
)

# What is compared, in the order of the columns.
RESULTS = ("out", "lse", "grad query", "grad key", "grad value", "grad bias", "weights")


@dataclass
class _Problem:
    """One check in one dtype: what every instruction set is held against."""

    leaves: dict[str, Tensor]
    mask: Tensor | None
    options: dict[str, Any]
    grad_out: Tensor
    grad_lse: Tensor
    exact: dict[str, Tensor] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)


def _make(check: Check, dtype: torch.dtype) -> _Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    b, h, q, k, d = check.batch, check.heads, check.queries, check.keys, check.head_dim
    v = d if check.value_dim is None else check.value_dim
    leaves = {
        "query": normal(b, q, h, d).transpose(1, 2),
        "key": normal(b, k, check.kv_heads, d).transpose(1, 2),
        "value": normal(b, k, check.kv_heads, v).transpose(1, 2),
    }
    if check.bias is not None:
        leaves["bias"] = normal(*check.bias)
    mask = None
    if check.mask:
        mask = torch.rand(b, 1, q, k, generator=generator) < 0.6
        mask[:, :, 3] = False
    options = dict(check.options)
    if check.padded:
        options["key_lengths"] = torch.linspace(k, k // 3, b).long()
    if "dropout_p" in options:
        options["seed"] = torch.tensor([123456789, 987654321])
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    problem = _Problem(
        leaves,
        mask,
        options,
        grad_out=normal(b, h, q, v),
        grad_lse=normal(b, h, q).to(lse_dtype),
    )
    problem.exact = _compute(reference, problem, torch.float64)
    plain = [_compute(reference, problem, dtype), _reversed_sums(problem, dtype)]
    terms = _largest_terms(problem)
    # In float64 the exact result is itself a plain evaluation, with an error of its own.
    factor = 3 if dtype == torch.float64 else 2
    for name, exact in problem.exact.items():
        ulp = torch.finfo(lse_dtype if name == "lse" else dtype).eps
        error = max(_error(results[name], exact) for results in plain)
        problem.tolerance[name] = factor * error + 4 * ulp * terms[name]
    return problem


def _reversed_sums(problem: _Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain PyTorch with the sums over head_dim in reverse: a second sample of its rounding error."""
    turned = {
        name: leaf.flip(-1) if name in ("query", "key") else leaf
        for name, leaf in problem.leaves.items()
    }
    results = _compute(reference, replace(problem, leaves=turned), dtype)
    return {
        name: result.flip(-1) if name in ("grad query", "grad key") else result
        for name, result in results.items()
    }


def _compute(module: Any, problem: _Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse, gradients and weights through `module`: mha_ext itself or its reference."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in problem.leaves.items()}
    query, key, value, bias = (leaves.get(n) for n in ("query", "key", "value", "bias"))
    options = problem.options
    # An empty row's lse is -inf and takes no gradient: out and lse are differentiated together.
    out, lse = module.attention(
        query, key, value, problem.mask, bias=bias, return_lse=True, **options
    )
    grads = torch.autograd.grad(
        (out, lse),
        list(leaves.values()),
        (problem.grad_out.to(out.dtype), problem.grad_lse.to(lse.dtype)),
    )
    of_weights = {n: o for n, o in options.items() if n not in ("dropout_p", "seed")}
    with torch.no_grad():
        weights = module.attention_weights(query, key, problem.mask, bias=bias, **of_weights)
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    results["weights"] = weights
    return results


def _largest_terms(problem: _Problem) -> dict[str, float]:
    """For each result the largest sum of absolute terms: what an ulp is relative to."""
    x = {name: leaf.detach().double() for name, leaf in problem.leaves.items()}
    query, key, value, bias = x["query"], x["key"], x["value"], x.get("bias")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).abs(), value.repeat_interleave(groups, 1).abs()
    options = {n: o for n, o in problem.options.items() if n not in ("dropout_p", "seed")}
    scale = abs(options.get("scale") or query.shape[-1] ** -0.5)

    def share(grad: Tensor) -> Tensor:  # [B, H, Lk, D] -> [B, Hkv, Lk, D]
        return grad.view(grad.shape[0], -1, groups, *grad.shape[2:]).sum(2)

    weights = reference.attention_weights(query, x["key"], problem.mask, bias=bias, **options)
    dropout = reference.keep_scale(problem.options.get("dropout_p", 0.0))
    grad_out, grad_lse = problem.grad_out.double().abs(), problem.grad_lse.double().abs()
    grad_weights = dropout * (grad_out @ value.mT)
    delta = (weights * grad_weights).sum(-1) + grad_lse
    grad_scores = weights * (grad_weights + delta[..., None])
    grad_key = scale * share(grad_scores.mT @ query.abs())
    grad_value = dropout * share(weights.mT @ grad_out)
    scores = scale * (query.abs() @ key.mT)
    terms = {
        "out": dropout * (weights @ value),
        "lse": scores if bias is None else scores + bias.abs(),
        "grad query": scale * (grad_scores @ key),
        "grad key": grad_key,
        "grad value": grad_value,
        "weights": weights,
    }
    if bias is not None:
        terms["grad bias"] = grad_scores.sum_to_size(bias.shape)
    return {name: float(term.max()) for name, term in terms.items()}


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; inf where one is not finite and the other differs."""
    found, exact = found.double(), exact.double()
    difference = torch.where(found == exact, 0.0, (found - exact).abs())
    return float(difference.nan_to_num(nan=torch.inf).max())


def main(isa: str | None = None, dtype: str | None = None, verbose: bool = False) -> int:
    """Runs `mha-ext check` and prints its table; 1 if anything is outside its tolerance."""
    isas = [isa] if isa else list(_C.supported_isas())
    dtypes = [dtype] if dtype else list(DTYPES)
    worst: dict[tuple[str, str], dict[str, float]] = {
        (i, d): dict.fromkeys(RESULTS, 0.0) for i in isas for d in dtypes
    }
    failures: list[str] = []
    before = _C.active_isa()
    try:
        with progress(len(dtypes)) as advance:
            for dtype_name in dtypes:
                advance(f"{dtype_name}: {len(CHECKS)} problems on {', '.join(isas)}")
                for check in CHECKS:
                    problem = _make(check, DTYPES[dtype_name])
                    for name in isas:
                        _C.set_isa(name)
                        ratios, problems = _compare(problem, DTYPES[dtype_name])
                        where = f"{name}, {dtype_name}, {check.name}"
                        failures += [f"{where}: {text}" for text in problems]
                        table = worst[name, dtype_name]
                        for result, ratio in ratios.items():
                            table[result] = max(table[result], ratio)
                        if verbose:
                            cells = " ".join(f"{n} {r:.2f};" for n, r in ratios.items())
                            print(f"{where}: {cells}".rstrip(";"))
    finally:
        _C.set_isa(before)
    rows: list[Row] = []
    for name in isas:
        if rows:
            rows.append(None)
        for dtype_name in dtypes:
            found = worst[name, dtype_name]
            rows.append([f"{name} {dtype_name}", *(f"{found[result]:.2f}" for result in RESULTS)])
    print_table(
        "Largest error, as a multiple of the tolerance (up to 1.00 is right)", ["", *RESULTS], rows
    )
    count = len(isas) * len(dtypes) * len(CHECKS)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"{count} problems, {len(failures)} results outside the tolerance.")
    return int(bool(failures))


def _compare(problem: _Problem, dtype: torch.dtype) -> tuple[dict[str, float], list[str]]:
    """Error over tolerance of every result on the active instruction set, and what failed."""
    try:
        found = _compute(mha_ext, problem, dtype)
    except (RuntimeError, ValueError, TypeError) as raised:
        return {}, [f"raised {type(raised).__name__}: {str(raised).splitlines()[0]}"]
    ratios: dict[str, float] = {}
    failed = []
    for name, exact in problem.exact.items():
        error = _error(found[name], exact)
        tolerance = problem.tolerance[name]
        ratios[name] = error / tolerance if tolerance else (0.0 if not error else float("inf"))
        if not ratios[name] <= 1:
            failed.append(f"{name} is off by {error:.2e}, allowed are {tolerance:.2e}")
    return ratios, failed
