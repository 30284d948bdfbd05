"""Pictures of attention, with matplotlib (``pip install matplotlib``).

Every function returns the matplotlib Figure, shows nothing and changes no global state: ``figure.savefig(...)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mha_ext.arguments import describe, is_integer
from mha_ext.modules import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = "viridis"  # even in lightness, and for every kind of colour vision
_SMALLEST_TEXT = 5  # points


def heatmap(
    weights: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """One head: queries downwards, keys to the right.

    Args:
        weights: [Lq, Lk], the probabilities of one head of one sequence.
        query_tokens, key_tokens: a label for each query and key; ``key_tokens`` defaults to ``query_tokens`` where
            the lengths are equal.
        title: of the picture.

    Raises:
        TypeError, ValueError: where weights is not a tensor or no matrix, or there is not one label for each row or
            column.
        ImportError: without matplotlib.
    """
    _check_matrices(weights, 2, "[Lq, Lk]")
    queries, keys = _labels(weights, query_tokens, key_tokens)
    rows, columns = weights.shape
    figure = _figure(min(14, 2.2 + 0.28 * columns), min(14, 1.6 + 0.28 * rows))
    axes = figure.subplots()
    image = _draw(axes, weights, _top(weights))
    _label(axes, queries, keys)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if title:
        axes.set_title(title, parse_math=False)
    figure.colorbar(image, ax=axes, label="probability", fraction=0.046, pad=0.02)
    return figure


def head_grid(
    weights: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    columns: int | None = None,
    title: str | None = None,
) -> Figure:
    """All heads of one sequence on one scale, labels at the edges only.

    Args:
        weights: [H, Lq, Lk].
        query_tokens, key_tokens: as in `heatmap`.
        columns: heads in a row of the grid; a nearly square grid by default.
        title: of the picture.

    Raises:
        TypeError, ValueError: where weights is not a tensor [H, Lq, Lk], there is not one label for each row or
            column, or columns is not positive.
        ImportError: without matplotlib.
    """
    _check_matrices(weights, 3, "[H, Lq, Lk]")
    queries, keys = _labels(weights[0], query_tokens, key_tokens)
    heads = weights.shape[0]
    columns = math.ceil(math.sqrt(heads)) if columns is None else columns
    if not is_integer(columns):
        raise TypeError(
            f"columns must be an int, the heads in a row of the grid, not {describe(columns)}"
        )
    if columns < 1:
        raise ValueError(f"columns must be from 1, the heads in a row of the grid, not {columns}")
    rows = math.ceil(heads / columns)
    width = min(4.0, max(1.6, 0.16 * weights.shape[2]))
    height = min(4.0, max(1.6, 0.16 * weights.shape[1]))
    figure = _figure(1.8 + width * columns, 1.2 + (height + 0.35) * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    top = _top(weights)
    image: Any = None
    for index, axes in enumerate(grid.flat):
        if index >= heads:
            axes.set_axis_off()
            continue
        image = _draw(axes, weights[index], top)
        axes.set_title(f"head {index}", fontsize=9)
        _label(axes, queries, keys)
        axes.tick_params(labelbottom=index + columns >= heads, labelleft=index % columns == 0)
    figure.supxlabel("key")
    figure.supylabel("query")
    if title:
        figure.suptitle(title, parse_math=False)
    figure.colorbar(image, ax=grid, label="probability", fraction=0.03, pad=0.02)
    return figure


def received(tokens: Sequence[str], amount: Tensor, *, title: str | None = None) -> Figure:
    """A text whose words stand on the colour of the attention that they receive.

    Args:
        tokens: the words, or pieces of words.
        amount: [L], for example a head of `mha_ext.attention_received`.
        title: of the picture.

    Raises:
        TypeError, ValueError: where amount is not a tensor, or there is not one number for each token.
        ImportError: without matplotlib.
    """
    if not isinstance(amount, Tensor):
        raise TypeError(f"amount must be a tensor [L], not {type(amount).__name__}")
    if amount.dim() != 1 or len(amount) != len(tokens):
        raise ValueError(
            f"amount must be [L] = [{len(tokens)}], one number for each token, but is {list(amount.shape)}; "
            "select a sequence and a head, or average them"
        )
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = amount.detach().float().cpu()
    colours: Any = ScalarMappable(Normalize(0, _top(values)))
    colours.set_cmap(matplotlib.colormaps["Blues"])
    columns = max(72, *map(len, tokens)) if len(tokens) else 72
    lines = _wrap(tokens, columns)
    figure = _figure(0.1 * columns + 0.2, max(1.8, 0.9 + 0.3 * len(lines)))
    axes = figure.subplots()
    axes.set_xlim(0, columns + 4)
    axes.set_ylim(len(lines), -0.3)
    axes.set_axis_off()
    for row, line in enumerate(lines):
        for column, index in line:
            red, green, blue, _ = colours.to_rgba(float(values[index]))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(
                column,
                row + 0.35,
                tokens[index],
                family="monospace",
                fontsize=9,
                va="center",
                parse_math=False,
                color="white" if dark else "black",
                bbox={"facecolor": (red, green, blue), "edgecolor": "none", "pad": 1.5},
            )
    if title:
        axes.set_title(title, loc="left", parse_math=False)
    figure.colorbar(colours, ax=axes, label="attention received", fraction=0.02, pad=0.01)
    return figure


def data_flow(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None, value: Tensor | None = None
) -> Figure:
    """The way of the data through a layer, with the shapes that it has for these inputs (the layer is run once).

    Args:
        layer: a `mha_ext.MultiHeadAttention`.
        query, key, value: as in its call.

    Raises:
        TypeError: where layer is another module.
        ImportError: without matplotlib.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"layer must be a mha_ext.MultiHeadAttention, not {type(layer).__name__}")
    shapes: dict[str, tuple[list[int], list[int]]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            shapes[name] = (list(given[0].shape), list(result.shape))

        return hook

    hooks = [child.register_forward_hook(note(name)) for name, child in layer.named_children()]
    try:
        place = next(layer.parameters()).device
        generators = [place] if place.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators):  # dropout draws a seed
            layer(query, key, value)
    finally:
        for hook in hooks:
            hook.remove()
    batch, queries = query.shape[:2]
    keys = queries if key is None else key.shape[1]
    split = {
        "q_proj": [batch, layer.num_heads, queries, layer.head_dim],
        "k_proj": [batch, layer.num_kv_heads, keys, layer.head_dim],
        "v_proj": [batch, layer.num_kv_heads, keys, layer.value_head_dim],
    }
    figure = _figure(11, 4.6)
    axes = figure.subplots()
    axes.set_xlim(0, 11)
    axes.set_ylim(4.4, -0.2)
    axes.set_axis_off()

    def box(x: float, y: float, text: str, colour: str) -> None:
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": "0.3"},
        )

    def arrow(x0: float, y0: float, x1: float, y1: float) -> None:
        axes.annotate(
            "", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "-|>", "color": "0.3", "shrinkB": 2}
        )

    for row, name in enumerate(("query", "key", "value")):
        y = 0.6 + 1.3 * row
        projection = f"{name[0]}_proj"
        arrow(1.3, y, 2.55, y)
        arrow(3.7, y, 4.95, y)
        arrow(6.05, y, 7.45, 1.9 + 0.2 * (row - 1))
        box(0.8, y, f"{name}\n{shapes[projection][0]}", "#f2f2f2")
        box(3.1, y, f"{projection}\n→ {shapes[projection][1]}", "#cfe3f5")
        box(5.5, y, f"split heads\n{split[projection]}", "#f2f2f2")
    attended = [batch, layer.num_heads, queries, layer.value_head_dim]
    merged, out = shapes["out_proj"]
    arrow(8.2, 2.1, 8.2, 3.25)
    arrow(8.75, 3.65, 9.7, 3.65)
    box(8.2, 1.9, f"softmax(Q Kᵀ / √{layer.head_dim}) V\n{attended}", "#fde3c8")
    box(8.2, 3.65, f"merge heads\n{merged}", "#f2f2f2")
    box(10.25, 3.65, f"out_proj\n→ {out}", "#cfe3f5")
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("mha_ext.visualize needs matplotlib; pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def _check_matrices(weights: Tensor, rank: int, shape: str) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor {shape}, not {type(weights).__name__}")
    if weights.dim() != rank or 0 in weights.shape:
        raise ValueError(
            f"weights must be {shape}, without empty dimensions, but has shape {list(weights.shape)}; select what is "
            "to be shown, as in weights[0] for the first sequence and weights[0, 3] for its head 3"
        )


def _labels(
    weights: Tensor, queries: Sequence[str] | None, keys: Sequence[str] | None
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    if keys is None and queries is not None and weights.shape[0] == weights.shape[1]:
        keys = queries
    for name, labels, count in (
        ("query_tokens", queries, weights.shape[0]),
        ("key_tokens", keys, weights.shape[1]),
    ):
        if labels is not None and len(labels) != count:
            raise ValueError(
                f"{name} must have one label for each of {count}, but has {len(labels)}; leave it out for numbers"
            )
    return queries, keys


def _top(values: Tensor) -> float:
    """Of the scale: the largest value, if there is one above 0."""
    top = values.max().item() if values.numel() else 0.0
    return top if top > 0 else 1.0


def _draw(axes: Axes, weights: Tensor, top: float) -> Any:
    values = weights.detach().float().cpu().numpy()
    return axes.imshow(
        values, cmap=_COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest"
    )


def _label(axes: Axes, queries: Sequence[str] | None, keys: Sequence[str] | None) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis, labels, rotation in ((axes.xaxis, keys, 90), (axes.yaxis, queries, 0)):
        if labels is None:
            axis.set_major_locator(MaxNLocator(integer=True))
            continue
        size = max(_SMALLEST_TEXT, min(9, 260 / len(labels)))
        axis.set_ticks(
            range(len(labels)), labels, rotation=rotation, fontsize=size, parse_math=False
        )


def _wrap(tokens: Sequence[str], width: int) -> list[list[tuple[int, int]]]:
    """Lines of (column, index of the token)."""
    lines: list[list[tuple[int, int]]] = [[]]
    column = 0
    for index, token in enumerate(tokens):
        if column and column + len(token) > width:
            lines.append([])
            column = 0
        lines[-1].append((column, index))
        column += len(token) + 1
    return lines
