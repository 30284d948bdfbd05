"""One rank: runs every case of a module, and writes down what went wrong in each.

RANK=0 WORLD_SIZE=2 RENDEZVOUS=folder python -m ranks.worker sequence_cases
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import mha_ext.distributed  # noqa: F401
from ranks.launch import TIMEOUT


def main(module: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT - 20)  # into the log, where the ranks hang
    folder, rank = Path(os.environ["RENDEZVOUS"]), int(os.environ["RANK"])
    cases = importlib.import_module(f"ranks.{module}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=getattr(cases, "TIMEOUT", 60)),
    )
    report: dict[str, str] = {}
    for name, case in cases.CASES.items():
        if not name.startswith(os.environ.get("ONLY", "")):  # to look into one by hand
            continue
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            case()
            report[name] = ""
        except Exception:  # the other ranks may be anywhere: none goes on
            report[name] = traceback.format_exc(limit=-8)
        Path(folder, f"report{rank}.json").write_text(json.dumps(report))
        if report[name]:
            sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
