"""Per-sample gradient norms: which samples does a language model not fit?

    python examples/per_sample_gradients.py

A small causal model over characters is trained on text that ships with Python, each sample's
gradient clipped to a norm of its own (as in DP-SGD, Abadi et al., 2016, without the noise). The
gradients of all samples come from one vmap(grad). At the end the norms find the samples whose
characters were shuffled.
"""

from __future__ import annotations

import sys

import torch
from small import CharacterModel, Text, both, next_character_loss
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

LENGTH, BATCH, CLIP = 33, 32, 1.0


def per_sample_gradients(model: nn.Module, text: Tensor) -> dict[str, Tensor]:
    """For each parameter the gradients [B, *shape], one for each sample of [B, L]."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return functional_call(model, parameters, (x,))

        return next_character_loss(run, sample[None])  # type: ignore[arg-type]

    return vmap(grad(loss), in_dims=(None, 0))(parameters, text)


def norms(gradients: dict[str, Tensor]) -> Tensor:
    """[B]: the norm of each sample's whole gradient."""
    return sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()


def train(model: nn.Module, data: Text, steps: int) -> list[float]:
    """The mean norm of the samples' gradients, at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    reports = []
    for _ in range(steps):
        gradients = per_sample_gradients(model, data.sample(BATCH, LENGTH))
        size = norms(gradients)
        weight = (CLIP / size).clamp(max=1) / BATCH
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("b,b...->...", weight, gradients[name])
        optimizer.step()
        reports.append(size.mean().item())
    return reports


def main(steps: int = 400) -> int:
    torch.manual_seed(0)
    data = Text()
    print("mean norm of a sample's gradient")
    model = CharacterModel(data.characters, LENGTH)
    model, difference = both(model, lambda model: train(model, data, steps))

    text = data.sample(64, LENGTH)
    spoilt = torch.arange(8)
    for index in spoilt:
        text[index] = text[index, torch.randperm(LENGTH)]
    gradients = per_sample_gradients(model, text)
    one = torch.autograd.grad(next_character_loss(model, text[5:6]), [*model.parameters()])
    alone = torch.cat([g.flatten() for g in one]).norm()
    size = norms(gradients)
    print(f"sample 5: norm {size[5]:.5f} by vmap, {alone:.5f} by a backward pass of its own")
    suspects = size.topk(8).indices
    found = len(set(suspects.tolist()) & set(spoilt.tolist()))
    print(f"8 of 64 samples are shuffled; {found} of them are among the 8 largest norms")
    return int(difference > 1e-2 or abs(size[5] - alone) > 1e-3 * alone or found < 4)


if __name__ == "__main__":
    sys.exit(main())
