"""MeanFlow: generation in one step, learnt through a forward-mode derivative (Geng et al., 2025).

    python examples/meanflow.py

The data are closed curves of 16 points: ellipses of random size, turned at random. The network
u(z, r, t) is the mean velocity between the times r and t, and its target holds its own time
derivative along the flow,

    u = v - (t - r) du/dt,      du/dt = v . du/dz + du/dt,

a Jacobian-vector product: torch.func.jvp, one pass. A curve is then drawn in a single step from
noise: x = z - u(z, 0, 1).
"""

from __future__ import annotations

import math
import sys

import torch
from small import Block, both
from torch import Tensor, nn

POINTS, BATCH = 16, 64


def ellipses(count: int) -> Tensor:
    """[count, POINTS, 2]"""
    angle = torch.arange(POINTS) * (2 * math.pi / POINTS) + 2 * math.pi * torch.rand(count, 1)
    long, short = 1 + torch.rand(count, 1), 0.3 + 0.4 * torch.rand(count, 1)
    x, y, turn = long * angle.cos(), short * angle.sin(), 2 * math.pi * torch.rand(count, 1)
    return torch.stack((x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()), -1)


class MeanVelocity(nn.Module):
    """u(z, r, t): curves [B, POINTS, 2] and times [B] to velocities [B, POINTS, 2]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.into, self.time = nn.Linear(2, width), nn.Linear(2, width)
        self.position = nn.Parameter(0.1 * torch.randn(POINTS, width))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = nn.functional.silu(self.time(torch.stack((t, t - r), -1)))
        x = self.into(z) + self.position + times[:, None]
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        x, noise, times = ellipses(BATCH), torch.randn(BATCH, POINTS, 2), torch.rand(2, BATCH)
        t, r = times.amax(0), times.amin(0)
        r = torch.where(torch.rand(BATCH) < 0.5, t, r)  # half of the pairs learn plain velocity
        v = noise - x
        z = x + t[:, None, None] * v
        u, slope = torch.func.jvp(model, (z, r, t), (v, torch.zeros(BATCH), torch.ones(BATCH)))
        target = (v - (t - r)[:, None, None] * slope).detach()
        loss = (u - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def draw(model: nn.Module, count: int) -> Tensor:
    """Curves [count, POINTS, 2] in one step from noise."""
    z = torch.randn(count, POINTS, 2)
    return z - model(z, torch.zeros(count), torch.ones(count))


def roughness(curves: Tensor) -> float:
    """Mean length of the second difference around a curve: small for ellipses, large for noise."""
    bend = curves.roll(1, 1) - 2 * curves + curves.roll(-1, 1)
    return bend.norm(dim=-1).mean().item()


def main(steps: int = 400) -> int:
    torch.manual_seed(0)
    print("loss of the mean velocity")
    model, difference = both(MeanVelocity(), lambda model: train(model, steps))
    noise, drawn = roughness(torch.randn(256, POINTS, 2)), roughness(draw(model, 256))
    print(f"roughness: noise {noise:.2f}, drawn {drawn:.2f}, data {roughness(ellipses(256)):.2f}")
    return int(difference > 1e-2 or drawn > 0.5 * noise)


if __name__ == "__main__":
    sys.exit(main())
