"""The charts of a run, as SVG: colours that the colour-blind tell apart, and a marker for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import suite
from goals import COMPARED, OWN, Found, geometric_mean, seconds

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator  # noqa: E402

# Okabe and Ito's colours. mha_ext is the same one everywhere.
STYLES: dict[str, dict[str, Any]] = {
    "mha_ext": {"color": "#D55E00", "marker": "o", "zorder": 4, "linewidth": 2.2},
    "mha_ext avx512_bf16": {"color": "#D55E00", "marker": "D", "zorder": 4},
    "onnxruntime": {"color": "#009E73", "marker": "s"},
    "SDPA": {"color": "#0072B2", "marker": "^"},
    "SDPA math": {"color": "#0072B2", "marker": "v"},
    "nn.MultiheadAttention": {"color": "#E69F00", "marker": "P"},
    "torch.compile": {"color": "#CC79A7", "marker": "X"},
    "eager": {"color": "#555555", "marker": "v"},
}
LABELS = {
    "onnxruntime": "ONNX Runtime",
    "torch.compile": "torch.compile of eager",
    "eager": "eager PyTorch",
}
Content = Mapping[str, Any]

SETTINGS: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 6,
    "svg.hashsalt": "mha_ext",  # the same bytes from the same figures
}


def draw_all(content: Content, folder: Path, kind: str = "svg") -> list[Path]:
    """Draws what the records allow, into `folder`, as svg or png; returns the files."""
    found = Found(content["records"])
    paths = []
    with plt.rc_context(SETTINGS):
        for name, figure in _figures(content, found):
            folder.mkdir(exist_ok=True)
            path = folder / f"{name}.{kind}"
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(path, dpi=150, metadata=metadata, bbox_inches="tight", pad_inches=0.15)
            plt.close(figure)
            paths.append(path)
    return paths


def _figures(content: Content, found: Found) -> Iterator[tuple[str, Figure]]:
    threads = sorted({record["threads"] for record in found.records})
    for count in threads:
        suffix = "one-thread" if count == 1 else f"{count}-threads"
        for name, draw in (
            ("share-of-peak", _share_of_peak),
            ("decode", _decode),
            ("options", _options),
        ):
            figure = draw(content, found, count)
            if figure is not None:
                yield f"{name}-{suffix}", figure
        for dtype in suite.DTYPES:
            figure = _speedup(content, found, count, dtype)
            if figure is not None:
                yield f"speed-up-{dtype}-{suffix}", figure
    for name, single in (("memory", _memory), ("second-order", _second_order)):
        figure = single(content, found)
        if figure is not None:
            yield name, figure


def _style(name: str) -> dict[str, Any]:
    return {"label": LABELS.get(name, name), **STYLES.get(name, {"color": "black", "marker": "."})}


def _ordered(names: set[str]) -> list[str]:
    return [*(name for name in STYLES if name in names), *sorted(names - set(STYLES))]


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _finish(figure: Figure, content: Content, title: str, bottom: float) -> None:
    """The title above; where and when it was measured below."""
    machine, versions = content["machine"], content["versions"]
    onnx = versions.get("onnxruntime")
    note = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['isa']}; "
        f"mha_ext {versions['mha_ext']} ({versions['commit'] or 'no commit'}), "
        f"torch {versions['torch']}"
        f"{f', onnxruntime {onnx}' if onnx else ''}, {versions['build']['compiler']}; "
        f"{content['date'][:10]}"
    )
    height = figure.get_figheight()
    figure.suptitle(title, fontsize=13, fontweight="bold", y=1 + 0.08 / height, va="bottom")
    figure.text(0.5, bottom, note, ha="center", va="top", fontsize=8, color="#444444")


def _legend(
    figure: Figure, axes: Sequence[Axes], y: float, titles: Mapping[str, str] | None = None
) -> None:
    """One legend for all panels, below them; titles: what to write for a label."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    figure.legend(
        list(entries.values()),
        [(titles or {}).get(text, text) for text in entries],
        loc="upper center",
        ncols=min(3 if titles else 6, len(entries)),
        bbox_to_anchor=(0.5, y),
    )


def _per_cent(ax: Axes, top: float | None = None) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
    ax.set_ylim(0, top)


def _amounts(ax: Axes) -> None:
    """A logarithmic axis with plain numbers, between powers of ten too where it has few of them."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(LogFormatter())


def _lengths(ax: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic axis whose ticks are the lengths themselves."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())


# ------------------------------------------------------------------------------ share of peak


def _share_of_peak(content: Content, found: Found, threads: int) -> Figure | None:
    """Rows: forward and backward. Columns: dtypes. Solid: head width 64, dashed: 128."""
    records = found.all(topic="peak", threads=threads, what=("forward", "backward"))
    panels: list[tuple[str, str, str]] = []  # dtype, title, what the peers' and our name end in
    amx = any(record["isa"] == "amx" for record in records)
    for dtype in suite.DTYPES:
        if any(record["dtype"] == dtype for record in records):
            unit = " (AMX)" if dtype == "bfloat16" and amx else ""
            panels.append((dtype, dtype + unit, ""))
    if any(record["implementation"] == "mha_ext avx512_bf16" for record in records):
        panels.insert(2, ("bfloat16", "bfloat16 (vdpbf16ps)", " avx512_bf16"))
    if not panels:
        return None
    figure, grid = plt.subplots(
        2,
        len(panels),
        figsize=(1.2 + 2.7 * len(panels), 6.2),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for row, what in enumerate(("forward", "backward")):
        # Products by another unit than the one whose peak it is can exceed that.
        top = max([1.0, *(1.03 * (r["share"] or 0) for r in records if r["what"] == what)])
        for column, (dtype, title, ending) in enumerate(panels):
            ax = grid[row][column]
            panel = [r for r in records if r["dtype"] == dtype and r["what"] == what]
            _share_panel(ax, panel, ending)
            _per_cent(ax, top)
            if row == 0:
                ax.set_title(title)
            else:
                ax.set_xlabel("sequence length")
            if column == 0:
                ax.set_ylabel(f"{what}, share of peak")
    _legend(figure, [ax for line in grid for ax in line], -0.01)
    title = f"Share of the arithmetic peak, {_threads(threads)} (solid: head width 64, dashed: 128)"
    _finish(figure, content, title, -0.07)
    return figure


def _share_panel(ax: Axes, records: Sequence[Mapping[str, Any]], ending: str) -> None:
    lengths = sorted({int(r["case"].split(" x ")[1]) for r in records})
    _lengths(ax, lengths)
    ax.axhline(1.0, color="0.6", linewidth=0.8, zorder=0)
    for name in _ordered({r["implementation"] for r in records}):
        own = name.startswith(OWN)
        if own and name != OWN + ending or not own and ending:
            continue  # vdpbf16ps is a unit of its own: the peers are held against AMX
        for width, line in ((64, "-"), (128, "--")):
            points = sorted(
                (int(r["case"].split(" x ")[1]), r["share"])
                for r in records
                if r["implementation"] == name and r["case"].endswith(f" x {width}")
            )
            if points:
                style = _style(OWN if own else name)
                if width == 128:
                    style |= {"label": "_", "markerfacecolor": "white"}
                ax.plot(*zip(*points, strict=True), linestyle=line, **style)


# ------------------------------------------------------------------------------ speed-up


def _speedup(content: Content, found: Found, threads: int, dtype: str) -> Figure | None:
    """A row for each case: how many times faster than each peer, forward and backward."""
    panels = []
    for what, title in (("forward", "forward"), ("training", "forward and backward")):
        ratios = _ratios(found, threads, dtype, what)
        if ratios:
            panels.append((title, ratios))
    if not panels:
        return None
    rows = list(dict.fromkeys(row for _, ratios in panels for row in ratios))
    height = 2.0 + 0.21 * len(rows)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3.4 + 4.2 * len(panels), height),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    place = {row: index for index, row in enumerate(rows)}
    means: dict[str, list[str]] = {}
    for ax, (title, ratios) in zip(axes[0], panels, strict=True):
        peers: dict[str, list[tuple[float, int]]] = {}
        for row, by_peer in ratios.items():
            for peer, ratio in by_peer.items():
                peers.setdefault(peer, []).append((ratio, place[row]))
        for peer in _ordered(set(peers)):
            style = {k: v for k, v in _style(peer).items() if k != "linewidth"}
            usual = [value for value, index in peers[peer] if rows[index][0] in COMPARED]
            if usual:
                means.setdefault(peer, []).append(f"{geometric_mean(usual):.2f}x")
            style["label"] = peer
            ax.plot(*zip(*peers[peer], strict=True), linestyle="none", alpha=0.85, **style)
        ax.axvline(1, color="black", linewidth=1)
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256) if low <= t <= high]
        ax.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_title(title)
        ax.set_xlabel("time of the peer / time of mha_ext")
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.axvspan(ax.get_xlim()[0], 1, color="black", alpha=0.05, linewidth=0)
        ax.set_xlim(low, high)
        topics = [row[0] for row in rows]
        for index in range(1, len(rows)):
            if topics[index] != topics[index - 1]:
                ax.axhline(index - 0.5, color="#999999", linewidth=0.8)
    names = [f"{topic}: {case}" for topic, case in rows]
    axes[0][0].set_yticks(range(len(rows)), names, fontsize=8)
    for ax in axes[0]:
        ax.tick_params(axis="y", length=0)
    titles = {}
    for peer in {name for _, ratios in panels for found in ratios.values() for name in found}:
        mean = f", mean {' and '.join(means[peer])}" if peer in means else ""
        titles[peer] = LABELS.get(peer, peer) + mean
    _legend(figure, list(axes[0]), -0.05 / height, titles)
    title = f"Speed-up of mha_ext over each peer, {dtype}, {_threads(threads)}"
    lines = -(-len(titles) // 3)
    _finish(figure, content, title, -(0.2 + 0.25 * lines) / height)
    return figure


def _ratios(
    found: Found, threads: int, dtype: str, what: str
) -> dict[tuple[str, str], dict[str, float]]:
    """(topic, case) -> peer -> time of the peer / time of ours."""
    result: dict[tuple[str, str], dict[str, float]] = {}
    for topic in (*COMPARED, "few queries", "fallback", "layer"):
        same: Any = {"topic": topic, "threads": threads, "dtype": dtype, "what": what}
        for own in found.all(**same, implementation=OWN):
            for other in found.all(**same, case=own["case"]):
                if other["implementation"].startswith(OWN) or not other["flops"]:
                    continue
                key = (topic, own["case"])
                ratio = seconds(other) / seconds(own)
                result.setdefault(key, {})[other["implementation"]] = ratio
    return result


# ------------------------------------------------------------------------------ decode


def _decode(content: Content, found: Found, threads: int) -> Figure | None:
    """Share of the bandwidth of reading over the number of keys."""
    records = found.all(topic="decode", threads=threads, what="forward")
    panels = list(dict.fromkeys((r["dtype"], r["case"].split(",")[0]) for r in records))
    if not panels:
        return None
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1 + 3 * len(panels), 3.2),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for ax, (dtype, kind) in zip(axes[0], panels, strict=True):
        chosen = [r for r in records if r["dtype"] == dtype and r["case"].startswith(f"{kind},")]

        def keys(record: Mapping[str, Any]) -> int:
            return int(record["case"].split(",")[1].split(" x ")[0])

        _lengths(ax, sorted({keys(r) for r in chosen}))
        for name in _ordered({r["implementation"] for r in chosen}):
            points = sorted(
                (keys(r), r["share_of_bandwidth"]) for r in chosen if r["implementation"] == name
            )
            ax.plot(*zip(*points, strict=True), **_style(name))
        ax.axhline(1, color="black", linewidth=1)
        heads = "32 heads, 8 of keys" if kind == "32:8" else kind
        ax.set_title(f"{heads}, {dtype}")
        ax.set_xlabel("keys")
    for ax in axes[0]:
        _per_cent(ax)
    axes[0][0].set_ylabel("share of read bandwidth")
    _legend(figure, list(axes[0]), -0.02)
    title = f"Decoding, one query, head width 128: bytes of K and V a second, {_threads(threads)}"
    _finish(figure, content, title, -0.13)
    return figure


# ------------------------------------------------------------------------------ options


def _options(content: Content, found: Found, threads: int) -> Figure | None:
    """The time of an option relative to none, beside the share of pairs that it leaves."""
    bars: list[tuple[str, str, dict[str, float], float]] = []  # dtype, option, passes, share
    for topic in ("masks", "dropout"):
        for record in found.all(topic=topic, threads=threads, implementation=OWN, what="forward"):
            name = record["case"]
            plain = "none" if topic == "masks" else name.removesuffix(", dropout")
            if name == plain:
                continue
            costs = {}
            for what in ("forward", "backward"):
                one = found.other(record, what=what)
                beside = found.other(record, what=what, case=plain)
                if one is not None and beside is not None:
                    costs[what] = seconds(one) / seconds(beside)
            beside = found.other(record, case=plain)
            if beside is not None:
                option = name if topic == "masks" else f"dropout, L = {name.split(' x ')[1]}"
                share = record["flops"] / beside["flops"]
                bars.append((record["dtype"], option, costs, share))
    dtypes = list(dict.fromkeys(bar[0] for bar in bars))
    if not bars:
        return None
    figure, axes = plt.subplots(
        1,
        len(dtypes),
        figsize=(2.2 + 4.4 * len(dtypes), 4.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    colours = {"forward": "#D55E00", "backward": "#F0B67F"}
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        chosen = [bar for bar in bars if bar[0] == dtype]
        for offset, what in ((-0.2, "forward"), (0.2, "backward")):
            ax.barh(
                [index + offset for index in range(len(chosen))],
                [bar[2].get(what, 0.0) for bar in chosen],
                0.38,
                color=colours[what],
                label=what,
            )
        for index, (_, _, _, share) in enumerate(chosen):
            ax.plot(
                [share, share],
                [index - 0.42, index + 0.42],
                color="black",
                linewidth=2,
                label="share of the pairs that count" if index == 0 else "_",
            )
        ax.axvline(1, color="black", linewidth=0.8, linestyle=":")
        names = [bar[1].removesuffix(", dropout").replace(" x 64", "") for bar in chosen]
        ax.set_yticks(range(len(chosen)), names)
        ax.set_ylim(len(chosen) - 0.5, -0.5)
        ax.grid(visible=False, axis="y")
        ax.set_title(dtype)
        ax.set_xlabel("time relative to no option")
    _legend(figure, list(axes[0]), -0.02)
    title = f"What masks, biases and dropout cost, mha_ext, {_threads(threads)}"
    _finish(figure, content, title, -0.09)
    return figure


# ------------------------------------------------------------------------------ memory


def _memory(content: Content, found: Found) -> Figure | None:
    """Extra memory of forward and backward over the length, logarithmic."""
    records = found.all(topic="memory", what="memory")
    if not records:
        return None
    figure, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")

    def length(record: Mapping[str, Any]) -> int:
        return int(record["case"].split(" x ")[1])

    _lengths(ax, sorted({length(r) for r in records}))
    for name in _ordered({r["implementation"] for r in records}):
        points = sorted(
            (length(r), r["memory"] / 1e6) for r in records if r["implementation"] == name
        )
        ax.plot(*zip(*points, strict=True), **_style(name))
        x, y = points[-1]
        ax.annotate(f"{y:,.0f} MB", (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9)
    _amounts(ax)
    ax.set_xlabel("sequence length")
    ax.set_ylabel("extra memory at the peak, MB")
    ax.legend()
    _finish(figure, content, "Memory of forward and backward, one head of width 64, float32", -0.02)
    return figure


# ------------------------------------------------------------------------------ second order


def _second_order(content: Content, found: Found) -> Figure | None:
    """Forward mode and Hessian-vector products, in milliseconds over the length."""
    records = found.all(topic="second order", what=("jvp", "hvp"), threads=1)
    panels = list(dict.fromkeys((r["dtype"], r["what"]) for r in records))
    if not panels:
        return None
    titles = {"jvp": "forward mode", "hvp": "Hessian-vector product"}
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1 + 3.2 * len(panels), 3.4),
        squeeze=False,
        layout="constrained",
    )
    for ax, (dtype, what) in zip(axes[0], panels, strict=True):
        chosen = [r for r in records if (r["dtype"], r["what"]) == (dtype, what)]
        _lengths(ax, sorted({int(r["case"].split(" x ")[1]) for r in chosen}))
        for name in _ordered({r["implementation"] for r in chosen}):
            points = sorted(
                (int(r["case"].split(" x ")[1]), seconds(r) * 1e3)
                for r in chosen
                if r["implementation"] == name
            )
            ax.plot(*zip(*points, strict=True), **_style(name))
        _amounts(ax)
        ax.set_title(f"{titles[what]}, {dtype}")
        ax.set_xlabel("sequence length")
    axes[0][0].set_ylabel("ms")
    _legend(figure, list(axes[0]), -0.02)
    _finish(figure, content, "Second order, one thread, head width 64", -0.12)
    return figure
