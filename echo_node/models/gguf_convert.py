"""Convert a GGUF file to a Hugging Face folder, once, and keep it.

`gguf_worker` does it in a process of its own, so that neither torch nor a hostile file is loaded
here. A folder is built beside its place and then renamed: it is complete or absent.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from blake3 import blake3

from echo_node.errors import ConfigError, StoreError, boundary, one_line
from echo_node.models.folder import check_folder
from echo_node.models.progress import Progress, no_progress

PACKAGES: Final = ("torch", "transformers", "accelerate", "gguf")
_MAGIC: Final = b"GGUF"
_PARTIAL: Final = ".partial-"
_LONGEST: Final = 3600.0  # seconds that a conversion may take
_ABANDONED: Final = 86_400.0  # seconds after which nobody builds in a folder any more
_DAMAGED: Final = "if it is damaged or was cut short, fetch it again"


def convert(file: Path, cache: Path, progress: Progress = no_progress) -> Path:
    """Return the bf16 folder of a GGUF file's model, named after the file's content."""
    _check_looks(file)
    progress(f"reading {file.name}", 0, 0)
    with boundary(ConfigError, f"reading {file}"):
        digest = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
    folder = cache / f"{file.stem}-{digest[:16]}"
    if folder.is_dir():
        try:
            return check_folder(folder)
        except ConfigError:  # a disk that filled up, or somebody's hand: it is made again
            shutil.rmtree(folder, ignore_errors=True)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"opening a GGUF file needs {', '.join(missing)}", advice='pip install "echo-node[torch]"'
        )
    progress(f"converting {file.name}, once; it takes a minute", 0, 0)
    with boundary(StoreError, f"making {folder}", advice="see that the disk has room and can be written to"):
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache, ignore_cleanup_errors=True) as partial:
            built = Path(partial, "model")
            _unpack(file, built)
            check_folder(built)
            try:
                built.rename(folder)
            except OSError:
                if not folder.is_dir():  # else somebody made the same at the same time
                    raise
    return check_folder(folder)


def _check_looks(file: Path) -> None:
    """Refuse what is no GGUF file by its first bytes."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}", advice="give a model's folder or its .gguf file")
    with boundary(ConfigError, f"reading {file}"), file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{file} is no GGUF file", advice=_DAMAGED)


def _unpack(file: Path, folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "echo_node.models.gguf_worker", str(file.resolve()), str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"converting {file} took more than {_LONGEST / 60:.0f} minutes") from None
    if done.returncode < 0:
        raise ConfigError(
            f"converting {file} was ended by signal {-done.returncode}", advice="is there memory?"
        )
    if done.returncode:
        words = done.stdout.strip() or (done.stderr.strip().splitlines() or ["it did not say why"])[-1]
        raise ConfigError(f"{file.name} cannot be opened as a model: {one_line(words)}", advice=_DAMAGED)


def _sweep(cache: Path) -> None:
    """Take away what a conversion left that was killed."""
    for path in cache.glob(f"{_PARTIAL}*"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
