"""MultiHeadAttention and AttentionBlock: projections, masks, weights, layouts, initialisation."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext

pytestmark = pytest.mark.isa


def from_torch(theirs: nn.MultiheadAttention) -> mha_ext.MultiHeadAttention:
    """Our layer with the parameters of torch's."""
    ours = mha_ext.MultiHeadAttention(theirs.embed_dim, theirs.num_heads)
    with torch.no_grad():
        for name, weight, bias in zip(
            ("q_proj", "k_proj", "v_proj"),
            theirs.in_proj_weight.chunk(3),
            theirs.in_proj_bias.chunk(3),
            strict=True,
        ):
            getattr(ours, name).weight.copy_(weight)
            getattr(ours, name).bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return ours


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masks", ["", "mask", "padding", "mask padding"])
def test_agrees_with_torch(masks: str) -> None:
    """Output and weights of nn.MultiheadAttention, whose masks mean the opposite (True = hide)."""
    theirs = nn.MultiheadAttention(48, 4, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = from_torch(theirs)
    query, key, value = torch.randn(3, 7, 48), torch.randn(3, 9, 48), torch.randn(3, 9, 48)
    mask = torch.rand(7, 9) < 0.7
    mask[:, 0] = True
    padding = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    mine, other = {}, {}
    if "mask" in masks:
        mine["mask"], other["attn_mask"] = mask, ~mask
    if "padding" in masks:
        mine["key_padding_mask"], other["key_padding_mask"] = padding, ~padding
    for average in (False, True):
        found = ours(query, key, value, need_weights=True, average_weights=average, **mine)
        wanted = theirs(query, key, value, average_attn_weights=average, **other)
        for f, w in zip(found, wanted, strict=True):
            close(f, w)


def test_arguments_default_to_each_other() -> None:
    layer = mha_ext.MultiHeadAttention(16, 2)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    assert torch.equal(layer(x), layer(x, x, x))
    assert torch.equal(layer(x, y), layer(x, y, y))


def test_every_width_is_free() -> None:
    layer = mha_ext.MultiHeadAttention(
        40,
        4,
        query_dim=3,
        key_dim=5,
        value_dim=7,
        head_dim=6,
        value_head_dim=9,
        out_dim=11,
        num_kv_heads=2,
        bias=False,
    )
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "q_proj.weight": (24, 3),
        "k_proj.weight": (12, 5),
        "v_proj.weight": (18, 7),
        "out_proj.weight": (11, 36),
    }
    inputs = torch.randn(2, 4, 3), torch.randn(2, 6, 5), torch.randn(2, 6, 7)
    out, weights = layer(*inputs, need_weights=True)
    assert out.shape == (2, 4, 11) and weights.shape == (2, 4, 4, 6)
    q, k, v = (
        projection(x).unflatten(-1, (-1, width)).transpose(1, 2)
        for projection, x, width in zip(
            (layer.q_proj, layer.k_proj, layer.v_proj), inputs, (6, 6, 9), strict=True
        )
    )
    heads = mha_ext.reference.attention(q, k, v)
    close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))


@pytest.mark.cpu_alone("calls no kernel")
def test_initialised_as_torch_does() -> None:
    """Xavier over the stacked q, k, v where the widths agree, apart where they differ."""
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(256, 4), mha_ext.MultiHeadAttention(256, 4)
    for projection, weight in zip(
        (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj),
        (*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight),
        strict=True,
    ):
        mine, other = projection.weight.detach(), weight.detach()
        assert float(mine.std() / other.std()) == pytest.approx(1, abs=0.02)
        assert float(mine.abs().max() / other.abs().max()) == pytest.approx(1, abs=0.002)
        assert not projection.bias.any()
    ours = mha_ext.MultiHeadAttention(256, 4, key_dim=100)
    assert float(ours.k_proj.weight.detach().abs().max()) == pytest.approx(
        math.sqrt(6 / 356), rel=0.01
    )
    before = copy.deepcopy(ours.state_dict())
    nn.init.ones_(ours.q_proj.bias)
    ours.reset_parameters()
    assert not ours.q_proj.bias.any()
    assert not torch.equal(before["v_proj.weight"], ours.v_proj.weight)


def test_device_and_dtype() -> None:
    meta = mha_ext.AttentionBlock(16, 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}
    layer = mha_ext.MultiHeadAttention(16, 2, dtype=torch.float64)
    assert layer(torch.randn(2, 3, 16, dtype=torch.float64)).dtype == torch.float64


def test_projections_are_called_as_modules() -> None:
    """Hooks run, replaced children are used, and gradients reach all parameters."""
    layer = mha_ext.MultiHeadAttention(16, 2)
    called = []
    for name, child in layer.named_children():
        child.register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.randn(2, 3, 16)).sum().backward()
    assert sorted(called) == ["k_proj", "out_proj", "q_proj", "v_proj"]
    assert all(p.grad is not None for p in layer.parameters())
    layer.v_proj = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))
    assert layer(torch.randn(2, 3, 16)).shape == (2, 3, 16)


def test_a_shard_of_the_heads() -> None:
    """With projections that hold some of the heads, the layer works on those; the shards add up."""
    layer = mha_ext.MultiHeadAttention(32, 4)
    nn.init.normal_(layer.q_proj.bias)
    x = torch.randn(2, 5, 32)
    parts = []
    for rank in range(2):
        shard, half = copy.deepcopy(layer), slice(16 * rank, 16 * rank + 16)
        for name in ("q_proj", "k_proj", "v_proj"):
            child = getattr(shard, name)
            child.weight = nn.Parameter(child.weight[half])
            child.bias = nn.Parameter(child.bias[half])
        shard.out_proj.weight = nn.Parameter(layer.out_proj.weight[:, half])
        shard.out_proj.bias = None
        parts.append(shard(x))
    close(parts[0] + parts[1] + layer.out_proj.bias, layer(x))


class Operator(TorchDispatchMode):
    """What attention_forward is given, and what it returns."""

    args: tuple[Any, ...] = ()
    results: tuple[Tensor, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.mha_ext.attention_forward.default:
            self.args, self.results = args, results
        return results


@pytest.mark.parametrize("need_weights", [False, True])
def test_splitting_and_merging_the_heads_copies_nothing(need_weights: bool) -> None:
    """The operator gets views of what the projections returned; out_proj gets a view of its out."""
    layer = mha_ext.MultiHeadAttention(32, 4, num_kv_heads=2)
    pointers: dict[str, int] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(
            lambda _, x, y, name=name: pointers.__setitem__(name, y.data_ptr())
        )
    layer.out_proj.register_forward_pre_hook(
        lambda _, x: pointers.__setitem__("merged", x[0].data_ptr())
    )
    with Operator() as call:
        layer(torch.randn(2, 5, 32), need_weights=need_weights)
    names = ("q_proj", "k_proj", "v_proj", "merged")
    seen = (*call.args[:3], call.results[0])
    assert {name: tensor.data_ptr() for name, tensor in zip(names, seen)} == pointers


def the_mask_passed(layer: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    with Operator() as call:
        layer(*inputs, **options)
    return call.args[3]


def test_masks_are_not_expanded() -> None:
    """Padding alone is passed as a view; joined to a mask it takes the room of their broadcast."""
    layer, x = mha_ext.MultiHeadAttention(16, 4), torch.randn(3, 5, 16)
    padding = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    passed = the_mask_passed(layer, x, key_padding_mask=padding)
    assert passed.shape == (3, 1, 1, 5) and passed.data_ptr() == padding.data_ptr()
    pairs = torch.ones(5, 5).tril().bool()
    assert the_mask_passed(layer, x, mask=pairs).data_ptr() == pairs.data_ptr()
    joined = the_mask_passed(layer, x, mask=pairs, key_padding_mask=padding)
    assert joined.shape == (3, 1, 5, 5)
    expanded = pairs.expand(3, 4, 5, 5)
    assert the_mask_passed(layer, x, mask=expanded, key_padding_mask=padding).numel() == 75


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.uint16])
def test_the_two_masks_together(dtype: torch.dtype) -> None:
    """Nonzero in both = attend, for every integer dtype (2 & 1 would be 0)."""
    layer, x = mha_ext.MultiHeadAttention(16, 4), torch.randn(3, 5, 16)
    padding = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    pairs = torch.rand(3, 4, 5, 5) < 0.7
    wanted = layer(x, mask=pairs & padding[:, None, None])
    twice = (pairs.to(dtype) * 2).to(dtype)
    assert torch.equal(layer(x, mask=twice, key_padding_mask=padding.to(dtype)), wanted)


def test_options_reach_the_attention() -> None:
    """causal, window, bias, key_lengths, empty_rows, and causal overridden call by call."""
    x = torch.randn(2, 6, 16)
    layer = mha_ext.MultiHeadAttention(16, 2, causal=True)
    causal, all_keys = layer(x), layer(x, causal=False)
    close(causal[:, -1], all_keys[:, -1])
    close(layer(x, mask=torch.ones(6, 6).tril().bool(), causal=False), causal)
    lengths = torch.tensor([6, 3])
    padded = layer(x, key_lengths=lengths, causal="upper_left")
    close(padded, layer(x, key_padding_mask=torch.arange(6) < lengths[:, None]))
    layer.window = (1, None)
    band = torch.ones(6, 6).tril().triu(-1).bool()
    close(layer(x), layer(x, mask=band))
    layer.window, bias = None, torch.randn(1, 2, 6, 6, requires_grad=True)
    layer(x, bias=bias).sum().backward()
    assert bias.grad is not None and bias.grad.shape == bias.shape
    nothing = torch.zeros(6, 6).bool()
    close(layer(x, mask=nothing), layer.out_proj.bias.expand(2, 6, 16))
    layer.empty_rows = "uniform"
    _, weights = layer(x, mask=nothing, need_weights=True)
    close(weights, torch.full((2, 2, 6, 6), 1 / 6))


def test_dropout_in_training_only() -> None:
    layer, x = mha_ext.MultiHeadAttention(16, 2, dropout=0.5), torch.randn(2, 6, 16)
    torch.manual_seed(1)
    out, weights = layer(x, need_weights=True)
    torch.manual_seed(1)
    assert torch.equal(layer(x), out)
    assert not torch.equal(layer(x), out)
    close(weights.sum(-1), torch.ones(2, 2, 6))  # before dropout
    layer.eval()
    state = torch.get_rng_state()
    evaluated = layer(x)
    assert torch.equal(layer(x), evaluated) and not torch.equal(evaluated, out)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0), (0, 0)])
def test_empty_inputs(batch: int, length: int) -> None:
    layer, x = mha_ext.MultiHeadAttention(16, 2), torch.randn(batch, length, 16)
    x.requires_grad_()
    out, weights = layer(x, need_weights=True)
    assert out.shape == x.shape and weights.shape == (batch, 2, length, length)
    out.sum().backward()
    assert x.grad.shape == x.shape
    out = layer(torch.randn(2, 3, 16), torch.randn(2, 0, 16))  # nothing to attend to
    close(out, layer.out_proj.bias.expand(2, 3, 16))


def test_block() -> None:
    block = mha_ext.AttentionBlock(
        16, 2, dropout=0.1, hidden_dropout=0.2, layer_norm_eps=1e-6, causal=True
    )
    assert [name for name, _ in block.named_children()] == ["attention", "dropout", "norm"]
    assert block.norm.eps == 1e-6 and block.dropout.p == 0.2 and block.attention.dropout == 0.1
    assert mha_ext.AttentionBlock(16, 2).norm.eps == 1e-12
    x = torch.randn(2, 5, 16)
    block.eval()
    out, weights = block(x, need_weights=True, average_weights=True)
    close(out, block.norm(x + block.attention(x)))
    assert weights.shape == (2, 5, 5) and not weights.triu(1).any()
    wide = mha_ext.AttentionBlock(12, 2, query_dim=16, out_dim=16)
    assert wide(x, torch.ones(5, 5).bool()).shape == x.shape


def test_state_dict_and_repr() -> None:
    layer = mha_ext.MultiHeadAttention(16, 4, num_kv_heads=2, causal="lower_right", window=(3, 0))
    assert list(layer.state_dict()) == [
        f"{name}_proj.{kind}" for name in ("q", "k", "v", "out") for kind in ("weight", "bias")
    ]
    other = mha_ext.MultiHeadAttention(16, 4, num_kv_heads=2, causal="lower_right", window=(3, 0))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert layer.extra_repr() == (
        "embed_dim=16, num_heads=4, num_kv_heads=2, causal='lower_right', window=(3, 0)"
    )
    assert mha_ext.MultiHeadAttention(16, 4).extra_repr() == "embed_dim=16, num_heads=4"


def test_packages_are_there_when_they_are_asked_for(tmp_path: Path) -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import mha_ext; new = set(sys.modules) - before; "
        "assert not {'mha_ext.compat', 'mha_ext.visualize', 'torch._dynamo'} & new; "
        "mha_ext.compat.from_torch; mha_ext.visualize; mha_ext.distributed; mha_ext.integrations"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)  # not the source tree
    with pytest.raises(AttributeError, match="module 'mha_ext' has no attribute 'compatible'"):
        _ = mha_ext.compatible


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_of_torchs_module(widths: dict[str, int], bias: bool) -> None:
    theirs = nn.Sequential(nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, **widths))
    options = {"key_dim": widths.get("kdim"), "value_dim": widths.get("vdim")}
    ours = nn.Sequential(mha_ext.MultiHeadAttention(12, 3, bias=bias, **options))
    saved = theirs.state_dict()
    names = list(saved)
    ours.load_state_dict(saved)
    assert list(saved) == names
    x, key, value = (torch.randn(2, 5, widths.get(name, 12)) for name in ("", "kdim", "vdim"))
    expected, _ = theirs[0](x, key, value, need_weights=False)
    torch.testing.assert_close(ours[0](x, key, value), expected)
    with pytest.raises(RuntimeError, match="Unexpected key.*bias_k"):
        ours.load_state_dict(
            nn.Sequential(nn.MultiheadAttention(12, 3, add_bias_kv=True)).state_dict()
        )


def test_stacked_parameters_of_heads_that_share_keys() -> None:
    layer = mha_ext.MultiHeadAttention(12, 4, num_kv_heads=2, value_head_dim=5)
    weight, bias = torch.randn(12 + 6 + 10, 12), torch.randn(12 + 6 + 10)
    layer.load_state_dict(
        {"in_proj_weight": weight, "in_proj_bias": bias}
        | {f"out_proj.{name}": part for name, part in layer.out_proj.state_dict().items()}
    )
    for projection, first, last in (("q", 0, 12), ("k", 12, 18), ("v", 18, 28)):
        assert torch.equal(getattr(layer, f"{projection}_proj").weight, weight[first:last])
        assert torch.equal(getattr(layer, f"{projection}_proj").bias, bias[first:last])


@pytest.mark.parametrize(("rows", "shape"), [(35, "[35, 12]"), (2, "[2, 12]")])
def test_stacked_parameters_of_another_size(rows: int, shape: str) -> None:
    layer = mha_ext.MultiHeadAttention(12, 3)
    saved = nn.MultiheadAttention(12, 3).state_dict() | {"in_proj_weight": torch.randn(rows, 12)}
    before = layer.q_proj.weight.clone()
    with pytest.raises(
        RuntimeError, match=r"in_proj_weight must have 36 rows \(12 \+ 12 \+ 12 "
    ) as error:
        layer.load_state_dict(saved)
    assert shape in str(error.value)
    assert torch.equal(layer.q_proj.weight, before)


@torch.no_grad()
def test_a_block_decodes_and_attends_elsewhere() -> None:
    block = mha_ext.AttentionBlock(16, 2, causal=True, rotary_base=100.0).eval()
    x = torch.randn(2, 5, 16)
    cache = mha_ext.KVCache.of(block, batch=2, max_length=5)
    found = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(5)], 1)
    torch.testing.assert_close(found, block(x))
    torch.testing.assert_close(block(x, positions=torch.arange(5) + 7), block(x))
    across = mha_ext.AttentionBlock(16, 2, key_dim=6).eval()
    key = torch.randn(2, 7, 6)
    expected = across.norm(x + across.attention(x, key))
    torch.testing.assert_close(across(x, key=key), expected)


def test_masks_of_every_rank_beside_padding() -> None:
    layer = mha_ext.MultiHeadAttention(16, 2)
    x = torch.randn(2, 5, 16)
    padding = torch.ones(2, 5).bool()
    padding[1, 3:] = False
    for shape in ((), (5,), (5, 5), (2, 1, 5, 5), (1, 2, 1, 1)):
        mask = torch.rand(shape) < 0.7
        whole = mask.expand(2, 2, 5, 5) & padding[:, None, None, :]
        found = layer(x, mask=mask, key_padding_mask=padding)
        torch.testing.assert_close(found, layer(x, mask=whole))
