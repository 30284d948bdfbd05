"""The command line: `mha-ext profile | info | check`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch

import mha_ext
from mha_ext import check, profile
from mha_ext.cases import CASES, DTYPES, MASKS, SQUARE_MASKS, Case


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _positive_int(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1 and below 2**31, got {text[:40]!r}"
        )
    return int(text)


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mha-ext", description="Multi-head attention for PyTorch.")
    parser.add_argument("--version", action="version", version=mha_ext.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="profile|info|check")
    _add_profile(commands)
    what = "what was built, and what this machine can do"
    commands.add_parser("info", help=what, description=f"Says {what}.")
    what = "compare the kernels with their definition, on this machine"
    checking = commands.add_parser(
        "check",
        help=what,
        description=f"{what.capitalize()}. The exit status is 1 where a result is off by more than its tolerance.",
    )
    checking.add_argument(
        "--isa", choices=_isas(), help="only this instruction set (default: all supported)"
    )
    checking.add_argument("--dtype", choices=DTYPES, help="only this dtype (default: all)")
    checking.add_argument("--verbose", action="store_true", help="a line for every single check")
    return parser


def _isas() -> list[str]:
    return list(mha_ext._C.supported_isas())


def _add_profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="time, memory and error of mha_ext beside PyTorch's own attention",
        description="Without options: a handful of real shapes, in about a minute. With any of "
        "--batch to --head-dim: that one shape. " + profile.MEMORY_HELP,
    )
    shape = parser.add_argument_group("one shape of your own")
    shape.add_argument("--batch", type=_positive_int, metavar="N", help="default 1")
    shape.add_argument("--heads", type=_positive_int, metavar="N", help="default 12")
    shape.add_argument(
        "--kv-heads", type=_positive_int, metavar="N", help="default: as many as heads"
    )
    shape.add_argument("--queries", type=_positive_int, metavar="N", help="default 512")
    shape.add_argument(
        "--keys", type=_positive_int, metavar="N", help="default: as many as queries"
    )
    shape.add_argument("--head-dim", type=_positive_int, metavar="N", help="default 64")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument(
        "--mask",
        choices=MASKS,
        help="default: as the case has it; without a shape, causal and window leave out cases whose lengths differ",
    )
    parser.add_argument("--dropout", type=float, metavar="P", help="dropout probability, default 0")
    parser.add_argument("--threads", type=_positive_int, metavar="N", help="default: torch's")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--seconds",
        type=_positive_float,
        metavar="S",
        default=60.0,
        help="about so long in all, default 60",
    )
    parser.add_argument(
        "--repeats", type=_positive_int, metavar="N", help="so many rounds instead of --seconds"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write a torch.profiler trace of one layer, forward and backward, to FILE",
    )


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases asked for. Raises ValueError for a shape that makes no sense."""
    given = (
        arguments.batch,
        arguments.heads,
        arguments.kv_heads,
        arguments.queries,
        arguments.keys,
        arguments.head_dim,
    )
    changes: dict[str, object] = {}
    if arguments.mask is not None:
        changes["mask"] = arguments.mask
    if arguments.dropout is not None:
        changes["dropout"] = arguments.dropout
    if not any(given):
        cases: Sequence[Case] = CASES
        if arguments.mask in SQUARE_MASKS:
            cases = tuple(case for case in cases if case.queries == case.keys)
        return [replace(case, **changes) for case in cases]  # type: ignore[arg-type]
    queries = arguments.queries or (arguments.keys or 512)
    case = Case(
        "",
        arguments.batch or 1,
        arguments.heads or 12,
        queries,
        arguments.keys or queries,
        arguments.head_dim or 64,
        arguments.kv_heads,
    )
    name = f"{case.batch}x({case.queries}|{case.keys})x{case.width}"
    heads = f"{case.heads}" if case.kv_heads is None else f"{case.heads}:{case.kv_heads}"
    return [replace(case, name=f"{name}, {heads} heads", **changes)]  # type: ignore[arg-type]


def _profile(arguments: argparse.Namespace) -> int:
    settings = profile.Settings(
        cases=_cases(arguments),
        dtype=arguments.dtype,
        threads=arguments.threads,
        device=arguments.device,
        seconds=arguments.seconds,
        repeats=arguments.repeats,
    )
    try:
        torch.device(settings.device)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {settings.device!r}") from None
    return profile.main(settings, arguments.json, arguments.trace)


_OPTIONAL = ("transformers", "onnxscript", "onnxruntime", "matplotlib", "rich")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels(device: str) -> list[str]:
    """The operators that have a kernel of their own for a device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (
        op.removeprefix("mha_ext::")
        for op in sorted(torch._C._dispatch_get_all_op_names())
        if op.startswith("mha_ext::")
    )
    return [name for name in names if has(f"mha_ext::{name}", device)]


def info() -> str:
    """What was built and what this machine can do, as lines of `name  value`."""
    c = mha_ext._C
    lines = {name: str(value) for name, value in c.build_info().items() if name != "isas"}
    lines["torch here"] = torch.__version__
    lines["python"] = sys.version.split()[0]
    lines["instruction sets"] = (
        f"compiled {', '.join(c.compiled_isas())}; supported here {', '.join(c.supported_isas())}; "
        f"active {c.active_isa()}"
    )
    if torch.cuda.is_available():
        lines["GPU"] = torch.cuda.get_device_name()
    else:
        lines["GPU"] = "none that torch can use"
    for device in ("CPU", "CUDA"):
        lines[f"kernels on {device}"] = ", ".join(_kernels(device)) or "none"
    found = [f"{name} {_version(name)}" for name in _OPTIONAL if _version(name)]
    lines["optional packages"] = ", ".join(found) or f"none of {', '.join(_OPTIONAL)}"
    lines["threads"] = f"{torch.get_num_threads()} (torch.get_num_threads())"
    for dtype in DTYPES:
        lines[f"peak {dtype}"] = f"{c.fma_peak(dtype) * 1e-9:.0f} GFLOP/s a thread"
    lines["copy bandwidth"] = f"{c.copy_bandwidth(2**28) * 1e-9:.1f} GB/s a thread (read + write)"
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "profile":
            return _profile(arguments)
        if arguments.command == "check":
            return check.main(arguments.isa, arguments.dtype, verbose=arguments.verbose)
        print(info(), flush=True)
        return 0
    except (ValueError, RuntimeError) as error:
        line = " ".join(str(error).split())
        if isinstance(error, RuntimeError):
            if not any(words in line for words in ("allocate", "out of memory", "overflow")):
                raise
            end = line[-100:] if len(line) <= 100 else line[-100:].partition(" ")[2]  # whole words
            line = f"the tensors do not fit into memory; choose a smaller shape ({end})"
        print(f"mha-ext {arguments.command}: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough, as in `mha-ext info | head -1`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what is flushed at exit
        return 0 if arguments.command == "info" else 141  # as by the signal
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
