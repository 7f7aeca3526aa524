"""Write a wheel from a distribution's installed files, offline.

No network and no build tools are needed. The same files give the same bytes on every machine:
entries are stored, in order, without times. Of the metadata only the name, the version, the
requirements and the contracts are taken over, so that an editable install of a package gives the
same wheel as its release.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.utils import canonicalize_name
from packaging.version import Version

from echo_node.contract.registry import GROUP
from echo_node.contract.wheel_reader import (
    MAX_FILES,
    NATIVE,
    RefusedError,
    check_place,
    folder_of,
    read_wheel,
    record_entry,
)
from echo_node.errors import ContractError, boundary
from protocol import blob_id, limits
from protocol.manifest import Wheel

_TIME: Final = (1980, 1, 1, 0, 0, 0)
"""Time of every entry: the earliest that an archive can have."""
_REGULAR: Final = 0o100644 << 16
_ADVICE: Final = "only pure Python travels with a run; keep data inside the package"


def distribution_name(distribution: Distribution) -> str:
    """Return the normalised name of a distribution."""
    return canonicalize_name(distribution.metadata["Name"])


def is_native(distribution: Distribution) -> bool:
    """Return whether a distribution has native code."""
    return any(file.name.endswith(NATIVE) for file in distribution.files or ())


def write_wheel(distribution: Distribution) -> tuple[Wheel, bytes]:
    """Return the wheel of an installed distribution, and its entry of a manifest."""
    name = distribution_name(distribution)
    what = f"making a wheel of the package {name}"
    try:
        with boundary(ContractError, what, advice=_ADVICE):
            version = str(Version(distribution.version))
            files = _read(distribution, folder_of(name, version))
            files |= _facts(distribution, name, version)
            data = _archive(files, f"{folder_of(name, version)}/RECORD")
            wheel = Wheel(blob=blob_id(data), name=name, size=len(data), version=version)
            read_wheel(data, wheel)  # as everyone who joins will
    except RefusedError as error:
        raise ContractError(f"{what}: {error.what}", advice=_ADVICE) from None
    return wheel, data


def _read(distribution: Distribution, facts: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = limits.CODE_BYTES
    for path, file in _modules(distribution):
        if "__pycache__" in path or path.endswith((".pyc", ".pyo")):
            continue
        check_place(path, facts)
        if file.is_symlink():
            raise RefusedError(f"{path} is a symbolic link")
        left -= file.stat().st_size
        if left < 0 or len(found) == MAX_FILES:
            raise RefusedError(f"it has more than {MAX_FILES:,} files or {limits.CODE_BYTES:,} bytes")
        found[path] = file.read_bytes()
    if not found:
        raise RefusedError("it has no Python module")
    return found


def _modules(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the files of a distribution's modules by their paths in a wheel.

    The RECORD lists them, except of an editable install and of a folder without RECORD: there they
    lie beneath the modules that its metadata or its contracts name.
    """
    listed = [file for file in distribution.files or () if _is_module_file(file)]
    if listed:
        yield from ((str(file), Path(str(distribution.locate_file(file)))) for file in listed)
        return
    declared = (distribution.read_text("top_level.txt") or "").split()
    entries = [entry.module.partition(".")[0] for entry in distribution.entry_points.select(group=GROUP)]
    for module in sorted({*declared, *entries}):
        yield from _files_of(module, distribution)


def _is_module_file(file: PurePosixPath) -> bool:
    """Return whether a RECORD's path is a module: no metadata, script, data, `.pth`."""
    top = file.parts[0]
    beside = top == ".." or file.is_absolute() or top.endswith((".dist-info", ".egg-info", ".data"))
    if beside or top == "__pycache__" or top.startswith("__editable__"):
        return False
    return len(file.parts) > 1 or file.suffix in {".py", ".pyi"} or file.name.endswith(NATIVE)


def _files_of(module: str, distribution: Distribution) -> Iterator[tuple[str, Path]]:
    # Beside its metadata first: another package of that name must not be taken for it.
    check_place(f"{module}.py", "")
    spec = PathFinder.find_spec(module, [str(distribution.locate_file(""))]) or find_spec(module)
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    if not places:
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise RefusedError(f"its module {module} is no Python file")
        yield f"{module}.py", Path(spec.origin)
        return
    if len(places) > 1:
        raise RefusedError(f"its module {module} lies in {len(places)} folders")
    for file in sorted(places[0].rglob("*")):
        if file.is_symlink() or file.is_file():
            yield file.relative_to(places[0].parent).as_posix(), file


def _facts(distribution: Distribution, name: str, version: str) -> dict[str, bytes]:
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    headers += [f"Requires-Python: {each}" for each in distribution.metadata.get_all("Requires-Python") or ()]
    headers += sorted(f"Requires-Dist: {each}" for each in distribution.requires or ())
    wheel = "Wheel-Version: 1.0\nGenerator: echo-node\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts = {"METADATA": "\n".join(headers) + "\n", "WHEEL": wheel}
    contracts = sorted(
        f"{each.name} = {each.value}" for each in distribution.entry_points.select(group=GROUP)
    )
    if contracts:
        texts["entry_points.txt"] = "\n".join([f"[{GROUP}]", *contracts]) + "\n"
    return {f"{folder_of(name, version)}/{file}": text.encode() for file, text in texts.items()}


def _archive(files: dict[str, bytes], record: str) -> bytes:
    rows = io.StringIO(newline="")
    table = csv.writer(rows, lineterminator="\n")
    for path in sorted(files):
        table.writerow([path, *record_entry(files[path])])
    table.writerow([record, "", ""])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for path, data in [*sorted(files.items()), (record, rows.getvalue().encode())]:
            entry = zipfile.ZipInfo(path, _TIME)
            entry.external_attr = _REGULAR
            entry.create_system = 3  # Unix, on every system
            archive.writestr(entry, data)
    return packed.getvalue()
