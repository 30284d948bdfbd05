"""The same problems in float64, and whether a result is right."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mha_ext import reference
from mha_ext.cases import Inputs, Level
from mha_ext.peers import Run, projected, projected_run

# Above so many scores the float64 check takes a few rows of the first batch entry, forward only.
SCORES_CHECKED_IN_FULL = 2**26


@dataclass
class Exact:
    """The results in float64. Of a large problem: the forward for a few rows of batch entry 0."""

    out: Tensor
    grads: dict[str, Tensor] | None
    rows: Tensor | None = None  # the rows that `out` holds


def exact_results(inputs: Inputs, level: Level, grad_out: Tensor) -> Exact:
    """The same problem through mha_ext.reference on float64 copies of the inputs."""
    case = inputs.case
    x = copy.copy(inputs)
    x.tensors = {name: _leaf64(tensor) for name, tensor in inputs.tensors.items()}
    x.bias = None if inputs.bias is None else _leaf64(inputs.bias)
    rows = None
    keep = None
    if case.scores > SCORES_CHECKED_IN_FULL:
        rows = torch.linspace(0, case.queries - 1, min(32, case.queries)).long()
        rows = rows.to(grad_out.device)
        keep = inputs.keep(rows)
        keep = None if keep is None else keep[:1]
        key = x.tensors.get("key", x.tensors["query"])  # self-attention in a layer: all its tokens
        x.tensors = {name: tensor[:1].detach() for name, tensor in x.tensors.items()}
        x.tensors["query"] = x.tensors["query"].index_select(-2, rows)
        x.tensors["key"] = key[:1].detach()
        x.bias = None if x.bias is None else x.bias.detach()[:, :, rows]
    else:
        keep = inputs.keep()

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = reference.attention(q, k, v, keep, bias=x.bias)
        assert isinstance(out, Tensor)
        return out

    if level == "attention":
        run = Run("", lambda x: core(x.tensors["query"], x.tensors["key"], x.tensors["value"]))
    else:
        layer = projected(case, grad_out.dtype, grad_out.device).double()
        run = projected_run("", layer, core)
    out = run.call(x)
    whole = rows is None and case.training
    return Exact(out, run.gradients(x, grad_out.double()) if whole else None, rows)


def _leaf64(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


@dataclass
class Result:
    """What was found for one implementation on one case."""

    case: str
    level: Level
    name: str
    out_error: float | None = None  # largest absolute difference to float64
    grad_error: float | None = None
    wrong: list[str] = field(default_factory=list)  # results outside the tolerance
    excess: dict[str, float] = field(default_factory=dict)  # error over tolerance, where finite
    forward_ms: float | None = None
    training_ms: float | None = None  # forward and backward
    memory: int | None = None  # bytes
    gbytes_per_s: float | None = None  # forward: inputs and outputs, once each
    bandwidth: float | None = None  # bytes/s that as many threads can read
    peak: float | None = None  # FLOP/s of this machine on `threads` threads
    forward_flops: float = 0.0
    training_flops: float = 0.0

    def judge(self, name: str, error: float, tolerance: float) -> None:
        """Notes a result that is off, also where it is NaN."""
        if error <= tolerance:
            return
        self.wrong.append(name)
        if tolerance > 0 and math.isfinite(error):
            self.excess[name] = error / tolerance


def wrong_text(wrong: Sequence[str], excess: Mapping[str, float]) -> str:
    """What is off, for a reader, and how far it is off where that is known."""
    found = []
    for name in wrong:
        gradient = name != "out" and not name.startswith(("jvp", "hvp"))
        text = f"gradient of {name}" if gradient else name
        if name in excess:
            text += f" ({excess[name]:.3g} times the tolerance)"
        found.append(text)
    return ", ".join(found)


def random_like(tensor: Tensor, seed: int = 1) -> Tensor:
    """Normal values: the same ones for every dtype and device."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(tensor)


def verify(
    runs: Sequence[Run], inputs: Inputs, level: Level, exact: Exact | None = None
) -> dict[str, Result]:
    """Compares every run with float64; `wrong` names what is off.

    An error may be four times that of eager PyTorch, or 32 units in the last place of the largest
    element, whichever is larger. Gradients that cancel (a single key gives its query none) count as
    no smaller than a twentieth of the largest gradient.

    exact: what exact_results gave for these inputs and random_like(out), where it is known.
    """
    outs = {run.name: run.call(inputs) for run in runs}
    grad_out = random_like(next(iter(outs.values())))
    exact = exact or exact_results(inputs, level, grad_out)
    gradients = exact.grads or {}
    largest = max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
    results: dict[str, Result] = {}
    allowed: dict[str, float] = {}
    for run in runs:
        result = results[run.name] = Result(inputs.case.name, level, run.name)
        out = outs[run.name]
        if exact.rows is not None:
            out = out[:1].index_select(-2, exact.rows)
        pairs = {"out": (out, exact.out)}
        if gradients and run.differentiable:
            for name, grad in _split_in_proj(run.gradients(inputs, grad_out)).items():
                pairs[name] = (grad, gradients[name])
        for name, (found, wanted) in pairs.items():
            error = float((found.double() - wanted).abs().max())
            if name == "out":
                result.out_error = error
            elif name == "k_proj.bias":
                continue  # exactly zero: a constant added to all keys does not change a softmax
            else:
                result.grad_error = max(error, result.grad_error or 0.0)
            size = max(float(wanted.abs().max()), 0.0 if name == "out" else largest / 20)
            least = 32 * torch.finfo(out.dtype).eps * size
            if run.name == "eager":
                allowed[name] = 4 * error
            result.judge(name, error, max(least, allowed.get(name, 0.0)))
    return results


def _split_in_proj(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """nn.MultiheadAttention keeps three projections in one parameter: the names of the others."""
    split: dict[str, Tensor] = {}
    for name, grad in grads.items():
        if name.startswith("in_proj_"):
            kind = name.removeprefix("in_proj_")
            for which, part in zip("qkv", grad.chunk(3), strict=True):
                split[f"{which}_proj.{kind}"] = part
        else:
            split[name] = grad
    return split
