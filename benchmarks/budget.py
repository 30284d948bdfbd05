"""Where the time of a tile goes: what each column of its products costs, and what remains.

A tile is 64 queries by 64 keys. Its time is fitted, over head widths D and value widths Dv, by

    t = fixed + per_d * D + per_dv * Dv

`fixed` is what does not grow with the widths: the softmax, masks, the loop. `per_d` and `per_dv` are
what one column takes of the products over D and over Dv, with what is packed and read for it; they
are held against the arithmetic peak of the same rounds. An option's price is its time beyond that
without it, for each tile that is not empty. Small differences are wanted here: so the shortest
of many short samples counts, and the highest peak, not the medians.

    python benchmarks/budget.py                     # float32, one thread, about a minute
    python benchmarks/budget.py --dtype bfloat16 --isa avx512_bf16
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import run
from measure import Bench, Record
from suite import BOTH, DTYPES, Group, named, square

from mha_ext import _C
from mha_ext.cases import Case
from mha_ext.report import Row, print_table

TILE, LENGTH, HEADS = 64, 512, 1
WIDTHS = (32, 64, 96, 128)
PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}  # over D, over Dv
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "causal": {"mask": "causal"},
    "bool mask": {"mask": "random"},
    "bias": {"mask": "bias", "bias_gradient": False},
    "bias with gradient": {"mask": "bias"},
    "dropout": {"dropout": 0.1},
}


@dataclass(frozen=True)
class Budget:
    """One pass: nanoseconds of one tile, on one thread."""

    fixed: float
    per_d: float  # of all products over D, for each column
    per_dv: float
    column: float  # of one product, for each column, at the peak
    residual: float  # the largest relative error of the fit
    measured: float  # at D = Dv = 64
    options: Mapping[str, float]  # beyond that


def tiles(case: Case) -> int:
    """Those that are not empty."""
    side = LENGTH // TILE
    return HEADS * (side * (side + 1) // 2 if case.mask == "causal" else side * side)


def widths() -> dict[tuple[int, int], Case]:
    """(D, Dv) -> its case."""
    return {
        (d, dv): named(square(LENGTH, d, HEADS), f"{d}, {dv}", value_dim=dv)
        for d in WIDTHS
        for dv in WIDTHS
    }


def options() -> dict[str, Case]:
    """Each option alone, at D = Dv = 64."""
    plain = square(LENGTH, 64, HEADS)
    return {name: named(plain, name, **changes) for name, changes in OPTIONS.items()}


def fit(taken: Mapping[tuple[int, int], float]) -> tuple[float, float, float, float]:
    """fixed, per_d, per_dv and residual of nanoseconds by (D, Dv).

    Relative errors are what is made small, so that narrow heads count as much as wide ones.
    """
    found = np.array(list(taken.values()))
    terms = np.array([[1.0, d, dv] for d, dv in taken])
    fixed, per_d, per_dv = np.linalg.lstsq(terms / found[:, None], np.ones(len(found)), None)[0]
    error = np.abs(terms @ (fixed, per_d, per_dv) / found - 1).max()
    return float(fixed), float(per_d), float(per_dv), float(error)


def budgets(records: Sequence[Record]) -> dict[str, Budget]:
    """Pass -> budget, from the records of all widths and options."""
    by_name = {(record.case, record.what): record for record in records}

    def tile(case: Case, what: str) -> float:
        record = by_name[case.name, what]
        assert record.seconds is not None
        return record.seconds.min * 1e9 / tiles(case)

    found = {}
    for what in PRODUCTS:
        taken = {pair: tile(case, what) for pair, case in widths().items()}
        peak = by_name["64, 64", what].peak
        assert peak is not None
        prices = {name: tile(case, what) - taken[64, 64] for name, case in options().items()}
        fixed, per_d, per_dv, residual = fit(taken)
        column = 2 * TILE * TILE / peak.max * 1e9
        found[what] = Budget(fixed, per_d, per_dv, column, residual, taken[64, 64], prices)
    return found


def rows(what: str, budget: Budget) -> list[Row]:
    """The table of one pass, for D = Dv = 64."""
    over_d, over_dv = PRODUCTS[what]
    parts = (
        ("what does not grow with the widths", budget.fixed, 0.0),
        (f"{over_d} product(s) over D", 64 * budget.per_d, 64 * over_d * budget.column),
        (f"{over_dv} product(s) over Dv", 64 * budget.per_dv, 64 * over_dv * budget.column),
    )
    shown: list[Row] = []
    for name, taken, bound in parts:
        share = f"{bound / taken:.0%}" if bound else "-"
        least = f"{bound:.0f}" if bound else "-"
        shown.append([name, f"{taken:.0f}", f"{taken / budget.measured:.0%}", least, share])
    bound = 64 * (over_d + over_dv) * budget.column
    whole = budget.measured
    shown += [None, ["measured", f"{whole:.0f}", "100%", f"{bound:.0f}", f"{bound / whole:.0%}"]]
    shown.append(None)
    for name, price in budget.options.items():
        shown.append([f"  {name}, beyond that", f"{price:+.0f}", f"{price / whole:+.0%}", "", ""])
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where a result was wrong."""
    parser = run.Parser(prog="budget.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--isa", choices=_C.supported_isas(), default=_C.active_isa())
    parser.add_argument("--seconds", type=run.positive, default=1.0, help="for each case")
    arguments = parser.parse_args(argv)
    cases = (*widths().values(), *options().values())
    group = Group("budget", arguments.dtype, cases, BOTH, peers=())
    before = _C.active_isa()
    _C.set_isa(arguments.isa)
    try:
        records = Bench((), 3 * arguments.seconds, None).measure(group, 1)
    finally:
        _C.set_isa(before)
    wrong = sorted({record.case for record in records if record.wrong})
    if wrong:
        print(f"budget.py: error: wrong results: {', '.join(wrong)}", file=sys.stderr)
        return 1
    for what, budget in budgets(records).items():
        title = f"{what}, {arguments.dtype}, {arguments.isa}, one thread, D = Dv = 64"
        headers = ("", "ns for\na tile", "of it", "at the\npeak", "share\nof peak")
        print_table(title, headers, rows(what, budget))
        print(f"largest error of the fit over the widths {WIDTHS}: {budget.residual:.0%}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
