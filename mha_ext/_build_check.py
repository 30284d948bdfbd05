"""Refuses, in one message that says what to do, what would otherwise be an undefined symbol."""

import importlib
import importlib.util
from pathlib import Path

import torch


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch_version() -> None:
    """Check that the compiled module is there, and that it was built for the torch that is running.

    Raises:
        ImportError: it is not there (for example because the source folder shadows the installed
            package), or it was built for another minor version of torch.
    """
    package = Path(__file__).resolve().parent
    if importlib.util.find_spec("mha_ext._C") is None:
        if (package.parent / "setup.py").is_file():
            raise ImportError(
                f"mha_ext was imported from its source folder {package}, which holds no compiled "
                "module for this Python and hides the installed package. Use the commands pytest "
                "and mha-ext (not python -m ...), or run Python in another folder, or install the "
                "source folder itself: pip install -e . --no-build-isolation"
            )
        raise ImportError(
            f"mha_ext in {package} has no compiled module for this Python: install it again, with "
            "pip install --force-reinstall --no-cache-dir --no-deps, from where you had it"
        )
    built = str(importlib.import_module("mha_ext._build_info").TORCH_VERSION)
    if _minor(built) != _minor(torch.__version__):
        raise ImportError(
            f"mha_ext was built for torch {_minor(built)} ({built}), but torch {torch.__version__} "
            "is running. Build it again for this torch, in the source folder: "
            "pip install --force-reinstall --no-cache-dir --no-deps ."
        )
