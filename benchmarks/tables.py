"""The records of a run as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import goals
import suite

from mha_ext.exact import wrong_text
from mha_ext.report import Row, print_table

JsonRecord = Mapping[str, Any]
Block = dict[str, dict[str, JsonRecord]]  # implementation -> pass -> record

MAIN = ("forward", "backward")
OTHERS = ("training", "recorded", "jvp", "hvp")
HEADERS: tuple[str, ...] = ("", "forward\nms", "\n+-", "\nGFLOP/s", "% of\nlimit")
HEADERS += ("backward\nms", "\n+-", "\nGFLOP/s", "% of\nlimit", "max diff\nto float64")


def show(content: Mapping[str, Any]) -> None:
    """All tables, then the goals, what was left out and what was wrong."""
    records = content["records"]
    for topic, meaning in suite.TOPICS.items():
        blocks = _blocks(r for r in records if r["topic"] == topic and r["what"] != "memory")
        if not blocks:
            continue
        if topic in ("overhead", "second order"):
            _show_passes(f"{topic}: {meaning}", blocks)
        else:
            print_table(f"{topic}: {meaning}", HEADERS, _rows(blocks))
    _show_memory(records)
    print(
        "Limit: the peak of the multiply-add that mha_ext uses for the dtype, times the threads; for\n"
        "decode the bandwidth of reading. +-: half the distance of the quartiles. Backward: from\n"
        "the result to its gradients, timed inside of a call that does both.\n"
    )
    goals.show(content["goals"])
    for name, reason in content["left_out"].items():
        print(f"left out: {name}: {reason}")
    for record in records:
        if record["wrong"]:
            where = f"{record['topic']}: {record['case']}, {record['dtype']}"
            what = wrong_text(record["wrong"], record.get("excess", {}))
            print(f"WRONG: {record['implementation']}, {where}: {what}")


def _blocks(records: Any) -> dict[str, Block]:
    blocks: dict[str, Block] = {}
    for record in records:
        threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
        title = f"{record['case']}, {record['dtype']}, {threads}"
        passes = blocks.setdefault(title, {}).setdefault(record["implementation"], {})
        passes[record["what"]] = record
    return blocks


def _rows(blocks: Mapping[str, Block]) -> list[Row]:
    rows: list[Row] = []
    for title, block in blocks.items():
        rows += [None] if rows else []
        rows.append([title, *[""] * (len(HEADERS) - 1)])
        for name, passes in block.items():
            row = [f"  {name}"]
            for what in MAIN:
                row += _cells(passes.get(what))
            error = passes["forward"]["error"]
            row.append("-" if error is None else f"{error:.0e}")
            rows.append(row)
    return rows


def _cells(record: JsonRecord | None) -> list[str]:
    if record is None or record["seconds"] is None:
        return ["WRONG" if record and record["wrong"] else "-", "-", "-", "-"]
    taken, share = record["seconds"], record["share"]
    if record["share_of_bandwidth"] is not None:
        share = record["share_of_bandwidth"]
    return [
        milliseconds(taken["median"]),
        f"{50 * (taken['q3'] - taken['q1']) / taken['median']:.0f}%",
        "-" if not record["flops"] else f"{record['flops'] / taken['median'] * 1e-9:.1f}",
        "-" if share is None else f"{share:.0%}",
    ]


def milliseconds(seconds: float) -> str:
    """Three digits that count."""
    ms = seconds * 1e3
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _show_passes(title: str, blocks: Mapping[str, Block]) -> None:
    """All passes side by side, in milliseconds alone."""
    found = {what for block in blocks.values() for passes in block.values() for what in passes}
    passes_shown = [what for what in (*MAIN, *OTHERS) if what in found]
    rows: list[Row] = []
    for case, block in blocks.items():
        rows += [None] if rows else []
        rows.append([case, *[""] * len(passes_shown)])
        for name, passes in block.items():
            cells = [_cells(passes.get(what))[0] for what in passes_shown]
            rows.append([f"  {name}", *cells])
    print_table(title, ["", *(f"{what}\nms" for what in passes_shown)], rows)


def _show_memory(records: Sequence[JsonRecord]) -> None:
    sizes: dict[str, dict[str, int]] = {}
    for record in records:
        if record["what"] == "memory":
            title = f"{record['topic']}: {record['case']}, {record['dtype']}"
            sizes.setdefault(title, {})[record["implementation"]] = record["memory"]
    names = list(dict.fromkeys(name for found in sizes.values() for name in found))
    rows: list[Row] = [
        [title, *(f"{found[n] / 1e6:.1f}" if n in found else "-" for n in names)]
        for title, found in sizes.items()
    ]
    if rows:
        print_table("extra memory at the peak, MB", ["", *names], rows)
