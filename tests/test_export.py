"""Exported models compute the same numbers: ONNX in ONNX Runtime, and AOTInductor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import mha_ext

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, QUERIES, KEYS = (torch.export.Dim(name, min=2, max=999) for name in ("b", "q", "k"))
ROWS = {0: BATCH, 2: KEYS}
DYNAMIC = {
    "query": {0: BATCH, 2: QUERIES},
    **{"key": ROWS, "value": ROWS},
    "mask": {0: BATCH, 3: KEYS},
    "bias": {1: QUERIES, 2: KEYS},
    "key_lengths": {0: BATCH},
}


class Attention(nn.Module):
    """`mha_ext.attention`, and what else is asked for, as a module."""

    def __init__(self, weights: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.weights, self.options = weights, options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        key_lengths: Tensor | None = None,
    ) -> list[Tensor]:
        pairs: dict[str, Any] = {"mask": mask, "bias": bias, "key_lengths": key_lengths}
        found = mha_ext.attention(query, key, value, **pairs, **self.options)
        if not self.weights:
            return [*found] if self.options.get("return_lse") else [found]
        options = {name: o for name, o in self.options.items() if name != "return_lse"}
        shown = mha_ext.attention_weights(query, key, **pairs, **options, heads=[3, 0], rows=[1])
        return [*found, shown]


def make(
    batch: int = 2,
    queries: int = 5,
    keys: int = 7,
    kv_heads: int = 4,
    pairs: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    key, value = (torch.randn(batch, kv_heads, keys, 8, dtype=dtype) for _ in range(2))
    every = {
        "mask": torch.rand(batch, 1, 1, keys) > 0.3,
        "bias": torch.randn(4, queries, keys, dtype=dtype),
        "key_lengths": torch.randint(0, keys + 1, (batch,)),
    }
    query = torch.randn(batch, 4, queries, 8, dtype=dtype)
    return {"query": query, "key": key, "value": value} | {name: every[name] for name in pairs}


def exported(model: nn.Module, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    shapes = {name: DYNAMIC[name] for name in inputs}
    return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)


def in_onnx_runtime(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> Any:
    """The model as a function that ONNX Runtime computes."""
    pytest.importorskip("onnx", reason="pip install onnx")
    pytest.importorskip("onnxscript", reason="pip install onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    from mha_ext.integrations.onnx import custom_translation_table

    table = custom_translation_table()
    program = exported(model.eval(), inputs)
    torch.onnx.export(program, dynamo=True, custom_translation_table=table).save(path)
    session = runtime.InferenceSession(path)
    names = {given.name for given in session.get_inputs()}

    def run(inputs: dict[str, Tensor]) -> list[Tensor]:
        found = session.run(None, {n: x.numpy() for n, x in inputs.items() if n in names})
        return [torch.from_numpy(x) for x in found]

    return run


EVERYTHING = ("mask", "bias", "key_lengths")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "mask": ({"pairs": ("mask",)}, {"empty_rows": "uniform"}),
    "bias": ({"pairs": ("bias",)}, {"scale": -0.7}),
    "lengths": ({"pairs": ("key_lengths",)}, {"return_lse": True}),
    "upper left": ({}, {"causal": "upper_left", "return_lse": True}),
    "lower right": ({"kv_heads": 2}, {"causal": "lower_right"}),
    "window": ({"kv_heads": 1}, {"causal": "upper_left", "window": (2, None)}),
    "everything": (
        {"kv_heads": 2, "pairs": EVERYTHING},
        {"causal": "lower_right", "window": (3, None), "empty_rows": "uniform", "return_lse": True},
    ),
    "float64": ({"dtype": torch.float64, "pairs": EVERYTHING}, {"scale": 0.1, "return_lse": True}),
    "float16": ({"dtype": torch.float16, "kv_heads": 2}, {"causal": "upper_left"}),
}


@pytest.mark.parametrize("name", CASES)
def test_onnx(name: str, tmp_path: Path) -> None:
    sizes, options = CASES[name]
    model = Attention(name == "everything", options)
    run = in_onnx_runtime(model, make(**sizes), tmp_path / "model.onnx")
    for size in ({}, {"batch": 3, "queries": 9, "keys": 11}, {"queries": 2, "keys": 70}):
        inputs = make(**sizes, **size)
        for found, wanted in zip(run(inputs), model(**inputs), strict=True):
            assert found.dtype == wanted.dtype
            assert_close(found, wanted, check_stride=False)


def test_onnx_of_a_layer(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mha_ext.MultiHeadAttention(
                32, 4, num_kv_heads=2, dropout=0.3, fast_linear=True, rotary_base=10000.0
            )

        def forward(self, query: Tensor, key_lengths: Tensor) -> Tensor:
            return self.layer(query, key_lengths=key_lengths, causal="upper_left")

    pytest.importorskip("onnxscript", reason="pip install onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    from mha_ext.integrations.onnx import custom_translation_table

    model = Layer().eval()
    inputs = (torch.randn(2, 5, 32), torch.tensor([5, 2]))
    length = torch.export.Dim("length", min=2, max=999)
    torch.onnx.export(
        *(model, inputs, tmp_path / "layer.onnx"),
        dynamo=True,
        dynamic_shapes=({0: BATCH, 1: length}, {0: BATCH}),
        custom_translation_table=custom_translation_table(),
    )
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    names = [given.name for given in session.get_inputs()]
    inputs = (torch.randn(3, 9, 32), torch.tensor([9, 0, 4]))
    found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    assert_close(torch.from_numpy(found[0]), model(*inputs).detach())


class Nearby(nn.Module):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        length = query.shape[2]
        scale = length**-0.5 if self.scaled else None
        return mha_ext.attention(
            query, key, key, causal="lower_right", window=(length, None), scale=scale
        )


@pytest.mark.parametrize("strict", [False, True])
def test_window_of_a_dynamic_length(strict: bool) -> None:
    sizes = [{2: torch.export.Dim(name, min=2, max=99)} for name in ("queries", "keys")]
    inputs = (torch.randn(1, 2, 7, 4), torch.randn(1, 2, 9, 4))
    program = torch.export.export(Nearby(), inputs, dynamic_shapes=tuple(sizes), strict=strict)
    inputs = (torch.randn(1, 2, 3, 4), torch.randn(1, 2, 30, 4))
    assert_close(program.module()(*inputs), Nearby()(*inputs))
    if not strict:
        with pytest.raises(TypeError, match="scale must be a number that depends on no dynamic"):
            torch.export.export(Nearby(True), inputs, dynamic_shapes=tuple(sizes), strict=False)


def test_onnx_refuses_dropout(tmp_path: Path) -> None:
    options = {"dropout_p": 0.5, "seed": torch.tensor([1, 2])}
    with pytest.raises(Exception, match="dropout_p must be 0 to export"):
        in_onnx_runtime(Attention(False, options), make(), tmp_path / "model.onnx")


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    sizes, options = CASES["everything"]
    model = Attention(True, options)
    program = exported(model, make(**sizes))
    path = str(tmp_path / "model.pt2")
    path = torch._inductor.aoti_compile_and_package(program, package_path=path)
    run = torch._inductor.aoti_load_package(path)
    for size in ({}, {"batch": 3, "queries": 9, "keys": 11}):
        inputs = make(**sizes, **size)
        assert_close(list(run(**inputs)), model(**inputs))
