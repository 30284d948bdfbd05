"""Two builds of mha_ext in turns: what a change does to the time, on a machine that is never quiet.

    python benchmarks/turns.py BEFORE AFTER --cases peak --dtype bfloat16 --threads 1

BEFORE and AFTER are folders that hold a built package mha_ext: a clone after `python setup.py build_ext
--inplace`, or what `pip install --no-deps --target FOLDER` has filled. Each runs in a process of its own, on
the same cores, for some milliseconds at a time. A neighbour and the clock stay as they are for longer than
that, so they slow both alike. BEFORE runs in two processes, one before and one after each turn of AFTER, which
is held against both: what these two differ by is noise. Where a process has its memory can make some per cent
of difference for as long as it lives, so all of them are started anew several times; what counts is the median of
the starts, and how far apart they are. Results are compared with float64 before anything is timed, and the
bits of the two builds with each other. The exit status is 1 where AFTER is slower beyond noise, 2 where the
two cannot be compared.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import measure
import suite
import torch
from run import Parser, add_selection, plan, positive
from tables import milliseconds

from mha_ext import _C
from mha_ext.report import Row, print_table, progress

SECONDS, QUICK_SECONDS = 1.0, 0.2  # for each case and pass, at each start
LEAST_ROUNDS = 5
STARTS = 5
BEFORE, AFTER, AGAIN = "before", "after", "before, once more"  # in turns, from either end
Passes = dict[str, float]  # pass -> seconds


# ------------------------------------------------------------------------------ a build


def answer_all() -> None:
    """What the process of a build does: a line of JSON for each line that it reads."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    cores = os.sched_getaffinity(0)
    bench = measure.Bench((), 1.0, None)
    groups = suite.groups()
    visits: list[dict[str, Callable[[], Passes]]] = []
    gc.disable()
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            if "case" in ask:
                reply: object = visits[ask["case"]][ask["what"]]()
            else:
                # One thread stays where the others are; several find their own places.
                os.sched_setaffinity(0, {min(cores)} if ask["threads"] == 1 else cores)
                torch.set_num_threads(ask["threads"])
                work = [
                    w
                    for w in bench.prepare(groups[ask["group"]], ask["threads"])
                    if w.run.name == measure.OWN and w.isa == _C.active_isa()
                ]
                passes = groups[ask["group"]].passes
                visits = [{what: measure.visit(w, [what]) for what in passes} for w in work]
                reply = [{"bits": bits(w), "wrong": w.wrong} for w in work]
                gc.collect()
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def bits(w: measure.Work) -> str:
    """A digest of the result and the gradients."""
    torch.manual_seed(0)
    found = {"out": w.run.call(w.inputs)}
    if w.case.training and w.run.differentiable:
        torch.manual_seed(0)
        found |= w.run.gradients(w.inputs, w.grad_out)
    digest = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Build:
    """The process of a build. Raises ValueError in one line."""

    def __init__(self, folder: str, role: str) -> None:
        self.name = f"{folder} ({role})"
        if not list(Path(folder).glob("mha_ext/_C.*.so")):
            raise ValueError(
                f"{role.split(',')[0].upper()} must be a folder that holds a built package mha_ext, but {folder} "
                "has no mha_ext/_C.*.so: python setup.py build_ext --inplace there, or pip install --no-deps "
                "--target FOLDER"
            )
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(Path(folder).resolve()), *([before] if before else [])])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Threads that wait for more work would take the cores of whoever is next.
            env={"GOMP_SPINCOUNT": "10000", **os.environ, "PYTHONPATH": path},
        )

    def ask(self, **question: object) -> Any:
        """The reply."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            reply = json.loads(line)
        else:
            reply = {"error": f"its process has ended with {self.process.wait()}, see above"}
        if "error" in reply:
            raise ValueError(f"{self.name} failed: {reply['error']}")
        return reply

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


# ------------------------------------------------------------------------------ in turns


class Spread(NamedTuple):
    """A ratio: the median of the starts, and the least and the most. Of five starts the true median is there in 15
    cases of 16, whatever the distribution.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value for each start."""
        return cls(statistics.median(values), min(values), max(values))


class Start(NamedTuple):
    """One pass over one case, between two starts of the processes."""

    before: float  # seconds, medians
    after: float
    ratio: float  # after / before, the median of the rounds
    noise: float  # before / before
    same_bits: bool

    @classmethod
    def of(
        cls,
        before: Sequence[float],
        after: Sequence[float],
        again: Sequence[float],
        same_bits: bool,
    ) -> Start:
        """From the seconds of each round."""
        both = [math.sqrt(b * c) for b, c in zip(before, again, strict=True)]
        return cls(
            statistics.median(both),
            statistics.median(after),
            statistics.median(a / b for a, b in zip(after, both, strict=True)),
            statistics.median(c / b for b, c in zip(before, again, strict=True)),
            same_bits,
        )


@dataclass(frozen=True)
class Comparison:
    """One pass over one case, of all starts."""

    name: str
    before: float
    after: float
    ratio: Spread
    noise: Spread
    same_bits: bool
    starts: int

    @classmethod
    def of(cls, name: str, starts: Sequence[Start]) -> Comparison:
        """From what was found between any two starts."""
        return cls(
            name,
            statistics.median(start.before for start in starts),
            statistics.median(start.after for start in starts),
            Spread.of([start.ratio for start in starts]),
            Spread.of([start.noise for start in starts]),
            all(start.same_bits for start in starts),
            len(starts),
        )

    @property
    def _says(self) -> bool:
        """Of four starts, all are above all of noise once in 70 times where builds are alike; fewer say less."""
        return self.starts >= 4

    @property
    def is_slower(self) -> bool:
        """Beyond noise."""
        return self._says and self.ratio.least > max(1.0, self.noise.most, 1 / self.noise.least)

    @property
    def is_faster(self) -> bool:
        """Beyond noise."""
        return self._says and self.ratio.most < min(1.0, self.noise.least, 1 / self.noise.most)


def rounds(
    builds: Mapping[str, Build], case: int, what: suite.Pass, seconds: float
) -> dict[str, list[Passes]]:
    """What each build takes, one after the other, from either end: AFTER is always in the middle."""
    found: dict[str, list[Passes]] = {role: [] for role in builds}
    order, end = list(builds), time.perf_counter() + seconds
    while len(found[AFTER]) < LEAST_ROUNDS or time.perf_counter() < end:
        for role in order:
            found[role].append(builds[role].ask(case=case, what=what))
        order.reverse()
    return found


def compare(
    builds: Mapping[str, Build], group: suite.Group, threads: int, seconds: float
) -> dict[str, Start]:
    """All cases and passes of a group, by a line that names them."""
    index = suite.groups().index(group)
    ready = {role: build.ask(group=index, threads=threads) for role, build in builds.items()}
    found = {}
    for k, case in enumerate(group.cases):
        for role, build in builds.items():
            if wrong := ready[role][k]["wrong"]:
                raise ValueError(f"{build.name} is wrong in {', '.join(wrong)}: {group.title}")
        same = ready[BEFORE][k]["bits"] == ready[AFTER][k]["bits"]
        for timed in group.passes if case.training else suite.FORWARD:
            taken = rounds(builds, k, timed, seconds)
            for what in taken[AFTER][0]:
                name = f"{group.topic}: {case.name}, {group.dtype}, {threads} thr., {what}"
                times = [[sample[what] for sample in taken[role]] for role in builds]
                found[name] = Start.of(*times, same)
    return found


def _rows(found: Sequence[Comparison]) -> list[Row]:
    def words(spread: Spread) -> list[str]:
        return [f"{spread.median:.3f}", f"{spread.least:.3f} to {spread.most:.3f}"]

    return [
        [
            c.name,
            milliseconds(c.before),
            milliseconds(c.after),
            *words(c.ratio),
            *words(c.noise),
            "same" if c.same_bits else "other",
            "slower" if c.is_slower else "faster" if c.is_faster else "",
        ]
        for c in found
    ]


HEADERS = ("", "before\nms", "after\nms", "after /\nbefore", "of all\nstarts", "before /\nbefore")
HEADERS += ("of all\nstarts", "\nbits", "")


def _run(arguments: argparse.Namespace) -> int:
    work = [(group, threads) for group, threads in plan(arguments) if group.passes]
    if not work:
        raise ValueError("nothing is left to time: memory alone was asked for")
    if arguments.starts < 1:
        raise ValueError(f"--starts must be at least 1, got {arguments.starts}")
    folders = {BEFORE: arguments.before, AFTER: arguments.after, AGAIN: arguments.before}
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    found: dict[str, list[Start]] = {}
    builds: dict[str, Build] = {}
    try:
        with progress(len(work) * arguments.starts) as advance:
            for start in range(arguments.starts):
                for role, folder in folders.items():
                    builds[role] = Build(folder, role)
                for group, threads in work:
                    advance(f"start {start + 1}: {group.title}, {threads} thr.")
                    for name, one in compare(builds, group, threads, seconds).items():
                        found.setdefault(name, []).append(one)
                for build in builds.values():
                    build.stop()
    except KeyboardInterrupt:
        print("interrupted: what was measured is shown", file=sys.stderr)
    finally:
        for build in builds.values():
            build.stop()
    compared = [Comparison.of(name, starts) for name, starts in found.items()]
    if compared:
        print_table(f"{arguments.after} beside {arguments.before}", HEADERS, _rows(compared))
    slower, faster = sum(c.is_slower for c in compared), sum(c.is_faster for c in compared)
    print(f"{slower} slower, {faster} faster, {len(compared) - slower - faster} neither")
    return int(slower > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares two builds; 1 where the second is slower, 2 where they cannot be compared."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given == ["--answer"]:
        answer_all()
        return 0
    parser = Parser(prog="turns.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", metavar="BEFORE", help="a folder with a built mha_ext")
    parser.add_argument("after", metavar="AFTER", help="another one")
    add_selection(parser)
    parser.add_argument(
        "--seconds",
        type=positive,
        help=f"for each case and pass, at each start; default {SECONDS} ({QUICK_SECONDS})",
    )
    parser.add_argument("--starts", type=int, default=STARTS, help=f"default {STARTS}")
    arguments = parser.parse_args(given)
    try:
        return _run(arguments)
    except ValueError as error:
        print(f"turns.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
