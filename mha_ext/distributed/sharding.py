"""DTensors: by which dimensions each operator may be sharded, and attention on them with each rank's own origin.

A sharding rule says how arguments and results lie, but cannot give each rank an argument of its own. Dropout needs
that: `origin`. So `mha_ext.attention` takes the local tensors of its DTensors and calls the operator with the origin
that their placements imply; the operators' own rules shard what does not depend on the position, and replicate dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from mha_ext.distributed.agree import shared_seed

_ops = torch.ops.mha_ext
_forward = _ops.attention_forward.default
_weights = _ops.attention_weights.default

BATCH, HEADS = -4, -3  # of [B, H, L, D]
_PAIRS = {"mask", "bias", "bias_tangent"}
_LSE = {"lse", "lse_low", "lse_tangent", "grad_lse", "grad_lse_tangent"}


def _placement(name: str, shape: Sequence[int], dim: int) -> Placement:
    """Of an argument where the batch or the heads are sharded."""
    if name in _LSE:
        return Shard(len(shape) + dim + 1)
    if name == "key_lengths":
        return Shard(len(shape) - 1) if dim == BATCH else Replicate()
    if name == "seed":
        return Replicate()
    if name in _PAIRS and (len(shape) < -dim or shape[dim] == 1):
        return Replicate()
    return Shard(len(shape) + dim)


def _register(op: Any) -> None:
    arguments = [argument.name for argument in op._schema.arguments]
    results = [result.name for result in op._schema.returns]

    @register_sharding(op)  # type: ignore[untyped-decorator, unused-ignore]
    def rule(*args: Any, **options: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(arguments, args))
        shapes = {name: spec.shape for name, spec in given.items() if hasattr(spec, "tensor_meta")}
        rank = len(shapes["query"])

        def result(name: str, dim: int) -> Placement:
            if name.removesuffix("_tangent") == "grad_bias":
                if "bias" not in shapes or not options["output_mask"][-1]:
                    return Replicate()
                place = _placement("bias", shapes["bias"], dim)
                return Partial() if place.is_replicate() else place
            if "output_mask" in options and not options["output_mask"][results.index(name)]:
                return Replicate()
            if name in _LSE and not options.get("with_lse", True):  # an empty tensor
                return Replicate()
            return Shard(rank + dim)  # of lse too: it lacks the last dimension

        def placements(dim: int) -> tuple[list[Any], list[Any]]:
            inputs = [
                _placement(name, shapes[name], dim) if name in shapes else None for name in given
            ]
            return [result(name, dim) for name in results], inputs

        whole = [Replicate() if name in shapes else None for name in given]
        found: list[tuple[list[Any], list[Any]]] = [([Replicate()] * len(results), whole)]
        if options.get("dropout_p", 0.0):
            return found
        found.append(placements(BATCH))
        if options.get("heads") is None:
            found.append(placements(HEADS))
        return found

    # What a decision may be remembered for: by itself register_sharding looks at integers only, and would take the
    # shapes of one output_mask, or the rule of no dropout, for another.
    propagator = DTensor._op_dispatcher.sharding_propagator
    options = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(len(arguments), options, needs_pytree=True)


for _name in ("attention_forward", "attention_backward", "attention_weights"):
    _register(getattr(_ops, _name).default)
for _name in (
    "attention_forward_tangent",
    "attention_backward_tangent",
    "attention_weights_backward",
):
    _register(getattr(_ops, _name).default)


@register_sharding(_ops.linear.default)  # type: ignore[untyped-decorator, unused-ignore]
def _linear_rule(input: Any, weight: Any, bias: Any = None) -> list[tuple[list[Any], list[Any]]]:
    """Rows of the input, columns of the result (rows of the weight), or the terms of the sum."""
    last = len(input.shape) - 1
    one = [Replicate()] if bias is not None else [None]
    found: list[tuple[list[Any], list[Any]]] = [([Replicate()], [Replicate(), Replicate(), *one])]
    found += [([Shard(i)], [Shard(i), Replicate(), *one]) for i in range(last)]
    columns = [Shard(0)] if bias is not None else [None]
    found.append(([Shard(last)], [Replicate(), Shard(0), *columns]))
    if bias is None:
        found.append(([Partial()], [Shard(last), Shard(1), None]))
    return found


def attention_of_dtensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    options: dict[str, Any],
) -> tuple[DTensor, DTensor, DTensor]:
    """`mha_ext.attention` on DTensors: batch and heads lie as query's do, all else is gathered. (out, lse, lse_low).

    Key, value, mask, bias and key_lengths may be plain tensors, the same on every rank. A seed that is not given is
    drawn, and that of the mesh' first rank is taken.

    Raises:
        ValueError: where the heads are sharded, and the ranks do not divide them.
    """
    assert isinstance(query, DTensor)
    mesh = query.device_mesh
    placements: list[Placement] = [
        p if p in (Shard(0), Shard(1)) else Replicate() for p in query.placements
    ]
    batch, heads = (_cut(query, placements, dim) for dim in (0, 1))
    _check_heads(query.shape[1], key.shape[1], mesh, placements)

    def local(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        whole = _as_dtensor(tensor, mesh)
        where: list[Placement] = []
        for placement in placements:
            if placement.is_replicate():
                where.append(placement)
            else:
                dim = BATCH if placement == Shard(0) else HEADS
                where.append(_placement(name, tensor.shape, dim))
        grads = [  # what several ranks read has a gradient that is the sum of theirs
            Partial() if place.is_replicate() and placement.is_shard() else place
            for place, placement in zip(where, placements)
        ]
        here: Tensor = whole.redistribute(mesh, where).to_local(grad_placements=grads)
        return here

    if options.get("dropout_p") and seed is None:
        groups = mesh.get_all_groups()
        seed = shared_seed(query.device, groups)
    found = _forward(
        local("query", query),
        local("key", key),
        local("value", value),
        local("mask", mask),
        local("bias", bias),
        local("key_lengths", key_lengths),
        local("seed", seed),
        **options,
        origin=[batch, heads, 0, 0],
    )
    sizes = query.shape[:3]
    count, length, width = query.shape[1], query.shape[2], value.shape[-1]
    stride = (length * count * width, width, count * width, 1)
    lse_stride = (count * length, length, 1)

    def whole(tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> DTensor:
        made: DTensor = DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return made

    return (
        whole(found[0], (*sizes, width), stride),
        whole(found[1], tuple(sizes), lse_stride),
        whole(found[2], tuple(sizes), lse_stride),
    )


def weights_of_dtensors(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The operator attention_weights, whose sharding rule is enough: it knows no dropout."""
    query = tensors[0]
    assert isinstance(query, DTensor)
    mesh = query.device_mesh
    weights: Tensor = _weights(
        *(None if t is None else _as_dtensor(t, mesh) for t in tensors), **options
    )
    return weights


def _as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    made: DTensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def _cut(tensor: DTensor, placements: list[Placement], dim: int) -> int:
    """The global position of this rank's first element along a dimension, as Shard cuts it: chunk by chunk."""
    mesh, first, size = tensor.device_mesh, 0, tensor.shape[dim]
    for i, placement in enumerate(placements):
        if placement == Shard(dim):
            chunk = -(-size // mesh.size(i))
            begin = min(mesh.get_local_rank(i) * chunk, size)
            first, size = first + begin, min(chunk, size - begin)
    return first


def _check_heads(heads: int, kv_heads: int, mesh: DeviceMesh, placements: list[Placement]) -> None:
    ranks = 1
    for i, placement in enumerate(placements):
        if placement == Shard(1):
            ranks *= mesh.size(i)
    if heads % ranks or kv_heads % ranks:
        raise ValueError(
            f"query and key must have heads that the {ranks} ranks of Shard(1) divide, not {heads} and {kv_heads}; "
            "shard the batch, or repeat the key heads"
        )
