"""On a GPU: what the emulator cannot show. Streams, graphs, devices, races, sizes, agreement with the CPU.

The contract itself runs there by `pytest --device cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, Inputs, Problem, call, largest_terms, make, results
from devices import Gpu, no_gpu
from torch import Tensor

import mha_ext
from mha_ext import reference

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "there is a GPU")

TRAINS = Gpu().has("mha_ext::attention_backward")
OPTIONS = {
    "plain": Problem(batch=3, heads=4, kv_heads=2, queries=200, keys=333, head_dim=64),
    "causal": Problem(heads=4, queries=256, keys=256, head_dim=128, causal=True, dropout_p=0.1),
    "everything": Problem(
        batch=3,
        heads=4,
        kv_heads=2,
        queries=130,
        keys=300,
        head_dim=40,
        value_dim=72,
        mask="b1qk",
        bias="1hqk",
        key_lengths="random",
        dropout_p=0.3,
        empty_rows="uniform",
    ),
    "bias": Problem(batch=3, heads=8, kv_heads=2, queries=200, keys=328, head_dim=64, bias="1hqk"),
    "bias of pairs": Problem(
        heads=4,
        queries=150,
        keys=200,
        head_dim=128,
        bias="bhqk",
        mask="b1qk",
        key_lengths="random",
        causal="upper_left",
    ),
    "one query": Problem(batch=4, heads=8, kv_heads=2, queries=1, keys=5000, head_dim=128),
    "wide": Problem(heads=2, queries=100, keys=100, head_dim=256, mask="11qk"),
    # where one kernel makes all gradients
    "long": Problem(batch=3, heads=4, kv_heads=2, queries=1100, keys=1300, head_dim=128),
    "long, dropout": Problem(
        batch=2,
        heads=3,
        kv_heads=3,
        queries=1100,
        keys=1100,
        head_dim=64,
        causal=True,
        dropout_p=0.1,
    ),
    "long, odd": Problem(heads=2, queries=1030, keys=1100, head_dim=50, mask="b1qk"),
}
options = pytest.mark.parametrize("problem", OPTIONS.values(), ids=list(OPTIONS))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def there(inputs: Inputs, device: str = "cuda") -> Inputs:
    names = ("query", "key", "value", "mask", "bias", "key_lengths", "seed")
    names += ("grad_out", "grad_lse")
    moved = {name: getattr(inputs, name) for name in names}
    return inputs.replaced(**{n: None if t is None else t.to(device) for n, t in moved.items()})


def everything(inputs: Inputs) -> dict[str, Tensor]:
    """out and lse, and the gradients where there is a backward."""
    if TRAINS:
        return results(lambda i: call(mha_ext.attention, i), inputs)
    return dict(zip(("out", "lse"), call(mha_ext.attention, inputs), strict=True))


def weights(inputs: Inputs, **chosen: list[int]) -> dict[str, Tensor]:
    """P of some heads and rows, or all, and its gradients."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves().items()}
    options = {name: inputs.options[name] for name in ("causal", "window", "scale", "empty_rows")}
    options |= {"bias": leaves.get("bias"), "key_lengths": inputs.key_lengths, **chosen}
    found = mha_ext.attention_weights(leaves["query"], leaves["key"], inputs.mask, **options)
    del leaves["value"]
    cotangent = torch.arange(found.numel(), device=found.device).remainder(7).sub(3)
    grads = torch.autograd.grad(found, list(leaves.values()), cotangent.view_as(found).to(found))
    named = {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"weights": found.detach(), **named}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


# What the CPU gives.


@options
@dtypes
def test_as_on_the_cpu(problem: Problem, dtype: torch.dtype) -> None:
    """Up to rounding; what is hidden, empty or dropped is the same."""
    inputs = make(replace(problem, dtype=dtype))
    found, wanted = everything(there(inputs)), everything(inputs)
    eps = torch.finfo(dtype).eps
    for name, tensor in wanted.items():
        size = float(tensor.masked_fill(tensor == -torch.inf, 0).double().abs().max())
        if name == "grad_bias":  # a sum over the batch, of terms that cancel
            size = largest_terms(inputs)[name]
        ours = found[name].cpu()
        torch.testing.assert_close(ours, tensor, rtol=16 * eps, atol=16 * eps * max(size, 1.0))


@pytest.mark.parametrize("keys", [600, 601, 602])
@pytest.mark.parametrize("width", [40, 128, 256])
@dtypes
def test_weights_as_on_the_cpu(dtype: torch.dtype, width: int, keys: int) -> None:
    """Rows of the result that are 16, 4 or 2 bytes aligned, and parts of them."""
    changes = {"dtype": dtype, "head_dim": width, "keys": keys, "dropout_p": 0.0}
    inputs = make(replace(OPTIONS["everything"], **changes))
    for chosen in ({}, {"heads": [3, 0, 3], "rows": [*range(40, 120), 129, 7]}):
        found, wanted = weights(there(inputs), **chosen), weights(inputs, **chosen)
        eps = torch.finfo(dtype).eps
        for name, tensor in wanted.items():
            size = float(tensor.double().abs().max())
            torch.testing.assert_close(
                found[name].cpu(), tensor, rtol=16 * eps, atol=16 * eps * max(size, 1.0)
            )


@dtypes
@pytest.mark.parametrize("dropout_p", [0.1, 0.75])
def test_dropout_bits(dtype: torch.dtype, dropout_p: float) -> None:
    """With values that form an identity matrix, out is the dropped P: each pair is as defined."""
    shape, seed = (2, 3, 200, 190), torch.tensor([2**32 - 5, 17])
    batch, heads, queries, keys = shape
    query, key = torch.zeros(batch, heads, queries, 8), torch.zeros(batch, heads, keys, 8)
    value = torch.eye(keys).expand(batch, heads, keys, keys)
    on_gpu = [t.to("cuda", dtype) for t in (query, key, value)]
    out = mha_ext.attention(*on_gpu, dropout_p=dropout_p, seed=seed.cuda())
    assert torch.equal(out.cpu() > 0, reference.keep(seed, dropout_p, shape))


# Races: the same bits, whatever else runs.


@options
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hundreds_of_runs_give_the_same_bits(problem: Problem, dtype: torch.dtype) -> None:
    """Many blocks, while another stream keeps a part of the GPU busy for a while."""
    inputs = there(make(replace(problem, dtype=dtype, batch=16, heads=16, kv_heads=16)))
    wanted = everything(inputs)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for i in range(300):
        if i % 3 == 0:
            with torch.cuda.stream(busy):
                noise @ noise
        assert_same(everything(inputs), wanted)
    busy.synchronize()


# Streams, graphs, devices.


def test_work_is_enqueued_on_the_current_stream() -> None:
    """Inputs that a slow stream has yet to write are read after that."""
    inputs = there(make(replace(OPTIONS["everything"], dtype=torch.bfloat16)))
    wanted = everything(inputs)
    stream = torch.cuda.Stream()
    late = torch.full_like(inputs.query, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        late.copy_(inputs.query)
        found = everything(inputs.replaced(query=late))
    stream.synchronize()
    assert_same(found, wanted)


def test_nothing_waits_for_the_gpu() -> None:
    """The call returns while the work before it is still going on."""
    inputs = there(make(OPTIONS["everything"]))
    everything(inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    done.record()
    with torch.cuda.device(inputs.query.device):
        everything(inputs)
    assert not done.query()
    torch.cuda.synchronize()


@options
def test_cuda_graphs(problem: Problem) -> None:
    """A captured call follows its inputs, seed and lengths included."""
    inputs = there(make(replace(problem, dtype=torch.bfloat16)))
    other = there(make(replace(problem, dtype=torch.bfloat16, numbers=1)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(inputs)
    torch.cuda.current_stream().wait_stream(side)
    wanted = everything(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everything(inputs)
    for name in ("query", "key", "value", "mask", "bias", "key_lengths", "seed", "grad_out"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).copy_(getattr(other, name))
    inputs.grad_lse.copy_(other.grad_lse)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, wanted)


@pytest.mark.parametrize("chosen", [{}, {"heads": [2, 0], "rows": [*range(100), 0, 129]}])
def test_cuda_graphs_of_the_weights(chosen: dict[str, list[int]]) -> None:
    """The lists of heads and rows are the graph's own, and nothing waits for them."""
    problem = replace(OPTIONS["everything"], dtype=torch.bfloat16, dropout_p=0.0)
    inputs, other = there(make(problem)), there(make(replace(problem, numbers=1)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights(inputs, **chosen)
    torch.cuda.current_stream().wait_stream(side)
    wanted = weights(other, **chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = weights(inputs, **chosen)
    for name in ("query", "key", "mask", "bias", "key_lengths"):
        getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@options
def test_tensors_of_another_gpu_than_the_current_one(problem: Problem) -> None:
    inputs = make(replace(problem, dtype=torch.bfloat16))
    with torch.cuda.device(0):
        found, wanted = everything(there(inputs, "cuda:1")), everything(there(inputs, "cuda:0"))
        assert torch.cuda.current_device() == 0
    for name, tensor in wanted.items():
        assert found[name].device.index == 1
        assert torch.equal(found[name].cpu(), tensor.cpu())


# Sizes.


@pytest.mark.parametrize(
    "batch, heads, queries, keys",
    [(70000, 1, 2, 3), (1, 70000, 2, 3), (300, 300, 1, 5), (1, 1, 70000, 70), (1, 1, 3, 200000)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dimensions_past_65535(
    batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype
) -> None:
    """A sample of the rows against the definition: the first ones, the last ones, some between."""
    problem = Problem(dtype, batch, heads, queries=queries, keys=keys, head_dim=8, mask="b11k")
    inputs = make(problem)
    found = everything(there(inputs))
    rows = torch.linspace(0, batch - 1, min(batch, 4)).long()
    columns = torch.linspace(0, heads - 1, min(heads, 4)).long()
    last = slice(-2, None)

    def part(tensor: Tensor) -> Tensor:
        return tensor[rows][:, columns].double()

    inputs.mask = inputs.mask[rows]
    query, key, value = part(inputs.query)[:, :, last], part(inputs.key), part(inputs.value)
    wanted = reference.attention(query, key, value, inputs.mask)
    out = found["out"].cpu()[rows][:, columns][:, :, last].double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, wanted, rtol=8 * eps, atol=8 * eps)


def test_offsets_past_2_31_elements() -> None:
    """Strides that reach past 2^31 elements; 9 GiB, of which a few rows are touched."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    step, rows = 2**29, 9
    huge = torch.empty(step * (rows - 1) + 64, dtype=torch.bfloat16, device="cuda")
    view = huge.as_strided((1, 1, rows, 16), (step, step, step, 1))
    small = torch.randn(1, 1, rows, 16, device="cuda").bfloat16()
    view.copy_(small)
    assert torch.equal(mha_ext.attention(view, view, view), mha_ext.attention(small, small, small))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_is_linear(dtype: torch.dtype) -> None:
    """Beside inputs and results: at most as much again for each, never Lq Lk scores."""
    batch, heads, length, width = 1, 4, 16384, 64

    def used(run: Callable[[], object]) -> int:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    tensors = [
        torch.randn(batch, heads, length, width, device="cuda", dtype=dtype) for _ in range(3)
    ]
    rows = batch * heads * length * width * 4
    planes = 3 * rows if dtype == torch.float32 else 0  # keys and values, in three of 16 bits each
    most = 2 * rows + planes
    assert used(lambda: mha_ext.attention(*tensors, causal=True, dropout_p=0.1)) <= most
    if TRAINS:
        for tensor in tensors:
            tensor.requires_grad_()

        def train() -> object:
            out = mha_ext.attention(*tensors, causal=True, dropout_p=0.1)
            return torch.autograd.grad(out, tensors, torch.ones_like(out))

        assert used(train) <= 14 * rows < batch * heads * length * length * 2
