"""What mha_ext has to reach, what it aims for, and what the records of a run say.

Each goal is a figure of the worst case that it names, so that a mean hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from suite import ODD_LENGTHS, ODD_WIDTHS

from mha_ext.report import Row, print_table

OWN, SDPA, ONNX = "mha_ext", "SDPA", "onnxruntime"


class Figure(NamedTuple):
    """A value, the case that it is of, and what a kernel at the measured limit would reach there."""

    value: float
    where: str
    limit: float | None = None


JsonRecord = Mapping[str, Any]


class Found:
    """The records of a run, by what they are of."""

    def __init__(self, records: Iterable[JsonRecord]) -> None:
        self.records = [record for record in records if not record["wrong"]]

    def all(self, **wanted: object) -> list[JsonRecord]:
        """Those whose fields are as wanted; a tuple means any of its values."""

        def fits(record: JsonRecord) -> bool:
            for name, value in wanted.items():
                found = record[name]
                if found not in value if isinstance(value, tuple) else found != value:
                    return False
            return True

        return [record for record in self.records if fits(record)]

    def other(self, record: JsonRecord, **changes: object) -> JsonRecord | None:
        """The record that differs in these fields alone, or None."""
        names = ("topic", "case", "dtype", "threads", "level", "implementation", "what")
        wanted = {name: record[name] for name in names} | changes
        found = self.all(**wanted)
        return found[0] if found else None


def seconds(record: JsonRecord) -> float:
    """The median."""
    return float(record["seconds"]["median"])


def label(record: JsonRecord) -> str:
    """The case, the pass and the threads, where there are several."""
    threads = "" if record["threads"] == 1 else f", {record['threads']} threads"
    return f"{record['case']}, {record['what']}{threads}"


@dataclass(frozen=True)
class Goal:
    """One line of the table. Shares and costs are fractions; `at_least` False: at most."""

    name: str
    required: float | None
    aim: float | None
    unit: str  # "%", "x", "us" or "MB"
    measure: Callable[[Found], Figure | None]
    at_least: bool = True

    def met(self, value: float) -> bool | None:
        """Whether the value is good enough; None where nothing is required."""
        if self.required is None:
            return None
        return value >= self.required if self.at_least else value <= self.required

    def show(self, value: float | None) -> str:
        """With its unit and sign."""
        if value is None:
            return "-"
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.format(value)}"

    def format(self, value: float) -> str:
        """With its unit."""
        if self.unit == "%":
            return f"{100 * value:.0f}%"
        return f"{value:.2f}x" if self.unit == "x" else f"{value:.1f} {self.unit}"


def _worst(figures: Sequence[Figure], at_least: bool = True) -> Figure | None:
    if not figures:
        return None
    return (min if at_least else max)(figures, key=lambda figure: figure.value)


def _length(record: JsonRecord) -> int:
    return int(record["case"].split(" x ")[1])


def _share(
    dtype: str, what: str, lengths: Callable[[int], bool], name: str = OWN
) -> Callable[[Found], Figure | None]:
    """The lowest share of the peak, on one thread and on several."""

    def measure(found: Found) -> Figure | None:
        records = found.all(topic="peak", dtype=dtype, what=what, implementation=name)
        return _worst([Figure(r["share"], label(r), 1.0) for r in records if lengths(_length(r))])

    return measure


def _odd(found: Found) -> Figure | None:
    """The rate of an odd size, relative to that of its round neighbour."""
    figures = []
    for topic, neighbours, place in (
        ("odd width", ODD_WIDTHS, 2),
        ("odd length", ODD_LENGTHS, 1),
    ):
        records = found.all(topic=topic, implementation=OWN, dtype="float32")
        for record in records:
            parts = record["case"].split(" x ")
            if record["what"] == "training" or int(parts[place]) not in neighbours:
                continue
            parts[place] = str(neighbours[int(parts[place])])
            beside = found.other(record, case=" x ".join(parts))
            if beside is not None:
                rate = record["flops"] / seconds(record)
                ratio = rate / (beside["flops"] / seconds(beside))
                figures.append(Figure(ratio, label(record)))
    return _worst(figures)


def _speedups(found: Found, peer: str | None, **wanted: object) -> list[Figure]:
    """How many times faster than a peer, or than the best of all, on each record of ours."""
    figures = []
    for record in found.all(implementation=OWN, **wanted):
        if record["seconds"] is None:
            continue
        keys = {n: record[n] for n in ("topic", "case", "dtype", "threads", "level", "what")}
        times = [
            seconds(other)
            for other in found.all(**keys)
            if other["seconds"] is not None
            and not other["implementation"].startswith(OWN)
            and other["flops"]
            and peer in (None, other["implementation"])
        ]
        if times:
            ratio = min(times) / seconds(record)
            share = record["share_of_bandwidth"] if record["topic"] == "decode" else record["share"]
            figures.append(Figure(ratio, label(record), ratio / share if share else None))
    return figures


def _against_best(topic: str) -> Callable[[Found], Figure | None]:
    what = ("forward", "training")
    return lambda found: _worst(_speedups(found, None, topic=topic, what=what, dtype="float32"))


# What a geometric mean is taken over: attention of every kind but that which the peer lacks.
COMPARED = ("peak", "causal", "odd width", "odd length", "tiny", "models", "decode", "few heads")


def geometric_mean(values: Sequence[float]) -> float:
    """The exponential of the mean logarithm."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _mean(peer: str, dtype: str, what: str) -> Callable[[Found], Figure | None]:
    def measure(found: Found) -> Figure | None:
        figures = _speedups(found, peer, topic=COMPARED, dtype=dtype, what=what)
        if not figures:
            return None
        low = min(figures, key=lambda figure: figure.value)
        limits = [figure.limit for figure in figures if figure.limit is not None]
        return Figure(
            geometric_mean([figure.value for figure in figures]),
            f"{len(figures)} cases, lowest {low.value:.2f}x: {low.where}",
            geometric_mean(limits) if len(limits) == len(figures) else None,
        )

    return measure


def _decode(found: Found) -> Figure | None:
    records = found.all(topic="decode", implementation=OWN, what="forward")
    return _worst(
        [
            Figure(r["share_of_bandwidth"], f"{r['dtype']} {label(r)}", 1.0)
            for r in records
            if r["share_of_bandwidth"] is not None
        ]
    )


def _extra(topic: str, cases: Sequence[str] | None) -> Callable[[Found], Figure | None]:
    """The time beyond that without the option, for each pair that counts as visible.

    Reading a mask or a bias, at the bandwidth of reading a tensor of its size, is not counted.
    """

    def measure(found: Found) -> Figure | None:
        figures = []
        for record in found.all(topic=topic, implementation=OWN, dtype="float32"):
            name = record["case"]
            plain = name.removesuffix(", dropout") if cases is None else "none"
            wanted = name != plain if cases is None else name in cases
            beside = found.other(record, case=plain)
            if not wanted or record["what"] in ("training", "memory") or beside is None:
                continue
            work = record["flops"] / beside["flops"]
            taken = seconds(record) - (record.get("reading") or 0)
            figures.append(Figure(taken / seconds(beside) / work - 1, label(record)))
        return _worst(figures, at_least=False)

    return measure


def _fallback(*cases: str) -> Callable[[Found], Figure | None]:
    return lambda found: _worst(
        _speedups(found, SDPA, topic="fallback", case=cases, what="training")
    )


def _layer(found: Found) -> Figure | None:
    """The speed-up over any peer, divided by that with attention at no cost."""
    figures = []
    for record in found.all(topic="layer", implementation=OWN, what=("forward", "training")):
        floor = found.other(record, implementation="projections alone")
        if floor is not None:
            where = f"{record['dtype']} {label(record)}"
            figures.append(Figure(seconds(floor) / seconds(record), where, 1.0))
    return _worst(figures)


def _overhead(what: str) -> Callable[[Found], Figure | None]:
    def measure(found: Found) -> Figure | None:
        for record in found.all(topic="overhead", implementation=OWN, what=what):
            floor = found.other(record, implementation="aten addcmul")
            if floor is not None:
                taken = (seconds(record) - seconds(floor)) * 1e6
                return Figure(taken, "beyond torch.addcmul")
        return None

    return measure


def _memory(found: Found) -> Figure | None:
    records = found.all(topic="memory", implementation=OWN, case="1 x 16384 x 64")
    return Figure(records[0]["memory"] / 1e6, records[0]["case"]) if records else None


def _second_order(what: str, base: str) -> Callable[[Found], Figure | None]:
    """The time, relative to that of the plain pass."""

    def measure(found: Found) -> Figure | None:
        figures = []
        for record in found.all(topic="second order", implementation=OWN, what=what):
            beside = found.other(record, what=base)
            if beside is not None:
                where = f"{record['dtype']} {label(record)}"
                figures.append(Figure(seconds(record) / seconds(beside), where))
        return _worst(figures, at_least=False)

    return measure


def _against_math(what: str, base: str | None = None) -> Callable[[Found], Figure | None]:
    """How many times faster than PyTorch's quadratic path at L = 2048; with `base`, of what `what` adds to it."""

    def measure(found: Found) -> Figure | None:
        figures = []
        for record in found.all(
            topic="second order", implementation=OWN, what=what, dtype="float32"
        ):
            peer = found.other(record, implementation="SDPA math")
            if peer is None or _length(record) != 2048:
                continue
            times = [seconds(record), seconds(peer)]
            if base is not None:
                plain = [found.other(r, what=base) for r in (record, peer)]
                times = [t - seconds(p) for t, p in zip(times, plain, strict=True) if p is not None]
            if len(times) == 2:
                figures.append(Figure(times[1] / times[0], label(record)))
        return _worst(figures)

    return measure


def _long(length: int) -> bool:
    return length >= 512


def _short(length: int) -> bool:
    return length == 128


VDP = "mha_ext avx512_bf16"
GOALS = (
    Goal("float32 forward, L >= 512", 0.85, 0.92, "%", _share("float32", "forward", _long)),
    Goal("float32 forward, L = 128", 0.75, 0.82, "%", _share("float32", "forward", _short)),
    Goal("float32 backward, L >= 512", 0.78, 0.87, "%", _share("float32", "backward", _long)),
    Goal(
        "bfloat16 forward, vdpbf16ps",
        0.75,
        0.85,
        "%",
        lambda found: (
            _share("bfloat16", "forward", _long, VDP)(found) or _not_amx(found, "forward")
        ),
    ),
    Goal(
        "bfloat16 backward, vdpbf16ps",
        0.60,
        0.70,
        "%",
        lambda found: (
            _share("bfloat16", "backward", _long, VDP)(found) or _not_amx(found, "backward")
        ),
    ),
    Goal("bfloat16 forward, of AMX", None, None, "%", lambda f: _amx(f, "forward")),
    Goal("bfloat16 backward, of AMX", None, None, "%", lambda f: _amx(f, "backward")),
    Goal("float16 forward, of float32", 0.80, None, "%", _share("float16", "forward", _long)),
    Goal("float64 forward", 0.80, None, "%", _share("float64", "forward", _long)),
    Goal("odd sizes / round neighbour", 0.85, None, "%", _odd),
    Goal("tiny / best peer", 4.0, None, "x", _against_best("tiny")),
    Goal("decode, of read bandwidth", 0.85, None, "%", _decode),
    Goal(
        "cost of mask, padding, bias",
        0.10,
        None,
        "%",
        _extra("masks", ("bool mask", "key padding", "bias")),
        at_least=False,
    ),
    Goal("cost of dropout", 0.30, None, "%", _extra("dropout", None), at_least=False),
    Goal("mean / ONNX Runtime, float32", 1.3, None, "x", _mean(ONNX, "float32", "forward")),
    Goal("mean / SDPA, float32 forward", 2.7, None, "x", _mean(SDPA, "float32", "forward")),
    Goal("mean / SDPA, bfloat16 forward", 4.0, None, "x", _mean(SDPA, "bfloat16", "forward")),
    Goal("mean / SDPA, float32 backward", 2.3, None, "x", _mean(SDPA, "float32", "backward")),
    Goal("mean / SDPA, bfloat16 backward", 2.3, None, "x", _mean(SDPA, "bfloat16", "backward")),
    Goal("dropout / SDPA", 7.0, None, "x", _fallback("dropout")),
    Goal("bias gradient / SDPA", 5.0, None, "x", _fallback("bias gradient")),
    Goal("value width / SDPA", 3.5, None, "x", _fallback("value width 32", "value width 128")),
    Goal("layer, of that with free attention", 0.85, None, "%", _layer),
    Goal("call overhead", 5.0, None, "us", _overhead("forward"), at_least=False),
    Goal("call overhead with grad", 10.0, None, "us", _overhead("recorded"), at_least=False),
    Goal("memory at L = 16,384", 64.0, None, "MB", _memory, at_least=False),
    Goal("jvp / forward", 3.9, None, "x", _second_order("jvp", "forward"), at_least=False),
    Goal("hvp / training", 4.0, None, "x", _second_order("hvp", "training"), at_least=False),
    Goal("jvp / SDPA math, L = 2048", 4.0, None, "x", _against_math("jvp")),
    Goal("double backward / SDPA math", 4.0, None, "x", _against_math("hvp", "training")),
)


def _uses_amx(found: Found) -> bool:
    return bool(found.all(implementation=OWN, isa="amx"))


def _amx(found: Found, what: str) -> Figure | None:
    return _share("bfloat16", what, _long)(found) if _uses_amx(found) else None


def _not_amx(found: Found, what: str) -> Figure | None:
    return None if _uses_amx(found) else _share("bfloat16", what, _long)(found)


def evaluate(records: Iterable[JsonRecord]) -> list[dict[str, Any]]:
    """Every goal with its figure: name, unit, required, aim, measured, limit, where, met."""
    found = Found(records)
    rows = []
    for goal in GOALS:
        figure = goal.measure(found)
        value = None if figure is None else figure.value
        rows.append(
            {
                "name": goal.name,
                "unit": goal.unit,
                "required": goal.required,
                "aim": goal.aim,
                "measured": value,
                "limit": None if figure is None else figure.limit,
                "where": "" if figure is None else figure.where,
                "met": None if value is None else goal.met(value),
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table: goal, required, aim, measured, at the limit, met.

    At the limit stands what a kernel would reach that did nothing but the useful operations at the
    peak (decode: read at the bandwidth) of the same rounds. A ratio to a peer that is close to the
    peak itself cannot be large.
    """
    by_name = {goal.name: goal for goal in GOALS}
    shown: list[Row] = []
    for row in rows:
        goal, value = by_name[row["name"]], row["measured"]
        shown.append(
            [
                goal.name,
                goal.show(goal.required),
                goal.show(goal.aim),
                "not measured" if value is None else goal.format(value),
                "" if row.get("limit") is None else goal.format(row["limit"]),
                {None: "", True: "met", False: "NOT MET"}[row["met"]],
                row["where"],
            ]
        )
    headers = (
        "goal",
        "required",
        "aim",
        "measured",
        "at the limit",
        "",
        "worst case (mean: of how many)",
    )
    print_table("Goals: the worst case of each", headers, shown)
