"""Tensor parallel layers, and DTensors passed to attention and the operators, against one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import mha_ext
from mha_ext.distributed import tensor_parallel_plan

TIGHT = {"atol": 1e-10, "rtol": 1e-10}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def layer(**options: Any) -> mha_ext.MultiHeadAttention:
    torch.manual_seed(1)
    options = {"embed_dim": 32, "num_heads": 8, "dtype": torch.float64, **options}
    return mha_ext.MultiHeadAttention(**options)


def split(whole: mha_ext.MultiHeadAttention) -> mha_ext.MultiHeadAttention:
    twin = copy.deepcopy(whole)
    parallelize_module(twin, mesh(), tensor_parallel_plan(twin))
    return twin


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_layers(
    one: mha_ext.MultiHeadAttention,
    many: Callable[..., Any],
    of: Any,
    *inputs: Tensor,
    **options: Any,
) -> None:
    """Output and the gradients of inputs, options and parameters."""
    results = []
    for call in (one, many):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        named = {
            name: x.detach().clone().requires_grad_()
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for name, x in options.items()
        }
        torch.manual_seed(5)
        out = call(*leaves, **named)
        outs = out if isinstance(out, tuple) else (out,)
        sum((x * numbers(*x.shape, seed=7)).sum() for x in outs).backward()
        parameters = (one if call is one else of).named_parameters()
        found = {f"out{i}": x.detach() for i, x in enumerate(outs)}
        found |= {f"input {i}": whole(x.grad) for i, x in enumerate(leaves)}
        found |= {
            k: whole(x.grad) for k, x in named.items() if isinstance(x, Tensor) and x.requires_grad
        }
        found |= {name: whole(p.grad) for name, p in parameters}
        results.append(found)
    one.zero_grad()
    torch.testing.assert_close(results[1], results[0], **TIGHT)


def plan(inputs: int = 1, call: dict[str, Any] | None = None, **options: Any) -> None:
    one = layer(**options)
    many = split(one)
    tensors = [numbers(2, 12, 32, seed=i) for i in range(inputs)]
    assert many.k_proj.weight.to_local().shape[0] * dist.get_world_size() == one.k_proj.out_features
    same_layers(one, many, many, *tensors, **(call or {}))


def compiled(**options: Any) -> None:
    one = layer(**options)
    many = split(one)
    call = torch.compile(many, backend="aot_eager", fullgraph=True)
    same_layers(one, call, many, numbers(2, 12, 32))


def grouped_error() -> None:
    few = layer(num_kv_heads=1)
    try:
        split(few)
    except ValueError as error:
        assert "num_kv_heads must be a multiple" in str(error), error
    else:
        raise AssertionError("one key head was split")


def cached() -> None:
    one = layer(causal=True, rotary_base=10000.0)
    many = split(one)
    x = numbers(2, 6, 32)
    caches = [mha_ext.KVCache.of(module, batch=2, max_length=8) for module in (one, many)]
    with torch.no_grad():
        for part in (x[:, :4], x[:, 4:5], x[:, 5:]):
            first, second = one(part, cache=caches[0]), many(part, cache=caches[1])
            torch.testing.assert_close(second, first, **TIGHT)


def placed(inputs: cases.Inputs, where: Any) -> dict[str, Any]:
    """Query, key and value as DTensors; all else plain and whole."""
    place = mesh()
    found = {}
    for name, leaf in inputs.leaves().items():
        leaf = leaf.detach()
        if name != "bias":
            leaf = distribute_tensor(leaf, place, [where])
        found[name] = leaf.requires_grad_()
    return found


def dtensors(problem: cases.Problem, where: Any, compile: bool = False) -> None:
    inputs = cases.make(problem)
    one = cases.results(partial(cases.call, mha_ext.attention), inputs)
    function: Any = mha_ext.attention
    if compile:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    leaves = placed(inputs, where)
    out, lse = cases.call(function, inputs.replaced(**leaves))
    assert out.placements == (where,), out.placements
    place = mesh()
    cotangents = [distribute_tensor(x, place, [where]) for x in (inputs.grad_out, inputs.grad_lse)]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), cotangents)
    torch.testing.assert_close(whole(out), one["out"], **TIGHT)
    torch.testing.assert_close(whole(lse), one["lse"], **TIGHT)
    for name, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(whole(grad), one[f"grad_{name}"], **TIGHT)


BASE = cases.Problem(torch.float64, 4, 4, 4, 12, 10, 8)
OPTIONS = {
    "plain": {},
    "dropout": {"dropout_p": 0.3},
    "bias": {"bias": "bhqk", "dropout_p": 0.3},
    "shared bias": {"bias": "qk", "mask": "b1qk"},
    "bias of heads": {"bias": "h1k", "key_lengths": "random", "causal": "lower_right"},
    "mask of heads": {"mask": "1hq1", "window": (3, 3), "causal": "upper_left"},
}
CASES: dict[str, Callable[[], Any]] = {
    "plan": plan,
    "plan, cross": partial(plan, 3),
    "plan, key and value": partial(plan, 2),
    "plan, grouped": partial(plan, num_kv_heads=4, head_dim=6, value_head_dim=5),
    "plan, dropout": partial(plan, dropout=0.3, causal=True),
    "plan, rotary": partial(plan, rotary_base=10000.0, causal=True, bias=False),
    "plan, fast linear": partial(plan, fast_linear=True),
    "plan, masks": partial(
        plan,
        call={
            "mask": torch.arange(96).reshape(8, 12)[None, :, None] % 5 != 0,
            "key_padding_mask": torch.arange(24).reshape(2, 12) % 7 != 0,
        },
        dropout=0.2,
    ),
    "plan, bias": partial(plan, call={"bias": numbers(2, 8, 12, 12)}, dropout=0.2),
    "plan, shared bias": partial(plan, call={"bias": numbers(12, 12)}),
    "plan, weights": partial(
        plan, call={"bias": numbers(1, 8, 1, 12), "need_weights": True, "average_weights": True}
    ),
    "plan, compiled": compiled,
    "plan, compiled, dropout": partial(compiled, dropout=0.3, causal=True, num_kv_heads=4),
    "plan, too few key heads": grouped_error,
    "plan, cache": cached,
}
for _name, _options in OPTIONS.items():
    _problem = cases.replace(BASE, **_options)
    for _where in (Shard(0), Shard(1), Replicate()):
        CASES[f"DTensor, {_name}, {_where}"] = partial(dtensors, _problem, _where)
for _where in (Shard(0), Shard(1)):
    CASES[f"DTensor, compiled, {_where}"] = partial(
        dtensors, cases.replace(BASE, **OPTIONS["bias"]), _where, compile=True
    )
