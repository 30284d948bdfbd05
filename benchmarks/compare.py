"""What became slower or faster between two results of run.py, beyond noise.

    python benchmarks/compare.py OLD.json NEW.json

Times are multiplied by the limit that was measured in the same rounds (the arithmetic peak; for
decode the bandwidth of reading), so that another clock is no change. A time has changed where the
quartiles of the two runs do not overlap and the medians differ by more than --threshold. The exit
status is 1 where mha_ext became slower or wrong, 2 where the files cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goals import OWN, geometric_mean
from run import Parser, load
from tables import milliseconds

from mha_ext.report import Row, print_table

JsonRecord = Mapping[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One time in both results."""

    key: Key
    old: float  # seconds
    new: float
    ratio: float  # new / old, both in units of their own limit; above 1 is slower
    noise: float  # how far the quartiles are from the medians, as a fraction, both together
    apart: bool  # the quartiles do not overlap

    def is_slower(self, threshold: float) -> bool:
        """Beyond noise and threshold."""
        return self.apart and self.ratio > 1 + threshold

    def is_faster(self, threshold: float) -> bool:
        """Beyond noise and threshold."""
        return self.apart and 1 / self.ratio > 1 + threshold


def key_of(record: JsonRecord) -> Key:
    """What a record is of."""
    names = ("topic", "case", "dtype", "level", "what", "implementation")
    return (*(str(record[name]) for name in names), f"{record['threads']}")


def describe(key: Key) -> str:
    """One line."""
    topic, case, dtype, level, what, implementation, threads = key
    where = "" if level == "attention" else f" {level}"
    name = "" if implementation == OWN else f" ({implementation})"
    return f"{topic}{where}: {case}, {dtype}, {threads} thr., {what}{name}"


def _interval(record: JsonRecord) -> tuple[float, float, float]:
    """q1, median and q3 of the time, in units of the limit of the same rounds."""
    taken, limit = record["seconds"], record["bandwidth"] or record["peak"]
    if not limit:
        return taken["q1"], taken["median"], taken["q3"]
    factor = limit["median"]
    return taken["q1"] * factor, taken["median"] * factor, taken["q3"] * factor


def _limit_noise(record: JsonRecord) -> float:
    """Half the distance of the limit's quartiles, as a fraction."""
    limit = record["bandwidth"] or record["peak"]
    return (limit["q3"] - limit["q1"]) / 2 / limit["median"] if limit else 0.0


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """All times that both results have."""
    before = {key_of(r): r for r in old["records"] if r["seconds"]}
    found = []
    for record in new["records"]:
        key = key_of(record)
        if not record["seconds"] or key not in before:
            continue
        a, b = _interval(before[key]), _interval(record)
        slack = _limit_noise(before[key]) + _limit_noise(record)
        apart = b[0] > a[2] * (1 + slack) or a[0] > b[2] * (1 + slack)
        noise = (a[2] - a[0]) / 2 / a[1] + (b[2] - b[0]) / 2 / b[1] + slack
        found.append(
            Change(
                key,
                before[key]["seconds"]["median"],
                record["seconds"]["median"],
                b[1] / a[1],
                noise,
                apart,
            )
        )
    return found


def _machine(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, {machine['isa']}"


def _rows(found: Sequence[Change]) -> list[Row]:
    return [
        [
            describe(change.key),
            milliseconds(change.old),
            milliseconds(change.new),
            f"{change.ratio:.2f}x" if change.ratio >= 1 else f"1/{1 / change.ratio:.2f}x",
            f"{change.noise:.0%}",
        ]
        for change in found
    ]


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], threshold: float, peers: bool = False
) -> int:
    """Prints the tables; the exit status."""
    if _machine(old) != _machine(new):
        print(
            f"warning: the results are of different machines: {_machine(old)}; {_machine(new)}",
            file=sys.stderr,
        )
    found = changes(old, new)
    if not found:
        raise ValueError("the two results have no time in common")
    ours = [c for c in found if peers or c.key[5].startswith(OWN)]
    slower = sorted((c for c in ours if c.is_slower(threshold)), key=lambda c: -c.ratio)
    faster = sorted((c for c in ours if c.is_faster(threshold)), key=lambda c: c.ratio)
    headers = ("", "old\nms", "new\nms", "\ntime", "\nnoise")
    for title, chosen in (("Slower", slower), ("Faster", faster)):
        if chosen:
            print_table(f"{title}, beyond {threshold:.0%} and noise", headers, _rows(chosen))
    for name, chosen in (
        ("mha_ext", [c for c in found if c.key[5].startswith(OWN)]),
        ("the peers", [c for c in found if not c.key[5].startswith(OWN)]),
    ):
        if chosen:
            mean = geometric_mean([c.ratio for c in chosen])
            print(f"{name}: {len(chosen)} times, geometric mean of new / old {mean:.3f}")
    wrong = [key_of(r) for r in new["records"] if r["wrong"]]
    wrong = [key for key in wrong if key[5].startswith(OWN)]
    for key in wrong:
        print(f"WRONG: {describe(key)}")
    lost = {c.key for c in changes(old, old)} - {c.key for c in found}
    if lost:
        print(f"{len(lost)} times of the old result are not in the new one")
    worse = [c for c in slower if c.key[5].startswith(OWN)]
    print(f"{len(worse)} slower, {len([c for c in faster if c.key[5].startswith(OWN)])} faster")
    return int(bool(worse or wrong))


def _threshold(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 10:
        raise argparse.ArgumentTypeError(f"must be a fraction from 0 on, got {text!r}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Compares two files; 1 where something became slower or wrong, 2 where it cannot."""
    parser = Parser(prog="compare.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument("--threshold", type=_threshold, default=0.05, help="fraction, default 0.05")
    parser.add_argument("--peers", action="store_true", help="list the peers' changes too")
    arguments = parser.parse_args(argv)
    try:
        old, new = load(arguments.old), load(arguments.new)
        return compare(old, new, arguments.threshold, arguments.peers)
    except ValueError as error:
        print(f"compare.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
