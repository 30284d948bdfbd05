"""Every operator on DTensors against the same operator on whole tensors: its sharding rule, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from ranks.tensor_cases import TIGHT, numbers, whole

ops = torch.ops.mha_ext
BASE = cases.Problem(
    torch.float64, 4, 4, 4, 12, 10, 8, bias="1hqk", mask="b1qk", key_lengths="random"
)


def calls(dropout_p: float) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments of every operator of attention, for one problem."""
    inputs = cases.make(cases.replace(BASE, dropout_p=dropout_p))
    query, key, value = inputs.query, inputs.key, inputs.value
    masks = [inputs.mask, inputs.bias, inputs.key_lengths, inputs.seed]
    options: dict[str, Any] = {"scale": 0.3, "window_left": 7}
    dropout = {"dropout_p": dropout_p}
    out, lse, low = ops.attention_forward(query, key, value, *masks, **options, **dropout)
    weights = ops.attention_weights(query, key, lse, low, *masks[:3], **options)
    tangents = [numbers(*t.shape, seed=i) for i, t in enumerate((query, key, value, inputs.bias))]
    saved = [query, key, value, out, lse, low]
    moved = [*ops.attention_forward_tangent(*saved, *tangents, *masks, **options, **dropout)]
    grads = [inputs.grad_out, inputs.grad_lse]
    return {
        "attention_forward": ([query, key, value, *masks], options | dropout),
        "attention_backward": (
            [*grads, *saved, *masks],
            options | dropout | {"output_mask": [True, True, False, True]},
        ),
        "attention_forward_tangent": ([*saved, *tangents, *masks], options | dropout),
        "attention_backward_tangent": (
            [*grads, *saved, *moved, *tangents, *grads, *masks],
            options | dropout | {"output_mask": [True] * 4},
        ),
        "attention_weights": ([query, key, lse, low, *masks[:3]], options),
        "attention_weights_backward": (
            [torch.ones_like(weights), weights, query, key, lse, low, *masks[:3]],
            options | {"output_mask": [True] * 3},
        ),
    }


def placement(tensor: Tensor, dim: int | None) -> Placement:
    """By the batch (0) or the heads (1); what has no such dimension is whole."""
    if dim is None or tensor.dim() == 1 and (dim == 1 or tensor.numel() == 2):
        return Replicate()
    return Replicate() if tensor.shape[dim] == 1 else Shard(dim)


def operator(
    name: str,
    dim: int | None,
    dropout_p: float = 0.0,
    compile: bool = False,
    **changes: Any,
) -> None:
    args, options = calls(dropout_p)[name]
    options |= changes
    op: Any = getattr(ops, name).default
    wanted = op(*args, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        plain = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return plain.redistribute(mesh, [placement(value, dim)])

    spread_args = [spread(value) for value in args]
    if compile:
        call = torch.compile(
            lambda *args: op(*args, **options), backend="aot_eager", fullgraph=True
        )
        found = call(*spread_args)
    else:
        with CommDebugMode() as sent:
            found = op(*spread_args, **options)
    wanted, found = ([x] if isinstance(x, Tensor) else [*x] for x in (wanted, found))
    if not dropout_p and dim is not None:
        assert compile or sent.get_total_counts() == 0, (
            sent.get_comm_counts()
        )  # nothing is gathered
        assert found[0].placements == (Shard(dim),), found[0].placements
    for result, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(whole(result), exact, **TIGHT)


def linear(where: Placement, weight: Placement, result: Placement, bias: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    args = [numbers(8, 4, 16), numbers(12, 16), numbers(12) if bias else None]
    wanted = ops.linear(*args)
    bias_place = Shard(0) if weight == Shard(0) else Replicate()
    found = ops.linear(
        *(
            None
            if x is None
            else DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [place])
            for x, place in zip(args, (where, weight, bias_place))
        )
    )
    assert found.placements == (result,), found.placements
    torch.testing.assert_close(whole(found), wanted, **TIGHT)


def second_order() -> None:
    """A gradient of a gradient, through the operators' rules alone."""
    inputs = cases.make(cases.replace(BASE, mask=None, key_lengths=""))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for spread in (False, True):
        leaves = [inputs.query, inputs.key, inputs.value]
        if spread:
            leaves = [DTensor.from_local(x, mesh, [Replicate()]) for x in leaves]
            leaves = [x.redistribute(mesh, [Shard(1)]) for x in leaves]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = ops.attention_forward(*leaves, None, None, None, None, scale=0.3)[0]
        (grad,) = torch.autograd.grad(out.square().sum(), leaves[1], create_graph=True)
        results.append([whole(g) for g in torch.autograd.grad(grad.square().sum(), leaves)])
    torch.testing.assert_close(results[1], results[0], **TIGHT)


CASES: dict[str, Callable[[], Any]] = {}
for _name in calls(0.0):
    for _dim in (None, 0, 1):
        CASES[f"{_name}, {_dim}"] = partial(operator, _name, _dim)
for _name in ("attention_forward", "attention_backward"):
    CASES[f"{_name}, dropout"] = partial(operator, _name, 1, 0.3)
    CASES[f"{_name}, compiled"] = partial(operator, _name, 1, compile=True)
for _dim in (None, 0, 1):
    CASES[f"attention_forward without lse, {_dim}"] = partial(
        operator, "attention_forward", _dim, with_lse=False
    )
CASES |= {
    "second order": second_order,
    "linear, rows": partial(linear, Shard(0), Replicate(), Shard(0), True),
    "linear, columns": partial(linear, Replicate(), Shard(0), Shard(2), True),
    "linear, terms": partial(linear, Shard(2), Shard(1), Partial(), False),
}
