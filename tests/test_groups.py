"""Leading dimensions of query, which vmap puts there: each group is a problem of its own, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import DTYPES
from sizes import size
from torch import Tensor

pytestmark = pytest.mark.isa

OPS = torch.ops.mha_ext
B, H, HKV, D, DV = 2, 4, 2, 20, 12
LQ, LK = size((70, 150), emulated=(10, 70))
# how many dimensions each argument has of its own
OWN = {"key_lengths": 1, "seed": 1, "lse": 3, "lse_low": 3, "grad_lse": 3}
OWN |= {"lse_tangent": 3, "grad_lse_tangent": 3}


def draw(groups: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """Every argument of attention_forward, with the groups in front."""
    return {
        "query": torch.randn(*groups, B, H, LQ, D).to(dtype),
        "key": torch.randn(*groups, B, HKV, LK, D).to(dtype),
        "value": torch.randn(*groups, B, HKV, LK, DV).to(dtype),
        "mask": torch.rand(*groups, B, 1, LQ, LK) < 0.7,
        "bias": torch.randn(*groups, 1, H, LQ, LK).to(dtype),
        "key_lengths": torch.randint(0, LK + 1, (*groups, B)),
        "seed": torch.randint(0, 2**32, (*groups, 2)),
    }


def every_result(arguments: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What the operators give, one after the other, each with what the one before gave."""
    options: dict[str, Any] = {"scale": 0.3, "dropout_p": 0.2, "corner": "lower_right"}
    options |= {"window_left": 100, "uniform_empty_rows": True}
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    pairs = [arguments[name] for name in ("mask", "bias", "key_lengths")]
    seed = arguments["seed"]
    forward = OPS.attention_forward(query, key, value, *pairs, seed, **options)
    out, lse, lse_low = forward
    rng = torch.Generator().manual_seed(1)

    def like(tensor: Tensor) -> Tensor:  # the same numbers in every group
        own = OWN["lse"] if tensor.dim() == lse.dim() else 4
        drawn = torch.randn(tensor.shape[-own:], generator=rng).to(tensor.dtype)
        return drawn.expand(tensor.shape)

    grad_out, grad_lse = like(out), like(lse)
    backward = OPS.attention_backward(
        *(grad_out, grad_lse, query, key, value, *forward, *pairs, seed),
        **options,
        output_mask=[True] * 4,
    )
    del options["dropout_p"]
    weights = OPS.attention_weights(
        query, key, lse, lse_low, *pairs, **options, heads=[2, 0], rows=[5, 6, 1]
    )
    weights_backward = OPS.attention_weights_backward(
        *(like(weights), weights, query, key, lse, lse_low, *pairs),
        **options,
        heads=[2, 0],
        rows=[5, 6, 1],
        output_mask=[True] * 3,
    )
    found = {"weights": weights}
    for name, results in (("forward", forward), ("backward", backward)):
        found |= {f"{name} {i}": result for i, result in enumerate(results)}
    return found | {f"weights_backward {i}": r for i, r in enumerate(weights_backward)}


def each_group(
    function: Callable[[dict[str, Tensor | None]], dict[str, Tensor]],
    arguments: dict[str, Tensor | None],
    groups: Sequence[int],
) -> dict[str, Tensor]:
    """The loop over groups. An argument without dimensions of groups is the same for all."""
    rows = []
    for index in itertools.product(*map(range, groups)):
        one = {}
        for name, tensor in arguments.items():
            own = OWN.get(name, 4)
            if tensor is None or tensor.dim() <= own:
                one[name] = tensor
            else:
                place = tuple(
                    0 if size == 1 else i for i, size in zip(index, tensor.shape, strict=False)
                )
                one[name] = tensor[place]
        rows.append(function(one))
    return {
        name: torch.stack([row[name] for row in rows]).unflatten(0, tuple(groups))
        for name in rows[0]
    }


def check(arguments: dict[str, Tensor | None], groups: Sequence[int]) -> None:
    found, wanted = every_result(arguments), each_group(every_result, arguments, groups)
    for name, right in wanted.items():
        assert found[name].shape == right.shape, name
        assert torch.equal(found[name], right), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [(1,), (3,), (2, 3)], ids=str)
def test_groups_are_problems_of_their_own(groups: tuple[int, ...], dtype: torch.dtype) -> None:
    check(draw(groups, dtype), groups)


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "mask", "bias", "key_lengths", "seed", "key value"]
)
def test_what_groups_share_is_not_copied(name: str) -> None:
    arguments = draw((3,))
    for one in name.split():
        tensor = arguments[one]
        assert tensor is not None
        arguments[one] = tensor[:1].expand(tensor.shape)
    check(arguments, (3,))


@pytest.mark.parametrize("name", ["mask", "key_lengths", "seed"])
def test_what_has_no_groups_is_shared(name: str) -> None:
    arguments = draw((3,))
    tensor = arguments[name]
    assert tensor is not None
    arguments[name] = tensor[0]
    check(arguments, (3,))
    if name == "mask":
        arguments[name] = tensor[0, 0, 0, 0, :]
        check(arguments, (3,))
        arguments[name] = tensor[:1]  # one dimension for the groups, of size 1
        check(arguments, (3,))


@pytest.mark.parametrize("shape", [(1, H, LQ, LK), (B, 1, 1, LK), (1, 1, LQ, 1), (B, H, LQ, LK)])
def test_the_gradient_of_a_bias_is_that_of_its_group(shape: tuple[int, ...]) -> None:
    arguments = draw((2, 2))
    arguments["bias"] = torch.randn(2, 2, *shape)
    check(arguments, (2, 2))


def test_few_queries() -> None:
    arguments = draw((3,))
    for name in ("query", "mask", "bias"):
        tensor = arguments[name]
        assert tensor is not None
        arguments[name] = torch.cat([tensor[..., -3:, :]] * 3, -2)[..., :7, :]
    check(arguments, (3,))
    options: dict[str, Any] = {"scale": 1.0}
    one = [arguments[name] for name in ("query", "key", "value")]
    one[0] = one[0][..., :2, :]
    found = OPS.attention_forward(*one, None, None, None, None, **options)
    for i in range(3):
        wanted = OPS.attention_forward(*(t[i] for t in one), None, None, None, None, **options)
        assert all(torch.equal(a[i], b) for a, b in zip(found, wanted, strict=True))


def test_any_strides() -> None:
    """Groups in the middle of memory, as vmap's in_dims give them; a last stride that is not 1."""
    arguments = draw((3,))
    for name in ("query", "value"):
        tensor = arguments[name]
        assert tensor is not None
        arguments[name] = tensor.movedim(0, 2).contiguous().movedim(2, 0)
    tensor = arguments["key"]
    assert tensor is not None
    arguments["key"] = tensor[0].mT.contiguous().mT.expand(tensor.shape)
    check(arguments, (3,))


def test_memory_form() -> None:
    arguments = draw((2, 3))
    results = every_result(arguments)
    out, lse = results["forward 0"], results["forward 1"]
    assert out.transpose(-3, -2).is_contiguous() and lse.is_contiguous()
    assert arguments["key"].is_contiguous() and results["backward 1"].is_contiguous()
    arguments["key"] = arguments["key"].transpose(-3, -2).contiguous().transpose(-3, -2)
    assert every_result(arguments)["backward 1"].transpose(-3, -2).is_contiguous()


def test_no_groups() -> None:
    for groups in ((0,), (2, 0)):
        for name, result in every_result(draw(groups)).items():
            assert result.shape[: len(groups)] == groups, name


def forward(**changes: Any) -> Any:
    arguments = draw((3,)) | changes
    options = {"scale": 1.0, "dropout_p": 0.1}
    return OPS.attention_forward(*arguments.values(), **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"key": torch.randn(B, HKV, LK, D)},
            "key must have 5 dimensions [..., batch, heads, length, head_dim], but has shape "
            f"[2, 2, {LK}, 20]; split the heads with key.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
        ),
        (
            {"value": torch.randn(1, B, HKV, LK, DV)},
            f"value must have query's leading dimensions [3], but has shape [1, 2, 2, {LK}, 12]; expand it "
            "to them",
        ),
        (
            {"mask": torch.ones(2, B, H, LQ, LK).bool()},
            f"mask must broadcast to [..., batch, heads, queries, keys] = [3, 2, 4, {LQ}, {LK}], but has "
            f"shape [2, 2, 4, {LQ}, {LK}]; give it dimensions of size 1, e.g. mask[:, None, None, :] for "
            "[batch, keys]",
        ),
        (
            {"key_lengths": torch.ones(2, B).long()},
            "key_lengths must have shape [..., batch] = [3, 2], but has [2, 2]; pass one length for each "
            "batch entry",
        ),
        (
            {"seed": torch.ones(2, 2).long()},
            "seed must have shape [3, 2], but has [2, 2]; draw it with torch.randint(0, 2**32, (2,), "
            "device=query.device)",
        ),
    ],
)
def test_message(changes: dict[str, Tensor], message: str) -> None:
    for device in ("cpu", "meta"):
        moved = {name: tensor.to(device) for name, tensor in changes.items()}
        with torch.device(device), pytest.raises(ValueError) as raised:
            forward(**moved)
        assert str(raised.value) == message


def test_a_shared_bias_has_no_gradient() -> None:
    """Its sum would run across groups."""
    arguments = draw((3,))
    for bias in (torch.randn(H, LQ, LK), torch.randn(1, B, H, LQ, LK)):
        with pytest.raises(ValueError) as raised:
            every_result(arguments | {"bias": bias})
        assert str(raised.value) == (
            "bias must have query's leading dimensions [3] where its gradient is wanted, but has shape "
            f"{list(bias.shape)}; expand it to them"
        )
