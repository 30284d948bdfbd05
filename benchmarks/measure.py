"""Verifies, times and weighs the groups of suite.py; a record for each figure."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import harmonic_mean
from typing import Any

import onnxruntime_peer
import torch
import torch.nn.functional as F
from suite import Group, Pass
from torch import Tensor

from mha_ext import _C, peers
from mha_ext.cases import DTYPES, Case, Inputs, make_inputs
from mha_ext.exact import Exact, Result, exact_results, random_like, verify
from mha_ext.peers import Run, attention_run, eager_attention
from mha_ext.profile import ROTATED_BYTES, measure_memory, rotation
from mha_ext.timing import Samples, calls_per_sample, clock, in_turns, settled, summary

CPU = torch.device("cpu")
OWN = "mha_ext"
ADDCMUL, PROJECTIONS, SDPA_MATH = "aten addcmul", "projections alone", "SDPA math"
_PEAK_SECONDS = 4e-3  # of one probe
_SPINNING_SECONDS = 3e-2  # of OpenMP threads after a call


@dataclass
class Record:
    """One figure: an implementation, a pass and a number of threads. The README has the fields."""

    topic: str
    case: str
    dtype: str
    threads: int
    level: str
    implementation: str
    what: str  # the pass, or "backward"
    isa: str | None = None
    seconds: Samples | None = None
    flops: float | None = None
    bytes: int | None = None
    peak: Samples | None = None
    bandwidth: Samples | None = None
    reading: float | None = None  # seconds that reading the mask or the bias would take alone
    memory: int | None = None
    error: float | None = None
    wrong: list[str] = field(default_factory=list)
    excess: dict[str, float] = field(default_factory=dict)  # error over tolerance of what is wrong

    @property
    def share(self) -> float | None:
        """Of the arithmetic peak of these threads, medians of the same rounds."""
        if self.seconds is None or self.peak is None or not self.flops:
            return None
        return self.flops / self.seconds.median / self.peak.median

    @property
    def share_of_bandwidth(self) -> float | None:
        """Of the bandwidth of reading of these threads, medians of the same rounds."""
        if self.seconds is None or self.bandwidth is None or not self.bytes:
            return None
        return self.bytes / self.seconds.median / self.bandwidth.median

    def as_json(self) -> dict[str, Any]:
        """The fields, and the shares."""
        shares = {"share": self.share, "share_of_bandwidth": self.share_of_bandwidth}
        return {**asdict(self), **shares}


@dataclass
class Work:
    """One implementation on one case, ready to be timed."""

    case: Case
    run: Run
    inputs: Inputs
    copies: list[Inputs]
    grad_out: Tensor
    isa: str | None  # None: not ours
    error: float | None = None
    wrong: list[str] = field(default_factory=list)
    excess: dict[str, float] = field(default_factory=dict)  # error over tolerance of what is wrong

    @property
    def name(self) -> str:
        """Ours says which instruction set, where that is not the active one."""
        other = self.isa is not None and self.isa != _C.active_isa()
        return f"{self.run.name} {self.isa}" if other else self.run.name

    def timed(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """Those of them that what was found right allows: forward, where only gradients are off."""
        if not self.wrong:
            return tuple(passes)
        return tuple(what for what in passes if what == "forward" and "out" not in self.wrong)


class Failures:
    """What could not run, and why: said once on stderr, and kept."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add(self, name: str, error: BaseException | str) -> None:
        """`name` failed with `error`."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if name not in self.found:
            print(f"{name} was left out: {lines[0]}", file=sys.stderr, flush=True)
        self.found[name] = lines[0]


@contextmanager
def _on(isa: str | None) -> Iterator[None]:
    """On an instruction set of ours; it does not touch the others."""
    before = _C.active_isa()
    if isa is None or isa == before:
        yield
        return
    _C.set_isa(isa)
    try:
        yield
    finally:
        _C.set_isa(before)


class Bench:
    """What stays between groups: the peers that are wanted, the float64 results, what failed."""

    def __init__(
        self, wanted: Sequence[str], seconds: float, repeats: int | None, at_least: int = 3
    ) -> None:
        self.wanted = wanted
        self.seconds = seconds  # for each group and number of threads
        self.repeats = repeats
        self.at_least = at_least  # rounds, however long they take
        self.failures = Failures()
        # (fma, read or copy; dtype and instruction set of fma; threads) -> all probes
        self.rates: dict[tuple[str, str | None, str | None, int], list[float]] = {}
        self._exact: dict[tuple[Case, str, str], Exact] = {}

    def measure(self, group: Group, threads: int) -> list[Record]:
        """The times of a group, on so many threads. [] where only its memory is wanted."""
        if not group.passes:
            return []
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return self._time(group, self.prepare(group, threads), threads)
        finally:
            torch.set_num_threads(before)

    def prepare(self, group: Group, threads: int) -> list[Work]:
        """Every implementation on every case of a group, compared with float64."""
        return [w for case in group.cases for w in self._prepare(group, case, threads)]

    # -------------------------------------------------------------- what runs

    def _names(self, group: Group) -> list[str]:
        return [*(name for name in group.peers if name in self.wanted), OWN]

    def _runs(self, group: Group, inputs: Inputs, threads: int) -> list[Run]:
        """Every implementation that was asked for; eager too, whose error is the measure."""
        names, case, dtype = self._names(group), inputs.case, DTYPES[group.dtype]
        if group.level == "layer":
            found = [
                run
                for run in peers.layer_runs(inputs, dtype, CPU)
                if run.name in names or run.name == "eager"
            ]
            return [*found, _projections(inputs, dtype)]
        runs = peers.attention_runs(inputs, [*names, "eager"])
        if group.topic == "overhead":
            runs.append(_addcmul())
        if SDPA_MATH in names:
            runs.append(_sdpa_math())
        wanted = onnxruntime_peer.NAME in names and onnxruntime_peer.supports(case, dtype)
        if wanted and onnxruntime_peer.missing() is None:
            try:
                runs.append(onnxruntime_peer.onnxruntime_run(inputs, threads))
            except Exception as error:  # its own, which derive from nothing else
                self.failures.add(f"{onnxruntime_peer.NAME}, {group.title}", error)
        return runs

    def _prepare(self, group: Group, case: Case, threads: int) -> list[Work]:
        """What is right, with its inputs; each implementation that fails is left out and named."""
        # Dropout is off while results are compared: every implementation draws its own.
        inputs = make_inputs(replace(case, dropout=0.0), group.level, DTYPES[group.dtype], CPU)
        runs = self._runs(group, inputs, threads)
        results, grad_out = self._verify(group, runs, inputs)
        if case.dropout:
            inputs = make_inputs(case, group.level, DTYPES[group.dtype], CPU)
            runs = self._runs(group, inputs, threads)
        copies = rotation(inputs)
        isas = [isa for isa in group.isas if isa in _C.supported_isas() and isa != _C.active_isa()]
        found = []
        for run in runs:
            if run.name == "eager" and run.name not in self._names(group):
                continue
            own = run.name == OWN
            for isa in (_C.active_isa(), *isas) if own else (None,):
                if run.floor:
                    found.append(Work(case, run, inputs, copies, grad_out, isa))
                    continue
                result = results.get((run.name, isa))
                if result is not None:
                    work = Work(case, run, inputs, copies, grad_out, isa)
                    work.error = result.out_error
                    work.wrong, work.excess = result.wrong, result.excess
                    found.append(work)
        return found

    def _verify(
        self, group: Group, runs: Sequence[Run], inputs: Inputs
    ) -> tuple[dict[tuple[str, str | None], Result], Tensor]:
        """(implementation, instruction set of ours) -> Result; and a gradient of the output."""
        own = next(run for run in runs if run.name == OWN)
        grad_out = random_like(own.call(inputs))
        key = (inputs.case, group.dtype, group.level)
        if key not in self._exact:
            if len(self._exact) >= 16:  # the same group on another number of threads needs it
                self._exact.clear()
            self._exact[key] = exact_results(inputs, group.level, grad_out)
        exact = self._exact[key]
        works = []  # eager first: its error decides what others may have
        for run in runs:
            try:
                if run.floor:
                    continue
                run.call(inputs)
                if inputs.case.training and run.differentiable:
                    run.gradients(inputs, grad_out)
                works.append(run)
            except Exception as error:
                if run.name == OWN:
                    raise
                self.failures.add(f"{run.name}, {group.title}", error)
        found: dict[tuple[str, str | None], Result] = {}
        for name, result in verify(works, inputs, group.level, exact).items():
            found[name, _C.active_isa() if name == OWN else None] = result
        for isa in group.isas:
            if isa in _C.supported_isas() and isa != _C.active_isa():
                with _on(isa):
                    found[OWN, isa] = verify([own], inputs, group.level, exact)[OWN]
        if "jvp" in group.passes or "hvp" in group.passes:
            _verify_second_order(works, inputs, grad_out, found)
        return found, grad_out

    # -------------------------------------------------------------- timing

    def _time(self, group: Group, work: Sequence[Work], threads: int) -> list[Record]:
        visits: dict[Any, Callable[[], dict[str, float]]] = {}
        for index, w in enumerate(work):
            passes = w.timed(group.passes)
            if not passes:
                continue
            try:
                visits[index] = visit(w, passes)
            except Exception as error:
                self.failures.add(f"{w.name}, {group.title}", error)
        isas = {w.isa or _C.active_isa() for w in work}
        with ThreadPoolExecutor(threads) as pool:
            for isa in isas:
                visits["fma", isa] = _peak_probe(pool, threads, group.dtype, isa)
            if group.bandwidth:
                for kind in ("read", "copy"):
                    visits[kind, None] = _bandwidth_probe(threads, kind)
            for size in {_mask_bytes(w.inputs) for w in work if group.topic == "masks"} - {0}:
                visits["read", size] = _bandwidth_probe(threads, "read", size, 0.01)
            if self.repeats is not None:
                least = most = self.repeats
            else:
                least, most = self.at_least, 200
                if group.topic == "second order":  # seconds each, on the peers' quadratic path
                    least = min(least, 3)
            seconds = self.seconds * max(1.0, len(group.cases) / 3)
            found = in_turns(visits, seconds, at_least=least, at_most=most)
        rates = {}
        for key, values in found.items():
            if not isinstance(key, int):
                samples = [sample["rate"] for sample in values]
                rates[key] = summary(samples)
                kind, isa = key
                if isinstance(isa, int):
                    continue  # of the size of a mask
                known = self.rates.setdefault((kind, isa and group.dtype, isa, threads), [])
                known.extend(samples)
        records = []
        for index, w in enumerate(work):
            base = Record(
                group.topic,
                w.case.name,
                group.dtype,
                threads,
                group.level,
                w.name,
                "forward",
                isa=w.isa,
                peak=rates["fma", w.isa or _C.active_isa()],
                bandwidth=rates.get(("read", None)),
                error=w.error,
            )
            if w.wrong:
                untimed = "backward" if "forward" in w.timed(group.passes) else "forward"
                records.append(replace(base, what=untimed, wrong=w.wrong, excess=w.excess))
            for what in found[index][0] if index in found else ():
                record = replace(base, what=what)
                record.seconds = summary([sample[what] for sample in found[index]])
                if not w.run.floor:
                    record.flops = _flops(w.case, group, what)
                    if what == "forward":
                        record.bytes = _moved(w.case, DTYPES[group.dtype])
                    rate = rates.get(("read", _mask_bytes(w.inputs)))
                    if rate is not None and what in ("forward", "backward"):
                        record.reading = w.case.scores * _mask_item(w.inputs) / rate.median
                records.append(record)
        return records

    # -------------------------------------------------------------- memory

    def weigh(self, groups: Sequence[Group], threads: int) -> list[Record]:
        """The extra memory of all groups, from one process for each dtype."""
        records = []
        for dtype in DTYPES:
            ours = [group for group in groups if group.memory and group.dtype == dtype]
            cases = {
                (group.topic, case.name): (group, replace(case, name=f"{group.topic}/{case.name}"))
                for group in ours
                for case in group.cases
            }
            if not cases:
                continue
            wanted = {case.name: self._names(group) for group, case in cases.values()}
            found = measure_memory([case for _, case in cases.values()], dtype, threads, wanted)
            for (topic, name), (group, case) in cases.items():
                for implementation in self._names(group):
                    memory = found.get((case.name, group.level, implementation))
                    if memory is not None:
                        record = Record(
                            topic, name, dtype, threads, group.level, implementation, "memory"
                        )
                        record.isa = _C.active_isa() if implementation == OWN else None
                        record.memory = memory
                        records.append(record)
        return records


def visit(w: Work, passes: Sequence[Pass]) -> Callable[[], dict[str, float]]:
    """Times all passes of one implementation, one after the other."""
    calls = {what: _call(w, what) for what in passes if what == "forward" or _trains(w)}

    def settled_pass(what: str, call: Callable[[], object]) -> Callable[[], dict[str, float]]:
        times = calls_per_sample(call, CPU)
        if what == "training":
            return settled(call, lambda: _clock_training(w, times), lambda found: found[what])
        return settled(call, lambda: {what: clock(call, times, CPU)}, lambda found: found[what])

    with _on(w.isa):
        samples = [settled_pass(what, call) for what, call in calls.items()]

    def visit() -> dict[str, float]:
        found: dict[str, float] = {}
        with _on(w.isa):
            for sample in samples:
                found |= sample()
        return found

    return visit


def _clock_training(w: Work, times: int) -> dict[str, float]:
    """Seconds of forward and backward, and of backward alone: from the result to its gradients."""
    leaves = list(w.run.leaves(w.inputs).values())
    training = backward = 0.0
    for _ in range(times):
        start = time.perf_counter()
        out = w.run.forward(w.inputs)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, w.grad_out)
        end = time.perf_counter()
        training += end - start
        backward += end - middle
    return {"training": training / times, "backward": backward / times}


def _trains(w: Work) -> bool:
    return w.case.training and w.run.differentiable


def _call(w: Work, what: str) -> Callable[[], object]:
    run, inputs, grad_out = w.run, w.inputs, w.grad_out
    if what == "forward":
        turn = itertools.cycle(w.copies)
        return lambda: run.call(next(turn))
    if what == "recorded":
        return lambda: run.forward(inputs)
    if what == "training":
        return lambda: run.gradients(inputs, grad_out)
    tangents = _tangents(inputs)
    if what == "jvp":
        return lambda: run.tangent(inputs, tangents)
    if what == "hvp":
        return lambda: run.hessian_vector(inputs, grad_out, tangents)
    raise ValueError(f"what must be a pass of suite.PASSES, got {what!r}")


def _tangents(inputs: Inputs) -> dict[str, Tensor]:
    leaves = inputs.leaves.items()
    return {name: random_like(leaf, 2 + i) for i, (name, leaf) in enumerate(leaves)}


def _flops(case: Case, group: Group, what: str) -> float | None:
    forward = case.flops(group.level, False)
    both = case.flops(group.level, True)
    known = {"forward": forward, "training": both, "backward": both - forward}
    if (
        case.head_dim == case.value_width
    ):  # products: forward 2, backward 5, their tangents 5 and 10
        known |= {"jvp": forward * 7 / 2, "hvp": forward * 22 / 2}
    return known.get(what)


def _moved(case: Case, dtype: torch.dtype) -> int:
    """Bytes of forward: inputs and the output, once each."""
    elements = case.batch * case.queries * case.heads * (case.head_dim + case.value_width)
    elements += case.batch * case.keys * case.key_heads * (case.head_dim + case.value_width)
    return elements * dtype.itemsize


def _mask_item(inputs: Inputs) -> int:
    """Bytes of the mask or the bias for each pair; 0 where there is none."""
    return next((t.element_size() for t in (inputs.mask, inputs.bias) if t is not None), 0)


def _mask_bytes(inputs: Inputs) -> int:
    """Of the tensor, which batch entries and heads may share."""
    return next((t.nbytes for t in (inputs.mask, inputs.bias) if t is not None), 0)


def _peak_probe(
    pool: ThreadPoolExecutor, threads: int, dtype: str, isa: str
) -> Callable[[], dict[str, float]]:
    def passes(seconds: float) -> list[float]:
        rates = []
        until = time.perf_counter() + seconds
        while not rates or time.perf_counter() < until:
            rates.append(float(_C.fma_peak(dtype, 0.0)))  # the same work in each
        return rates

    def probe(_: int) -> float:
        # As a sample of a case: all work over all the time, so that neighbours slow both alike.
        # OpenMP's threads wait in a loop after a call, and take a core until they sleep.
        if threads > 1:
            passes(_SPINNING_SECONDS)
        return harmonic_mean(passes(_PEAK_SECONDS))

    def visit() -> dict[str, float]:
        with _on(isa):
            return {"rate": sum(pool.map(probe, range(threads)))}

    return visit


def _bandwidth_probe(
    threads: int, kind: str, size: int = ROTATED_BYTES, seconds: float = 0.05
) -> Callable[[], dict[str, float]]:
    """Over as many bytes as the inputs of a decoding step are rotated through, or over others."""
    rate = {"read": _C.read_bandwidth, "copy": _C.copy_bandwidth}[kind]
    return lambda: {"rate": rate(size, seconds, threads)}


# ------------------------------------------------------------------------------ floors


def _addcmul() -> Run:
    """An aten operator of three tensors: what a call into PyTorch costs at least."""
    run = attention_run(ADDCMUL, lambda q, k, v: torch.addcmul(q, k, v))
    return replace(run, floor=True)


class _Free(torch.autograd.Function):
    """Attention at no cost: the values as they are; the gradient for all three as it comes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grads[0], grads[0], grads[0]


def _projections(inputs: Inputs, dtype: torch.dtype) -> Run:
    """The layer with attention at no cost: its four projections."""
    plain = peers.projected(inputs.case, dtype, CPU)

    def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = _Free.apply(query, key, value)
        return out

    return replace(peers.projected_run(PROJECTIONS, plain, core), floor=True)


# ------------------------------------------------------------------------------ second order


def _sdpa_math() -> Run:
    """SDPA's composite path, the only one that has second derivatives and forward mode."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value)

    return attention_run(SDPA_MATH, core)


def _verify_second_order(
    runs: Sequence[Run],
    inputs: Inputs,
    grad_out: Tensor,
    results: dict[tuple[str, str | None], Result],
) -> None:
    """Compares tangent and Hessian-vector product with float64; the tolerance is that of verify."""
    exact = replace(inputs, tensors={n: _leaf64(t) for n, t in inputs.tensors.items()})
    plain = attention_run("", lambda q, k, v: eager_attention(q, k, v))
    tangents = _tangents(inputs)
    tangents64 = {name: tangent.double() for name, tangent in tangents.items()}
    wanted = _second_order(plain, exact, grad_out.double(), tangents64)
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    allowed: dict[str, float] = {}
    for run in runs:
        found = _second_order(run, inputs, grad_out, tangents)
        result = results[run.name, _C.active_isa() if run.name == OWN else None]
        for name, tensor in found.items():
            error = float((tensor.double() - wanted[name]).abs().max())
            if run.name == "eager":
                allowed[name] = 4 * error
            size = max(float(wanted[name].abs().max()), largest / 20)
            least = 32 * torch.finfo(tensor.dtype).eps * size
            result.judge(name, error, max(least, allowed.get(name, 0.0)))


def _second_order(
    run: Run, inputs: Inputs, grad_out: Tensor, tangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    found = {f"hvp of {n}": t for n, t in run.hessian_vector(inputs, grad_out, tangents).items()}
    return {"jvp": run.tangent(inputs, tangents), **found}


def _leaf64(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def missing_peers(wanted: Sequence[str]) -> dict[str, str]:
    """The peers that cannot run here, and why."""
    found = {}
    why = onnxruntime_peer.missing()
    if onnxruntime_peer.NAME in wanted and why is not None:
        found[onnxruntime_peer.NAME] = why
    return found
