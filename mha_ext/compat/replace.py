"""From PyTorch's modules to ours and back: in a whole model, or one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mha_ext.compat.multihead import MultiheadAttention
from mha_ext.modules import MultiHeadAttention


class Swap(NamedTuple):
    """What `replace_attention` did with one module."""

    name: str  # in model.named_modules(), "" for the model itself
    swapped: bool
    reason: str  # why not; "" where it was swapped


def replace_attention(model: nn.Module) -> list[Swap]:
    """Swaps every `nn.MultiheadAttention` in ``model``, in place, for ours with the same parameters.

    The parameters are shared, not copied: optimizers, state_dict, tied weights, hooks and the training mode stay as
    they are. PyTorch's encoders stop making nested tensors, which only its own fused layer can read.

    Returns:
        One entry for each attention module that was found, with the reason where it was left alone.

    Raises:
        ValueError: where ``model`` itself is an `nn.MultiheadAttention`: use `from_torch`, which returns ours.
    """
    if type(model) is nn.MultiheadAttention:
        raise ValueError(
            "model must hold attention modules, but is one itself and cannot be swapped in place; use "
            "mha_ext.compat.from_torch(model)"
        )
    report: list[Swap] = []
    new: dict[nn.Module, MultiheadAttention] = {}
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        if isinstance(module, MultiheadAttention):
            if module not in new.values():
                report.append(Swap(name, False, "it is mha_ext's already"))
        elif type(module) is nn.MultiheadAttention:
            parent_name, _, child = name.rpartition(".")
            if module not in new:
                new[module] = from_torch(module)
            setattr(model.get_submodule(parent_name), child, new[module])
            report.append(Swap(name, True, ""))
        elif isinstance(module, nn.MultiheadAttention):
            reason = f"it is a {type(module).__qualname__}, which may compute something else"
            report.append(Swap(name, False, reason))
    return report


def from_torch(module: nn.MultiheadAttention) -> MultiheadAttention:
    """Ours in place of PyTorch's: the same parameters (shared), hooks, mode and results.

    Raises:
        TypeError: where module is not an `nn.MultiheadAttention` itself, but a subclass or another module.
    """
    if type(module) is not nn.MultiheadAttention:
        raise TypeError(
            f"module must be an nn.MultiheadAttention itself, not {type(module).__qualname__}; what a subclass "
            "computes is not known here"
        )
    new = MultiheadAttention.__new__(MultiheadAttention)
    new.__dict__.update(_shallow(module))
    same = new.__dict__.pop("_qkv_same_embed_dim")
    new.__dict__["_same_width"], new.__dict__["_stacked"] = same, same
    return new


def to_torch(module: MultiheadAttention | MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's in place of ours, with copies of the parameters of a `mha_ext.MultiHeadAttention`, or sharing those of
    a `MultiheadAttention`; batch first in the former case.

    Raises:
        ValueError: where PyTorch's module cannot express the layer.
    """
    if isinstance(module, MultiheadAttention):
        new = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        new.__dict__.update(_shallow(module))
        del new.__dict__["_same_width"], new.__dict__["_stacked"]
        new._qkv_same_embed_dim = module.in_proj_weight is not None
        return new
    refused = {
        "num_kv_heads": (module.num_kv_heads, module.num_heads),
        "query_dim": (module.query_dim, module.embed_dim),
        "head_dim": (module.num_heads * module.head_dim, module.embed_dim),
        "value_head_dim": (module.value_head_dim, module.head_dim),
        "out_dim": (module.out_dim, module.embed_dim),
        "causal": (module.causal, False),
        "window": (module.window, None),
        "rotary_base": (module.rotary_base, None),
        "empty_rows": (module.empty_rows, "zero"),
    }
    for name, (value, only) in refused.items():
        if value != only:
            raise ValueError(
                f"module must be one that nn.MultiheadAttention can express, but its {name} is "
                f"{getattr(module, name)}; keep mha_ext.MultiHeadAttention"
            )
    weight = module.out_proj.weight
    new = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=module.q_proj.bias is not None,
        kdim=module.key_dim,
        vdim=module.value_dim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    ).train(module.training)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    with torch.no_grad():
        if new.in_proj_weight is not None:
            new.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, projection in zip("qkv", projections, strict=True):
                getattr(new, f"{name}_proj_weight").copy_(projection.weight)
        if new.in_proj_bias is not None:
            new.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        new.out_proj.load_state_dict(module.out_proj.state_dict())
    if new.in_proj_weight is not None:
        _freeze_alike([p.weight for p in projections], [new.in_proj_weight])
    else:
        weights = [new.q_proj_weight, new.k_proj_weight, new.v_proj_weight]
        _freeze_alike([p.weight for p in projections], weights)
    _freeze_alike([p.bias for p in projections], [new.in_proj_bias])
    _freeze_alike([*module.out_proj.parameters()], [*new.out_proj.parameters()])
    return new


def _freeze_alike(given: Sequence[Any], new: Sequence[Any]) -> None:
    """requires_grad of the parameters as of those that they are copies of: each of its own, or one of all."""
    flags = {parameter.requires_grad for parameter in given if parameter is not None}
    if len(new) < len(given) and len(flags) > 1:
        raise ValueError(
            "q_proj, k_proj and v_proj must all need gradients or none, since nn.MultiheadAttention has one parameter "
            "for them, but they differ; call requires_grad_() on them"
        )
    for parameter, like in zip(new, given, strict=False):
        if parameter is not None:
            parameter.requires_grad_(like.requires_grad)


def to_multi_head_attention(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """`mha_ext.MultiHeadAttention`, batch first and with masks that say nonzero = attend, with copies of the
    parameters of PyTorch's module or of `MultiheadAttention`.

    Raises:
        ValueError: where the module adds keys of its own (add_bias_kv, add_zero_attn).
    """
    for name, present in (
        ("add_bias_kv", module.bias_k is not None),
        ("add_zero_attn", module.add_zero_attn),
    ):
        if present:
            raise ValueError(
                f"module must be one that mha_ext.MultiHeadAttention can express, but it has {name}; use "
                "mha_ext.compat.from_torch"
            )
    weight = module.out_proj.weight
    new = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        device=weight.device,
        dtype=weight.dtype,
    ).train(module.training)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    with torch.no_grad():
        for projection, weight in zip((new.q_proj, new.k_proj, new.v_proj), weights, strict=True):
            projection.weight.copy_(weight)
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
            for projection, bias in zip((new.q_proj, new.k_proj, new.v_proj), biases, strict=True):
                projection.bias.copy_(bias)
        new.out_proj.load_state_dict(module.out_proj.state_dict())
    projections = (new.q_proj, new.k_proj, new.v_proj)
    stacked = module.in_proj_weight is not None
    sources = [module.in_proj_weight] * 3 if stacked else weights
    _freeze_alike(sources, [p.weight for p in projections])
    _freeze_alike([module.in_proj_bias] * 3, [p.bias for p in projections])
    _freeze_alike([*module.out_proj.parameters()], [*new.out_proj.parameters()])
    return new


def _shallow(module: nn.Module) -> dict[str, Any]:
    """The state of a module: its own tables, the same parameters and children."""
    tables = (dict, set, list)
    return {k: copy.copy(v) if isinstance(v, tables) else v for k, v in vars(module).items()}
