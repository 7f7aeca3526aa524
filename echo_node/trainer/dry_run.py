"""Dry run of a model before a run is sealed; a passed one is remembered.

`dry_run_worker` does it in a process of its own: neither torch nor a library that aborts is loaded
here. What was passed is kept by the hash of everything that it depends on: the model, the engine
classes, the versions of the libraries, and this package's own code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

import echo_node
from echo_node.engine.engine_classes import PACKAGES, kinds
from echo_node.errors import ConfigError, StoreError, boundary, one_line
from echo_node.models.progress import Progress, no_progress
from protocol import Manifest

PASSED: Final = "dry-runs"
"""Folder in a node's state: a file per dry run that was passed."""
_LONGEST: Final = 900.0  # seconds that a dry run may take
_CODE: Final = ("engine", "trainer", "models")
"""Packages whose code a dry run depends on."""


def dry_run(
    manifest: Manifest, folder: Path, state: Path, *, progress: Progress = no_progress
) -> tuple[str, ...]:
    """Try a model in a training step and all engines; refuse it if they differ.

    Return the engine classes that were not tried, since their packages are not installed here.
    """
    missing = {kind.engine_class for kind in kinds() if not kind.installed}
    every = {each.engine: each.d_mean for each in manifest.engines}
    classes = {name: allowed for name, allowed in every.items() if name not in missing}
    if any(find_spec(name) is None for name in PACKAGES["torch"]):
        return ("the trainer", *every)
    mark = state / PASSED / _key(manifest, folder, classes)
    if not mark.is_file():
        request = json.dumps({"classes": classes, "temperature": manifest.sampling.temperature})
        gaps = _run(folder, request, progress)
        with boundary(StoreError, f"writing {mark}", advice="make room on that disk"):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(json.dumps(gaps, sort_keys=True) + "\n")
    return tuple(sorted(every.keys() & missing))


def _run(folder: Path, request: str, progress: Progress) -> dict[str, float]:
    """Run the worker; it ends with this call, however that ends."""
    command = [sys.executable, "-P", "-m", "echo_node.trainer.dry_run_worker", str(folder.resolve()), request]
    doing, last = "starting", {}
    progress("dry run: starting", 0, 0)
    with (
        boundary(ConfigError, "starting the dry run"),
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as worker,
    ):
        words = _Reader(worker)
        deadline = threading.Timer(_LONGEST, worker.kill)
        deadline.start()
        try:
            for line in worker.stdout or ():
                last = _message(line)
                if "doing" in last:
                    doing = str(last["doing"])
                    progress(doing, 0, 0)
            worker.wait()
        finally:
            deadline.cancel()
            worker.kill()
            words.join()
    if "refused" in last:
        raise ConfigError(
            f"this model cannot be trained: {last['refused']}", advice=str(last.get("advice", ""))
        )
    if worker.returncode or "gaps" not in last:
        how = f"signal {-worker.returncode}" if worker.returncode < 0 else f"exit code {worker.returncode}"
        said = one_line((words.text.strip().splitlines() or ["no word"])[-1])
        raise ConfigError(
            f"the dry run of this model ended with {how} ({doing}): {said}",
            advice="is there memory? if so, take another model, or leave that engine class out",
        )
    return {str(name): float(gap) for name, gap in last["gaps"].items()}


class _Reader(threading.Thread):
    """Drain of a process's standard error; keeps the end of it.

    Without it the process would wait on a full pipe.
    """

    def __init__(self, worker: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._stream = worker.stderr
        self.text = ""
        self.start()

    def run(self) -> None:
        for line in self._stream or ():
            self.text = (self.text + line)[-4096:]


def _message(line: str) -> dict[str, Any]:
    """Return a line as a message; libraries may print lines of their own."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _key(manifest: Manifest, folder: Path, classes: dict[str, float]) -> str:
    key = blake3(manifest.model.root)
    key.update((folder / "config.json").read_bytes())
    key.update(json.dumps([classes, manifest.sampling.temperature], sort_keys=True).encode())
    for name in ("torch", "transformers", "llama-cpp-python", "gguf"):
        try:
            key.update(f"{name} {metadata.version(name)}\n".encode())
        except metadata.PackageNotFoundError:
            key.update(f"{name} is missing\n".encode())
    own = Path(echo_node.__file__).parent
    for file in sorted(path for package in _CODE for path in (own / package).glob("*.py")):
        key.update(file.name.encode()).update(file.read_bytes())
    return key.hexdigest()
