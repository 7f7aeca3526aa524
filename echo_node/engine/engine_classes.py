"""Engine classes: which exist, which this machine can run, how to make one.

torch and llama.cpp are imported only when one of their engines is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from echo_node.engine.decoder import Decoder
from echo_node.engine.local import LocalEngine
from echo_node.errors import ConfigError, EngineError, boundary

AUTO: Final = "auto"
"""The best device there is."""
PACKAGES: Final = {"torch": ("torch", "transformers"), "llama": ("llama_cpp", "gguf")}
"""Packages of each kind of engine; the extras of our own package have the same names."""
CLASSES: Final = (
    "llama/f16",
    "torch/f32",
    "llama/f32",
    "torch/f16",
    "torch/bf16",
    "llama/bf16",
    "llama/q8_0",
    "llama/q4_0",
)
"""Best first for sampling on a CPU: bf16 is slow there, and few bits verify poorly."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to be made: small enough to be sent to the process that will make it."""

    engine_class: str
    folder: Path
    device: str = AUTO
    rows: int = 64
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine class on this machine; `missing` lists packages that it needs."""

    engine_class: str
    device: str
    missing: tuple[str, ...]

    @property
    def installed(self) -> bool:
        return not self.missing

    @property
    def why_not(self) -> str:
        return f"needs {', '.join(self.missing)}" if self.missing else ""

    @property
    def install(self) -> str:
        """The command that brings what is missing."""
        return f'pip install "echo-node[{_medium(self.engine_class)}]"'


def make_engine(spec: EngineSpec) -> LocalEngine:
    """Make an engine in this process, without weights yet."""
    check_class(spec.engine_class)
    medium, _, arithmetic = spec.engine_class.partition("/")
    decoder: Decoder
    if medium == "torch":
        from echo_node.engine.torch_decoder import TorchDecoder  # noqa: PLC0415 - takes seconds and 400 MB

        decoder = TorchDecoder(spec.folder, device=spec.device, dtype=arithmetic, threads=spec.threads)
    else:
        from echo_node.engine.llama_decoder import LlamaDecoder  # noqa: PLC0415 - as above

        decoder = LlamaDecoder(spec.folder, kind=arithmetic, threads=spec.threads, device=spec.device)
    return LocalEngine(decoder, rows=spec.rows)


def check_class(engine_class: str) -> None:
    """Raise unless the engine class exists and its packages are installed."""
    if engine_class not in CLASSES:
        raise ConfigError(
            f"there are no engines of the class {engine_class!r}", advice=f"take one of {', '.join(CLASSES)}"
        )
    kind = _kind(engine_class, device="")
    if not kind.installed:
        raise EngineError(f"the engine {engine_class} {kind.why_not}", advice=kind.install)


def check_torch(who: str) -> None:
    """`who` computes with torch, which not every machine has."""
    kind = _kind("torch/f32", device="")
    if not kind.installed:
        raise EngineError(f"{who} {kind.why_not}", advice=kind.install)


def kinds() -> list[Kind]:
    """Every class of engines, with what this machine has for it."""
    devices = {"torch": torch_device(), "llama": llama_device()}
    return [_kind(engine_class, devices[_medium(engine_class)]) for engine_class in CLASSES]


def best_class(allowed: Collection[str], device: str = AUTO) -> str:
    """Return the best class to sample with on a device, of those allowed."""
    return ready_classes(allowed, device)[0]


def ready_classes(allowed: Collection[str], device: str = AUTO) -> list[str]:
    """Return the classes that can sample on a device here, best first; at least one."""
    known = [engine_class for engine_class in CLASSES if engine_class in allowed]
    if not known:
        raise ConfigError(
            f"this program has no engine of {_some(allowed)}", advice="a newer version may have one"
        )
    ready = [engine_class for engine_class in known if _kind(engine_class, device="").installed]
    if not ready:
        kind = _kind(known[0], device="")
        raise EngineError(f"the engine {kind.engine_class} {kind.why_not}", advice=kind.install)
    devices = {engine_class: device_of(engine_class, device) for engine_class in ready}
    if any(where != "cpu" for where in devices.values()):
        ready.sort(key=lambda one: (devices[one] == "cpu", _medium(one) != "torch"))
    return ready


def device_of(engine_class: str, wanted: str) -> str:
    """Return the device on which an engine of this class runs, for `--device`."""
    best = torch_device() if _medium(engine_class) == "torch" else llama_device()
    return best if wanted in {AUTO, best} else "cpu"


def check_device(wanted: str, *, torch_only: bool = False) -> None:
    """Refuse a device that this machine does not have, or that no engine here can use."""
    devices = {AUTO, "cpu", torch_device()} | (set() if torch_only else {llama_device()})
    if wanted not in devices:
        raise ConfigError(
            f"there is no {wanted} here that {'torch' if torch_only else 'torch or llama.cpp'} can use",
            advice="echo-node doctor says what there is; without --device the best of it is taken",
        )


def torch_device() -> str:
    """Return torch's device, importing torch only if there seems to be a GPU."""
    if not _has(PACKAGES["torch"]) or not _signs_of_a_gpu():
        return "cpu"
    with boundary(EngineError, "asking torch for its devices"):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"


def llama_device() -> str:
    """Return where llama.cpp computes by default; import it only if there is a GPU."""
    if not _gpu_hardware() or not llama_offloads():
        return "cpu"
    return "mps" if sys.platform == "darwin" else "cuda"


def llama_offloads() -> bool | None:
    """Return whether the installed llama.cpp can use a GPU; None if not installed."""
    if not _has(PACKAGES["llama"]):
        return None
    with boundary(EngineError, "asking llama.cpp whether it can use a GPU"):
        return bool(importlib.import_module("llama_cpp").llama_supports_gpu_offload())


def _signs_of_a_gpu() -> bool:
    """Return whether torch is worth importing to ask it for a GPU."""
    if not _gpu_hardware():
        return False
    return sys.platform == "darwin" or metadata.version("torch").partition("+")[2] != "cpu"


def _gpu_hardware() -> bool:
    if sys.platform == "darwin":
        return True
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _kind(engine_class: str, device: str) -> Kind:
    needs = PACKAGES[_medium(engine_class)]
    return Kind(engine_class, device, tuple(name for name in needs if find_spec(name) is None))


def _has(packages: Collection[str]) -> bool:
    return all(find_spec(name) is not None for name in packages)


def _medium(engine_class: str) -> str:
    return engine_class.partition("/")[0]


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:4]) or "no class at all"
