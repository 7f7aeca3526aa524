"""Every target, by name, and the module that it stands in."""

from __future__ import annotations

import importlib
from typing import Final

from tests.fuzz.target import Target

MODULES: Final = tuple(
    f"tests.fuzz.{name}_targets"
    for name in ("wire", "link", "net", "role", "term", "answer", "file", "local")
)


def in_module(module: str) -> dict[str, Target]:
    """The targets of one module. What they reach is imported now: a fuzzer must be there before."""
    return {target.name: target for target in importlib.import_module(module).TARGETS}


def everywhere() -> dict[str, tuple[str, Target]]:
    return {name: (module, target) for module in MODULES for name, target in in_module(module).items()}
