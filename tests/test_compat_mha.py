"""mha_ext.compat.MultiheadAttention is nn.MultiheadAttention to whoever uses it; swapping and converting models."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import mha_ext
from mha_ext import compat

DOUBLE = {"dtype": torch.float64}


def pair(*args: Any, **kwargs: Any) -> tuple[nn.MultiheadAttention, compat.MultiheadAttention]:
    """PyTorch's and ours with the same random parameters."""
    theirs = nn.MultiheadAttention(*args, **kwargs)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = compat.MultiheadAttention(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def same(ours: Any, theirs: Any, inputs: list[Tensor] | None = None) -> None:
    """Outputs, weights and the gradients of all inputs and parameters."""
    assert (ours[1] is None) == (theirs[1] is None)
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            assert_close(a, b, equal_nan=False)


def test_pytorchs_own_module_inputs() -> None:
    pytest.importorskip("expecttest", reason="pip install expecttest (the extra [test])")
    from torch.testing._internal.common_modules import module_db

    (info,) = (m for m in module_db if m.module_cls is nn.MultiheadAttention)
    count = 0
    for training in (False, True):
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
        for sample in samples:
            made, given = sample.constructor_input, sample.forward_input
            theirs, ours = pair(*made.args, **made.kwargs, **DOUBLE)
            theirs.train(training), ours.train(training)
            results = [module(*given.args, **given.kwargs) for module in (ours, theirs)]
            visible = results[1][1].isnan().logical_not().all()
            if visible:  # PyTorch gives NaN where a query may attend to nothing
                same(*results)
            count += 1
    assert count >= 64


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}, {"kdim": 12, "vdim": 10}])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("bias", [False, True])
def test_masks_and_gradients(
    batch_first: bool, widths: dict[str, int], extra: dict[str, bool], bias: bool
) -> None:
    torch.manual_seed(0)
    length, keys, batch, heads = 5, 7, 2, 3
    theirs, ours = pair(12, heads, batch_first=batch_first, bias=bias, **widths, **extra, **DOUBLE)
    sizes = [(length, 12), (keys, widths.get("kdim", 12)), (keys, widths.get("vdim", 12))]
    inputs = [torch.randn(n, batch, w, requires_grad=True, **DOUBLE) for n, w in sizes]
    if batch_first:
        inputs = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in inputs]
    flat = torch.rand(length, keys) < 0.4
    flat[:, 0] = False
    deep = torch.rand(batch * heads, length, keys) < 0.4
    deep[:, :, 0] = False
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    masks = [None, flat, deep, torch.randn(length, keys, requires_grad=True, **DOUBLE)]
    masks.append(torch.randn(batch * heads, length, keys, **DOUBLE))
    paddings = [None, padding, torch.randn(batch, keys, requires_grad=True, **DOUBLE)]
    for attn_mask, key_padding_mask, average in itertools.product(masks, paddings, (True, False)):
        given = [attn_mask, key_padding_mask]
        if all(m is not None for m in given) and attn_mask.dtype != key_padding_mask.dtype:  # type: ignore[union-attr]
            continue  # deprecated there
        wanted = [*inputs, *(m for m in given if m is not None and m.requires_grad)]
        grads = []
        for module in (ours, theirs):
            out, weights = module(
                *inputs, key_padding_mask, attn_mask=attn_mask, average_attn_weights=average
            )
            shape = (batch, length, keys + len(extra))
            assert weights.shape == (shape if average else (batch, heads, *shape[1:]))
            generator = torch.Generator().manual_seed(1)
            value = sum(
                (x * torch.randn(x.shape, generator=generator, **DOUBLE)).sum()
                for x in (out, weights)
            )
            grads.append(
                [out, weights, *torch.autograd.grad(value, [*wanted, *module.parameters()])]
            )
        for a, b in zip(*grads, strict=True):
            assert_close(a, b)


def test_self_attention_without_weights_and_the_causal_hint() -> None:
    torch.manual_seed(0)
    theirs, ours = pair(12, 2, **DOUBLE)
    x = torch.randn(6, 3, 12, **DOUBLE)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = torch.zeros(3, 6).bool()
    padding[1, 4:] = True
    for need_weights, key_padding_mask in itertools.product((False, True), (None, padding)):
        options = {"need_weights": need_weights, "attn_mask": mask, "is_causal": True}
        if key_padding_mask is not None:
            options["key_padding_mask"] = torch.zeros(3, 6, **DOUBLE).masked_fill(
                key_padding_mask, float("-inf")
            )
        same(ours(x, x, x, **options), theirs(x, x, x, **options))
    with pytest.raises(RuntimeError, match="attn_mask must be given where is_causal is True"):
        ours(x, x, x, is_causal=True)


def test_dropout() -> None:
    torch.manual_seed(0)
    _, ours = pair(12, 2, dropout=0.25)
    nn.init.zeros_(ours.in_proj_weight)
    x = torch.randn(40, 1, 12)
    out, weights = ours(x, x, x, average_attn_weights=False)
    kept = weights > 0  # every probability is 1 / 40 before dropout
    assert_close(weights[kept], torch.full_like(weights[kept], 1 / 30))
    assert 0.2 < (~kept).float().mean() < 0.3
    v = ours.in_proj_bias.chunk(3)[2].unflatten(0, (2, 6))
    expected = torch.einsum("nhls,hd->lnhd", weights, v).flatten(-2)
    assert_close(out, ours.out_proj(expected))
    ours.eval()
    assert_close(ours(x, x, x)[1], torch.full((1, 40, 40), 1 / 40))
    everything = compat.MultiheadAttention(12, 2, dropout=1.0)
    out, weights = everything(x, x, x)
    assert weights.abs().max() == 0
    assert_close(out, everything.out_proj.bias.expand(40, 1, 12))


def test_it_is_pytorchs_module() -> None:
    theirs, ours = pair(12, 2, dropout=0.1, add_bias_kv=True)
    assert isinstance(ours, nn.MultiheadAttention)
    signatures = [inspect.signature(type(module).forward).parameters for module in (ours, theirs)]
    assert [*signatures[0]] == [*signatures[1]]
    assert all(a.default is signatures[1][name].default for name, a in signatures[0].items())
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert repr(ours) == repr(theirs)
    skipped = {"_same_width", "_stacked", "_qkv_same_embed_dim"}
    assert set(vars(ours)) - skipped == set(vars(theirs)) - skipped
    x = torch.randn(5, 2, 12)
    ours.eval()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        same(twin(x, x, x), ours(x, x, x))
    torch.manual_seed(0)
    fresh = nn.MultiheadAttention(12, 2)
    torch.manual_seed(0)
    for name, value in compat.MultiheadAttention(12, 2).state_dict().items():
        assert_close(value, fresh.state_dict()[name])


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda x: {"query": x[0, 0]}, AssertionError),
        (lambda x: {"key": x[0]}, AssertionError),
        (lambda x: {"query": x[..., :8]}, AssertionError),
        (lambda x: {"value": x[:3]}, AssertionError),
        (lambda x: {"attn_mask": torch.ones(5, 4).bool()}, RuntimeError),
        (lambda x: {"attn_mask": torch.ones(3, 5, 5).bool()}, RuntimeError),
        (lambda x: {"attn_mask": torch.ones(5).bool()}, AssertionError),
        (lambda x: {"attn_mask": torch.ones(5, 5).int()}, AssertionError),
        (lambda x: {"key_padding_mask": torch.ones(5).bool()}, AssertionError),
        (lambda x: {"key_padding_mask": torch.ones(2, 4).bool()}, AssertionError),
    ],
)
def test_error_types_are_pytorchs(change: Any, error: type[Exception]) -> None:
    theirs, ours = pair(12, 2)
    x = torch.randn(5, 2, 12)
    for module in (ours, theirs):
        with pytest.raises(error):
            module(**{"query": x, "key": x, "value": x, **change(x)})
    with pytest.raises(error) as caught:
        ours(**{"query": x, "key": x, "value": x, **change(x)})
    assert " must " in str(caught.value) and "\n" not in str(caught.value)


def model() -> nn.Transformer:
    return nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True).double()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_whole_transformer(training: bool, grad: bool) -> None:
    torch.manual_seed(0)
    theirs = model().train(training)
    ours = copy.deepcopy(theirs)
    report = compat.replace_attention(ours)
    assert [entry.swapped for entry in report] == [True] * 6
    assert {entry.name for entry in report} >= {"encoder.layers.0.self_attn"}
    assert not any(type(m) is nn.MultiheadAttention for m in ours.modules())
    source, target = torch.randn(2, 7, 16, **DOUBLE), torch.randn(2, 5, 16, **DOUBLE)
    padding = torch.zeros(2, 7).bool()
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    floating = torch.zeros(2, 7, **DOUBLE).masked_fill(padding, float("-inf"))
    calls = []
    for attention in (m for m in ours.modules() if isinstance(m, compat.MultiheadAttention)):
        attention.out_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.set_grad_enabled(grad):
        results = [
            m(
                source,
                target,
                tgt_mask=causal,
                tgt_is_causal=True,
                src_key_padding_mask=mask,
                memory_key_padding_mask=floating,
            )
            for m, mask in ((ours, padding), (theirs, padding), (ours, floating))
        ]
    assert_close(results[0], results[1])
    assert_close(results[2], results[1])
    assert len(calls) == 12  # no layer left for a kernel of PyTorch's own


def test_replacing_shares_the_parameters() -> None:
    layers = model()
    shared = nn.ModuleList([layers.encoder.layers[0].self_attn])
    whole = nn.ModuleDict({"a": layers, "b": shared})
    before = dict(whole.named_parameters())

    class Own(nn.MultiheadAttention):
        pass

    whole["own"] = Own(16, 2)
    before |= {f"own.{name}": value for name, value in whole["own"].named_parameters()}
    report = compat.replace_attention(whole)
    after = dict(whole.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert whole["b"][0] is whole["a"].encoder.layers[0].self_attn  # tied modules stay tied
    (left,) = (entry for entry in report if not entry.swapped)
    assert left.name == "own" and "Own" in left.reason
    again = compat.replace_attention(whole)
    assert not any(entry.swapped for entry in again)
    with pytest.raises(ValueError, match="cannot be swapped in place"):
        compat.replace_attention(nn.MultiheadAttention(4, 2))


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
@pytest.mark.parametrize("bias", [False, True])
def test_converters(widths: dict[str, int], bias: bool) -> None:
    torch.manual_seed(0)
    theirs, ours = pair(12, 3, batch_first=True, bias=bias, **widths, **DOUBLE)
    x, key = torch.randn(2, 5, 12, **DOUBLE), torch.randn(2, 7, widths.get("kdim", 12), **DOUBLE)
    value = torch.randn(2, 7, widths.get("vdim", 12), **DOUBLE)
    expected = theirs(x, key, value, average_attn_weights=False)
    same(compat.from_torch(theirs)(x, key, value, average_attn_weights=False), expected)
    assert compat.from_torch(theirs).out_proj.weight is theirs.out_proj.weight
    back = compat.to_torch(ours)
    assert type(back) is nn.MultiheadAttention and back.out_proj.weight is ours.out_proj.weight
    same(back(x, key, value, average_attn_weights=False), expected)
    for module in (theirs, ours):
        separate = compat.to_multi_head_attention(module)
        same(separate(x, key, value, need_weights=True), expected)
        again = compat.to_torch(separate)
        same(again(x, key, value, average_attn_weights=False), expected)


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
def test_frozen_parameters_stay_so(widths: dict[str, int]) -> None:
    theirs = nn.MultiheadAttention(12, 3, **widths)
    theirs.requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(True)
    ours = compat.to_multi_head_attention(theirs)
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == ["out_proj.bias"]
    back = compat.to_torch(ours)
    assert [n for n, p in back.named_parameters() if p.requires_grad] == ["out_proj.bias"]


def test_what_cannot_be_converted_says_so() -> None:
    with pytest.raises(ValueError, match="it has add_zero_attn"):
        compat.to_multi_head_attention(nn.MultiheadAttention(4, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match="its num_kv_heads is 1"):
        compat.to_torch(mha_ext.MultiHeadAttention(4, 2, num_kv_heads=1))
    with pytest.raises(ValueError, match="its rotary_base is 100.0"):
        compat.to_torch(mha_ext.MultiHeadAttention(4, 2, rotary_base=100.0))
    with pytest.raises(ValueError, match="its empty_rows is uniform"):
        compat.to_torch(mha_ext.MultiHeadAttention(4, 2, empty_rows="uniform"))
    uneven = mha_ext.MultiHeadAttention(4, 2)
    uneven.k_proj.requires_grad_(False)
    with pytest.raises(
        ValueError, match="q_proj, k_proj and v_proj must all need gradients or none"
    ):
        compat.to_torch(uneven)
    with pytest.raises(TypeError, match="must be an nn.MultiheadAttention itself, not Linear"):
        compat.from_torch(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_under_compile() -> None:
    _, ours = pair(12, 2, **DOUBLE)
    x = torch.randn(5, 2, 12, **DOUBLE)
    mask = torch.ones(5, 5).triu(1).bool()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    same(compiled(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask))
