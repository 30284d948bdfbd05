"""Masked language modelling in the manner of BERT (Devlin et al., 2019), on English that ships with Python.

    python examples/bert.py [--steps 200]

`mha_ext.AttentionBlock` is the attention layer of BERT. A seventh of the words of each sentence is
hidden and must be guessed from both sides. Sentences have different lengths: `key_lengths` leaves their
padding out.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys
from collections import Counter

import torch
from small import both, descend, run
from torch import Tensor, nn

import mha_ext

BATCH, LENGTH, WORDS, WIDTH = 32, 32, 1000, 64
PADDING, HIDDEN, RARE = 0, 1, 2  # the first three tokens; then the words, the most frequent first


def sentences() -> tuple[Tensor, Tensor]:
    """[N, LENGTH] tokens, padded, and the lengths [N] of all sentences of 6 to LENGTH words."""
    text = " ".join(pydoc_data.topics.topics.values())
    split = [re.findall(r"\w+|[^\w\s]", sentence) for sentence in re.split(r"(?<=\.)\s", text)]
    chosen = [words for words in split if 6 <= len(words) <= LENGTH]
    common = Counter(word for words in chosen for word in words).most_common(WORDS)
    codes = {word: code for code, (word, _) in enumerate(common, RARE + 1)}
    tokens = torch.full((len(chosen), LENGTH), PADDING)
    for row, words in zip(tokens, chosen, strict=True):
        row[: len(words)] = torch.tensor([codes.get(word, RARE) for word in words])
    return tokens, torch.tensor([len(words) for words in chosen])


def hide(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens with a seventh of the known words hidden, and which ones."""
    hidden = (torch.rand(tokens.shape) < 1 / 7) & (tokens > RARE)
    return tokens.masked_fill(hidden, HIDDEN), hidden


class Layer(nn.Module):
    """A post-norm layer: [B, L, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = mha_ext.AttentionBlock(WIDTH, 4)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(x, key_lengths=lengths)
        return self.norm(x + self.mlp(x))


class Bert(nn.Module):
    """Tokens [B, L] of these lengths to logits [B, L, tokens]; the head shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(RARE + 1 + WORDS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, lengths)
        return x @ self.token.weight.T


def masked_loss(model: nn.Module, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of the hidden words, and which share of them is guessed."""
    shown, hidden = hide(tokens)
    logits = model(shown, lengths)[hidden]
    right = (logits.argmax(-1) == tokens[hidden]).float().mean()
    return nn.functional.cross_entropy(logits, tokens[hidden]), right


def train(model: nn.Module, data: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """The loss of each step, in nats a hidden word."""
    tokens, lengths = data

    def loss() -> Tensor:
        chosen = torch.randint(len(tokens) // 10, len(tokens), (BATCH,))
        return masked_loss(model, tokens[chosen], lengths[chosen])[0]

    return descend(model, loss, steps)


def main(steps: int) -> int:
    torch.manual_seed(0)
    data = sentences()
    print(f"{len(data[0])} sentences; loss, nats a hidden word")
    model, difference = both(Bert(), lambda model: train(model, data, steps))
    tokens, lengths = (x[: len(x) // 10] for x in data)  # never trained on
    with torch.no_grad():
        loss, right = masked_loss(model, tokens, lengths)
    known = tokens[tokens > RARE]
    always = (known == RARE + 1).float().mean()
    print(f"on other sentences: loss {loss:.2f}, {right:.1%} of the hidden words guessed;")
    print(f"the most frequent word would be right for {always:.1%}")
    return int(difference > 1e-2 or (steps >= 200 and right < 2 * always))


if __name__ == "__main__":
    sys.exit(run(main, 200))
