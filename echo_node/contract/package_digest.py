"""Digest of the package that declares a contract, without importing it.

A run pins it in its manifest (`contract.wheel`), and the jail checks it before the first import. It
covers every file beneath the top-level module that the entry point names, as its wheel installs
them, without bytecode; an editable install of the same files has the same digest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from echo_node.contract.registry import entry_of, is_built_in
from echo_node.errors import ContractError, boundary
from protocol import blob_id, canonical

MAX_FILES: Final = 10_000
MAX_BYTES: Final = 64 * 2**20
"""Most files and bytes of one package."""
_NATIVE: Final = tuple({*EXTENSION_SUFFIXES, ".so", ".dylib", ".pyd"})
_TAKEN: Final = sys.stdlib_module_names | {"echo_node", "protocol", "bootstrap"}


def package_digest(name: str, version: str) -> bytes | None:
    """Return the digest of a plug-in's package; None for a built-in contract."""
    if is_built_in(name, version):
        return None
    entry = entry_of(name, version)
    files: list[list[str | bytes]] = []
    left = MAX_BYTES
    with boundary(ContractError, f"reading the package of the contract {name} {version}"):
        for path, file in _files(entry):
            data = file.read_bytes()
            left -= len(data)
            if left < 0 or len(files) == MAX_FILES:
                raise ValueError(f"it has more than {MAX_FILES} files or {MAX_BYTES} bytes")
            files.append([path, blob_id(data)])
    return blob_id(canonical.encode(files))


def check_package(name: str, version: str, pinned: bytes) -> None:
    """Refuse a contract whose package is not the one that the run pins."""
    found = package_digest(name, version)
    if found != pinned:
        here = "it is built in here" if found is None else f"here it has the hash {found.hex()}"
        raise ContractError(
            f"the package of {name} {version} is not the one that the run names: {here}, the run has {pinned.hex()}",
            advice="install the release of it that the run's author used, from its wheel",
        )


def _files(entry: EntryPoint) -> Iterator[tuple[str, Path]]:
    """Yield the files of the entry's top-level module, by their paths in the wheel, in order."""
    top = entry.module.partition(".")[0]
    if top in _TAKEN:
        raise ValueError(f"its module {top} would shadow one of Python or of this program")
    spec = find_spec(top)
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    if not places:
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ValueError(f"its module {top} is no Python file")
        yield f"{top}.py", Path(spec.origin)
        return
    if len(places) > 1:
        raise ValueError(f"its module {top} lies in {len(places)} folders")
    found = {file.relative_to(places[0].parent).as_posix(): file for file in _walk(places[0])}
    yield from sorted(found.items())


def _walk(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            continue
        if file.is_symlink():
            raise ValueError(f"{file.name} is a symbolic link")
        if file.name.endswith(_NATIVE):
            raise ValueError(f"{file.name} is native code, which differs from machine to machine")
        if file.is_file():
            yield file
