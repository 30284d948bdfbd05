"""mha_ext.visualize draws what it is given: values, labels, shapes; and says what is wrong with bad input."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mha_ext

pytest.importorskip("matplotlib", reason="pip install matplotlib")

from mha_ext import visualize  # noqa: E402


def written(figure: Any) -> int:
    """Bytes of the PNG: drawing it raises no error and no warning."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return len(file.getvalue())


def images(figure: Any) -> list[Tensor]:
    found = [image for axes in figure.axes for image in axes.images]
    return [torch.as_tensor(image.get_array().filled()) for image in found]


def texts(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


TOKENS = ["[CLS]", "the", "cat", "sat", "[SEP]"]


def test_heatmap() -> None:
    weights = torch.rand(5, 5).softmax(-1)
    figure = visualize.heatmap(weights, TOKENS, title="head 3")
    assert_close(images(figure)[0], weights)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert [label.get_text() for label in axes.get_yticklabels()] == TOKENS
    assert axes.get_title() == "head 3"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert written(figure) > 1000
    assert written(visualize.heatmap(torch.rand(3, 200).bfloat16().requires_grad_())) > 1000


def test_head_grid() -> None:
    weights = torch.rand(7, 5, 4)
    figure = visualize.head_grid(weights, TOKENS, TOKENS[:4], title="layer 2")
    for image, head in zip(images(figure), weights, strict=True):
        assert_close(image, head)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:7] == [f"head {i}" for i in range(7)]
    limits = {image.get_clim() for axes in figure.axes for image in axes.images}
    assert len(limits) == 1  # one scale for all heads
    assert written(figure) > 1000
    assert written(visualize.head_grid(weights, columns=2)) > 1000


def test_received() -> None:
    words = TOKENS * 12
    amount = torch.arange(60.0)
    figure = visualize.received(words, amount)
    assert texts(figure).split() == words
    boxes = [text.get_bbox_patch().get_facecolor()[:3] for text in figure.axes[0].texts]
    assert sum(boxes[-1]) < sum(boxes[0])  # more is darker


def test_data_flow() -> None:
    layer = mha_ext.MultiHeadAttention(12, 6, num_kv_heads=2, value_dim=8, value_head_dim=3)
    figure = visualize.data_flow(
        layer, torch.rand(3, 5, 12), torch.rand(3, 7, 12), torch.rand(3, 7, 8)
    )
    shown = texts(figure)
    for shape in ("[3, 5, 12]", "[3, 7, 12]", "[3, 7, 8]", "[3, 7, 4]", "[3, 7, 6]"):
        assert shape in shown, shape
    for shape in ("[3, 6, 5, 2]", "[3, 2, 7, 2]", "[3, 2, 7, 3]", "[3, 6, 5, 3]", "[3, 5, 18]"):
        assert shape in shown, shape
    assert not any(child._forward_hooks for child in layer.children())


def test_data_flow_draws_no_random_number() -> None:
    layer = mha_ext.MultiHeadAttention(12, 6, dropout=0.5)
    state = torch.get_rng_state()
    visualize.data_flow(layer, torch.ones(1, 3, 12))
    assert torch.equal(torch.get_rng_state(), state)


def test_labels_are_drawn_as_they_are() -> None:
    words = ["$\\foo$", "$5$", "a$b$c"]
    for figure in (
        visualize.heatmap(torch.eye(3), words, title="$\\foo$"),
        visualize.head_grid(torch.ones(2, 3, 3), words),
        visualize.received(words, torch.ones(3)),
    ):
        file = io.StringIO()
        figure.savefig(file, format="svg")
        axes = figure.axes[0]
        drawn = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()]
        found = [text for text in drawn if text.get_text() in words]
        assert {text.get_text() for text in found} == set(words)
        assert not any(text.get_parse_math() for text in found)


def test_scales() -> None:
    """Zeros are the least of a scale to 1; a few rows are counted in whole numbers."""
    figure = visualize.heatmap(torch.zeros(3, 4))
    assert figure.axes[0].images[0].get_clim() == (0.0, 1.0)
    assert visualize.received(["a"], torch.zeros(1)).axes[-1].get_ylim() == (0.0, 1.0)
    axes = visualize.head_grid(torch.rand(1, 3, 3)).axes[0]
    assert all(float(tick).is_integer() for tick in [*axes.get_xticks(), *axes.get_yticks()])


def test_long_words_have_room() -> None:
    figure = visualize.received(["a" * 100, "b"], torch.ones(2))
    written(figure)
    box = figure.axes[0].texts[0].get_window_extent()
    assert box.x1 <= figure.axes[0].get_window_extent().x1


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"weights must be a tensor \[Lq, Lk\], not list"):
        visualize.heatmap([[1, 2], [3, 4]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layer must be a mha_ext.MultiHeadAttention, not Linear"):
        visualize.data_flow(torch.nn.Linear(2, 2), torch.ones(1, 1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"amount must be a tensor \[L\], not list"):
        visualize.received(["a"], [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns must be from 1, .* not 0"):
        visualize.head_grid(torch.ones(2, 3, 3), columns=0)
    with pytest.raises(TypeError, match="columns must be an int, .* not float 1.5"):
        visualize.head_grid(torch.ones(2, 3, 3), columns=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights must be \[Lq, Lk\].* \[2, 3, 4\]; select"):
        visualize.heatmap(torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match=r"weights must be \[H, Lq, Lk\].* \[0, 3, 4\]"):
        visualize.head_grid(torch.rand(0, 3, 4))
    with pytest.raises(ValueError, match="query_tokens must have one label for each of 3, but has"):
        visualize.heatmap(torch.rand(3, 4), TOKENS)
    with pytest.raises(ValueError, match=r"amount must be \[L\] = \[5\].* but is \[4\]"):
        visualize.received(TOKENS, torch.rand(4))
