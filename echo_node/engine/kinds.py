"""Which engines there are, which of them this machine can run, and how one is made from its name.

torch and llama.cpp are imported when an engine of theirs is made, and not before. It knows no run and no peer.
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
"""What each kind of engine imports. The extras of our own package have the same names."""
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
"""From what a CPU should sample with to what it should not: bf16 is slow there, and few bits prove little."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to be made: small enough to be sent to the process that will make it."""

    engine_class: str
    folder: Path
    device: str = AUTO
    rows: int = 64
    threads: int | None = None
    gpu_layers: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of engines on this machine. `missing` are the packages without which it does not run."""

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
    """The engine of a specification, in this process and without weights yet."""
    check_class(spec.engine_class)
    medium, _, arithmetic = spec.engine_class.partition("/")
    decoder: Decoder
    if medium == "torch":
        from echo_node.engine.torch import TorchDecoder  # noqa: PLC0415 - takes seconds and 400 MB

        decoder = TorchDecoder(spec.folder, device=spec.device, dtype=arithmetic, threads=spec.threads)
    else:
        from echo_node.engine.llamacpp import LlamaDecoder  # noqa: PLC0415 - as above

        decoder = LlamaDecoder(spec.folder, kind=arithmetic, threads=spec.threads, gpu_layers=spec.gpu_layers)
    return LocalEngine(decoder, rows=spec.rows)


def check_class(engine_class: str) -> None:
    """There are engines of this class, and their packages are installed."""
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
    device = torch_device()
    return [
        _kind(engine_class, device if _medium(engine_class) == "torch" else "cpu") for engine_class in CLASSES
    ]


def best_class(allowed: Collection[str], device: str = AUTO) -> str:
    """What this machine should sample with on a device, out of the classes that a run allows."""
    return ready_classes(allowed, device)[0]


def ready_classes(allowed: Collection[str], device: str = AUTO) -> list[str]:
    """What this machine can sample with on a device, out of the classes that a run allows, the best first: at least one."""
    known = [engine_class for engine_class in CLASSES if engine_class in allowed]
    if not known:
        raise ConfigError(
            f"this program has no engine of {_some(allowed)}", advice="a newer version may have one"
        )
    ready = [engine_class for engine_class in known if _kind(engine_class, device="").installed]
    if not ready:
        kind = _kind(known[0], device="")
        raise EngineError(f"the engine {kind.engine_class} {kind.why_not}", advice=kind.install)
    if (torch_device() if device == AUTO else device) != "cpu":
        ready.sort(key=lambda engine_class: _medium(engine_class) != "torch")
    return ready


def device_of(engine_class: str, wanted: str) -> str:
    """Where an engine of this class computes, if a person wants this device."""
    if _medium(engine_class) != "torch":
        return "cpu"
    return torch_device() if wanted == AUTO else wanted


def check_device(wanted: str) -> None:
    """This machine has what a person wants to compute on."""
    if wanted not in {AUTO, "cpu", torch_device()}:
        raise ConfigError(
            f"there is no {wanted} here that torch can use",
            advice="echo-node doctor says what there is; without --device the best of it is taken",
        )


def torch_device() -> str:
    """Where torch would compute. It is imported only if the machine shows signs of a GPU."""
    if not _has(PACKAGES["torch"]) or not _signs_of_a_gpu():
        return "cpu"
    with boundary(EngineError, "asking torch for its devices"):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"


def _signs_of_a_gpu() -> bool:
    if sys.platform == "darwin":
        return True
    build = metadata.version("torch").partition("+")[2]
    return build != "cpu" and any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _kind(engine_class: str, device: str) -> Kind:
    needs = PACKAGES[_medium(engine_class)]
    return Kind(engine_class, device, tuple(name for name in needs if find_spec(name) is None))


def _has(packages: Collection[str]) -> bool:
    return all(find_spec(name) is not None for name in packages)


def _medium(engine_class: str) -> str:
    return engine_class.partition("/")[0]


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:4]) or "no class at all"
