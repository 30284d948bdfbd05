"""The five hand-written attentions of examples/seeds.py: their weights in, their numbers out.

Each is written here in plain PyTorch. Outputs, probabilities and gradients agree to 1e-5 in
float32, for every kind of mask that it uses, rows that are fully masked included.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sizes import size
from torch import Tensor, nn

import mha_ext
from mha_ext import reference

pytestmark = pytest.mark.isa


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


seeds = load(Path(__file__).parents[1] / "examples" / "seeds.py")


class ByHand(nn.Module):
    """softmax(Q K^T / sqrt(d)) V over heads, as the five write it; how they mask differs."""

    def __init__(self, widths: tuple[int, int, int], width: int, heads: int, **options: Any):
        super().__init__()
        bias = options.get("bias", True)
        self.query, self.key, self.value = (nn.Linear(w, width, bias=bias) for w in widths)
        self.dense = nn.Linear(width, width, bias=bias)
        self.drop: nn.Module = nn.Dropout(options.get("dropout", 0.0))
        self.heads = heads
        self.fill = options.get("fill", -1e9)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k = self.split(self.query(query)), self.split(self.key(key))
        v = self.split(self.value(value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, self.fill)
        if added is not None:
            scores = scores + added
        weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(self.drop(weights), v).permute(0, 2, 1, 3).contiguous()
        return self.dense(out.view(out.shape[0], out.shape[1], -1)), weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.attend(query, key, value, mask, added)


class BertByHand(ByHand):
    """Attention, dropout, residual, layer norm with epsilon inside the root."""

    def __init__(self, width: int, heads: int, dropout: float, hidden_dropout: float):
        super().__init__((width, width, width), width, heads, dropout=dropout)
        self.out_drop = nn.Dropout(hidden_dropout)
        self.gamma = nn.Parameter(torch.randn(width))
        self.beta = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, weights = self.attend(x, x, x, None, added)
        x = x + self.out_drop(out)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return self.gamma * (centred / torch.sqrt(variance + 1e-12)) + self.beta, weights


class Replay(nn.Module):
    """Dropout that draws a seed as mha_ext does and drops what it drops for that seed."""

    def __init__(self, dropout_p: float):
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, weights: Tensor) -> Tensor:
        seed = torch.randint(0, 2**32, (2,))
        kept = reference.keep(seed, self.dropout_p, weights.shape)
        return weights * kept * reference.keep_scale(self.dropout_p)


PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "out_proj"}


def give_weights(by_hand: ByHand, ours: nn.Module) -> dict[str, str]:
    """Copies all parameters over; returns which name became which."""
    block = isinstance(ours, mha_ext.AttentionBlock)
    prefix = "attention." if block else ""
    names = {
        f"{old}.{kind}": f"{prefix}{new}.{kind}"
        for old, new in PROJECTIONS.items()
        for kind in ("weight", "bias")
        if getattr(getattr(by_hand, old), kind) is not None
    }
    if block:
        names |= {"gamma": "norm.weight", "beta": "norm.bias"}
    theirs = dict(by_hand.named_parameters())
    ours.load_state_dict({new: theirs[old].detach() for old, new in names.items()}, strict=True)
    return names


def assert_close(found: Tensor, wanted: Tensor, name: str) -> None:
    """1e-5, relative to the largest element where that is above 1."""
    size = max(1.0, float(wanted.abs().max()))
    assert float((found - wanted).abs().max()) <= 1e-5 * size, name


def compare(
    by_hand: ByHand,
    ours: nn.Module,
    inputs: tuple[Tensor, ...],
    theirs_options: dict[str, Any],
    our_options: dict[str, Any],
) -> None:
    """Outputs, probabilities, and gradients of every input and parameter."""
    names = give_weights(by_hand, ours)

    def run(module: nn.Module, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        torch.manual_seed(5)
        leaves = [x.detach().requires_grad_() for x in inputs]
        module.zero_grad()
        out, weights = module(*leaves, **options)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape) / out.shape[0])
        return out.detach(), weights.detach(), [leaf.grad for leaf in leaves]

    theirs = run(by_hand, **theirs_options)
    mine = run(ours, need_weights=True, **our_options)
    assert_close(mine[0], theirs[0], "output")
    assert_close(mine[1], theirs[1], "weights")
    for index, (grad, wanted) in enumerate(zip(mine[2], theirs[2], strict=True)):
        assert_close(grad, wanted, f"gradient of input {index}")
    old, new = dict(by_hand.named_parameters()), dict(ours.named_parameters())
    for theirs_name, our_name in names.items():
        assert_close(new[our_name].grad, old[theirs_name].grad, f"gradient of {our_name}")


def masks_of(batch: int, heads: int, queries: int, keys: int) -> dict[str, Tensor | None]:
    """The kinds of masks people pass, each with rows that are fully masked."""
    rng = torch.Generator().manual_seed(1)
    pairs = (torch.rand(batch, 1, queries, keys, generator=rng) < 0.6).long()
    pairs[0, 0, 1] = 0
    padding = (torch.arange(keys) < torch.arange(batch)[:, None] % (keys + 1)).long()
    padding = padding[:, None, None, :]  # the first sequence is empty
    return {
        "none": None,
        "padding": padding,
        "padding bool": padding.bool(),
        "padding expanded": padding.expand(batch, heads, queries, keys),
        "pairs": pairs,
        "pairs and heads": pairs * (torch.rand(batch, heads, 1, keys, generator=rng) < 0.8),
        "look-ahead": torch.ones(queries, keys).tril().long()[None, None],
        "look-ahead and padding": torch.ones(queries, keys).tril().long() * padding,
        "nothing at all": torch.zeros(1, 1, 1, keys).long(),
    }


KINDS = list(masks_of(2, 2, 2, 2))
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout replayed"])


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention(kind: str, training: bool) -> None:
    by_hand = ByHand((300, 300, 300), 300, 6, fill=-1e10, dropout=0.1)
    by_hand.drop = Replay(0.1) if training else nn.Identity()
    ours = seeds.cross_attention(hid_dim=300, n_heads=6, dropout=0.1).train(training)
    batch = size(64, emulated=4)
    inputs = torch.rand(batch, 12, 300), torch.rand(batch, 10, 300), torch.rand(batch, 10, 300)
    mask = masks_of(batch, 6, 12, 10)[kind]
    compare(by_hand, ours, inputs, {"mask": mask}, {"mask": mask})


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_self_attention(kind: str, training: bool) -> None:
    by_hand = ByHand((128, 128, 128), 128, 8, fill=-1e20)
    by_hand.drop = Replay(0.1) if training else nn.Identity()
    ours = seeds.self_attention(128, 8).train(training)
    x = torch.rand(3, 7, 128)
    mask = masks_of(3, 8, 7, 7)[kind]
    compare(by_hand, ours, (x, x, x), {"mask": mask}, {"mask": mask})


def test_self_attention_prints_its_weights() -> None:
    """[0, 1], [0.5, 0.5] for a row with nothing to attend to, [1, 0]: whatever the parameters."""
    layer = seeds.self_attention(128, 8)
    padding = torch.tensor([[0, 1], [0, 0], [1, 0]])
    mask = padding[:, None, None, :].expand(3, 8, 2, 2)
    out, weights = layer(torch.rand(3, 2, 128), mask=mask, need_weights=True)
    rows = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    assert torch.equal(weights, rows[:, None, None, :].expand(3, 8, 2, 2))
    assert out.shape == (3, 2, 128)


def test_three_widths() -> None:
    by_hand = ByHand((20, 30, 40), 64, 4)
    ours = seeds.three_widths(20, 30, 40, hidden_size=16, num_heads=4)
    inputs = torch.rand(2, 5, 20), torch.rand(2, 7, 30), torch.rand(2, 7, 40)
    compare(by_hand, ours, inputs, {}, {})


@MODES
@pytest.mark.parametrize("kind", ["none", "-10000", "finfo.min", "-inf", "finfo.min everywhere"])
def test_bert_layer(kind: str, training: bool) -> None:
    by_hand = BertByHand(96, 12, dropout=0.2, hidden_dropout=0.3).train(training)
    by_hand.drop = Replay(0.2) if training else nn.Identity()
    ours = seeds.bert_layer(12, 96, 96, 0.3, 0.2).train(training)
    x = torch.rand(3, 9, 96)
    added = None
    if kind != "none":
        low = {"-10000": -10000.0, "-inf": -torch.inf}.get(kind, torch.finfo(torch.float32).min)
        lengths = torch.tensor([9, 4, 0 if "everywhere" in kind else 1])
        hidden = torch.arange(9) >= lengths[:, None]
        added = torch.zeros(3, 9).masked_fill(hidden, low)[:, None, None, :]
    compare(by_hand, ours, (x,), {"added": added}, {"bias": added})


@pytest.mark.cpu_alone("calls no kernel")
def test_bert_layer_refuses_a_width_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"(?s)768.*7"):
        seeds.bert_layer(7, 768, 768, 0.1, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_visible_attention(kind: str) -> None:
    by_hand = ByHand((64, 64, 64), 64, 8, bias=False)
    ours = seeds.visible_attention(64, 8)
    inputs = torch.rand(3, 5, 64), torch.rand(3, 6, 64), torch.rand(3, 6, 64)
    mask = masks_of(3, 8, 5, 6)[kind]
    compare(by_hand, ours, inputs, {"mask": mask}, {"mask": mask})


@pytest.mark.parametrize(
    "build, mask",
    [
        (lambda: seeds.cross_attention(60, 6, 0.1), torch.tensor([1, 1, 0, 1, 1])),
        (lambda: seeds.cross_attention(60, 6, 0.1), torch.zeros(5, dtype=torch.long)),
        (lambda: seeds.self_attention(60, 6), None),
        (lambda: seeds.bert_layer(6, 60, 60, 0.0, 0.5).attention, None),
    ],
)
def test_dropout_keeps_the_mean(
    build: Callable[[], mha_ext.MultiHeadAttention], mask: Tensor | None
) -> None:
    """Over many draws the mean of the output is the output without dropout, within 5 sigma."""
    layer, x, draws = build(), torch.rand(1, 5, 60), size(400, emulated=100)
    with torch.no_grad():
        wanted = layer.eval()(x, mask=mask)
        layer.train()
        outs = torch.cat([layer(x, mask=mask) for _ in range(draws)]).double()
    sigma = outs.std(0) / draws**0.5
    assert (sigma > 0).all()
    assert ((outs.mean(0) - wanted[0]).abs() <= 5 * sigma + 1e-6).all()


def test_the_example_prints_what_they_print(capsys: pytest.CaptureFixture[str]) -> None:
    seeds.main()
    printed = capsys.readouterr().out
    for text in (
        "torch.Size([64, 12, 300])",
        "[0.5000, 0.5000]",
        "torch.Size([3, 2, 128])",
        "torch.Size([2, 5, 64])",
        "torch.Size([2, 6, 768])",
        "ValueError: embed_dim must be a multiple of num_heads, not 768 over 7",
        "[2, 8, 4, 64]",
    ):
        assert text in printed
    assert re.search(
        r"query +\[2, 4, 512\] -> q_proj \[2, 4, 512\] -> split \[2, 8, 4, 64\]", printed
    )
