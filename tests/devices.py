"""Where the contract tests run: `pytest --device emulator` and `pytest --device cuda`.

The tests make tensors of the CPU and call mha_ext. With this plugin the operators of the CPU key
are those of another device, and no kernel of the CPU runs: an operator that the device does not
have yet ends the test, which is then skipped with that reason; so is a test that never came to the
device. What was replaced, and how many tests were left out and why, is said at the end.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mha_ext  # noqa: F401  (its operators)

# Of a tile, for a guess of what a test costs.
PRODUCTS = {
    "mha_ext::attention_forward": 2,
    "mha_ext::attention_backward": 7,
    "mha_ext::attention_forward_tangent": 5,
    "mha_ext::attention_backward_tangent": 15,
    "mha_ext::attention_weights": 1,
    "mha_ext::attention_weights_backward": 7,
}


class Device(Protocol):
    """What runs the operators."""

    name: str
    work_of_a_test: float  # multiply-adds that a test may ask for
    widest: int  # columns of query or value

    def has(self, operator: str) -> bool:
        """Whether there is a kernel for "mha_ext::name"."""

    def run(
        self, operator: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Any, int]:
        """The results, as tensors of the CPU, and how many kernels were launched."""


class Gpu:
    """The CUDA key itself; tensors go there and come back with their strides."""

    name, work_of_a_test, widest = "the CUDA kernels", float("inf"), 256

    def has(self, operator: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")

    def run(
        self, operator: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Any, int]:
        moved: dict[int, Tensor] = {}  # by storage: what shares memory here shares it there

        def there(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in moved:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                moved[storage.data_ptr()] = whole.cuda()
            memory = moved[storage.data_ptr()].untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
            return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

        arguments, options = tree_map_only(Tensor, there, (tuple(arguments), dict(options)))
        results = operator(*arguments, **options)
        return tree_map_only(Tensor, Tensor.cpu, results), 1


def device(name: str) -> Device:
    """ "emulator", "hopper" (the emulator as a GPU of compute capability 9.0) or "cuda"."""
    if name != "cuda":
        import operators  # it knows the compiler

        given = os.environ.get("MHA_EXT_EMULATOR")  # a module that operators.build has made
        return operators.Emulator(Path(given) if given else operators.build(), name == "hopper")
    why_not = no_gpu()
    if why_not:
        raise pytest.UsageError(f"--device cuda: {why_not}")
    return Gpu()


def no_gpu() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not Gpu().has("mha_ext::attention_forward"):
        return "mha_ext was built without its CUDA kernels (MHA_EXT_CUDA=1)"
    return ""


def why_not_there(item: pytest.Item) -> str:
    """Why a test cannot be asked of another device; empty where it can."""
    if "isa" not in item.keywords:
        return "faces no kernel"
    if "own_process" in item.keywords:
        return "starts a process"
    alone = item.get_closest_marker("cpu_alone")
    return alone.args[0] if alone else ""


def function_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


class Elsewhere:
    """The plugin."""

    def __init__(self, device: Device, cases: int = 0) -> None:
        self.device = device
        self.cases = cases  # of each test function, so many run; 0 = all
        self.lock = threading.RLock()
        self.calls = self.launches = self.all_launches = 0
        self.work, self.refused = 0.0, ""
        self.passed: Counter[str] = Counter()  # cases of each test function
        self.left_out: Counter[str] = Counter()
        self.deselected: Counter[str] = Counter()
        names = sorted(
            n for n in torch._C._dispatch_get_all_op_names() if n.startswith("mha_ext::")
        )
        self.replaced = [name for name in names if device.has(name)]
        self.absent = [name for name in names if not device.has(name)]

    # ------------------------------------------------------------------ operators

    def pytest_sessionstart(self) -> None:
        self.operators = torch.library.Library("mha_ext", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there was another kernel
            for name in self.replaced + self.absent:
                short = name.removeprefix("mha_ext::")
                operator = getattr(torch.ops.mha_ext, short).default
                self.operators.impl(short, self._kernel(operator), "CPU", allow_override=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.operators._destroy()
        if hasattr(session.config, "workeroutput"):  # one process of several (pytest-xdist)
            found = (self.passed, self.left_out, self.deselected)
            session.config.workeroutput["elsewhere"] = [dict(counter) for counter in found]
            session.config.workeroutput["launches"] = self.all_launches

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """One of several processes has ended, each of which has collected all tests."""
        if "elsewhere" in getattr(node, "workeroutput", {}):
            passed, left_out, deselected = node.workeroutput["elsewhere"]
            self.all_launches += node.workeroutput["launches"]
            self.passed.update(passed)
            self.left_out.update(left_out)
            self.deselected = Counter(deselected)

    def _kernel(self, operator: Any) -> Any:
        exists = operator.name() in self.replaced
        names = [argument.name for argument in operator._schema.arguments]

        def kernel(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                if not exists:
                    self._refuse(f"needs {operator.name()}, which has no kernel there")
                given = dict(zip(names, arguments, strict=False)) | options
                operands = [given[name] for name in ("query", "key", "value") if name in given]
                self._weigh(operands, PRODUCTS.get(operator.name(), 1))
                self.calls += 1
                results, launches = self.device.run(operator, arguments, options)
                self.launches += launches
                return results

        return kernel

    def _refuse(self, reason: str) -> None:
        self.refused = reason  # the test may swallow what comes now
        pytest.skip(reason)

    def _weigh(self, operands: Sequence[Tensor], products: int) -> None:
        if any(tensor.dim() < 4 for tensor in operands):
            return  # an error, which the operator itself will find
        if max(tensor.shape[-1] for tensor in operands) > self.device.widest:
            self._refuse(f"heads are wider than {self.device.widest}")
        query, key = operands[:2]
        blocks = query.shape[:-2].numel() * -(-query.shape[-2] // 64)
        width = sum(max(16, t.shape[-1]) for t in (query, operands[-1])) / 2
        times = {4: 1.5, 8: 2}.get(query.itemsize, 1)  # the emulator's
        self.work += 64.0 * blocks * max(64, key.shape[-2]) * width * products * times
        if self.work > self.device.work_of_a_test:
            self._refuse("too much work for it")

    # ------------------------------------------------------------------ tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen: dict[str, list[pytest.Item]] = defaultdict(list)
        out = []
        for item in items:
            why = why_not_there(item)
            if why:
                out.append(item)
                self.deselected[why] += 1
            else:
                chosen[function_of(item)].append(item)
        self.passed.update(dict.fromkeys(chosen, 0))
        for name, cases in chosen.items():
            if 0 < self.cases < len(cases):
                kept = random.Random(name).sample(range(len(cases)), self.cases)
                rest = [case for i, case in enumerate(cases) if i not in kept]
                self.deselected["other cases of the same tests"] += len(rest)
                out += rest
        left = set(out)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.calls = self.launches = 0
        self.work, self.refused = 0.0, ""
        try:
            result = yield
        except BaseException:  # pytest.skip is no Exception
            if self.refused:
                self._leave_out()
            raise
        finally:
            self.all_launches += self.launches
        if self.refused or not self.calls:
            self._leave_out()
        self.passed[function_of(item)] += 1
        return result

    def _leave_out(self) -> None:
        reason = self.refused or "ran no kernel there"
        self.left_out[reason] += 1
        pytest.skip(reason)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"on {self.device.name}")
        write(f"replaced: {', '.join(self.replaced) or 'no operator'}")
        write(f"not there: {', '.join(self.absent) or 'none'}")
        write(f"{self.passed.total()} tests passed, with {self.all_launches} launches")
        for reason, count in self.left_out.most_common():
            write(f"{count} skipped: {reason}")
        for reason, count in self.deselected.items():
            write(f"{count} deselected: {reason}")
        for name in sorted(name for name, cases in self.passed.items() if not cases):
            write(f"no case ran of {name}")
