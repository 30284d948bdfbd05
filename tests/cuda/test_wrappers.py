"""Each wrapper of tile.cuh alone: on a GPU it must do what its host definition does.

And the host definitions, on which all emulated tests stand, must do what the PTX ISA says.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emulated
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(emulated.ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402

SOURCE = emulated.HERE / "wrappers.cu"
WHICH = re.search(r"enum Which \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
assert WHICH is not None
WRAPPERS = re.findall(r"k\w+", WHICH.group(1))
LANES, WORDS = 32, 32

Run = Callable[[str, Tensor], Tensor]


def runner(library: Path) -> Run:
    """run(which, words in [lane, 32]) -> words out, int32."""
    function = ctypes.CDLL(str(library)).run_wrapper
    function.restype = ctypes.c_char_p

    def run(which: str, words: Tensor) -> Tensor:
        words = words.to(torch.int32).contiguous()
        out = torch.full((LANES, WORDS), -1, dtype=torch.int32)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (words, out)]
        error = function(WRAPPERS.index(which), *pointers)
        assert error is None, error.decode()
        return out

    return run


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The host definitions, over the emulator."""
    target = tmp_path_factory.mktemp("host") / "wrappers.so"
    command = [
        "g++",
        *emulated.FLAGS,
        "-shared",
        "-I",
        str(emulated.HERE),
        "-I",
        str(emulated.KERNELS),
    ]
    command += ["-x", "c++", str(SOURCE), str(emulated.HERE / "emulator.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)
    return runner(target)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PTX, compiled."""
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    target = tmp_path_factory.mktemp("device") / "wrappers.so"
    flags = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC,-Wall", "-Werror", "all-warnings"]
    flags += cuda_toolkit.architectures("8.0+PTX")
    command = [nvcc, *flags, "-I", str(emulated.KERNELS), str(SOURCE)]
    answer = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return target


@pytest.fixture(scope="module")
def gpu(compiled: Path) -> Run:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return runner(compiled)


def drawn(seed: int) -> Tensor:
    """Words of all kinds; as bits of floats they are small whole numbers in some columns."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (LANES, WORDS), generator=rng).to(torch.int32)


def floats(*columns: Tensor) -> Tensor:
    """[lane] or [lane, n] float32 side by side, as words."""
    return torch.cat([c.float().reshape(LANES, -1) for c in columns], 1).view(torch.int32)


def halves(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 2 n] as [..., n] words of two."""
    return tensor.to(dtype).contiguous().view(torch.int32)


def as_floats(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.float32)


# --------------------------------------------------------------------- operands of the products

G, T = torch.arange(LANES) // 4, torch.arange(LANES) % 4  # as in the PTX ISA


def fragments(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype) -> Tensor:
    """What the lanes hold of a [16, 16], b [16, 8] and c [16, 8], in the order of the wrapper."""
    pair = torch.arange(2)
    t = 2 * T[:, None] + pair
    first = [a[G[:, None], t], a[G[:, None] + 8, t], a[G[:, None], t + 8], a[G[:, None] + 8, t + 8]]
    second = [b[t, G[:, None]], b[t + 8, G[:, None]]]
    sums = floats(c[G[:, None], t], c[G[:, None] + 8, t])
    words = torch.cat([sums, *(halves(x, dtype) for x in first + second)], 1)
    return torch.nn.functional.pad(words, (0, WORDS - words.shape[1]))


def matrix_of(words: Tensor) -> Tensor:
    """[16, 8] of the lanes' four floats."""
    found, c = as_floats(words[:, :4]), torch.empty(16, 8)
    for e in range(4):
        c[G + 8 * (e // 2), 2 * T + e % 2] = found[:, e]
    return c


HALVES = {"kProductBFloat16": torch.bfloat16, "kProductFloat16": torch.float16}


def operands(which: str, whole: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((16, 16), (16, 8), (16, 8))
    if whole:
        found = [torch.randint(-9, 10, shape, generator=rng).float() for shape in shapes]
    else:
        found = [torch.randn(shape, generator=rng) for shape in shapes]
    dtype = HALVES[which]
    return found[0].to(dtype).float(), found[1].to(dtype).float(), found[2]


def numbers(seed: int) -> Tensor:
    """x, y for pack; two 16-bit numbers; an exponent."""
    rng = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.00390625, 1.01171875, 65519.9])
    special = torch.cat([special, torch.tensor([65520.0, 2049.0, 2051.0, 6e-8, 1e-8, 3.4e38])])
    x = torch.randn(LANES, generator=rng) * 10.0 ** torch.randint(-9, 9, (LANES,), generator=rng)
    y = torch.randn(LANES, generator=rng)
    if seed == 0:
        x[: len(special)], y[: len(special)] = special, special
    bits = torch.randint(0, 2**16, (LANES, 2), generator=rng)
    exponents = torch.rand(LANES, generator=rng) * 130 - 120
    exponents[0], exponents[1], exponents[2] = -torch.inf, 0.0, -3.0
    packed = (bits[:, 0] | bits[:, 1] << 16).to(torch.int32)
    words = torch.cat([floats(x, y), packed[:, None], floats(exponents)], 1)
    return torch.nn.functional.pad(words, (0, WORDS - words.shape[1]))


def pairs_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The two 16-bit numbers of each word."""
    return words.contiguous().view(torch.int16).view(dtype).float().view(-1, 2)


# --------------------------------------------------------------------- what the host definitions do


def test_every_wrapper_is_here() -> None:
    """Each function that tile.cuh defines over PTX or intrinsics is called by wrappers.cu."""
    text = (emulated.KERNELS / "tile.cuh").read_text()
    section = text.split("#ifndef __CUDACC__", 1)[1].split("#else", 1)[1].split("#endif", 1)[0]
    names = set(re.findall(r"^DEVICE [\w ]+?\b(\w+)\(", section, re.MULTILINE))
    assert {"ballot", "multiply_add", "load_matrices", "copy_async", "pack"} <= names
    own = SOURCE.read_text()
    missing = [name for name in names - {"shared_window"} if not re.search(rf"\b{name}\b", own)]
    assert not missing, f"wrappers.cu does not call {', '.join(sorted(missing))}"


def test_votes_and_shuffles(host: Run) -> None:
    words = drawn(1)
    out = host("kVotes", words)
    ballot = sum(int(bit) << i for i, bit in enumerate((words[:, 0] & 1).tolist()))
    assert (out[:, 0] & 0xFFFFFFFF == ballot).all()
    assert (out[:, 1] == 1).all() and (out[:, 2] == 0).all()
    for lane in range(LANES):
        low, high = (int(word) & 0xFFFFFFFF for word in words[lane, 4:6])
        bits = high << 32 | low
        shifted = bits << lane * 2 | 1 << 63
        assert out[lane, 3] == (shifted & -shifted).bit_length() - 1
    out = host("kShuffles", words)
    source = (words[:, 1].long() & 0xFFFFFFFF) % LANES
    assert torch.equal(out[:, 0], words[source, 0])
    assert torch.equal(out[:, 2:4], words[source, 2:4])
    for i in range(5):
        other = torch.arange(LANES) ^ 1 << i
        assert torch.equal(out[:, 4 + i], words[other, 0])
        assert torch.equal(out[:, 10 + 2 * i : 12 + 2 * i], words[other, 2:4])
        assert torch.equal(out[:, 20 + i], words[other, 4])


def test_copies_fill_with_zeros(host: Run) -> None:
    words = drawn(2)
    memory = words[:, :4].contiguous().view(torch.uint8).view(LANES, 16)
    count = (words[:, 4].long() & 0xFFFFFFFF) % 17
    wanted = torch.where(torch.arange(16) < count[:, None], memory, 0).to(torch.uint8)
    out = host("kCopies16", words)[:, :4].contiguous().view(torch.uint8).view(LANES, 16)
    assert torch.equal(out, wanted[torch.arange(LANES) ^ 5])


def test_matrices(host: Run) -> None:
    """Lane l gets elements 2 (l % 4) and the next of row (or column) l / 4 of matrix i in to[i]."""
    words = drawn(3)
    rows = words[:, :4].contiguous().view(torch.int16).view(LANES, 8)
    matrices = rows[(torch.arange(LANES) * 5 + 3) % LANES].view(4, 8, 8)
    for which in ("kMatrices", "kTransposed"):
        out = host(which, words)[:, :4].contiguous().view(torch.int16).view(LANES, 4, 2)
        for i in range(4):
            matrix = matrices[i].T if which == "kTransposed" else matrices[i]
            assert torch.equal(out[:, i, 0], matrix[G, 2 * T])
            assert torch.equal(out[:, i, 1], matrix[G, 2 * T + 1])


@pytest.mark.parametrize("which", HALVES)
def test_products(which: str, host: Run) -> None:
    for seed in range(4):
        a, b, c = operands(which, True, seed)
        out = matrix_of(host(which, fragments(a, b, c, HALVES[which])))
        assert torch.equal(out, c + a @ b)


def test_numbers(host: Run) -> None:
    for seed in range(8):
        words = numbers(seed)
        x, y = as_floats(words[:, :2]).unbind(1)
        out = host("kNumbers", words)
        for column, dtype in ((0, torch.bfloat16), (1, torch.float16)):
            assert torch.equal(out[:, column], halves(torch.stack([x, y], 1), dtype)[:, 0])
        low, high = words[:, 2].contiguous().view(torch.int16).view(LANES, 2).unbind(1)
        for column, bits, dtype in ((2, low, torch.bfloat16), (3, high, torch.float16)):
            found, wanted = as_floats(out[:, column]), bits.contiguous().view(dtype).float()
            assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
        assert torch.equal(out[:, 4], x.bfloat16().view(torch.int16).int() & 0xFFFF)
        assert torch.equal(out[:, 5], y.half().view(torch.int16).int() & 0xFFFF)
        greater = torch.maximum(x, low.contiguous().view(torch.bfloat16).float())
        assert torch.equal(as_floats(out[:, 7]).nan_to_num(7), greater.nan_to_num(7))
        for column, dtype in ((8, torch.bfloat16), (9, torch.float16)):
            found, first, second = (
                pairs_of(w, dtype) for w in (out[:, column], words[:, 2], words[:, 0])
            )
            lesser = torch.where(first.isnan() | (second < first), second, first)
            assert torch.equal(found.nan_to_num(7), lesser.nan_to_num(7))
        exponents = as_floats(words[:, 3])
        torch.testing.assert_close(as_floats(out[:, 6]), exponents.exp2(), rtol=3e-7, atol=2e-38)
        factors = zip(words[:, 2].tolist(), words[:, 0].tolist(), strict=True)
        high = [(f & 0xFFFFFFFF) * (g & 0xFFFFFFFF) >> 32 for f, g in factors]
        assert [word & 0xFFFFFFFF for word in out[:, 13].tolist()] == high
        assert torch.equal(as_floats(out[:, 14]), y.clamp(0, 1))


# --------------------------------------------------------------------- what nvcc and a GPU do


def test_the_wrappers_compile(compiled: Path) -> None:
    assert compiled.stat().st_size > 0


EXACT = [which for which in WRAPPERS if which not in (*HALVES, "kNumbers")]


@pytest.mark.parametrize("which", EXACT)
def test_layouts_on_a_gpu(which: str, host: Run, gpu: Run) -> None:
    for seed in range(20):
        words = drawn(seed)
        assert torch.equal(gpu(which, words), host(which, words))


@pytest.mark.parametrize("which", HALVES)
def test_products_on_a_gpu(which: str, host: Run, gpu: Run) -> None:
    """Bit for bit where the sums are exact; elsewhere a GPU adds in another order."""
    for seed in range(20):
        words = fragments(*operands(which, True, seed), HALVES[which])
        assert torch.equal(gpu(which, words), host(which, words))
        words = fragments(*operands(which, False, seed), HALVES[which])
        found, wanted = matrix_of(gpu(which, words)), matrix_of(host(which, words))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_numbers_on_a_gpu(host: Run, gpu: Run) -> None:
    for seed in range(20):
        words = numbers(seed)
        found, wanted = gpu("kNumbers", words), host("kNumbers", words)
        for column in (0, 1, 4, 5, 10, 11, 12, 13):
            assert torch.equal(found[:, column], wanted[:, column])
        for column in (2, 3, 7, 14):
            f, w = as_floats(found[:, column]), as_floats(wanted[:, column])
            assert torch.equal(f.nan_to_num(7), w.nan_to_num(7))
        for column, dtype in ((8, torch.bfloat16), (9, torch.float16)):
            f, w = pairs_of(found[:, column], dtype), pairs_of(wanted[:, column], dtype)
            assert torch.equal(f.nan_to_num(7), w.nan_to_num(7))
        f, w = as_floats(found[:, 6]), as_floats(wanted[:, 6])
        torch.testing.assert_close(f, w, rtol=5e-7, atol=2e-38)
        assert f[0] == 0 and f[1] == 1
