"""The CUDA kernels on the emulator, as the operators of the CPU key: see README.md.

`library()` compiles them with g++ (once for the same sources); `install()` lets the operators of
mha_ext run on them, so that any test of the contract runs on them too.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from described import Described, Directions, address, pairs, rows
from structs import Attention, AttentionGrad, AttentionTangent, Options, Report
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "csrc/cuda"
FOLDER = ROOT / "build/cuda-emulator"  # of what is compiled
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unknown-pragmas"]
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    FLAGS += ["-march=x86-64-v3"]  # fused multiply-adds and conversions are instructions
SANITIZE = ["-fsanitize=address", "-fno-omit-frame-pointer"]
HALF = (torch.bfloat16, torch.float16)
ALL_DTYPES = (*HALF, torch.float32, torch.float64)
WIDEST = 256  # of query and value
SPLIT = 128  # the widest that are on the tensor cores in float32
KERNEL_NAMES = (
    "forward",
    "backward",
    "weights",
    "upload",
    "forward_tangent",
    "backward_tangent",
)  # of the seam


class EmulatorError(RuntimeError):
    """What a GPU would do silently: a race, a missing wait, an access past the end."""


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """One process at a time makes this file, and the others wait for it."""
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiled(command: list[str], target: Path, inputs: Sequence[Path], language: str) -> None:
    """Runs the compiler into a file of its own, which then takes its name."""
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    call = [*command, *language.split(), *map(str, inputs), "-o", str(unfinished)]
    answer = subprocess.run(call, capture_output=True, text=True)
    if answer.returncode != 0:
        raise RuntimeError(f"the kernels do not compile with g++:\n{answer.stderr}")
    unfinished.replace(target)


def objects(
    kernels: Path = KERNELS, flags: Sequence[str] = (), instead: Mapping[str, Path] | None = None
) -> list[Path]:
    """The objects of these kernels and of the emulator; what is new is compiled.

    instead: another source in place of the one of this name.
    """
    command = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags]
    command += ["-I", str(HERE), "-I", str(kernels)]
    headers = [*sorted(kernels.glob("*.*h")), *sorted((ROOT / "csrc/spec").glob("*.h"))]
    machine = hashlib.sha256(shlex.join([*FLAGS, *flags]).encode())
    for header in sorted(HERE.glob("*.h")):
        machine.update(header.name.encode() + header.read_bytes())
    shared = machine.copy()
    for header in headers:
        shared.update(header.name.encode() + header.read_bytes())
    FOLDER.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        state = (machine if source == HERE / "emulator.cpp" else shared).copy()
        state.update(source.name.encode() + source.read_bytes())
        target = FOLDER / f"{source.stem}-{state.hexdigest()[:16]}.o"
        with locked(target):
            if not target.is_file():
                _compiled([*command, "-c"], target, [source], "-x c++")
        return target

    sources = [HERE / "library.cpp", HERE / "emulator.cpp", *sorted(kernels.glob("*.cu"))]
    jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count()
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compiled, [(instead or {}).get(s.name, s) for s in sources]))


def build(kernels: Path = KERNELS, flags: Sequence[str] = ()) -> Path:
    """The shared library of these kernels."""
    found = objects(kernels, flags)
    names = hashlib.sha256("".join(path.name for path in found).encode())
    target = FOLDER / f"{names.hexdigest()[:16]}.so"
    if not target.is_file():
        linker = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags, "-shared"]
        _compiled(linker, target, found, "")
    return target


class Library:
    """One compiled emulator.

    `seed` chooses the schedule of the next calls, the limits are those of the GPU; `report` is what
    the last call did.
    """

    def __init__(self, path: Path) -> None:
        self.functions = ctypes.CDLL(str(path))
        self.report = Report()
        sizes = {"emulated_struct_size": Attention, "emulated_grad_size": AttentionGrad}
        sizes["emulated_tangent_size"] = AttentionTangent
        for name in (*sizes, "emulated_forward_scratch_bytes", "emulated_backward_scratch_bytes"):
            getattr(self.functions, name).restype = ctypes.c_int64
        for name in KERNEL_NAMES:
            getattr(self.functions, f"emulated_{name}").restype = ctypes.c_char_p
        self.seed = 0
        self.shared_limit, self.grid_limit = 99 * 1024, 65535
        self.traffic = True  # whether bank conflicts are counted
        self.watched = 1  # races are looked for in one of so many blocks
        self.processors = 3  # so few that a block of threads takes more than one block of queries
        self.hopper = False  # compute capability 9.0, with its shared memory
        for name, struct in sizes.items():
            size = getattr(self.functions, name)()
            if size != ctypes.sizeof(struct):
                raise RuntimeError(
                    f"{struct.__name__} has {size} bytes in C++ and {ctypes.sizeof(struct)} here"
                )

    def start(self) -> None:
        """Before the functions of a run: its schedule and its limits."""
        options = Options(self.seed, self.shared_limit, self.grid_limit, self.traffic, self.watched)
        options.processors = self.processors
        if self.hopper:
            options.shared_limit, options.hopper = 227 * 1024, 1
        self.functions.emulator_start(ctypes.byref(options))

    def finish(self) -> Report:
        """What the functions since `start` did."""
        self.functions.emulator_report(ctypes.byref(self.report))
        return self.report

    def call(self, name: str, *arguments: Any) -> None:
        """Runs one function of the seam."""
        self.start()
        error = getattr(self.functions, name)(*arguments)
        if error is not None:
            raise EmulatorError(error.decode())
        self.finish()

    def forward(self, described: Described) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and lse_low of a problem."""
        a, query = described.struct, described.query
        shape = (a.batch, a.queries, a.heads, a.value_dim)
        # What is not written stays NaN.
        out = torch.full(shape, torch.nan, dtype=query.dtype).transpose(1, 2)
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full(query.shape[:3], torch.nan, dtype=kind)
        lse_low = torch.full_like(lse, torch.nan)
        a.out, a.lse, a.lse_low = rows(out), address(lse), address(lse_low)
        self.run("forward", a)
        return out, lse, lse_low

    def run(self, kernel: str, *structs: ctypes.Structure) -> None:
        """One kernel of the seam, with scratch memory that holds NaN."""
        addresses = [ctypes.byref(struct) for struct in structs]
        scratch = []
        self.start()  # how much scratch it takes may depend on the GPU
        if kernel != "forward_tangent":
            sized = f"emulated_{kernel.removesuffix('_tangent')}_scratch_bytes"
            of = [ctypes.byref(s) for s in structs if not isinstance(s, AttentionTangent)]
            size = getattr(self.functions, sized)(*of)
            scratch = [torch.full((max(size, 1),), 255, dtype=torch.uint8)]
        self.call(
            f"emulated_{kernel}", *addresses, *(ctypes.c_void_p(t.data_ptr()) for t in scratch)
        )

    def backward(
        self,
        described: Described,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor | None],
        wanted: Sequence[bool],
        all_keys: bool = False,
    ) -> list[Tensor | None]:
        """The gradients of query, key, value and bias; saved: out, lse and lse_low."""
        g = described.saved(grad_out, grad_lse, saved)
        g.all_keys = all_keys
        grads = described.gradients(g, wanted)
        self.run("backward", described.struct, g)
        return grads

    def weights_backward(
        self, described: Described, grad_weights: Tensor, delta: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Those of query, key and bias, from the cotangent of P; delta = rowsum(P o dP)."""
        g = AttentionGrad()
        described.keep += [grad_weights, delta]
        g.grad_weights, g.delta = pairs(grad_weights), address(delta)
        grads = described.gradients(g, [wanted[0], wanted[1], False, wanted[2]])
        self.run("backward", described.struct, g)
        return grads

    def weights(
        self, described: Described, heads: list[int] | None, runs: list[tuple[int, int, int]] | None
    ) -> Tensor:
        """P of these heads and runs of rows (query, count, to); None = all."""
        a = described.struct
        chosen = None if heads is None else torch.tensor(heads)
        rows = None if runs is None else torch.tensor(runs)
        head_count = a.heads if heads is None else len(heads)
        row_count = a.queries if runs is None else sum(count for _, count, _ in runs)
        sizes = (a.batch, head_count, row_count, a.keys)
        found = torch.full(sizes, torch.nan, dtype=described.query.dtype)
        addresses = [ctypes.c_void_p(None if t is None else address(t)) for t in (chosen, rows)]
        counts = [ctypes.c_int64(n) for n in (head_count, len(runs or ()), row_count)]
        self.call(
            "emulated_weights",
            ctypes.byref(a),
            addresses[0],
            counts[0],
            addresses[1],
            *counts[1:],
            ctypes.c_void_p(address(found)),
        )
        return found

    def upload(self, numbers: Tensor) -> Tensor:
        """The same int64 numbers, by way of kernels' parameters."""
        to = torch.full_like(numbers, -1)
        count = ctypes.c_int64(numbers.numel())
        addresses = [ctypes.c_void_p(address(t)) for t in (numbers, to)]
        self.call("emulated_upload", addresses[0], count, addresses[1])
        return to

    def forward_tangent(
        self, described: Described, saved: Sequence[Tensor | None], directions: Directions
    ) -> tuple[Tensor, Tensor]:
        """O' and lse'."""
        described.saved(saved[0], None, saved)
        t, query = described.directions(directions), described.query
        out = torch.full_like(saved[0], torch.nan)
        lse = torch.full_like(saved[1], torch.nan)
        t.out, t.lse = rows(out), address(lse)
        self.run("forward_tangent", described.struct, t)
        assert out.dtype == query.dtype
        return out, lse

    def backward_tangent(
        self,
        described: Described,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor | None],
        directions: Directions,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """The tangents of what backward gives."""
        g, t = described.saved(grad_out, grad_lse, saved), described.directions(directions)
        if {"out", "grad_out", "grad_lse"} & {n for n, d in directions.items() if d is not None}:
            delta = torch.full_like(saved[1], torch.nan).contiguous()
            described.keep.append(delta)
            t.delta = address(delta)
        grads = described.gradients(g, wanted)
        self.run("backward_tangent", described.struct, g, t)
        return grads


_LIBRARY: Library | None = None


def library() -> Library:
    """The kernels of csrc/cuda."""
    global _LIBRARY
    if _LIBRARY is None:
        _LIBRARY = Library(build())
    return _LIBRARY


def _of_group(tensor: Tensor | None, group: tuple[int, ...], own: int) -> Tensor | None:
    if tensor is None or tensor.dim() <= own:
        return tensor  # shared
    places = (i if size > 1 else 0 for i, size in zip(group, tensor.shape, strict=False))
    return tensor[tuple(places)]


def _described(
    group: tuple[int, ...], options: Mapping[str, Any], *operands: Tensor | None
) -> Described:
    """One group (leading dimensions) of a problem."""
    own = (4, 4, 4, 4, 4, 1, 1)
    parts = [_of_group(tensor, group, n) for tensor, n in zip(operands, own, strict=True)]
    return Described(*parts, options)  # type: ignore[arg-type]


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    with_lse: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """mha_ext::attention_forward on the emulator; groups one by one."""
    shape, kind = query.shape[:-4], torch.float64 if query.dtype == torch.float64 else torch.float32
    sizes = (*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])
    out = query.new_full(sizes, torch.nan).transpose(-3, -2)
    lse = query.new_full(query.shape[:-1], torch.nan, dtype=kind)
    lse_low = torch.full_like(lse, torch.nan)
    operands = (query, key, value, mask, bias, key_lengths, seed)
    for group in itertools.product(*map(range, shape)):
        results = library().forward(_described(group, options, *operands))
        for to, result in zip((out, lse, lse_low), results, strict=True):
            to[group].copy_(result)
    if not with_lse:
        lse, lse_low = lse.new_empty(0), lse.new_empty(0)
    return out, lse, lse_low


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    output_mask: Sequence[bool],
    all_keys: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """mha_ext::attention_backward on the emulator, which always reads out; groups one by one."""
    leaves = (query, key, value, bias)
    grads = [_grad_like(leaf, query, want) for leaf, want in zip(leaves, output_mask, strict=True)]
    operands = (query, key, value, mask, bias, key_lengths, seed)
    for group in itertools.product(*map(range, query.shape[:-4])):
        described = _described(group, options, *operands)
        cotangent = None if grad_lse is None else grad_lse[group]
        saved = (out[group], lse[group], None if lse_low is None else lse_low[group])
        results = library().backward(
            described, grad_out[group], cotangent, saved, output_mask, all_keys
        )
        for to, result in zip(grads, results, strict=True):
            if result is not None:
                to[group].copy_(result)
    return tuple(grads)


def _grad_like(leaf: Tensor | None, query: Tensor, wanted: bool) -> Tensor:
    if leaf is None or not wanted:
        return query.new_empty(0)
    return torch.full(leaf.shape, torch.nan, dtype=leaf.dtype)


OPERATORS = (attention_forward, attention_backward)


@contextmanager
def installed() -> Iterator[None]:
    """Within it the operators run on the emulator, as far as the kernels exist."""
    with torch.library._scoped_library("mha_ext", "IMPL") as operators:
        for function in OPERATORS:
            operators.impl(function.__name__, function, "CPU", allow_override=True)
        yield
