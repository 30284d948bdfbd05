"""An encoder and decoder that translates dates: "Tuesday, 9 June 1987" -> "1987-06-09".

    python examples/translation.py [--steps 300]

Cross attention with padding: dates are written in many ways, of many lengths, so the encoder's
characters are padded and `key_lengths` says to both kinds of attention that see them how many are real.
The decoder is causal. The architecture is that of Vaswani et al. (2017), with the norms in front.
"""

from __future__ import annotations

import datetime
import random
import sys

import torch
from small import Block, both, descend, run
from torch import Tensor, nn

import mha_ext

BATCH, WIDTH, HEADS = 32, 64, 4
FORMS = [
    "%d %B %Y",
    "%A, %d %B %Y",
    "%B %d, %Y",
    "%b %d, %y",
    "%d/%m/%Y",
    "%d.%m.%y",
    "%a %d %b %Y",
]
CHARACTERS = sorted({*"\n0123456789 ,./-", *map(chr, range(65, 91)), *map(chr, range(97, 123))})
CODE = {character: code for code, character in enumerate(CHARACTERS)}
START = CODE["\n"]  # of what is written, and in the padding
ISO = len("2000-01-01")
LONGEST = len("Wednesday, 30 September 1987")


def dates(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts [count, longest] with their lengths [count], and what they mean [count, ISO]."""
    days = [datetime.date.fromordinal(random.randrange(711000, 738000)) for _ in range(count)]
    texts = [day.strftime(random.choice(FORMS)) for day in days]
    longest = max(map(len, texts))
    codes = torch.tensor([[CODE[c] for c in text.ljust(longest, "\n")] for text in texts])
    wanted = torch.tensor([[CODE[c] for c in day.isoformat()] for day in days])
    return codes, torch.tensor([len(text) for text in texts]), wanted


class DecoderBlock(Block):
    """A causal layer that also looks at what the encoder has read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, causal=True)
        self.norm3, self.cross = nn.LayerNorm(width), mha_ext.MultiHeadAttention(width, heads)

    def forward(self, x: Tensor, read: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm3(x), read, key_lengths=lengths)
        return x + self.mlp(self.norm2(x))


class Translator(nn.Module):
    """Texts [B, Ls] of these lengths and what is written so far [B, Lt] to logits [B, Lt, characters]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        self.encoder = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderBlock(WIDTH, HEADS) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, texts: Tensor, lengths: Tensor, written: Tensor) -> Tensor:
        read, x = (self.token(t) + self.place.weight[: t.shape[1]] for t in (texts, written))
        for block in self.encoder:
            read = block(read, key_lengths=lengths)
        for block in self.decoder:
            x = block(x, read, lengths)
        return self.head(self.norm(x))


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss of each step, in nats a character."""
    random.seed(0)

    def loss() -> Tensor:
        texts, lengths, wanted = dates(BATCH)
        written = torch.cat((torch.full((BATCH, 1), START), wanted[:, :-1]), 1)
        logits = model(texts, lengths, written)
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return descend(model, loss, steps)


@torch.no_grad()
def translate(model: nn.Module, texts: Tensor, lengths: Tensor) -> Tensor:
    """The most likely characters, one after the other: [B, ISO]."""
    written = torch.full((len(texts), 1), START)
    for _ in range(ISO):
        following = model(texts, lengths, written)[:, -1:].argmax(-1)
        written = torch.cat((written, following), 1)
    return written[:, 1:]


def spelled(codes: Tensor) -> str:
    return "".join(CHARACTERS[code] for code in codes.tolist())


def main(steps: int) -> int:
    torch.manual_seed(0)
    model, difference = both(Translator(), lambda model: train(model, steps))
    texts, lengths, wanted = dates(200)
    found = translate(model, texts, lengths)
    for i in range(5):
        print(f"{spelled(texts[i, : lengths[i]]):>28} -> {spelled(found[i])}")
    right = (found == wanted).all(1).float().mean().item()
    print(f"right to the last character: {right:.1%} of {len(texts)}")
    return int(difference > 1e-2 or (steps >= 300 and right < 0.8))


if __name__ == "__main__":
    sys.exit(run(main, 300))
