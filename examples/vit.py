"""A vision transformer that reads digits (Dosovitskiy et al., 2021).

    python examples/vit.py [--steps 250]

The images are scikit-learn's 1797 handwritten digits of 8 x 8 pixels where it is installed, and seven-segment
digits with noise elsewhere. An image is 16 patches of 2 x 2; the mean over them is classified.
"""

from __future__ import annotations

import sys

import torch
from small import Block, both, descend, run
from torch import Tensor, nn

BATCH = 64
SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd"]
STROKES = {  # rows and columns of each segment on 8 x 8 pixels
    **{"a": (slice(0, 1), slice(2, 6)), "g": (slice(3, 4), slice(2, 6))},
    **{"d": (slice(7, 8), slice(2, 6)), "f": (slice(0, 4), slice(1, 2))},
    **{"b": (slice(0, 4), slice(6, 7)), "e": (slice(4, 8), slice(1, 2))},
    "c": (slice(4, 8), slice(6, 7)),
}


def drawn(count: int) -> tuple[Tensor, Tensor]:
    """Seven-segment digits of changing brightness in noise."""
    shapes = torch.zeros(10, 8, 8)
    for digit, segments in enumerate(SEGMENTS):
        for segment in segments:
            shapes[(digit, *STROKES[segment])] = 1
    labels = torch.randint(10, (count,))
    brightness = 0.5 + 0.5 * torch.rand(count, 1, 1)
    return brightness * shapes[labels] + 0.3 * torch.randn(count, 8, 8), labels


def digits() -> tuple[Tensor, Tensor]:
    """[N, 8, 8] in about 0 to 1, and their labels [N], in an order without meaning."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return drawn(1797)
    data = load_digits()
    order = torch.randperm(len(data.target))
    return torch.tensor(data.images).float()[order] / 16, torch.tensor(data.target)[order]


class VisionTransformer(nn.Module):
    """[B, 8, 8] to [B, 10]."""

    def __init__(self, width: int = 48, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.into = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.1 * torch.randn((8 // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        side = self.patch
        patches = images.unfold(1, side, side).unfold(2, side, side).flatten(3).flatten(1, 2)
        x = self.into(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    """The loss of each step."""

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (BATCH,))
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return descend(model, loss, steps)


def main(steps: int) -> int:
    torch.manual_seed(0)
    images, labels = digits()
    images = (images - images.mean()) / images.std()
    model, difference = both(
        VisionTransformer(), lambda model: train(model, images[:1500], labels[:1500], steps)
    )
    with torch.no_grad():
        right = (model(images[1500:]).argmax(-1) == labels[1500:]).float().mean().item()
    print(f"right on {len(images) - 1500} other images: {right:.1%}")
    return int(difference > 1e-2 or (steps >= 100 and right < 0.85))


if __name__ == "__main__":
    sys.exit(run(main, 250))
