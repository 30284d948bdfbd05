"""The static site: the documents of this repository and the API, from its docstrings. Needs no network.

    sphinx-build -W --keep-going -c docs/site . site      # in the root of the clone, with mha_ext installed

The source folder is the root, so that the documents' links to each other are those of the repository.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.util import logging

import mha_ext

ROOT = Path(__file__).resolve().parents[2]

project = "mha_ext"
author = "the mha_ext authors"
copyright = author  # noqa: A001
release = version = mha_ext.__version__
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**", "examples/*.md", "benchmarks/*.md", "tests/cuda/*.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"{project} {version}"
templates_path: list[str] = []
myst_heading_anchors = 4
default_role = "py:obj"
autodoc_mock_imports = [
    name
    for name in ("onnx", "onnx_ir", "onnxscript", "transformers", "matplotlib")
    if find_spec(name) is None
]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Source", "Sources"]
suppress_warnings = [
    "myst.xref_missing"
]  # links to folders and code; tests/test_docs.py checks all


def mark_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Indented blocks of a docstring are code, as in Markdown, unless they belong to a section such as Args."""
    text = "\n".join(lines)
    text = re.sub(r"(?m)^(\S.*(?<!:))\n\n(?= {4}\S)", r"\1\n\n::\n\n", text)
    lines[:] = text.split("\n")


def every_name_has_a_page(app: Any) -> None:
    """Warns of what mha_ext exports and no page of the API shows."""
    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/site/api/*.md"))
    for name in mha_ext.__all__:
        thing = getattr(mha_ext, name)
        if callable(thing) and f"mha_ext.{name}\n" not in pages:
            logging.getLogger(__name__).warning("docs/site/api has no page for mha_ext.%s", name)


def front_page(app: Any, error: Exception | None) -> None:
    """The root document lies two folders deep."""
    page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/site/index.html">'
    Path(app.outdir, "index.html").write_text(page + "\n")


def setup(app: Any) -> None:
    app.connect("build-finished", front_page)
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("builder-inited", every_name_has_a_page)
