"""What the examples of derivatives share: a small transformer, its plain twin, and real text.

`plain` copies a model and lets plain PyTorch compute the attention of the copy, with the same
weights: what is compared is the attention alone.
"""

from __future__ import annotations

import copy
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import mha_ext


class Block(nn.Module):
    """A pre-norm transformer layer: [B, L, width] to [B, L, width]."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = mha_ext.MultiHeadAttention(width, heads, **options)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), **options)
        return x + self.mlp(self.norm2(x))


class PlainAttention(mha_ext.MultiHeadAttention):
    """The same layer, its attention by the definition in plain PyTorch: quadratic, any order."""

    def forward(self, query: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        q, k, v = (
            projection(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = mha_ext.reference.attention(q, k, v, causal=self.causal, **options)
        return self.out_proj(out.transpose(1, 2).flatten(-2))


def plain(model: nn.Module) -> nn.Module:
    """A copy of the model whose attention plain PyTorch computes."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is mha_ext.MultiHeadAttention:
            module.__class__ = PlainAttention
    return twin


class CharacterModel(nn.Module):
    """A causal language model over characters: [B, L] to [B, L, characters]."""

    def __init__(self, characters: int, length: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position.weight[: text.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of predicting each next character of [B, L]."""
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Text:
    """English that ships with Python: the topics of its help, as numbers."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics.values())
        characters = sorted(set(text))
        codes = {character: code for code, character in enumerate(characters)}
        self.characters = len(characters)
        self.codes = torch.tensor([codes[character] for character in text])

    def sample(self, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """[count, length] pieces from random places."""
        places = torch.randint(len(self.codes) - length, (count, 1), generator=generator)
        return self.codes[places + torch.arange(length)]


class Timer:
    seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def both(model: nn.Module, train: Callable[[nn.Module], list[float]]) -> tuple[nn.Module, float]:
    """Train the model and its plain twin from the same start; print both; return the trained model
    and the largest relative difference of what `train` reports, over the first ten entries (later
    ones drift apart by rounding, as two runs of anything do)."""
    twin, reports, seconds = plain(model), {}, {}
    for name, candidate in (("mha_ext", model), ("plain PyTorch", twin)):
        torch.manual_seed(0)
        timer = Timer()
        with timer.running():
            reports[name] = train(candidate)
        seconds[name] = timer.seconds
    ours, theirs = reports.values()
    print(f"{'step':>6}  {'mha_ext':>12}  {'plain PyTorch':>14}")
    shown = {0, 1, 2, *range(0, len(ours), max(1, len(ours) // 8)), len(ours) - 1}
    for step in sorted(shown & set(range(len(ours)))):
        print(f"{step:6}  {ours[step]:12.5f}  {theirs[step]:14.5f}")
    for name, value in seconds.items():
        print(f"{name}: {value:.1f} s")
    first = list(zip(ours[:10], theirs[:10], strict=True))
    difference = max(abs(a - b) / max(abs(b), 1e-6) for a, b in first)
    print(f"largest relative difference of the first ten: {difference:.1e}")
    return model, difference
