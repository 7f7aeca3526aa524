"""Isolation of the current process: this system's layers in order, each measured.

`close` comes before any code of a contract is imported, and `limit` once it is. A layer that this
system cannot provide is left out with its reason; `missing` names those that were required.
"""

from __future__ import annotations

import platform
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.contract.builtin import problems
from echo_node.contract.jail import Layer, LayerError
from echo_node.contract.jail.limits import Usage, set_limits

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
    "/dev/null",
)
"""Readable paths that late-loaded libraries and time zones need."""

_LEAST_BYTES: Final = 32 * 2**20
"""Bytes of memory that must be left to score with once the code is imported."""
_IMPORT_BYTES: Final = 8 * 2**30
"""Bytes of addresses that an import may map in addition: libraries map more than they touch."""


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
        self._usage = Usage()
        self.layers: list[Layer] = []

    def close(self, readable: Iterable[Path], on_listener: Callable[[int], None] | None = None) -> bool:
        """Put up every layer; from here on only paths beneath `readable` can be read.

        With `on_listener` this process is to fork one child per text: it gets the descriptor at
        which the node answers forks. Return whether the process may fork.
        """
        bounds, forks = self._bounds, False
        if sys.platform == "linux":
            self._put_up("no-new-privileges", privileges.forgo_privileges)
            self._put_up("namespaces", privileges.leave_namespaces)
            self._put_up("capabilities", lambda: privileges.drop_capabilities(platform.machine()))
            privileges.die_with(bounds.parent)
            self._put_up("landlock", lambda: landlock.restrict(readable))
            if on_listener is not None and "seccomp" not in bounds.off:
                listener = seccomp.listen(platform.machine())
                if listener is not None:
                    on_listener(listener)
                    forks = True
            self._put_up("seccomp", lambda: seccomp.install(platform.machine(), forks=forks))
        elif sys.platform == "darwin":
            macos.watch(bounds.parent, bounds.memory_bytes)
            self.layers.append(Layer("memory-watch", active=True))
            self._put_up("sandbox", lambda: macos.restrict(readable))
        _, untouched, _ = self._usage.read()
        self._put_up("limits", lambda: self._limit(untouched + _IMPORT_BYTES))
        return forks

    def limit(self) -> bool:
        """Lower the limits to what is left after the import.

        Return whether the import started threads.
        """
        used, untouched, threads = self._usage.read()
        self._usage.close()
        if used + _LEAST_BYTES > self._bounds.memory_bytes:
            raise TooLargeError(used)
        if any(layer.name == "limits" and layer.active for layer in self.layers):
            self._limit(untouched)
        return threads > 1

    def missing(self, require: Iterable[str]) -> str:
        """Return which of these layers do not hold, and why; empty if all do.

        `landlock|namespaces` requires one of the two.
        """
        why = {layer.name: layer.why_not for layer in self.layers}
        return "; ".join(
            " and ".join(f"{name}: {why.get(name, 'this system has no such layer')}" for name in names)
            for names in (wanted.split("|") for wanted in require)
            if all(why.get(name, "missing") for name in names)
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
    """Return the paths of code and problem files.

    Code is the standard library, the packages and the loaded modules.
    """
    standard = sysconfig.get_paths()
    folders = {Path(standard[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(folder) for folder in site.getsitepackages()}
    folders |= {Path(entry) for entry in sys.path if entry and Path(entry).is_absolute()}
    folders |= {Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix)}
    folders |= {Path(one) for one in _SHARED}
    folders.add(problems.folder())
    folders = {folder for folder in folders if folder != Path("/")}
    for name, module in list(sys.modules.items()):
        for home in _homes(name, module):
            if not any(home.is_relative_to(folder) for folder in folders):
                folders.add(home)
    return sorted(folders)


def _homes(name: str, module: Any) -> list[Path]:
    """Return the paths of a loaded top-level module.

    Of an editable install's finder: the paths that it maps.
    """
    mapped = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
    if isinstance(mapped, dict):
        return [_home(Path(str(place))) for place in mapped.values()]
    file = getattr(module, "__file__", None)
    return [] if "." in name or file is None else [_home(Path(file))]


def _home(path: Path) -> Path:
    return path.parent if path.name == "__init__.py" else path
