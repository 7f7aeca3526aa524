"""Read a wheel that travels with a run, by SPEC.md, executing nothing.

A wheel comes from whoever made the run. It is read into memory, within bounds that are checked
before anything is decompressed, and refused as a whole for the first entry that is not plain.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import struct
import sys
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Final

from packaging.utils import canonicalize_name

from echo_node.errors import ContractError, boundary
from protocol import limits
from protocol.manifest import Wheel

MAX_FILES: Final = 10_000
"""Most files of one wheel."""
MAX_RATIO: Final = 200
"""Most bytes of a file for each byte of its compressed form."""
FREE_BYTES: Final = 65_536
"""Bytes of a file for which the ratio does not count."""
MAX_PATH: Final = 255
MAX_PARTS: Final = 16
NATIVE: Final = tuple({*EXTENSION_SUFFIXES, ".so", ".dylib", ".pyd", ".dll", ".a", ".o"})
"""Suffixes of native code, which differs from machine to machine."""
TAKEN: Final = sys.stdlib_module_names | {
    "echo_node",
    "protocol",
    "bootstrap",
    "sitecustomize",
    "usercustomize",
}
"""Modules that no wheel may bring: those of Python and of this program."""
ADVICE: Final = "do not work for this run; its author can make it anew with echo-node run new"
_FACTS: Final = ("METADATA", "WHEEL", "RECORD")
_FORBIDDEN: Final = re.compile(r'[\\:*?"<>|]')
_MODULE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.pyi?)?")
_END: Final = struct.Struct("<4s4H2LH")
_END_MARK: Final = b"PK\x05\x06"
_ZIP64_MARK: Final = b"PK\x06\x07"
_ZIP64_BYTES: Final = 20
_ENTRY_BYTES: Final = 46 + MAX_PATH + 512
"""Bytes of one entry of an archive's directory, with its path and extra fields."""


@dataclass(frozen=True, slots=True)
class WheelContent:
    """The files of a wheel, and what it requires."""

    name: str
    version: str
    files: dict[str, bytes]
    requires: tuple[str, ...]
    """Requirements as they stand in METADATA."""
    requires_python: str


def folder_of(name: str, version: str) -> str:
    """Return the name of the folder of a wheel's metadata."""
    return f"{name.replace('-', '_')}-{version}.dist-info"


def file_of(wheel: Wheel) -> str:
    """Return the file name of a wheel."""
    return f"{wheel.name.replace('-', '_')}-{wheel.version}-py3-none-any.whl"


def read_wheel(data: bytes, wheel: Wheel, left: int = limits.CODE_BYTES) -> WheelContent:
    """Return the content of a wheel, at most `left` bytes; refuse one not plain."""
    what = f"the wheel {wheel.name} {wheel.version}"
    try:
        with boundary(ContractError, what, advice=ADVICE):
            return _content(data, wheel, left)
    except RefusedError as error:
        raise ContractError(f"{what}: {error.what}", advice=ADVICE) from None


class RefusedError(ContractError):
    """An entry that no wheel of a run may have."""


def _content(data: bytes, wheel: Wheel, left: int) -> WheelContent:
    _check_end(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = _files(archive, left)
    _check_paths(files)
    facts = folder_of(wheel.name, wheel.version)
    for path in files:
        check_place(path, facts)
    for name in _FACTS:
        if f"{facts}/{name}" not in files:
            raise RefusedError(f"it has no {facts}/{name}")
    _check_record(files, f"{facts}/RECORD")
    _check_tags(files[f"{facts}/WHEEL"])
    headers = HeaderParser().parsestr(files[f"{facts}/METADATA"].decode())
    named, version = canonicalize_name(str(headers["Name"])), str(headers["Version"])
    if (named, version) != (wheel.name, wheel.version):
        raise RefusedError(f"its METADATA is that of {named} {version}")
    requires = tuple(str(each) for each in headers.get_all("Requires-Dist") or ())
    return WheelContent(wheel.name, wheel.version, files, requires, str(headers["Requires-Python"] or ""))


def _check_end(data: bytes) -> None:
    """Check the archive's end record, which bounds the entries, before parsing."""
    if len(data) < _END.size or not data[-_END.size :].startswith(_END_MARK):
        raise RefusedError("it is no plain ZIP archive")
    _, disk, first_disk, here, entries, size, offset, comment = _END.unpack(data[-_END.size :])
    zip64 = data[-_END.size - _ZIP64_BYTES : -_END.size].startswith(_ZIP64_MARK)
    if zip64 or disk or first_disk or comment or here != entries or offset + size != len(data) - _END.size:
        raise RefusedError("it is no plain ZIP archive")
    if entries > MAX_FILES or size > MAX_FILES * _ENTRY_BYTES:
        raise RefusedError(f"it has more than {MAX_FILES:,} files")


def _files(archive: zipfile.ZipFile, left: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    entries = [each for each in archive.infolist() if not each.is_dir()]
    if len(archive.infolist()) > MAX_FILES:
        raise RefusedError(f"it has more than {MAX_FILES:,} files")
    if sum(each.file_size for each in entries) > left:
        raise RefusedError(f"unpacked, the code has more than {limits.CODE_BYTES:,} bytes")
    for entry in entries:
        _check_entry(entry)
        path = entry.filename
        if path in files:
            raise RefusedError(f"{path!r} stands in it twice")
        with archive.open(entry) as opened:  # checks the CRC at the end
            files[path] = opened.read(entry.file_size + 1)
        if len(files[path]) != entry.file_size:
            raise RefusedError(f"{path!r} has not the size that it says")
    return files


def _check_entry(entry: zipfile.ZipInfo) -> None:
    mode = entry.external_attr >> 16
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        raise RefusedError(f"{entry.filename!r} is no regular file")
    if entry.flag_bits & 0x1:
        raise RefusedError(f"{entry.filename!r} is encrypted")
    if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise RefusedError(f"{entry.filename!r} is compressed in another way than by deflate")
    if entry.file_size > MAX_RATIO * entry.compress_size + FREE_BYTES:
        raise RefusedError(f"{entry.filename!r} unpacks to more than {MAX_RATIO} times its size")


def _check_paths(files: dict[str, bytes]) -> None:
    seen: dict[str, str] = {}
    for path in files:
        parts = path.split("/")
        plain = path.isascii() and path.isprintable() and not _FORBIDDEN.search(path)
        if not plain or len(path) > MAX_PATH or len(parts) > MAX_PARTS:
            raise RefusedError(f"{path[:80]!r} is no plain path")
        if any(part.rstrip(". ") != part or not part for part in parts):  # also . and ..
            raise RefusedError(f"{path!r} is no plain path")
        if path.casefold() in seen:
            raise RefusedError(f"{path!r} and {seen[path.casefold()]!r} are one file on some machines")
        seen[path.casefold()] = path
    for path in seen:
        head = path
        while "/" in head:
            head = head.rpartition("/")[0]
            if head in seen:
                raise RefusedError(f"{seen[head]!r} is a file and a folder")


def check_place(path: str, facts: str) -> None:
    """Refuse a path that is neither of a Python package nor of the folder `facts`."""
    top, _, rest = path.partition("/")
    name = path.rpartition("/")[2]
    if top == facts:
        return
    if top.endswith((".dist-info", ".egg-info", ".data")):
        raise RefusedError(f"{path!r} is of another folder than {facts}")
    if name.endswith((".pth", ".egg-link")):
        raise RefusedError(f"{path!r} would change where modules are found")
    if name.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/"):
        raise RefusedError(f"{path!r} is bytecode")
    if name.endswith(NATIVE):
        raise RefusedError(f"{path!r} is native code, which differs from machine to machine")
    module, _, suffix = top.partition(".")
    if not _MODULE.fullmatch(top) or (suffix == "") == (rest == ""):
        raise RefusedError(f"{path!r} is no part of a Python package")
    if module in TAKEN or module.startswith("__"):
        raise RefusedError(f"its module {module} would shadow one of Python or of this program")


def _check_record(files: dict[str, bytes], record: str) -> None:
    """Check that the RECORD has the hash and size of every file, and names no other."""
    rows = list(csv.reader(io.StringIO(files[record].decode(), newline=""), strict=True))
    if any(len(row) != 3 for row in rows) or len({row[0] for row in rows}) != len(rows):
        raise RefusedError("its RECORD is malformed")
    listed = {path: (digest, size) for path, digest, size in rows}
    if listed.pop(record, ("", "")) != ("", "") or listed.keys() != files.keys() - {record}:
        odd = sorted(listed.keys() ^ (files.keys() - {record}))
        raise RefusedError(f"its RECORD does not list its files: {(odd or [record])[0]!r}")
    for path, found in listed.items():
        if found != record_entry(files[path]):
            raise RefusedError(f"{path!r} is not the file that its RECORD names")


def record_entry(data: bytes) -> tuple[str, str]:
    """Return the hash and the size of a file as a RECORD has them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))


def _check_tags(text: bytes) -> None:
    headers = HeaderParser().parsestr(text.decode())
    tags = [str(tag) for tag in headers.get_all("Tag") or ()]
    pure = str(headers["Root-Is-Purelib"]).strip().lower() == "true"
    if not pure or not tags or not all(tag.endswith("-none-any") for tag in tags):
        raise RefusedError(f"it is no pure Python: its tags are {', '.join(tags) or 'none'}")
