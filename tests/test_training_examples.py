"""The examples that train as one usually does: with attention from mha_ext they do what they do with attention in
plain PyTorch. (CI also runs each of them to its end.)"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["causal_lm", "bert", "translation", "vit"])
def test_a_few_steps(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "3"])
    assert example.run(example.main, 100) == 0
    shown = capsys.readouterr().out
    assert "plain PyTorch" in shown and "largest relative difference" in shown


def test_the_model_that_writes_with_caches_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("causal_lm", monkeypatch)
    model = example.CharacterModel(30, example.LENGTH)
    prompt = torch.randint(30, (3, 5))
    cached, whole = (example.write(model, prompt, 40, cached) for cached in (True, False))
    assert torch.equal(cached, whole) and cached.shape == (3, 45)


def test_digits_are_drawn_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("vit", monkeypatch)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    images, labels = example.digits()
    assert images.shape == (1797, 8, 8) and labels.bincount(minlength=10).min() > 100
    losses = example.train(example.VisionTransformer(), images, labels, 60)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_padding_changes_no_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("translation", monkeypatch)
    model = example.Translator().eval()
    texts, lengths, wanted = example.dates(6)
    row = int(lengths.argmin())
    short = texts[row : row + 1, : lengths[row]]
    with torch.no_grad():
        together = model(texts, lengths, wanted)[row]
        alone = model(short, lengths[row : row + 1], wanted[row : row + 1])[0]
    torch.testing.assert_close(together, alone)
