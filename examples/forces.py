"""Forces as -dE/dx inside the loss: an energy model of small molecules with attention.

    python examples/forces.py

The molecules are made here: 5 to 9 atoms of two kinds, placed at random and held by Lennard-Jones
forces, whose exact energies and forces are the data. The model sees distances only, through the
attention's bias, so its energy does not change when a molecule is moved or turned. It is trained on
the forces, which are a first derivative of it; the gradient of that loss is a second one, through
queries, keys, values and the bias.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from small import Block, both
from torch import Tensor, nn

MOST = 9  # atoms


class Molecules(NamedTuple):
    place: Tensor  # [B, MOST, 3]
    kind: Tensor  # [B, MOST]
    atoms: Tensor  # [B]: how many of the places are atoms
    energy: Tensor  # [B]
    force: Tensor  # [B, MOST, 3]

    def real(self) -> Tensor:
        """[B, MOST]: 1 for an atom, 0 for padding."""
        return (torch.arange(MOST) < self.atoms[:, None]).to(self.place)


def distances(place: Tensor) -> Tensor:
    """[B, MOST, MOST]; the eye keeps the root differentiable at an atom's distance to itself."""
    difference = place[:, :, None] - place[:, None]
    return (difference.square().sum(-1) + torch.eye(MOST)).sqrt()


def lennard_jones(place: Tensor, kind: Tensor, real: Tensor) -> Tensor:
    """Energies [B]; atoms of kind 1 are larger, and unlike atoms attract each other more."""
    size = 1.0 + 0.1 * (kind[:, :, None] + kind[:, None])
    depth = torch.where(kind[:, :, None] == kind[:, None], 0.3, 0.6)
    pair = real[:, :, None] * real[:, None] * (1 - torch.eye(MOST))
    ratio = (size / distances(place)) ** 6
    return (pair * 4 * depth * (ratio * ratio - ratio)).sum((1, 2)) / 2


def molecules(count: int) -> Molecules:
    """Random places, pulled together by a few steps down the energy, then shaken."""
    atoms, kind = torch.randint(5, MOST + 1, (count,)), torch.randint(2, (count, MOST))
    real = (torch.arange(MOST) < atoms[:, None]).float()
    place = 1.8 * torch.randn(count, MOST, 3)
    for step in range(201):
        place = place.detach().requires_grad_()
        energy = lennard_jones(place, kind, real)
        (slope,) = torch.autograd.grad(energy.sum(), place)
        if step < 200:
            place = place - 0.02 * slope.clamp(-5, 5)
        if step == 199:
            place = place + 0.04 * torch.randn_like(place)
    return Molecules(place.detach(), kind, atoms, energy.detach(), -slope)


class EnergyModel(nn.Module):
    """Energies [B] from kinds and distances."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.kind = nn.Embedding(2, width)
        self.bias = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, heads))
        self.near = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, place: Tensor, kind: Tensor, atoms: Tensor) -> Tensor:
        far = distances(place)[..., None] - torch.linspace(0.8, 4.0, 8)
        waves = torch.exp(-4 * far.square())  # [B, MOST, MOST, 8]
        real = (torch.arange(MOST) < atoms[:, None]).to(place)
        others = waves * (real[:, None, :] * (1 - torch.eye(MOST)))[..., None]
        x = self.kind(kind) + self.near(others.sum(2))
        bias = self.bias(waves).permute(0, 3, 1, 2)  # [B, heads, MOST, MOST]
        for block in self.blocks:
            x = block(x, bias=bias, key_lengths=atoms)
        return (self.out(x)[..., 0] * real).sum(1)


def forces(model: nn.Module, data: Molecules, create_graph: bool = False) -> Tensor:
    place = data.place.clone().requires_grad_()
    energy = model(place, data.kind, data.atoms)
    (slope,) = torch.autograd.grad(energy.sum(), place, create_graph=create_graph)
    return -slope * data.real()[..., None]


def train(model: nn.Module, data: Molecules, steps: int) -> list[float]:
    """The mean squared error of the forces, at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(data.atoms), (32,))
        batch = Molecules(*(field[chosen] for field in data))
        loss = (forces(model, batch, create_graph=True) - batch.force).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 400) -> int:
    torch.manual_seed(0)
    data, unseen = molecules(512), molecules(128)
    print("mean squared error of the forces")
    model, difference = both(EnergyModel(), lambda model: train(model, data, steps))
    error = (forces(model, unseen) - unseen.force).abs().sum() / (3 * unseen.atoms.sum())
    zero = unseen.force.abs().sum() / (3 * unseen.atoms.sum())
    print(
        f"on unseen molecules: mean error {error:.3f}, where no force at all would err {zero:.3f}"
    )
    return int(difference > 1e-2 or error > 0.8 * zero)


if __name__ == "__main__":
    sys.exit(main())
