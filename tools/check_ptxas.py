"""What ptxas says about each CUDA kernel: no spills, and no more registers than its budget.

    python tools/check_ptxas.py [architecture ...]
    NVCC_APPEND_FLAGS=-Xptxas=-v pip wheel --verbose . > build.log 2>&1
    python tools/check_ptxas.py --log build.log

Without a log it compiles the kernels, for the architectures that are built by default unless others
are named (80, 90, ...): that needs nvcc, but no GPU. With the log of a build it compiles nothing. One
line per kernel, and exit status 1 if any is over its budget.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402
import toolchain  # noqa: E402

# Registers of a thread, by kernel; the first pattern that fits. A block of 128 threads with 255
# registers leaves room for one more on a multiprocessor. Dynamic shared memory is checked where the
# kernels run: tests/cuda.
BUDGETS = [
    (r"decode_half_kernel|forward_half_kernel|backward_half_kernel|bias_half_kernel", 255),
    (
        r"forward_hopper_kernel|backward_hopper_(joint_)?kernel|bias_hopper_kernel",
        168,
    ),  # where a block starts
    (r"forward_split_kernel|backward_split_kernel", 255),
    (r"::split_kernel", 64),
    (r"bias_tangent_half_kernel", 200),
    (r"forward_tangent_half_kernel|backward_tangent_half_kernel", 255),
    (r"_wide_kernel<.*double|wide_gradient_kernel|wide_bias_kernel<.*double", 255),
    (r"forward_tangent_kernel", 255),
    (r"forward_wide_kernel|wide_bias_kernel", 232),
    (r"weights_half_kernel", 168),
    (r"query_sums_kernel", 64),
    (r"weights_kernel", 128),
    (r"combine_kernel", 80),
    (
        r"upload_kernel|align_rows_kernel|pack_mask_kernel|summarize_mask_kernel|uniform_rows_kernel|delta_(tangent_)?kernel|bias_finish_kernel|constant_bias_kernel",
        64,
    ),
]
STATIC_SHARED = 0  # bytes
# Bytes that may be spilled, by architecture and kernel, else none: all of the register file is in
# use, and the stores of a tile cost less than smaller tiles or fewer blocks do. In the kernels of
# Hopper it is mostly the producer that spills, which has 32 to 56 registers: not where products are.
SPILLS = [
    (r"backward_hopper_joint_kernel<.*, 128, true, true, ", 262),
    (r"backward_hopper_joint_kernel<.*, 128, true, false, ", 130),
    (r"backward_hopper_joint_kernel<.*, 64, ", 68),
    (r"backward_hopper_kernel<.*, 256, true, true, false, false>", 602),
    (r"backward_hopper_kernel<.*, 256, true, false, false, false>", 220),
    (r"backward_hopper_kernel<.*, 128, true, true, false, false>", 622),
    (r"backward_hopper_kernel<.*, 128, true, false, false, false>", 208),
    (r"backward_hopper_kernel<.*, (128|256), false, (true|false), false, false>", 52),
    (r"backward_hopper_kernel<.*, 128, true, false, true, false>", 276),
    (r"backward_hopper_kernel<.*, 128, false, false, true, false>", 132),
    (r"backward_hopper_kernel<.*, 64, true, false, true, false>", 216),
    (r"bias_hopper_kernel<.*, 128>", 36),
    (r"bias_hopper_kernel<.*, 64>", 156),
    (r"forward_hopper_kernel<.*, 128, false, 2, 128, true>", 792),
    (r"forward_hopper_kernel<.*, 128, true, 2, 128, true>", 344),
    (r"forward_hopper_kernel<.*, 64, false, 2, 128, true>", 456),
    (r"forward_hopper_kernel<.*, 64, true, 2, 128, true>", 144),
    (r"backward_hopper_kernel<.*, 64, false, true, false, false>", 110),
    (r"backward_hopper_kernel<.*, 64, true, true, false, false>", 130),
    (r"backward_hopper_kernel<.*, 64, true, false, false, false>", 116),
    (r"forward_hopper_kernel<.*, 128, false, 2, ", 700),
    (r"forward_hopper_kernel<.*, 256, false, 2, ", 748),
    (r"forward_hopper_kernel<.*, 64, true, [34], ", 318),
    (r"forward_hopper_kernel<.*, 64, false, 2, ", 308),
    (r"forward_hopper_kernel<.*, 64, false, 4, ", 1340),
    (r"forward_hopper_kernel<.*, 128, true, 2, ", 240),
    (r"forward_hopper_kernel<.*, 256, true, 2, ", 220),
    (r"forward_hopper_kernel<.*, 64, true, 2, ", 88),
    (r"sm_8\d .*backward_(tangent_)?half_kernel<.*, (128|256), ", 16),
    (r"sm_90 .*(backward|bias)_half_kernel<.*, 64, false, ", 56),
]


def kernels_in(text: str) -> list[tuple[str, bool]]:
    """One line for each kernel that ptxas speaks of, and whether it is within its budget."""
    text = subprocess.run(["c++filt"], input=text, capture_output=True, text=True).stdout
    found = []
    for part in text.split("Compiling entry function '")[1:]:
        name, architecture = part.split("' for '", 1)
        architecture = architecture.split("'")[0]
        spills = int(re.findall(r"(\d+) bytes spill stores", part)[0])
        registers = int(re.findall(r"Used (\d+) registers", part)[0])
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", part)))
        short = re.sub(r"mha_ext::(cuda::)?|\((?!mha_ext::cuda::Output).*|^void ", "", name)
        budget = next((limit for pattern, limit in BUDGETS if re.search(pattern, name)), 0)
        place = f"{architecture} {name}"
        allowed = next((most for pattern, most in SPILLS if re.search(pattern, place)), 0)
        fine = spills <= allowed and registers <= budget and shared <= STATIC_SHARED
        numbers = f"{registers} of {budget} registers, {spills} bytes of spills, {shared} shared"
        found.append((f"{architecture} {short}: {numbers}", fine))
    # Products of warpgroups that the assembler cannot leave running lose all they are for.
    serial = re.findall(r".*wgmma.mma_async instructions are serialized.*", text)
    return found + [(line.strip(), False) for line in serial]


def compiled(nvcc: list[str], source: Path, architecture: str) -> list[tuple[str, bool]]:
    """What kernels_in says of a source."""
    with tempfile.TemporaryDirectory() as folder:
        target = ["-cubin", "-Werror", "all-warnings", "-Xptxas", "-v"]
        target += ["-o", str(Path(folder, "kernel.cubin"))]
        chosen = ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        command = [*nvcc, *cuda_toolkit.flags_of(source, chosen), *target, str(source)]
        answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        return [(f"{source.name}: does not compile: {answer.stderr.strip()[-500:]}", False)]
    return kernels_in(answer.stderr)


def compile_all(architectures: list[str]) -> list[tuple[str, bool]]:
    """What kernels_in says of every source, for each of these architectures."""
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        sys.exit("there is no nvcc: nothing was checked")
    host = toolchain.find_compiler()
    jobs = [
        (source, number)
        for number in architectures
        for source in cuda_toolkit.sources(ROOT)
        if number.startswith("90") or not cuda_toolkit.is_hopper(source)
    ]
    with ThreadPoolExecutor(toolchain.job_count()) as pool:
        lines = pool.map(lambda job: compiled([nvcc, "-ccbin", host.command[0]], *job), jobs)
        return [line for part in lines for line in part]


def main() -> int:
    default = ["".join(n) for n in re.findall(r"(\d)\.(\d)", cuda_toolkit.ARCHITECTURES)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture", nargs="*", help="80, 90, ... (those built by default)")
    parser.add_argument("--log", type=Path, help="what a build printed, to be read instead")
    given = parser.parse_args()
    if given.log:
        found = kernels_in(given.log.read_text())
    else:
        found = compile_all(given.architecture or default)
    if not found:
        sys.exit("ptxas has said nothing: was the build run with NVCC_APPEND_FLAGS=-Xptxas=-v?")
    for line, fine in found:
        print(line if fine else f"{line}  <- over its budget")
    return 0 if all(fine for _, fine in found) else 1


if __name__ == "__main__":
    sys.exit(main())
