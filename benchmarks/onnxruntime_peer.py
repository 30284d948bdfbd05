"""ONNX Runtime's MultiHeadAttention operator (com.microsoft) as one more implementation.

It takes [B, L, H * D], the layout that projections leave in memory: nothing is copied for it. It
computes float32 forward only, without grouped heads.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from mha_ext.cases import Case, Inputs
from mha_ext.peers import Run

NAME = "onnxruntime"


def missing() -> str | None:
    """Why it cannot run here, or None."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed (pip install '.[bench]')"
    return None


def supports(case: Case, dtype: torch.dtype) -> bool:
    """Whether the operator computes this problem."""
    return (
        dtype == torch.float32
        and case.mask in ("none", "causal")
        and case.key_heads == case.heads
        and not case.dropout
    )


def onnxruntime_run(inputs: Inputs, threads: int) -> Run:
    """A session of one node. Raises ImportError without onnxruntime."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    case = inputs.case
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # After a call its threads would go on spinning, on the cores that the next in turn needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model(case.heads, case.mask == "causal"), options, providers=["CPUExecutionProvider"]
    )
    feeds: dict[int, tuple[Inputs, dict[str, Any]]] = {}  # made once: not a part of the call

    def forward(x: Inputs) -> Tensor:
        """[B, H, Lq, Dv], a view of what the operator wrote."""
        if id(x) not in feeds:
            arrays = {
                name: tensor.detach().transpose(1, 2).flatten(2).numpy()
                for name, tensor in x.tensors.items()
            }
            feeds[id(x)] = (x, arrays)
        out = torch.from_numpy(session.run(None, feeds[id(x)][1])[0])
        return out.unflatten(2, (case.heads, case.value_width)).transpose(1, 2)

    return Run(NAME, forward, differentiable=False)


def model(heads: int, causal: bool) -> bytes:
    """A model of one node. Written as protobuf by hand: the package onnx is not needed for that."""

    def number(value: int) -> bytes:
        parts = []
        while True:
            value, low = value >> 7, value & 127
            parts.append(low | (128 if value else 0))
            if not value:
                return bytes(parts)

    def integer(tag: int, value: int) -> bytes:
        return number(tag << 3) + number(value)

    def block(tag: int, content: bytes | str) -> bytes:
        data = content.encode() if isinstance(content, str) else content
        return number(tag << 3 | 2) + number(len(data)) + data

    def attribute(name: str, value: int) -> bytes:  # type 2: an integer
        return block(5, block(1, name) + integer(3, value) + integer(20, 2))

    def tensor_info(name: str) -> bytes:  # ValueInfoProto: float, three free dimensions
        shape = b"".join(block(1, block(2, f"{name}_{axis}")) for axis in range(3))
        return block(1, name) + block(2, block(1, integer(1, 1) + block(2, shape)))

    inputs = ("query", "key", "value")
    node = b"".join(block(1, name) for name in inputs) + block(2, "out")
    node += block(4, "MultiHeadAttention") + attribute("num_heads", heads)
    if causal:
        node += attribute("unidirectional", 1)
    node += block(7, "com.microsoft")
    graph = block(1, node) + block(2, "attention")
    graph += b"".join(block(11, tensor_info(name)) for name in inputs)
    graph += block(12, tensor_info("out"))
    opsets = block(8, block(1, "") + integer(2, 17))
    opsets += block(8, block(1, "com.microsoft") + integer(2, 1))
    return integer(1, 8) + block(7, graph) + opsets  # ir_version 8
