"""mha_ext inside other libraries, one module each; none is imported unless it is asked for."""

import importlib


def __getattr__(name: str) -> object:
    if name in ("onnx", "transformers"):
        return importlib.import_module(f"mha_ext.integrations.{name}")
    raise AttributeError(f"module 'mha_ext.integrations' has no attribute {name!r}")
