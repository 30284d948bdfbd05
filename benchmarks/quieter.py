"""Puts several runs of run.py together: of each group the quietest.

    python benchmarks/quieter.py FIRST.json AGAIN.json ... --output BOTH.json

The runs must be of one build on one machine. A neighbour on the same chip slows down whoever is
measured while he works, so the run of a group counts in which all of its times together, those of
the peers as much as those of mha_ext, have the least geometric mean, of those runs in which
nothing failed that did not fail in the others. Where mha_ext was wrong in any run, that one
counts. Date, load and settings are those of the first run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import suite
from compare import Key, key_of
from goals import OWN, evaluate, geometric_mean
from goals import show as show_goals
from run import Parser, draw, load

from mha_ext.report import check_output

Run = Mapping[str, Any]
Group = tuple[str, str]  # the title, the number of threads
STEADY = 0.95  # of the highest limit


def _titles() -> dict[tuple[str, str, str], str]:
    """The group of each topic, case and dtype."""
    return {
        (group.topic, case.name, group.dtype): group.title
        for group in suite.groups()
        for case in group.cases
    }


def by_group(run: Run) -> dict[Group, list[Mapping[str, Any]]]:
    """The records of each group. What no group of the suite has is one of its own."""
    titles = _titles()
    found: dict[Group, list[Mapping[str, Any]]] = {}
    for record in run["records"]:
        names = (record["topic"], record["case"], record["dtype"])
        title = titles.get(names, ": ".join(names))
        if record["what"] == "memory":
            title += ", memory"
        found.setdefault((title, str(record["threads"])), []).append(record)
    return found


def _is_wrong(records: Sequence[Mapping[str, Any]]) -> bool:
    return any(r["wrong"] and r["implementation"].startswith(OWN) for r in records)


def _limit(records: Sequence[Mapping[str, Any]]) -> float:
    """The lowest rate of the limit, which a neighbour has lowered for as long as he worked."""
    rates = [rate["median"] for r in records if (rate := r["bandwidth"] or r["peak"])]
    return min(rates, default=0.0)


def quietest(candidates: Sequence[tuple[int, list[Mapping[str, Any]]]]) -> int:
    """Of the runs that have a group, the one that counts: its position in `candidates`."""
    for position, (_, records) in enumerate(candidates):
        if _is_wrong(records):
            return position
    times: list[dict[Key, float]] = [
        {key_of(r): r["seconds"]["median"] for r in records if r["seconds"]}
        for _, records in candidates
    ]
    most = max(map(len, times))  # an implementation that failed in a run is no advantage of it
    whole = [position for position, found in enumerate(times) if len(found) == most]
    limits = [_limit(records) for _, records in candidates]
    highest = max(limits[position] for position in whole)
    whole = [position for position in whole if limits[position] >= STEADY * highest]
    common = set.intersection(*(set(times[position]) for position in whole))
    if not common:
        return whole[0]
    return min(whole, key=lambda i: geometric_mean([times[i][key] for key in sorted(common)]))


def _of_one_build(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Raises ValueError where the runs cannot be put together."""
    for what, value in (
        ("processor", lambda run: run["machine"]["processor"]),
        ("instruction set", lambda run: run["machine"]["isa"]),
        ("commit", lambda run: run["versions"]["commit"]),
        ("build", lambda run: run["versions"]["build"]),
        ("torch", lambda run: run["versions"]["torch"]),
        ("time for each group", lambda run: run["settings"]["seconds"]),
    ):
        for run, name in zip(runs, names, strict=True):
            if value(run) != value(runs[0]):
                raise ValueError(
                    f"the runs must be of one build on one machine, but the {what} is "
                    f"{value(runs[0])!r} in {names[0]} and {value(run)!r} in {name}"
                )


def together(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """One result of several. Raises ValueError where they are of different builds or machines."""
    _of_one_build(runs, names)
    grouped = [by_group(run) for run in runs]
    records: list[Mapping[str, Any]] = []
    used: Counter[int] = Counter()
    for group in dict.fromkeys(group for found in grouped for group in found):
        candidates = [(i, found[group]) for i, found in enumerate(grouped) if group in found]
        chosen, best = candidates[quietest(candidates)]
        used[chosen] += 1
        records += best
    peaks: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for peak in (peak for run in runs for peak in run["peaks"]):
        key = (peak["kind"], peak["dtype"], peak["isa"], peak["threads"])
        if key not in peaks or peak["rate"]["median"] > peaks[key]["rate"]["median"]:
            peaks[key] = peak
    parts = [f"{run['command']} ({used[i]} groups)" for i, run in enumerate(runs)]
    return {
        **runs[0],
        "command": "; ".join(parts),
        "complete": all(run["complete"] for run in runs),
        "minutes": round(sum(run["minutes"] for run in runs), 1),
        "left_out": {
            name: why
            for name, why in runs[0]["left_out"].items()
            if all(name in run["left_out"] for run in runs)
        },
        "peaks": list(peaks.values()),
        "records": records,
        "goals": evaluate(records),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes, draws and prints; 2 where the files cannot be put together."""
    parser = Parser(prog="quieter.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--output", required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument("--no-charts", action="store_true", help="only the JSON file")
    arguments = parser.parse_args(argv)
    output = Path(arguments.output)
    try:
        content = together([load(path) for path in arguments.results], arguments.results)
        check_output(output)
    except ValueError as error:
        print(f"quieter.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    output.write_text(json.dumps(content, indent=1) + "\n")
    show_goals(content["goals"])
    print(f"wrote {output}")
    if not arguments.no_charts:
        draw(content, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
