"""Starts the ranks of a test as processes of their own, and collects what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

TIMEOUT = 600  # seconds for all cases of a module
TESTS = Path(__file__).resolve().parent.parent


@cache
def reports(modules: str, world: int) -> dict[str, str]:
    """Runs every case of the modules, "a,b", on ``world`` ranks: what went wrong in each, "" where nothing did.

    After the first that goes wrong the ranks stop.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes, logs = start(modules, world, folder, TIMEOUT)
        found: dict[str, str] = {}
        for rank in range(world):
            report = Path(folder, f"report{rank}.json")
            if report.is_file():
                for name, error in json.loads(report.read_text()).items():
                    found[name] = found.get(name, "") + (f"rank {rank}: {error}\n" if error else "")
    if any(codes):
        found["ranks end well"] = f"exit status {codes}\n" + "\n".join(logs)
    return found


def start(modules: str, world: int, folder: str, timeout: float) -> tuple[list[int], list[str]]:
    """Runs ``python -m ranks.worker modules`` on every rank: exit status and output of each."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(TESTS),
        OMP_NUM_THREADS="1",
        WORLD_SIZE=str(world),
        RENDEZVOUS=folder,
        MHA_EXT_FAST_LINEAR="0",  # not measured on each rank
        GLOO_SOCKET_IFNAME="lo",
    )
    ranks = []
    for rank in range(world):
        log = open(Path(folder, f"log{rank}"), "w+")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "ranks.worker", modules],
            env={**environment, "RANK": str(rank)},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        ranks.append((process, log))
    codes = []
    deadline = time.monotonic() + timeout
    try:
        for process, _ in ranks:
            codes.append(process.wait(max(deadline - time.monotonic(), 0.1)))
    except subprocess.TimeoutExpired:
        codes.append(-1)
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()
    return codes, [Path(folder, f"log{rank}").read_text()[-3000:] for rank in range(world)]
