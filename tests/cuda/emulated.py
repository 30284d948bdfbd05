"""The CUDA kernels on the emulator, as the operators of the CPU key: see README.md.

`library()` compiles them with g++ (once for the same sources); `install()` lets the operators of
mha_ext run on them, so that any test of the contract runs on them too.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "csrc/cuda"
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unknown-pragmas"]
SANITIZE = ["-fsanitize=address", "-fno-omit-frame-pointer"]
DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # DType


def _fields(*layout: tuple[Any, str]) -> list[tuple[str, Any]]:
    kinds = {"p": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
    kinds |= {"u32": ctypes.c_uint32, "f64": ctypes.c_double, "bool": ctypes.c_bool}
    return [
        (name, kinds[kind] if isinstance(kind, str) else kind)
        for kind, names in layout
        for name in names.split()
    ]


# csrc/spec/attention.h, field by field; `library` compares the size.
class Rows(ctypes.Structure):
    _fields_ = _fields(("p", "data"), ("i64", "batch head row"))


class Pairs(ctypes.Structure):
    _fields_ = _fields(("p", "data"), ("i64", "batch head query key"), ("i32", "item_size"))


class Band(ctypes.Structure):
    _fields_ = _fields(("bool", "lower_right left_bounded right_bounded"), ("i64", "left right"))


class Dropout(ctypes.Structure):
    _fields_ = _fields(("p", "seed"), ("u32", "threshold"), ("f64", "keep_scale"))


class Origin(ctypes.Structure):
    _fields_ = _fields(("i64", "batch head query key"))


class Attention(ctypes.Structure):
    _fields_ = _fields(
        ("i32", "dtype"),
        ("i64", "batch heads kv_heads queries keys head_dim value_dim"),
        ("f64", "scale"),
        ("bool", "uniform_empty_rows"),
        (Rows, "query key value"),
        (Pairs, "mask bias"),
        ("bool", "bias_is_float32"),
        ("p", "key_lengths"),
        (Band, "band"),
        (Dropout, "dropout"),
        (Origin, "origin"),
        (Rows, "out"),
        ("p", "lse lse_low"),
    )


class Options(ctypes.Structure):
    _fields_ = _fields(("i64", "seed shared_limit grid_limit"))


class Traffic(ctypes.Structure):
    _fields_ = _fields(("i64", "accesses passes conflicts"))


class Report(ctypes.Structure):
    _fields_ = _fields(
        ("i64", "launches blocks threads shared_bytes barriers products"),
        (Traffic, "matrices copies plain"),
    )


class EmulatorError(RuntimeError):
    """What a GPU would do silently: a race, a missing wait, an access past the end."""


def build(kernels: Path = KERNELS, flags: Sequence[str] = ()) -> Path:
    """The shared library of these kernels; compiled where sources or flags are new."""
    command = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags]
    sources = [*sorted(kernels.glob("*.cu*")), *sorted(kernels.glob("*.h"))]
    sources += [*sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.cpp"))]
    sources += sorted((ROOT / "csrc/spec").glob("*.h"))
    state = hashlib.sha256(shlex.join(command).encode())
    for source in sources:
        state.update(source.name.encode() + source.read_bytes())
    folder = ROOT / "build/cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{state.hexdigest()[:16]}.so"
    if not target.is_file():
        files = [HERE / "library.cpp", HERE / "emulator.cpp", *sorted(kernels.glob("*.cu"))]
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        command += ["-I", str(HERE), "-I", str(kernels), "-x", "c++", *map(str, files)]
        answer = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if answer.returncode != 0:
            raise RuntimeError(f"the kernels do not compile with g++:\n{answer.stderr}")
        unfinished.replace(target)
    return target


class Library:
    """One compiled emulator.

    `seed` chooses the schedule of the next calls, the limits are those of the GPU; `report` is what
    the last call did.
    """

    def __init__(self, path: Path) -> None:
        self.functions = ctypes.CDLL(str(path))
        self.report = Report()
        for name in ("emulated_struct_size", "emulated_forward_scratch_bytes"):
            getattr(self.functions, name).restype = ctypes.c_int64
        self.functions.emulated_forward.restype = ctypes.c_char_p
        self.seed = 0
        self.shared_limit, self.grid_limit = 99 * 1024, 65535
        size = self.functions.emulated_struct_size()
        if size != ctypes.sizeof(Attention):
            raise RuntimeError(
                f"Attention has {size} bytes in C++ and {ctypes.sizeof(Attention)} here"
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Runs one function of the seam."""
        options = Options(self.seed, self.shared_limit, self.grid_limit)
        self.functions.emulator_start(ctypes.byref(options))
        error = getattr(self.functions, name)(*arguments)
        if error is not None:
            raise EmulatorError(error.decode())
        self.functions.emulator_report(ctypes.byref(self.report))

    def forward(self, described: Described) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and lse_low of a problem."""
        a, query = described.struct, described.query
        shape = (a.batch, a.queries, a.heads, a.value_dim)
        # What is not written stays NaN.
        out = torch.full(shape, torch.nan, dtype=query.dtype).transpose(1, 2)
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full(query.shape[:3], torch.nan, dtype=kind)
        lse_low = torch.full_like(lse, torch.nan)
        a.out, a.lse, a.lse_low = _rows(out), _address(lse), _address(lse_low)
        size = self.functions.emulated_forward_scratch_bytes(ctypes.byref(a))
        scratch = torch.full((max(size, 1),), 255, dtype=torch.uint8)
        self.call("emulated_forward", ctypes.byref(a), ctypes.c_void_p(scratch.data_ptr()))
        return out, lse, lse_low


class Described:
    """The struct of a problem, and the tensors that it points to."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        key_lengths: Tensor | None,
        seed: Tensor | None,
        options: Mapping[str, Any],
    ) -> None:
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
        if key_lengths is not None:
            key_lengths = key_lengths.to(torch.int64).contiguous()
        self.keep = [query, key, value, mask, bias, key_lengths, seed]
        self.query = query
        batch, heads, queries, head_dim = query.shape
        self.struct = a = Attention(
            DTYPES[query.dtype], batch, heads, key.shape[1], queries, key.shape[2], head_dim
        )
        a.value_dim, a.scale = value.shape[3], options["scale"]
        a.uniform_empty_rows = options.get("uniform_empty_rows", False)
        a.query, a.key, a.value = _rows(query), _rows(key), _rows(value)
        if mask is not None:
            a.mask = _pairs(mask)
        if bias is not None:
            a.bias, a.bias_is_float32 = _pairs(bias), bias.dtype == torch.float32
        if key_lengths is not None:
            a.key_lengths = _address(key_lengths)
        left, right = options.get("window_left"), options.get("window_right")
        a.band = Band(options.get("corner") == "lower_right", left is not None, right is not None)
        a.band.left, a.band.right = left or 0, right or 0
        a.dropout.keep_scale = 1.0
        threshold = min(round(65536 * options.get("dropout_p", 0.0)), 65535)
        if threshold:
            assert seed is not None
            a.dropout = Dropout(_address(seed), threshold, 65536 / (65536 - threshold))
        a.origin = Origin(*options.get("origin", (0, 0, 0, 0)))


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _rows(tensor: Tensor) -> Rows:
    return Rows(_address(tensor), *tensor.stride()[:3])


def _pairs(tensor: Tensor) -> Pairs:
    strides = [0] * (4 - tensor.dim())
    strides += [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
    return Pairs(_address(tensor), *strides, tensor.element_size())


_LIBRARY: Library | None = None


def library() -> Library:
    """The kernels of csrc/cuda."""
    global _LIBRARY
    if _LIBRARY is None:
        _LIBRARY = Library(build())
    return _LIBRARY


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """mha_ext::attention_forward on the emulator; groups (leading dimensions) one by one."""
    shape, kind = query.shape[:-4], torch.float64 if query.dtype == torch.float64 else torch.float32
    sizes = (*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])
    out = query.new_full(sizes, torch.nan).transpose(-3, -2)
    lse = query.new_full(query.shape[:-1], torch.nan, dtype=kind)
    lse_low = torch.full_like(lse, torch.nan)

    def of_group(tensor: Tensor | None, group: tuple[int, ...], own: int) -> Tensor | None:
        if tensor is None or tensor.dim() <= own:
            return tensor  # shared
        places = (i if size > 1 else 0 for i, size in zip(group, tensor.shape, strict=False))
        return tensor[tuple(places)]

    for group in itertools.product(*map(range, shape)):
        described = Described(
            query[group],
            key[group],
            value[group],
            of_group(mask, group, 4),
            of_group(bias, group, 4),
            of_group(key_lengths, group, 1),
            of_group(seed, group, 1),
            options,
        )
        results = library().forward(described)
        for to, result in zip((out, lse, lse_low), results, strict=True):
            to[group].copy_(result)
    return out, lse, lse_low


@contextmanager
def installed() -> Iterator[None]:
    """Within it the operators run on the emulator, as far as the kernels exist."""
    with torch.library._scoped_library("mha_ext", "IMPL") as operators:
        operators.impl("attention_forward", attention_forward, "CPU", allow_override=True)
        yield
