"""The list of what is measured: groups of cases that are timed in the same rounds.

A group is one dtype. Its cases are compared with each other (a mask with no mask, an odd width with
the round one beside it) and with every implementation, so all of them share their rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mha_ext.cases import CASES, Case, Level

Pass = Literal["forward", "training", "recorded", "jvp", "hvp", "memory"]
Threads = Literal["one", "all"]

PASSES: dict[str, str] = {
    "forward": "forward, without gradients",
    "training": "forward and backward",
    "backward": "of that, from the result to its gradients",
    "recorded": "forward with the graph for backward, and dropping it",
    "jvp": "forward and its derivative in one direction (forward mode)",
    "hvp": "forward, backward, and the derivative of backward in one direction",
    "memory": "extra memory at the peak of forward and backward (decode: forward)",
}
TOPICS: dict[str, str] = {
    "peak": "share of the arithmetic peak, over length, head width and dtype",
    "causal": "causal, square",
    "odd width": "head widths that are no multiple of 64, beside those that are",
    "odd length": "lengths that are no multiple of 64, beside those that are",
    "tiny": "many tiny heads",
    "models": "attention of real models",
    "decode": "one query: share of the bandwidth of reading",
    "few queries": "4 to 16 queries over many keys, as where drafted tokens are verified",
    "masks": "what masks and biases cost",
    "dropout": "what dropout costs",
    "few heads": "one head on several threads",
    "fallback": "what makes SDPA quadratic, forward and backward",
    "layer": "whole layers: projections and attention",
    "overhead": "the cost of a call",
    "memory": "memory over length",
    "second order": "forward mode and Hessian-vector products",
}
LENGTHS = (128, 512, 2048, 4096)
DTYPES = ("float32", "bfloat16", "float16", "float64")
PEERS = ("eager", "SDPA", "torch.compile", "onnxruntime", "nn.MultiheadAttention")
FORWARD: tuple[Pass, ...] = ("forward",)
BOTH: tuple[Pass, ...] = ("forward", "training")


@dataclass(frozen=True)
class Group:
    """Cases of one dtype that are measured in turns."""

    topic: str
    dtype: str
    cases: tuple[Case, ...]
    passes: tuple[Pass, ...] = BOTH
    peers: tuple[str, ...] = PEERS
    threads: tuple[Threads, ...] = ("one", "all")
    level: Level = "attention"
    isas: tuple[str, ...] = ()  # beside the active instruction set: ours on these too
    bandwidth: bool = False  # the memory is the limit: measure it in the same rounds
    quick: bool = False  # whether --quick runs it, on one thread
    memory: bool = False  # whether the memory is measured too

    @property
    def title(self) -> str:
        """One line for the progress and for --filter."""
        names = [case.name for case in self.cases]
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        return f"{self.topic}: {shown}, {self.dtype}"


def heads_for(length: int) -> int:
    """Twelve heads where that is quick, fewer for long sequences: 1 at 4096."""
    return max(1, min(12, 4096 // length))


def square(length: int, head_dim: int, heads: int | None = None, **options: object) -> Case:
    """Self-attention of one sequence."""
    heads = heads or heads_for(length)
    name = f"{heads} x {length} x {head_dim}"
    case = Case(name, 1, heads, length, length, head_dim, layer=False)
    return replace(case, **options)  # type: ignore[arg-type]


def named(case: Case, name: str, **options: object) -> Case:
    """The case with other options, and a name that says which."""
    return replace(case, name=name, **options)  # type: ignore[arg-type]


def groups() -> list[Group]:
    """All of them, in the order in which they run."""
    return [
        *_peak(),
        *_causal(),
        *_odd(),
        *_tiny(),
        *_models(),
        *_decode(),
        *_few_queries(),
        *_masks(),
        *_dropout(),
        *_few_heads(),
        *_fallback(),
        *_layer(),
        *_overhead(),
        *_memory(),
        *_second_order(),
    ]


def _peak() -> list[Group]:
    found = []
    for dtype in DTYPES:
        for length in LENGTHS:
            for head_dim in (64, 128):
                compiled = dtype in ("float32", "bfloat16") and head_dim == 64
                peers = tuple(peer for peer in PEERS if compiled or peer != "torch.compile")
                found.append(
                    Group(
                        "peak",
                        dtype,
                        (square(length, head_dim),),
                        peers=peers,
                        isas=("avx512_bf16",) if dtype == "bfloat16" else (),
                        quick=head_dim == 64 and length in (128, 512, 2048),
                        memory=dtype == "float32" and head_dim == 64,
                    )
                )
    return found


def _causal() -> list[Group]:
    return [
        Group(
            "causal",
            dtype,
            (named(square(length, 64), f"{heads_for(length)} x {length} x 64", mask="causal"),),
            quick=length == 2048 and dtype == "float32",
        )
        for dtype in ("float32", "bfloat16")
        for length in (512, 2048, 4096)
    ]


# Each odd size and the round one that it is held against.
ODD_WIDTHS = {32: 64, 50: 64, 80: 64, 96: 128, 256: 128}
ODD_LENGTHS = {197: 192, 333: 320, 1000: 1024}


def _odd() -> list[Group]:
    widths = sorted({*ODD_WIDTHS, *ODD_WIDTHS.values()})
    lengths = sorted({*ODD_LENGTHS, *ODD_LENGTHS.values()})
    peers = tuple(peer for peer in PEERS if peer != "torch.compile")
    found = []
    for dtype in ("float32", "bfloat16"):
        isas = ("avx512_bf16",) if dtype == "bfloat16" else ()
        cases = tuple(square(512, width) for width in widths)
        found.append(Group("odd width", dtype, cases, peers=peers, threads=("one",), isas=isas))
        cases = tuple(square(length, 64, 4) for length in lengths)
        found.append(Group("odd length", dtype, cases, peers=peers, threads=("one",), isas=isas))
    return [replace(group, quick=group.dtype == "float32") for group in found]


def _tiny() -> list[Group]:
    case = Case("64 x 6 x (12, 10) x 50", 64, 6, 12, 10, 50, layer=False)
    return [Group("tiny", dtype, (case,), quick=True) for dtype in ("float32", "bfloat16")]


def _models() -> list[Group]:
    cases = [case for case in CASES if case.training and case.queries == case.keys]
    return [Group("models", "float32", (replace(case, layer=False),)) for case in cases]


def _decode() -> list[Group]:
    found = []
    for dtype in ("float32", "bfloat16"):
        for keys in (2048, 8192, 32768):
            for name, heads, kv_heads in (("32:8", 32, 8), ("1 head", 1, 1)):
                case = Case(f"{name}, {keys} x 128", 1, heads, 1, keys, 128, kv_heads)
                case = replace(case, training=False, layer=False)
                found.append(
                    Group(
                        "decode",
                        dtype,
                        (case,),
                        FORWARD,
                        peers=("eager", "SDPA", "onnxruntime"),
                        bandwidth=True,
                        quick=keys == 8192 and dtype == "float32",
                    )
                )
    return found


def _few_queries() -> list[Group]:
    cases = [
        *(Case(f"32:8 x ({q}, 2048) x 128", 1, 32, q, 2048, 128, 8) for q in (4, 8, 16)),
        Case("8 x 12 x (8, 512) x 64", 8, 12, 8, 512, 64),
    ]
    return [
        Group(
            "few queries",
            dtype,
            (replace(case, layer=False),),
            peers=("eager", "SDPA", "onnxruntime"),
            quick=case.queries == 8 and dtype == "float32",
        )
        for dtype in ("float32", "bfloat16")
        for case in cases
    ]


def _masks() -> list[Group]:
    none = Case("none", 4, 1, 1024, 1024, 64, layer=False)
    cases = (
        none,
        named(none, "bool mask", mask="random"),
        named(none, "key padding", mask="padding"),
        named(none, "bias", mask="bias", bias_gradient=False),
        named(none, "bias with gradient", mask="bias"),
        named(none, "causal", mask="causal"),
        named(none, "block-sparse", mask="blocks"),
        named(none, "window", mask="window", window=128),
    )
    return [
        Group(
            "masks",
            dtype,
            cases,
            peers=("SDPA",),
            threads=("one",),
            quick=dtype == "float32",
            memory=dtype == "float32",
        )
        for dtype in ("float32", "bfloat16")
    ]


def _dropout() -> list[Group]:
    found = []
    for dtype in ("float32", "bfloat16"):
        for length in (512, 2048):
            none = square(length, 64)
            cases = (none, named(none, f"{none.name}, dropout", dropout=0.1))
            quick = dtype == "float32" and length == 512
            threads: tuple[Threads, ...] = ("one",)
            found.append(
                Group("dropout", dtype, cases, peers=("SDPA",), threads=threads, quick=quick)
            )
    return found


def _few_heads() -> list[Group]:
    return [
        Group("few heads", dtype, (square(length, 64, 1),), quick=length == 2048)
        for dtype in ("float32", "bfloat16")
        for length in (512, 2048)
    ]


def _fallback() -> list[Group]:
    plain = square(2048, 64)
    return [
        Group("fallback", "float32", (case,), peers=("eager", "SDPA"), quick=True, memory=True)
        for case in (
            named(plain, "dropout", dropout=0.1),
            named(plain, "bias gradient", mask="bias"),
            named(plain, "value width 32", value_dim=32),
            named(plain, "value width 128", value_dim=128),
        )
    ]


def _layer() -> list[Group]:
    case = Case("BERT-base 8 x 128 x 768", 8, 12, 128, 128, 64)
    return [
        Group("layer", "float32", (case,), level="layer", quick=True, memory=True),
        Group("layer", "bfloat16", (case,), level="layer"),
    ]


def _overhead() -> list[Group]:
    case = Case("1 x 1 x 4 x 16", 1, 1, 4, 4, 16, layer=False)
    passes: tuple[Pass, ...] = ("forward", "recorded", "training")
    return [Group("overhead", "float32", (case,), passes, ("SDPA",), ("one",), quick=True)]


def _memory() -> list[Group]:
    return [
        Group(
            "memory",
            "float32",
            (square(length, 64, 1),),
            (),
            peers=("eager", "SDPA") if length <= 8192 else ("SDPA",),
            threads=("all",),
            quick=length in (1024, 4096, 16384),
            memory=True,
        )
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def _second_order() -> list[Group]:
    return [
        Group(
            "second order",
            dtype,
            (square(length, 64),),
            ("forward", "training", "jvp", "hvp"),
            peers=("SDPA math",),
            quick=length == 512 and dtype == "float32",
        )
        for dtype in ("float32", "bfloat16")
        for length in (512, 2048, 4096)
    ]
