"""Folder of the code that travels with a run: wheels, checked and unpacked.

    wheels/             the wheels, by their file names
    code/HASH/          their files, unpacked; HASH names the code as a whole

An unpacked folder is compared with the wheels at every start, and written anew if it differs. The
jail compares it once more, by one digest, before the first import.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.contract.requirements import contract_wheels, provided_modules
from echo_node.contract.wheel_reader import ADVICE, file_of, read_wheel
from echo_node.errors import ConfigError, ContractError
from echo_node.storage.files import disk_errors
from protocol import blob_id, canonical, limits
from protocol.manifest import ContractPin, Wheel

WHEELS: Final = "wheels"
CODE: Final = "code"


@dataclass(frozen=True, slots=True)
class CodeFolder:
    """Unpacked code of a run, its digest, and the host modules that it may import."""

    path: Path
    digest: bytes
    modules: tuple[str, ...]

    def packed(self) -> list[Any]:
        return [str(self.path.resolve()), self.digest, list(self.modules)]


def code_hash(wheels: Iterable[Wheel]) -> bytes:
    """Return the hash that names a run's code, to which a person consents."""
    return blob_id(canonical.encode([[each.name, each.version, each.blob] for each in wheels]))


def describe_code(wheels: Iterable[Wheel]) -> str:
    """Return in words which packages a run's code is, and its hash."""
    listed = list(wheels)
    packages = ", ".join(f"{each.name} {each.version} ({each.size:,} bytes)" for each in listed)
    return f"{packages}; hash {code_hash(listed).hex()}"


def tree_digest(files: Mapping[str, bytes]) -> bytes:
    """Return the digest of files by their paths."""
    listed: list[Any] = [[path, blob_id(files[path])] for path in sorted(files)]
    return blob_id(canonical.encode(listed, items=limits.MANY_ITEMS))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder; refuse links and more than code may have."""
    found: dict[str, bytes] = {}
    left = limits.CODE_BYTES
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ContractError(f"{path} is no regular file", advice=f"remove {folder}")
        if path.is_file():
            left -= path.stat().st_size
            if left < 0:
                raise ContractError(f"{folder} is larger than code may be", advice=f"remove {folder}")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def check_tree(folder: Path, digest: bytes) -> None:
    """Refuse a folder whose files are not those of the run's wheels."""
    if tree_digest(read_tree(folder)) != digest:
        raise ContractError(
            f"the code in {folder} is not the code that the run names",
            advice="start again: it is then unpacked anew",
        )


def open_code(wheels: tuple[Wheel, ...], place: Path) -> CodeFolder:
    """Check the wheels in the folder `place`; unpack and return their code."""
    files: dict[str, bytes] = {}
    contents = []
    left = limits.CODE_BYTES
    for wheel in wheels:
        content = read_wheel(_read(place / file_of(wheel), wheel), wheel, left)
        left -= sum(map(len, content.files.values()))
        twice = sorted(files.keys() & content.files.keys())
        if twice:
            raise ContractError(f"{twice[0]} stands in two wheels of the run", advice=ADVICE)
        files |= content.files
        contents.append(content)
    modules = provided_modules(contents)
    folder = place.parent / CODE / code_hash(wheels).hex()
    digest = tree_digest(files)
    with disk_errors(f"unpacking the run's code into {folder}"):
        if not _holds(folder, digest):
            _write(folder, files)
    return CodeFolder(folder, digest, tuple(modules))


def check_installed(pin: ContractPin) -> None:
    """Refuse an installed contract whose wheels are not those that the run names."""
    found = tuple(wheel for wheel, _ in contract_wheels(pin.name, pin.version))
    if found != pin.wheel:
        raise ContractError(
            f"the package of {pin.name} {pin.version} is not the one that the run names",
            advice="install the releases that the run's author used",
        )


def _read(file: Path, wheel: Wheel) -> bytes:
    right = file.is_file() and file.stat().st_size == wheel.size
    data = file.read_bytes() if right else b""
    if not right or blob_id(data) != wheel.blob:
        raise ConfigError(
            f"{file} is not the wheel that the manifest names",
            advice="join by the run's link, which fetches it, or give the run's own folder",
        )
    return data


def _holds(folder: Path, digest: bytes) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and tree_digest(read_tree(folder)) == digest
    except ContractError:
        return False


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside, old = (folder.with_name(f"{secrets.token_hex(8)}.{what}") for what in ("beside", "old"))
    try:
        for path, data in files.items():
            file = beside / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as opened:
                opened.write(data)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            folder.rename(old)
        beside.rename(folder)
    finally:
        for stale in (beside, old):
            shutil.rmtree(stale, ignore_errors=True)
