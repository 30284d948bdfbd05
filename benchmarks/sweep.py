"""Random problems beside PyTorch: where mha_ext is ahead least, or behind.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --problems 1000 --seed 3 --dtype float32 --threads 2 --worst 40

run.py measures the shapes that models have; this draws lengths, widths, grouped heads, masks and
dtypes at random and lists the problems with the least speed-up over the faster of eager and SDPA,
forward and backward apart. Each result is held against float64 first, without dropout, by the code
that run.py uses. The same seed draws the same problems.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from statistics import geometric_mean

import run
from measure import OWN, Bench, Record
from suite import BOTH, DTYPES, Group
from tables import milliseconds

from mha_ext.cases import MASKS, SQUARE_MASKS, Case
from mha_ext.report import Row, print_table, progress

PEERS = ("eager", "SDPA")
SHORT = (1, 2, 3, 4, 5, 8, 10, 12, 16, 17, 24, 32, 33, 50)
LENGTHS = (*SHORT, 64, 65, 77, 100, 128, 129, 197, 256, 300, 512, 700, 1024)
WIDTHS = (1, 4, 8, 10, 16, 24, 32, 40, 48, 50, 64, 72, 80, 96, 100, 128, 160, 192, 256, 300)
MOST_WORK = 3e8  # of a problem: pairs times columns of K and V
MOST_NUMBERS = 1e7  # the same with queries and keys in place of the pairs


def draw(source: random.Random) -> Case:
    """A problem that takes some milliseconds at most."""
    while True:
        kv_heads, group = source.choice((1, 2, 3, 4, 8, 12)), source.choice((1, 1, 1, 2, 4, 8))
        batch, heads = source.choice((1, 1, 2, 4, 8, 64)), kv_heads * group
        queries = source.choice(LENGTHS)
        # One key has gradients of zero, of which only rounding is left to compare.
        keys = max(2, queries if source.random() < 0.6 else source.choice(LENGTHS))
        head_dim = source.choice(WIDTHS)
        value_dim = head_dim if source.random() < 0.8 else source.choice(WIDTHS)
        widths = head_dim + value_dim
        if batch * heads * queries * keys * widths > MOST_WORK:
            continue
        if batch * heads * (queries + keys) * widths > MOST_NUMBERS:
            continue
        masks = [mask for mask in MASKS if queries == keys or mask not in SQUARE_MASKS]
        return Case(
            name=f"{batch} x {heads}:{kv_heads} x {queries} x {keys} x {head_dim}:{value_dim}",
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            head_dim=head_dim,
            kv_heads=kv_heads,
            mask=source.choice(masks),
            dropout=0.1 if source.random() < 0.1 else 0.0,
            layer=False,
            value_dim=value_dim,
            window=max(1, queries // 8),
            bias_gradient=source.random() < 0.5,
        )


def speedups(records: Sequence[Record], dtype: str, case: Case) -> list[tuple[float, Row]]:
    """Forward and backward of a problem: over the faster peer, and the row that says so."""
    found: list[tuple[float, Row]] = []
    for what in ("forward", "backward"):
        taken = {
            r.implementation: r.seconds.median for r in records if r.what == what and r.seconds
        }
        peers = {name: seconds for name, seconds in taken.items() if name != OWN}
        if OWN not in taken or not peers:
            continue
        best = min(peers, key=lambda name: peers[name])
        ratio = peers[best] / taken[OWN]
        times = [milliseconds(taken[OWN]), milliseconds(peers[best]), best, f"{ratio:.2f}x"]
        options = f"{case.mask}, dropout" if case.dropout else case.mask
        found.append((ratio, [case.name, options, dtype, what, *times]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The worst of what was drawn; 1 where a result of ours was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=run.positive, default=0.1, help="for each problem (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the problems (default: %(default)s)"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--worst", type=int, default=25, help="how many to list (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    for name in ("problems", "threads", "worst"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    source = random.Random(options.seed)
    bench = Bench(PEERS, options.seconds, None)
    found: list[tuple[float, Row]] = []
    wrong: set[str] = set()
    with progress(options.problems) as advance:
        for _ in range(options.problems):
            case, dtype = draw(source), source.choice(options.dtype)
            group = Group("sweep", dtype, (case,), BOTH, PEERS)
            advance(group.title)
            records = bench.measure(group, options.threads)
            found += speedups(records, dtype, case)
            if any(record.implementation == OWN and record.wrong for record in records):
                wrong.add(group.title)
    found.sort(key=lambda item: item[0])
    headers = [
        "problem",
        "options",
        "dtype",
        "pass",
        "mha_ext\nms",
        "best peer\nms",
        "which",
        "speed-up",
    ]
    title = (
        f"the least speed-ups of {options.problems} problems of seed {options.seed}, "
        f"threads: {options.threads}"
    )
    print_table(title, headers, [row for _, row in found[: options.worst]])
    for what in ("forward", "backward"):
        ratios = [ratio for ratio, row in found if row and row[3] == what]
        if ratios:
            behind = sum(ratio < 1 for ratio in ratios)
            print(
                f"{what}: mean {geometric_mean(ratios):.2f}x, behind in {behind} of {len(ratios)}"
            )
    for name in sorted(wrong):
        print(f"wrong: {name}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
