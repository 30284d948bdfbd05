"""One rank: runs every case of some modules, and writes down what went wrong in each.

RANK=0 WORLD_SIZE=2 RENDEZVOUS=folder python -m ranks.worker sequence_cases,tensor_cases
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

from ranks.launch import TIMEOUT


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT - 60)  # into the log: where the ranks hang
    folder, rank = Path(os.environ["RENDEZVOUS"]), int(os.environ["RANK"])
    modules = [importlib.import_module(f"ranks.{name}") for name in names]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=getattr(modules[0], "SECONDS", 120)),
    )
    report: dict[str, str] = {}
    for name, module in zip(names, modules, strict=True):
        for case, run in module.CASES.items():
            torch.manual_seed(0)
            error = ""
            try:
                run()
            except Exception:  # the other ranks may be anywhere: none goes on
                error = traceback.format_exc(limit=-8)
            report[f"{name}: {case}"] = error
            Path(folder, f"report{rank}.json").write_text(json.dumps(report))
            if error:
                sys.exit(1)
    dist.destroy_process_group()
    # DTensor's caches keep the groups: a thread of Gloo's that lets go of a tensor while Python ends aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1].split(","))
