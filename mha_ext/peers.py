"""Every implementation that runs the cases.

The peers run at their best setting: no gradients where none are asked for, `need_weights=False`
for nn.MultiheadAttention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext
from mha_ext.cases import SQUARE_MASKS, Case, Inputs, Level, make_inputs


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


def layer_runs(
    inputs: Inputs, dtype: torch.dtype, device: torch.device, fast_linear: bool = False
) -> list[Run]:
    """Whole layers with equal weights: eager, nn.MultiheadAttention, SDPA and mha_ext (with fast_linear)."""
    case = inputs.case
    plain = projected(case, dtype, device)
    runs = []
    for name, make in (("eager", _eager_core), ("SDPA", _sdpa_core)):
        if _affordable(name, case):
            runs.append(projected_run(name, plain, make(inputs)))
    if case.key_heads == case.heads and _affordable("nn.MultiheadAttention", case):
        runs.append(_torch_layer(inputs, plain))
    runs.append(_own_layer(inputs, plain, fast_linear))
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


def _own_layer(inputs: Inputs, plain: Projected, fast_linear: bool) -> Run:
    case = inputs.case
    weight = plain.q_proj.weight
    layer = mha_ext.MultiHeadAttention(
        case.width,
        case.heads,
        num_kv_heads=case.key_heads,
        dropout=case.dropout,
        window=_own_window(case),
        fast_linear=fast_linear,
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


def prepare(
    case: Case, level: Level, dtype: torch.dtype, device: torch.device
) -> tuple[Inputs, list[Run]]:
    """The inputs and all implementations of one case."""
    inputs = make_inputs(case, level, dtype, device)
    if level == "attention":
        return inputs, attention_runs(inputs)
    return inputs, layer_runs(inputs, dtype, device)
