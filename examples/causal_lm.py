"""A causal language model of characters, on English that ships with Python; it writes through KVCache.

    python examples/causal_lm.py [--steps 700]

Trained twice from the same start, with mha_ext and with attention in plain PyTorch. Then it continues
a prompt, character by character: each step computes one new row and finds the keys and values of all
rows before it in the caches. The same text comes out where the whole is computed again at each step.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys
import time

import torch
from small import CharacterModel, Text, both, descend, next_character_loss, run
from torch import Tensor, nn

import mha_ext

LENGTH, BATCH = 64, 16


def train(model: nn.Module, text: Text, steps: int) -> list[float]:
    """The loss of each step, in nats a character."""
    return descend(
        model, lambda: next_character_loss(model, text.sample(BATCH, LENGTH + 1)), steps, 5e-3
    )


@torch.no_grad()
def write(model: CharacterModel, prompt: Tensor, count: int, cached: bool) -> Tensor:
    """The prompt [B, L] and `count` characters after it, drawn one after the other."""
    text, generator = prompt, torch.Generator().manual_seed(0)
    caches = [mha_ext.KVCache.of(b.attention, len(prompt), LENGTH) for b in model.blocks]
    for _ in range(count):
        new = text[:, int(caches[0].lengths[0]) :] if cached else text
        logits = model(new, caches if cached else ())
        chances = (2 * logits[:, -1]).softmax(-1)  # more likely ones more often
        text = torch.cat((text, torch.multinomial(chances, 1, generator=generator)), 1)
    return text


def main(steps: int) -> int:
    torch.manual_seed(0)
    text = Text(re.sub(r"\s+", " ", " ".join(pydoc_data.topics.topics.values())))
    print("loss, nats a character")
    model = CharacterModel(text.characters, LENGTH)
    for embedding in (model.token, model.position):
        nn.init.normal_(embedding.weight, std=0.1)
    model, difference = both(model, lambda model: train(model, text, steps))
    prompt = torch.tensor([[text.code[c] for c in "The value of the "]])
    written, count = {}, LENGTH - prompt.shape[1]
    for cached in (True, False):
        start = time.perf_counter()
        written[cached] = write(model, prompt, count, cached)
        name = "with the caches" if cached else "from the start each time"
        print(f"{count} characters {name}: {time.perf_counter() - start:.2f} s")
    print("".join(text.alphabet[code] for code in written[True][0].tolist()))
    loss = next_character_loss(model, text.sample(64, LENGTH + 1)).item()
    print(f"loss on other pieces: {loss:.2f}")
    same = torch.equal(written[True], written[False])
    learnt = steps < 700 or loss < 2.0
    return int(difference > 1e-2 or not same or not learnt)


if __name__ == "__main__":
    sys.exit(run(main, 700))
