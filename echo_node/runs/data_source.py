"""Read the rows of a data set: JSON lines, JSON, CSV or parquet.

A data set is a file or on a hub.

path/to/file.jsonl          also .json, .csv, .parquet
owner/name[@revision]       a data set on a hub; its files of the wanted split are fetched once

Nothing that a data set's folder brings is executed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from echo_node.errors import ConfigError, boundary, looking_at
from echo_node.models.hub import is_hub_id

SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")
_LARGEST: Final = 4 * 1024**3  # bytes of one file
_FIELD_CHARACTERS: Final = 16 * 1024 * 1024  # of one field of a CSV file
_FORMS: Final = f"give a file ({', '.join(SUFFIXES)}) or a hub's owner/name"


def read_source(source: str, split: str, *, endpoint: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each unchecked row with its origin, for errors."""
    for path in find_files(source, split, endpoint=endpoint):
        with boundary(ConfigError, f"reading {path}"):
            if path.stat().st_size > _LARGEST:
                raise ConfigError(f"{path} has more than {_LARGEST:,} bytes")
            yield from _READERS[path.suffix.lower()](path)


def find_files(source: str, split: str, *, endpoint: str | None = None) -> list[Path]:
    """Return the files of a data set, from this machine or a hub."""
    path = Path(source).expanduser()
    with looking_at(source, advice=_FORMS):
        is_file, is_there = path.is_file(), path.exists()
    if is_file:
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"{source} is no {', '.join(SUFFIXES)} file", advice=_FORMS)
        return [path]
    if is_there:
        return choose_files(path, split, source)
    if is_hub_id(source):
        return choose_files(_fetch(source, endpoint), split, source)
    raise ConfigError(f"there is no data set {source!r}", advice=_FORMS)


def choose_files(folder: Path, split: str, source: str) -> list[Path]:
    """Return the files of a folder whose name or folder has the split's name."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    named = [path for path in files if split in path.relative_to(folder).as_posix().lower()]
    if not named:
        known = ", ".join(path.relative_to(folder).as_posix() for path in files[:5]) or "none"
        raise ConfigError(
            f"{source} has no data file of the split {split!r}; it has {known}",
            advice="name another split with data.split, or give one file",
        )
    best = min(SUFFIXES.index(path.suffix.lower()) for path in named)  # one form, where there are several
    return [path for path in named if SUFFIXES.index(path.suffix.lower()) == best]


def _fetch(source: str, endpoint: str | None) -> Path:
    with boundary(ConfigError, "opening the hub's library", advice="pip install huggingface_hub"):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - it takes a moment

    name, _, revision = source.partition("@")
    advice = "check how it is written and that the hub can be reached, or give a file"
    with boundary(ConfigError, f"fetching the data set {source} from the hub", advice=advice):
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision or None,
            endpoint=endpoint,
            allow_patterns=[f"*{suffix}" for suffix in SUFFIXES],
            library_name="echo-node",
        )
    return Path(folder)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"line {number} of {path.name}"
                with boundary(ConfigError, where, advice="each line is one JSON object"):
                    yield where, json.loads(line)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text("utf-8")
    if not text.lstrip().startswith("["):  # lines under another name
        yield from _json_lines(path)
        return
    for number, row in enumerate(json.loads(text), 1):
        yield f"row {number} of {path.name}", row


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_FIELD_CHARACTERS)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
            yield f"row {number} of {path.name}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    if find_spec("pyarrow") is None:
        raise ConfigError(
            f"reading {path.name} needs pyarrow", advice="pip install pyarrow, or give JSON lines"
        )
    from pyarrow import parquet  # type: ignore[import-untyped] # noqa: PLC0415 - optional

    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number} of {path.name}", row


_READERS: Final[Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
