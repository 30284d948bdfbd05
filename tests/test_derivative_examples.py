"""The examples that train through second and forward-mode derivatives: with attention from mha_ext they do
what they do with attention in plain PyTorch. (CI also runs each of them to its end.)"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    return importlib.import_module(request.param)


def named(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True, ids=[name])


@named("gradient_penalty")
def test_gradient_penalty(example: ModuleType) -> None:
    _, difference = example.both(example.Critic(), lambda model: example.train(model, 6))
    assert difference < 1e-2


@named("forces")
def test_forces(example: ModuleType) -> None:
    data, model = example.molecules(64), example.EnergyModel()
    model, difference = example.both(model, lambda model: example.train(model, data, 6))
    assert difference < 1e-2
    found = example.forces(model, data)
    torch.testing.assert_close(found.sum(1), torch.zeros(64, 3), atol=1e-4, rtol=0)
    assert found[~data.real().bool()].abs().max() == 0  # padding is not pushed


@named("meanflow")
def test_meanflow(example: ModuleType) -> None:
    _, difference = example.both(example.MeanVelocity(), lambda model: example.train(model, 6))
    assert difference < 1e-2


@named("per_sample_gradients")
def test_per_sample_gradients(example: ModuleType) -> None:
    data = example.Text()
    model = example.CharacterModel(data.characters, example.LENGTH)
    model, difference = example.both(model, lambda model: example.train(model, data, 4))
    assert difference < 1e-2
    text = data.sample(3, example.LENGTH)
    together = example.per_sample_gradients(model, text)
    for index in range(3):
        loss = example.next_character_loss(model, text[index : index + 1])
        alone = torch.autograd.grad(loss, [*model.parameters()])
        for name, gradient in zip(dict(model.named_parameters()), alone, strict=True):
            torch.testing.assert_close(together[name][index], gradient, atol=1e-5, rtol=1e-3)


@named("curvature")
def test_curvature(example: ModuleType) -> None:
    data = example.Text()
    text = data.sample(8, example.LENGTH)
    model = example.CharacterModel(data.characters, example.LENGTH)
    _, difference = example.both(model, lambda model: example.train(model, text, 4, every=2))
    assert difference < 2e-2
