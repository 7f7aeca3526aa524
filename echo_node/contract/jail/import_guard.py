"""Import guard: a run's code finds its own modules and those of every node.

What else is installed on a machine is not found, so that a contract behaves everywhere as it did
where the run was made.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class GuardedFinder:
    """A finder of modules that finds no top-level module but the allowed ones."""

    def __init__(self, finder: Any, allowed: frozenset[str]) -> None:
        self._finder = finder
        self._allowed = allowed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, if it may be imported."""
        if "." not in name and name not in self._allowed and not name.startswith("_sysconfigdata"):
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def guard_imports(folder: Path, modules: Iterable[str]) -> None:
    """Put a run's code after the standard library; forbid all other modules."""
    own = {path.name.partition(".")[0] for path in folder.iterdir() if not path.name.endswith(".dist-info")}
    allowed = frozenset({*sys.stdlib_module_names, *sys.builtin_module_names, *own, *modules})
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    last = max((at for at, entry in enumerate(sys.path) if _is_standard(entry, standard)), default=-1)
    sys.path.insert(last + 1, str(folder))
    sys.meta_path[:] = [GuardedFinder(finder, allowed) for finder in sys.meta_path]


def _is_standard(entry: str, standard: set[str]) -> bool:
    return entry in standard or entry.endswith("lib-dynload")
