"""Measures mha_ext beside every peer that is installed: times, shares of the peak, memory, charts.

    python benchmarks/run.py              # all of it, 20 to 25 minutes on two cores
    python benchmarks/run.py --quick      # about three minutes
    python benchmarks/run.py --list       # what would run
    python benchmarks/run.py --cases peak decode --dtype float32 --threads 1

Each result is compared with float64 before it is timed. benchmarks/README.md says how.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import goals
import measure
import suite
import tables
import torch

import mha_ext
from mha_ext import _C
from mha_ext.report import check_output, progress
from mha_ext.timing import summary

FORMAT = "mha_ext benchmark 1"
RESULTS = Path(__file__).resolve().parent / "results"
SECONDS, QUICK_SECONDS = 4.0, 0.7  # for each group and number of threads


class Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that say which groups: what `plan` reads."""
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="TOPIC",
        choices=suite.TOPICS,
        help=f"only these: {', '.join(suite.TOPICS)}",
    )
    parser.add_argument("--filter", metavar="REGEX", help="only groups whose line in --list fits")
    parser.add_argument("--quick", action="store_true", help="fewer groups, less time for each")
    parser.add_argument("--dtype", nargs="+", choices=suite.DTYPES, help="default: all")
    parser.add_argument(
        "--threads", nargs="+", metavar="N", help="numbers, or all; default: 1 and all"
    )


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=(__doc__ or "").split("\n")[0])
    add_selection(parser)
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=suite.PEERS,
        metavar="NAME",
        help=f"default: all that are installed of {', '.join(suite.PEERS)}",
    )
    parser.add_argument(
        "--seconds", type=positive, help=f"for each group, default {SECONDS} ({QUICK_SECONDS})"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="so many rounds instead")
    parser.add_argument("--output", metavar="FILE", help="the JSON file; charts lie beside it")
    parser.add_argument("--no-charts", action="store_true", help="only the JSON file")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--list", action="store_true", help="print the groups and stop")
    parser.add_argument(
        "--redraw", metavar="FILE", help="only print the goals of FILE and draw its charts again"
    )
    return parser


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _threads(words: Sequence[str] | None) -> list[int]:
    """The numbers of threads, ascending. Raises ValueError."""
    every = torch.get_num_threads()
    found = set()
    for word in words or ("1", "all"):
        if word != "all" and not (word.isdecimal() and int(word) >= 1):
            raise ValueError(f"--threads must be numbers of at least 1 or all, got {word!r}")
        found.add(every if word == "all" else int(word))
    return sorted(found)


def plan(arguments: argparse.Namespace) -> list[tuple[suite.Group, int]]:
    """The groups that were asked for, each with a number of threads. Raises ValueError."""
    counts = _threads(arguments.threads)
    try:
        pattern = re.compile(arguments.filter or "")
    except re.error as error:
        raise ValueError(f"--filter must be a regular expression: {error}") from None
    found = []
    for group in suite.groups():
        fits = pattern.search(group.title) and (group.quick or not arguments.quick)
        fits = fits and group.topic in (arguments.cases or suite.TOPICS)
        if not fits or group.dtype not in (arguments.dtype or suite.DTYPES):
            continue
        if arguments.threads:
            kinds = counts
        elif arguments.quick and group.topic != "few heads":
            kinds = counts[:1] if "one" in group.threads else counts[-1:]
        else:
            kinds = [n for n in counts if n == counts[0] and "one" in group.threads]
            kinds += [n for n in counts[-1:] if "all" in group.threads and n not in kinds]
        found += [(group, threads) for threads in kinds]
    if not found:
        raise ValueError("nothing is left to measure: run.py --list shows all groups")
    return found


# ------------------------------------------------------------------------------ what it ran on


def processor() -> str:
    """The processor's name where Linux tells it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The hardware and the system."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "isa": _C.active_isa(),
        "supported_isas": _C.supported_isas(),
    }


def versions() -> dict[str, Any]:
    """Of all that takes part."""
    found: dict[str, Any] = {
        "mha_ext": mha_ext.__version__,
        "commit": _commit(),
        "build": _C.build_info(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in ("onnxruntime", "numpy", "matplotlib"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """Of this clone, with + where code differs from it (no text or result); None without git."""
    folder = Path(__file__).resolve().parent
    answers = []
    text = ("--", ":/", ":!/benchmarks/results", ":!/docs", ":(exclude,glob)**/*.md")
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno", *text]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=folder, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        answers.append(done.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")


def default_output(arguments: argparse.Namespace) -> Path:
    """results/<processor>-<instruction set>.json; a part of the suite does not overwrite the whole."""
    words = re.sub(r"\((r|tm)\)|cpu|@.*", "", processor().lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", words)) or "machine"
    name = f"{slug}-{_C.active_isa()}"
    parts = (arguments.cases, arguments.filter, arguments.dtype, arguments.threads)
    if any(parts) or arguments.peers is not None:
        name += "-part"
    return RESULTS / f"{name}{'-quick' if arguments.quick else ''}.json"


# ------------------------------------------------------------------------------ all of it


def measure_all(
    work: Sequence[tuple[suite.Group, int]], bench: measure.Bench, memory: bool
) -> tuple[list[measure.Record], bool]:
    """All records, and whether it came to its end (an interrupt keeps what there is)."""
    records: list[measure.Record] = []
    timed = [(group, threads) for group, threads in work if group.passes]
    weighed = [group for group in dict.fromkeys(group for group, _ in work) if group.memory]
    try:
        with progress(len(timed) + bool(memory and weighed)) as advance:
            for group, threads in timed:
                advance(f"{group.title}, {threads} thread{'s' if threads > 1 else ''}")
                try:
                    records += bench.measure(group, threads)
                except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                    bench.failures.add(f"{measure.OWN}, {group.title}, {threads} threads", error)
            if memory and weighed:
                advance("memory")
                records += bench.weigh(weighed, max(threads for _, threads in work))
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return records, False
    return records, True


def draw(content: dict[str, Any], output: Path) -> None:
    """The charts, in the folder that is named as the file; a line where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no charts: matplotlib is not installed (pip install '.[bench]')", file=sys.stderr)
        return
    import charts

    for path in charts.draw_all(content, output.with_suffix("")):
        print(f"wrote {path}")


def load(path: str) -> dict[str, Any]:
    """The content of a result file. Raises ValueError in one line."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is not a result of run.py: it is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{path} is not a result of run.py: its "format" is not "{FORMAT}"')
    return content


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.redraw:
        content = load(arguments.redraw)
        content["goals"] = goals.evaluate(content["records"])
        goals.show(content["goals"])
        if not arguments.no_charts:
            draw(content, Path(arguments.output or arguments.redraw))
        return 0
    if arguments.repeats is not None and arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {arguments.repeats}")
    work = plan(arguments)
    if arguments.list:
        for group, threads in work:
            print(f"{group.title}, {threads} thread{'s' if threads > 1 else ''}")
        return 0
    output = Path(arguments.output) if arguments.output else default_output(arguments)
    if not arguments.output:
        RESULTS.mkdir(exist_ok=True)
    check_output(output)

    wanted = list(suite.PEERS if arguments.peers is None else arguments.peers)
    missing = measure.missing_peers(wanted)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    wanted = [name for name in wanted if name not in missing]
    if arguments.peers is None or "SDPA" in wanted:
        wanted.append(measure.SDPA_MATH)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    bench = measure.Bench(wanted, seconds, arguments.repeats, 3 if arguments.quick else 5)
    start, began = datetime.now(timezone.utc), time.perf_counter()
    load_before = os.getloadavg()[0]
    found, complete = measure_all(work, bench, not arguments.no_memory)

    records = [record.as_json() for record in found]
    content = {
        "format": FORMAT,
        "date": start.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/run.py", *argv]),
        "complete": complete,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "load_average": [load_before, os.getloadavg()[0]],
        "machine": machine(),
        "versions": versions(),
        "settings": {
            "quick": arguments.quick,
            "seconds": seconds,
            "repeats": arguments.repeats,
            "peers": wanted,
        },
        "left_out": {**missing, **bench.failures.found},
        "peaks": [
            {"kind": kind, "dtype": dtype, "isa": isa, "threads": threads}
            | {"rate": asdict(summary(rates))}
            for (kind, dtype, isa, threads), rates in bench.rates.items()
        ],
        "records": records,
        "goals": goals.evaluate(records),
    }
    output.write_text(json.dumps(content, indent=1) + "\n")
    tables.show(content)
    print(f"wrote {output}")
    if not arguments.no_charts:
        draw(content, output)
    wrong = any(r["wrong"] and r["implementation"].startswith("mha_ext") for r in records)
    failed = any(name.startswith(measure.OWN) for name in bench.failures.found)
    return 130 if not complete else int(wrong or failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes, draws, prints; 1 where mha_ext was wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    try:
        return _run(arguments, given)
    except ValueError as error:
        print(f"run.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured is kept then too
    sys.exit(main())
