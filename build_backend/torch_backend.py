"""PEP 517 backend: setuptools, building against the torch of the environment installed into.

A frontend (pip, uv, build) makes an isolated build environment and asks what to put into it. Where
the target environment has a torch, the answer is "nothing": its headers and libraries are used as
they lie there. It is found although it cannot be imported, because under pip the isolated build
runs the target's own interpreter, whose paths sysconfig still names. Where there is none, the
answer is the one torch that this release is tested with, and the wheel then requires exactly that.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

try:
    import setuptools
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)
except ModuleNotFoundError:
    raise SystemExit(
        "mha_ext: without build isolation (always so with uv) torch and setuptools must be there "
        "first: uv pip install torch==2.13.0 setuptools"
    ) from None

TESTED = "2.13.0"

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"mha_ext: setuptools {setuptools.__version__} is too old to build it without build "
        "isolation: pip install 'setuptools>=77.0.3'"
    )


class Torch(NamedTuple):
    """An installed torch, as its files describe it; it is never imported to build."""

    folder: Path
    version: str
    in_target: bool  # of the target environment, not of an isolated build environment

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = re.findall(r"\d+", self.version)[:2]
        return int(major), int(minor)


def site_folders() -> list[str]:
    """Where the packages of the environment that is installed into lie."""
    chosen = os.environ.get("MHA_EXT_TORCH_SITE")
    if chosen:
        return [chosen]
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages([sys.prefix])
    in_venv = sys.prefix != sys.base_prefix
    settings = Path(sys.prefix, "pyvenv.cfg")
    if in_venv and settings.is_file():
        shared = re.search(
            r"^include-system-site-packages\s*=\s*true", settings.read_text(), re.MULTILINE | re.I
        )
        if shared:
            base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
            folders += [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
            folders += site.getsitepackages([sys.base_prefix])
            in_venv = False
    if not in_venv:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def find_torch() -> Torch | None:
    """The target environment's torch, else the one that this process could import, else None."""
    spec = importlib.util.find_spec("torch")
    found = [(Path(folder, "torch"), True) for folder in site_folders()]
    found += [(Path(folder), False) for folder in (spec and spec.submodule_search_locations) or []]
    for folder, in_target in found:
        if (folder / "version.py").is_file():
            text = (folder / "version.py").read_text()
            version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
            if version:
                return Torch(folder, version.group(1), in_target)
    return None


def torch_requirement() -> str:
    """The minor version that was built against: its binary interface is the one compiled in."""
    torch = find_torch()
    if torch is None or (not torch.in_target and torch.version.split("+")[0] == TESTED):
        return f"torch=={TESTED}"
    major, minor = torch.minor
    preview = re.match(r"[\d.]+(a|b|rc|dev)", torch.version)  # 2.14.0a0+git comes before 2.14
    return f"torch>={major}.{minor}{'.0.dev0' if preview else ''},<{major}.{minor + 1}"


# setuptools' own answers to the next three would run setup.py.


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return [] if find_torch() else [f"torch=={TESTED}"]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: object = None) -> list[str]:
    return []


def build_wheel(
    wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None
) -> str:
    """Forget what the last build packed: deleted modules would be packed again. Objects stay."""
    for name in ("lib", "bdist"):
        for folder in Path("build").glob(f"{name}*"):
            shutil.rmtree(folder)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
