"""A gradient penalty: a Wasserstein critic of point sets (Gulrajani et al., 2017).

    python examples/gradient_penalty.py

The critic is a transformer over the points of a set. It is trained to tell noisy rings from noisy
squares and kept 1-Lipschitz by the penalty (|d critic / d points| - 1)^2, whose gradient is a second
derivative of the attention: double backward. What it estimates is the Wasserstein distance between
the two kinds of sets, so the estimate must rise from 0 and stay.
"""

from __future__ import annotations

import math
import sys

import torch
from small import Block, both
from torch import Tensor, nn

POINTS, BATCH = 32, 16


def rings(count: int) -> Tensor:
    """[count, POINTS, 2]: points on a circle of radius 1, with noise."""
    angle = 2 * math.pi * torch.rand(count, POINTS)
    circle = torch.stack((angle.cos(), angle.sin()), -1)
    return circle + 0.05 * torch.randn_like(circle)


def squares(count: int) -> Tensor:
    """[count, POINTS, 2]: points on a square of side 2, with noise."""
    along, side = 2 * torch.rand(count, POINTS) - 1, torch.randint(4, (count, POINTS))
    sign = 1.0 - 2.0 * (side % 2)
    square = torch.stack(
        (torch.where(side < 2, along, sign), torch.where(side < 2, sign, along)), -1
    )
    return square + 0.05 * torch.randn_like(square)


class Critic(nn.Module):
    """One number for each set [B, POINTS, 2]; the order of the points does not matter."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        x = self.into(points)
        for block in self.blocks:
            x = block(x)
        return self.out(x).mean((-1, -2))


def gradient_penalty(critic: nn.Module, points: Tensor) -> Tensor:
    points = points.requires_grad_()
    (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def train(critic: nn.Module, steps: int) -> list[float]:
    """The estimated distance at each step."""
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    distances = []
    for _ in range(steps):
        real, other = rings(BATCH), squares(BATCH)
        mix = torch.rand(BATCH, 1, 1)
        distance = critic(real).mean() - critic(other).mean()
        loss = -distance + 10 * gradient_penalty(critic, mix * real + (1 - mix) * other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(distance.item())
    return distances


def main(steps: int = 150) -> int:
    torch.manual_seed(0)
    print("estimated Wasserstein distance between rings and squares")
    critic, difference = both(Critic(), lambda model: train(model, steps))
    with torch.no_grad():
        gap = (critic(rings(200)).mean() - critic(squares(200)).mean()).item()
    print(f"on fresh sets: {gap:.3f}")
    return int(difference > 1e-2 or gap < 0.1)


if __name__ == "__main__":
    sys.exit(main())
