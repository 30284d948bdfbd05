"""What the examples that train share: a small transformer, its plain twin, and real text.

`plain` copies a model and lets plain PyTorch compute the attention of the copy, with the same
weights: what is compared is the attention alone.
"""

from __future__ import annotations

import argparse
import copy
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator, Sequence
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

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor | None = None, **options: Any
    ) -> Tensor:
        key = query if key is None else key
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        given = {
            name: option
            for name, option in options.items()
            if option is not None and option is not False
        }
        out = mha_ext.reference.attention(q, k, v, causal=self.causal, **given)
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

    def forward(self, text: Tensor, caches: Sequence[mha_ext.KVCache] = ()) -> Tensor:
        """With caches, one for each block, `text` goes on where they end."""
        start = int(caches[0].lengths[0]) if caches else 0
        x = self.token(text) + self.position.weight[start : start + text.shape[-1]]
        for i, block in enumerate(self.blocks):
            x = block(x, cache=caches[i]) if caches else block(x)
        return self.head(self.norm(x))


def next_character_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of predicting each next character of [B, L]."""
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Text:
    """English that ships with Python: the topics of its help, as numbers. Or another text."""

    def __init__(self, text: str = "\n".join(pydoc_data.topics.topics.values())) -> None:
        characters = sorted(set(text))
        self.alphabet = characters
        self.code = {character: code for code, character in enumerate(characters)}
        self.characters = len(characters)
        self.codes = torch.tensor([self.code[character] for character in text])

    def sample(self, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """[count, length] pieces from random places."""
        places = torch.randint(len(self.codes) - length, (count, 1), generator=generator)
        return self.codes[places + torch.arange(length)]


def descend(
    model: nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float = 3e-3
) -> list[float]:
    """Trains with AdamW, the rate falling to 0; the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


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


def run(main: Callable[[int], int], steps: int) -> int:
    """The exit status of main(steps), where the command line may say --steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps, help=f"of training (default {steps})")
    return main(parser.parse_args().steps)
