"""Isolation of the current process: this system's layers in order, each measured.

`before_import` comes first, `after_import` once the contract's code is imported and before any
completion is read. A layer that this system cannot provide is left out with its reason; `missing`
names those that were required.
"""

from __future__ import annotations

import platform
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.contract.jail import Layer, LayerError
from echo_node.contract.jail.limits import memory, set_limits

if sys.platform == "linux":
    from echo_node.contract.jail import landlock, privileges, seccomp
if sys.platform == "darwin":
    from echo_node.contract.jail import macos

_SHARED: Final = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
)
"""Readable paths that late-loaded libraries and time zones need."""

_LEAST_BYTES: Final = 32 * 2**20
"""Bytes of memory that must be left to score with once the code is imported."""


class TooLargeError(Exception):
    """The imported code leaves too little of the allowed memory for scoring."""

    def __init__(self, used: int) -> None:
        super().__init__(f"takes {used >> 20} MiB before its first text")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Resource bounds of a jailed process, and its parent's pid."""

    parent: int
    memory_bytes: int
    cpu_seconds: int
    off: frozenset[str] = frozenset()
    """Layers to leave out; tests use it to show what each layer prevents."""


class Enclosure:
    """The layers of this process, as they are put up."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.layers: list[Layer] = []

    def before_import(self) -> None:
        """Put up the layers that need a single thread and no foreign code."""
        if sys.platform == "linux":
            self._put_up("no-new-privileges", privileges.forgo_privileges)
            self._put_up("namespaces", privileges.leave_namespaces)
            self._put_up("capabilities", lambda: privileges.drop_capabilities(platform.machine()))
            privileges.die_with(self._bounds.parent)

    def after_import(self, readable: Iterable[Path]) -> None:
        """Put up the other layers; from here on only paths beneath `readable` can be read."""
        bounds = self._bounds
        used, untouched = memory()  # while /proc can still be read
        if used + _LEAST_BYTES > bounds.memory_bytes:
            raise TooLargeError(used)
        if sys.platform == "linux":
            self._put_up("landlock", lambda: landlock.restrict(readable))
            self._put_up("seccomp", lambda: seccomp.install(platform.machine()))
        elif sys.platform == "darwin":
            macos.watch(bounds.parent, bounds.memory_bytes)
            self.layers.append(Layer("memory-watch", active=True))
            self._put_up("sandbox", lambda: macos.restrict(readable))
        self._put_up("limits", lambda: self._limit(untouched))

    def missing(self, require: Iterable[str]) -> str:
        """Return which of these layers do not hold, and why; empty if all do."""
        why = {layer.name: layer.why_not for layer in self.layers if not layer.active}
        known = {layer.name for layer in self.layers}
        return "; ".join(
            f"{name}: {why.get(name, 'this system has no such layer')}"
            for name in require
            if name in why or name not in known
        )

    def _limit(self, untouched: int) -> None:
        holds = {layer.name for layer in self.layers if layer.active}
        set_limits(
            memory_bytes=self._bounds.memory_bytes,
            untouched=untouched,
            cpu_seconds=self._bounds.cpu_seconds,
            own_users="namespaces" in holds,
            may_fork=not holds & {"seccomp", "sandbox"},
        )

    def _put_up(self, name: str, act: Callable[[], None]) -> None:
        why_not = "switched off"
        if name not in self._bounds.off:
            try:
                act()
                why_not = ""
            except (LayerError, OSError, ValueError) as error:
                why_not = str(error)
        self.layers.append(Layer(name, active=not why_not, why_not=why_not))


def code_paths() -> list[Path]:
    """Return the paths of this process's code: standard library, packages, loaded modules."""
    standard = sysconfig.get_paths()
    folders = {Path(standard[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(folder) for folder in site.getsitepackages()}
    folders |= {Path(entry) for entry in sys.path if entry and Path(entry).is_absolute()}
    folders |= {Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix)}
    folders |= {Path(one) for one in _SHARED}
    folders = {folder for folder in folders if folder != Path("/")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file is not None:  # such as an editable install
            path = Path(file)
            home = path.parent if path.name == "__init__.py" else path
            if not any(home.is_relative_to(folder) for folder in folders):
                folders.add(home)
    return sorted(folders)
