"""The sharpest direction of a transformer's loss, by Hessian-vector products.

    python examples/curvature.py

While a small language model is trained by gradient descent, the largest eigenvalue of its loss'
Hessian is followed by power iteration (each step one Hessian-vector product, forward over reverse).
Gradient descent with step size lr is stable while that eigenvalue stays below 2 / lr (Cohen et al.,
2021).
"""

from __future__ import annotations

import sys

import torch
from small import CharacterModel, Text, both, next_character_loss
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

LENGTH, BATCH, RATE = 33, 16, 0.2


def top_eigenvalue(model: nn.Module, text: Tensor, iterations: int) -> float:
    """The Hessian eigenvalue of the largest size, by power iteration from a fixed start."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return next_character_loss(lambda x: functional_call(model, parameters, (x,)), text)  # type: ignore[arg-type]

    generator = torch.Generator().manual_seed(1)
    direction = {
        name: torch.randn(value.shape, generator=generator) for name, value in parameters.items()
    }
    value = 0.0
    for _ in range(iterations):
        norm = sum(d.square().sum() for d in direction.values()).sqrt()
        direction = {name: d / norm for name, d in direction.items()}
        _, product = jvp(grad(loss), (parameters,), (direction,))
        value = sum((direction[name] * product[name]).sum() for name in direction).item()
        direction = product
    return value


def train(model: nn.Module, text: Tensor, steps: int, every: int) -> list[float]:
    """The top eigenvalue, every few steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sharpness = []
    for step in range(steps):
        if step % every == 0:
            sharpness.append(top_eigenvalue(model, text, iterations=12))
        loss = next_character_loss(model, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sharpness


def main(steps: int = 200, every: int = 10) -> int:
    torch.manual_seed(0)
    data = Text()
    text = data.sample(BATCH, LENGTH)
    model = CharacterModel(data.characters, LENGTH)
    before = next_character_loss(model, text).item()
    print(f"largest Hessian eigenvalue, every {every} steps; stable below 2 / lr = {2 / RATE:.0f}")
    model, difference = both(model, lambda model: train(model, text, steps, every))
    after = next_character_loss(model, text).item()
    print(f"loss {before:.3f} -> {after:.3f}")
    return int(difference > 2e-2 or after > 0.8 * before)


if __name__ == "__main__":
    sys.exit(main())
