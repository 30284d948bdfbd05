"""The wrappers of tile_hopper.cuh: right on the emulator, and on a GPU of compute capability 9.0;
and what would be wrong, and often silently, is caught by the emulator."""

from __future__ import annotations

import ctypes
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

SOURCE = emulated.HERE / "wrappers_hopper.cu"
DTYPES = (torch.bfloat16, torch.float16)
FORMS = (*range(8), 8, 10, 12, 14, 26)
TILES = 5
CHAIN = 32

# run(form, a, b, c, seed) changes c; an error is raised as RuntimeError.
Run = Callable[[int, Tensor, Tensor, Tensor, int], None]


def runner(library: Path) -> Run:
    functions = ctypes.CDLL(str(library))
    functions.run_hopper.restype = ctypes.c_char_p
    start = getattr(functions, "start_hopper", None)

    def run(form: int, a: Tensor, b: Tensor, c: Tensor, seed: int) -> None:
        if start is not None:
            start(ctypes.c_uint64(seed))
        tensors = (a, b, c)
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        error = functions.run_hopper(
            form,
            int(a.dtype == torch.float16),
            *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
            *(ctypes.c_int64(t.nbytes) for t in tensors),
        )
        if error is not None:
            raise RuntimeError(error.decode())

    return run


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulator, compiled."""
    target = tmp_path_factory.mktemp("machine") / "emulator.o"
    source = emulated.HERE / "emulator.cpp"
    subprocess.run(["g++", *emulated.FLAGS, "-c", str(source), "-o", str(target)], check=True)
    return target


def on_the_host(target: Path, machine: Path, source: Path, kernels: Path) -> Run:
    command = ["g++", *emulated.FLAGS, "-shared", "-I", str(kernels), "-I", str(emulated.HERE)]
    command += [str(machine), "-x", "c++", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return runner(target)


@pytest.fixture(scope="module")
def host(machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("host") / "hopper.so"
    return on_the_host(target, machine, SOURCE, emulated.KERNELS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    target = tmp_path_factory.mktemp("device") / "hopper.so"
    flags = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC,-Wall", "-Werror", "all-warnings"]
    flags += ["-gencode", "arch=compute_90a,code=sm_90a", "-I", str(emulated.KERNELS)]
    answer = subprocess.run(
        [nvcc, *flags, str(SOURCE), "-o", str(target)], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return target


@pytest.fixture(scope="module")
def gpu(compiled: Path) -> Run:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not of compute capability 9.0")
    return runner(compiled)


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=rng).to(dtype)


def check_product(run: Run, form: int, dtype: torch.dtype, seed: int) -> None:
    """c += 2 a b, exactly."""
    across, left_across = bool(form & 2), bool(form & 8)
    columns = 32 if form & 16 else 128 if form & 4 else 64
    held = max(columns, 64)  # of b
    a, c = whole((128, 128), seed, dtype), whole((64, columns), seed + 1)
    b = whole((128, held) if across else (held, 128), seed + 2, dtype)
    left = a[:, 64:].T if left_across else a[64:]
    wanted = c + 2 * (left.float() @ (b if across else b.T).float())[:, -columns:]
    run(form, a, b, c, seed)
    assert torch.equal(c, wanted), "wrong numbers"


def check_pipeline(run: Run, seed: int) -> None:
    a, b = whole((2, 64, 128), seed, torch.bfloat16), whole((TILES, 128, 64), 1, torch.bfloat16)
    c = torch.full((2, 64, 64), torch.nan)
    product = a.float() @ b.float().sum(0)
    run(-TILES, a, b, c, seed)
    assert torch.equal(c, product - product.flip(0)), "wrong numbers"


def check_chain(run: Run, blocks: int, seed: int) -> None:
    """Sums in the order of the blocks' numbers, to the bit; what stores the matrices turns rows of
    eight lanes into matrices."""
    rng = torch.Generator().manual_seed(seed)
    b = torch.randn(blocks, 8, 64, generator=rng)
    words, c = torch.zeros(1 + blocks + 3, dtype=torch.int32), torch.full((8, 64), torch.nan)
    wanted = torch.zeros(512)
    for piece in b.reshape(blocks, 512):
        wanted = piece + wanted
    # Lane l has word 32 i + l of each 128: matrix i has it in row l / 4, column pair l % 4.
    run(CHAIN + blocks, words, b, c, seed)
    assert torch.equal(c.reshape(512), wanted), "wrong numbers"


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_chain(blocks: int, host: Run) -> None:
    for seed in range(6):
        check_chain(host, blocks, seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(form: int, dtype: torch.dtype, host: Run) -> None:
    check_product(host, form, dtype, form)


def test_pipeline(host: Run) -> None:
    for seed in range(6):
        check_pipeline(host, seed)


# file, what stands there, what shall stand there, what tells
HOPPER = "tile_hopper.cuh"
OWN = SOURCE.name
MUTATIONS = {
    "no wait for a free place": (
        OWN,
        "barrier_wait(freed(stage), (n / kStages & 1) ^ 1);",
        "",
        "which a product of warpgroup|is under way|no barrier is between",
    ),
    "parity": (OWN, "(n / kStages & 1) ^ 1);", "n / kStages & 1);", "deadlock"),
    "no wait for a full place": (
        OWN,
        "barrier_wait(filled(stage), n / kStages & 1);",
        "",
        "has not reached|no barrier is between",
    ),
    "no wait for copies": (OWN, "copy_wait<0>();\n    fence", "fence", "has not reached"),
    "no fence": (OWN, "fence_products();\n    barrier_arrive", "barrier_arrive", "no fence"),
    "late fence": (
        OWN,
        "fence_products();\n    barrier_arrive(filled(stage));",
        "barrier_arrive(filled(stage));\n    fence_products();",
        "no fence",
    ),
    "fence before the copies": (
        OWN,
        "copy_wait<0>();\n    fence_products();",
        "fence_products();\n    copy_wait<0>();",
        "no fence",
    ),
    "no arrival": (OWN, "barrier_arrive(filled(stage));", "", "deadlock"),
    "no arrival of the users": (OWN, "barrier_arrive(freed(stage));", "", "deadlock"),
    "arrival of some": (
        OWN,
        "barrier_arrive(freed(stage));",
        "if (lane_id()) barrier_arrive(freed(stage));",
        "deadlock",
    ),
    "arrival before the products are done": (
        OWN,
        "    wait_products<0>();\n    pin(sum);\n    barrier_arrive(freed(stage));",
        "    barrier_arrive(freed(stage));\n    wait_products<0>();\n    pin(sum);",
        "which a product of warpgroup",
    ),
    "products not waited for": (
        OWN,
        "wait_products<0>();\n    pin(sum);\n    barrier",
        "wait_products<1>();\n    pin(sum);\n    barrier",
        "which a product of warpgroup|products under way",
    ),
    "sums read early": (
        OWN,
        "wait_products<0>();\n    pin(sum);\n    pin(x);\n  }",
        "if (twice) c[0] = sum[0][0];\n    each_sum<kColumns>([&](int j, int e, int row, int column) {"
        " c[row * kColumns + column] = sum[j][e]; });\n    wait_products<0>(); return; }",
        "wrong",
    ),
    "sums written early": (
        OWN,
        "wait_products<0>();\n    pin(sum);\n    pin(x);",
        "sum[0][0] = 0;\n    wait_products<0>();",
        "written before its wait",
    ),
    "operand written early": (
        OWN,
        "wait_products<0>();\n    pin(sum);\n    pin(x);",
        "x[0][0] = 0;\n    wait_products<0>();",
        "written before its wait",
    ),
    "not begun": (OWN, "begin_products();\n#pragma unroll\n    for (int k = 0; k < kDeep / 16; k++)\n"
                       "      multiply", "for (int k = 0; k < kDeep / 16; k++)\n multiply", "begin"),
    "different products": (OWN, "right = operand(kRing", "right = operand(lane_id() * 1024 + kRing", "different"),
    "no barrier before the exchange": (OWN, "sync_some(1, 2 * kGroup);", "", "which a product"),
    "no barrier in the exchange": (OWN, "sync_some(3, 2 * kGroup);", "", "no barrier is between"),
    "a barrier of too many": (OWN, "arrive_some(3, 2 * kGroup);", "arrive_some(3, 3 * kGroup);", "and of"),
    "too many registers": (OWN, "take_registers<232>", "take_registers<240>", "deadlock"),
    "numbers without a fence": (
        OWN,
        "fence_products();\n  sync_block();\n  if (thread_id() == 0) {\n    if",
        "sync_block();\n  if (thread_id() == 0) {\n    if",
        "no fence_products",
    ),
    "numbers without a barrier": (
        OWN,
        "fence_products();\n  sync_block();\n  if (thread_id() == 0) {\n    if",
        "fence_products();\n  if (thread_id() == 0) {\n    if",
        "no barrier is between|no fence_products",
    ),
    "numbers not read": (OWN, "wait_numbers_read();\n    store", "store", "wrong"),
    "a signal before the numbers": (OWN, "wait_numbers();\n    give", "give", "signal is given"),
    "no signal": (OWN, "give_signal(words + n + 1, n + 1);", "", "does not run"),
    "a signal of a later block": (
        OWN,
        "take_number(words)",
        "(uint32_t)(gridDim.x - 1 - take_number(words))",
        "does not run",
    ),
    "half a panel": (OWN, "operand(kAt + (kColumns < 64 ? 64 : 0)", "operand(kAt + (kColumns < 64 ? 96 : 0)", "1024"),
    "left not across": (OWN, "multiply_group<kAcross, true>", "multiply_group<kAcross, false>", "wrong|1024"),
    "step of panels": (HOPPER, "(panels >> 4)", "(panels >> 5)", "wrong|shared memory"),
    "swizzle": (HOPPER, "((piece & 7) ^ (row & 7))", "(piece & 7)", "wrong"),
    "step of the rows": (HOPPER, "(k & 3) * 32", "(k & 3) * 64", "wrong|1024|shared memory"),
    "place of a panel": (OWN, "kRing = 2 * 64 * kDeep * 2", "kRing = 2 * 64 * kDeep * 2 + 512", "1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_mutations(name: str, machine: Path, tmp_path: Path) -> None:
    file, old, new, tells = MUTATIONS[name]
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/spec").symlink_to(emulated.ROOT / "csrc/spec")
    kernels = tmp_path / "csrc/cuda"
    kernels.mkdir()
    sources = [SOURCE, *emulated.KERNELS.glob("*.cuh"), emulated.KERNELS / "kernels.h"]
    for source in [*sources, emulated.HERE / "tile_hopper_host.h"]:
        text = source.read_text()
        if source.name == file:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
            text = text.replace(old, new)
        if source.name == "tile_hopper_host.h" and file == HOPPER:
            text = text.replace(old, new)
        (kernels / source.name).write_text(text)
    run = on_the_host(tmp_path / "hopper.so", machine, kernels / OWN, kernels)
    with pytest.raises((RuntimeError, AssertionError), match=tells) as caught:
        for seed in range(6):
            for form in FORMS:
                check_product(run, form, torch.bfloat16, seed)
            check_pipeline(run, seed)
            check_chain(run, 3, seed)
    assert caught.value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_on_a_gpu(form: int, dtype: torch.dtype, gpu: Run) -> None:
    for seed in range(4):
        check_product(gpu, form, dtype, seed)


def test_chain_on_a_gpu(gpu: Run) -> None:
    for seed in range(4):
        check_chain(gpu, 300, seed)


def test_pipeline_on_a_gpu(gpu: Run) -> None:
    for seed in range(4):
        check_pipeline(gpu, seed)


def test_the_wrappers_compile(compiled: Path) -> None:
    assert compiled.stat().st_size > 0
