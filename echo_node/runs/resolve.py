"""Resolve a run named on the command line.

    runs/mine, manifest       a run's folder, or its manifest's file
    mine.toml                 a run file; its run is sealed into a folder of that name beside it
    echo:…                    a link
    64 hexadecimal digits     a run's id
    nothing                   one of the open runs, by the user's choice

Commands about a local run take the same, and also the first digits of an id in the state folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, PeerError, StoreError, boundary, looking_at
from echo_node.net.base import Network
from echo_node.runs.manifest_exchange import find_manifest, open_runs
from echo_node.runs.spec import MANIFEST, RUN_FILE, new_run, read_run_file, write_run
from echo_node.runtime.threads import run_abandonable
from protocol import Identity, Link, Manifest, Opened, ProtocolError
from protocol.link import SCHEME

_ID: Final = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_SOME_DIGITS: Final = re.compile(r"[0-9a-f]{4,64}", re.IGNORECASE)
_FORMS: Final = (
    "give a run's folder, its manifest's or TOML file, its id of 64 digits, or its link from echo: on"
)
Choose = Callable[[Sequence[Opened[Manifest]]], Opened[Manifest]]
"""Chooses one of several open runs."""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run to fetch from peers: by id, by link, or any open one."""

    id: bytes | None = None
    link: Link | None = None

    @property
    def seeds(self) -> tuple[str, ...]:
        return self.link.addresses if self.link else ()


def resolve_run(text: str | None, author: Identity) -> Path | ResolvedRun:
    """Resolve a name, or None for any open run. `author` seals the run of a run file."""
    if text is None:
        return ResolvedRun()
    text = _bare(text)
    if not text:
        raise ConfigError("the run's name is empty", advice="give a link, an id, a folder or a file")
    if (link := pasted_link(text)) is not None:
        return ResolvedRun(link.run, link)
    path = Path(text)
    with looking_at(text, advice=_FORMS):
        is_there, is_file = path.exists(), path.is_file()
    if not is_there and _ID.fullmatch(text):
        return ResolvedRun(bytes.fromhex(text))
    if path.suffix == ".toml" and is_file:
        return _sealed(path, author)
    if not is_there:
        raise ConfigError(f"there is no run in {text}", advice=_FORMS)
    return path


def find_local_run(text: str, state: Path) -> Path:
    """Return the folder or manifest file of a run on this machine."""
    text = _bare(text)
    link = pasted_link(text)
    if link is None:
        with looking_at(text, advice=_FORMS):
            if Path(text).suffix == ".toml" and Path(text).is_file():
                return _already_sealed(Path(text))
            if Path(text).exists():
                return Path(text)
        if not _SOME_DIGITS.fullmatch(text):
            raise ConfigError(f"there is no run in {text}", advice=_FORMS)
    digits = text.lower() if link is None else link.run.hex()
    with boundary(StoreError, f"looking into {state}", advice="give another folder with --state"):
        found = sorted(paper.parents[1] for paper in (state / "runs").glob(f"{digits}*/weights/{MANIFEST}"))
    if not found:
        raise ConfigError(
            f"{state} holds nothing of the run {digits}", advice="join it first, or give another --state"
        )
    if len(found) > 1:
        raise ConfigError(
            f"several runs begin with {digits}",
            advice=f"such as {', '.join(each.name for each in found[:4])}",
        )
    return found[0]


def _bare(text: str) -> str:
    """Strip spaces, quotes and brackets that come along with pasted text."""
    text = text.strip()
    inner = text.strip("<>\"'").strip()
    return "".join(inner.split()) if inner.startswith(SCHEME) else text


def pasted_link(text: str) -> Link | None:
    """Parse a pasted link, also without `echo:`; None if it is something else."""
    if not text.startswith(SCHEME):
        try:
            return Link.parse(SCHEME + text)
        except ProtocolError:
            return None
    try:
        return Link.parse(text)
    except ProtocolError as error:
        raise ConfigError(
            f"that is no complete link: {error}", advice="it goes from echo: to its last character"
        ) from None


def _sealed(file: Path, author: Identity) -> Path:
    """Return the folder of a run file's run; seal it on first use."""
    folder = _folder_of(file)
    if not (folder / MANIFEST).exists():
        spec = read_run_file(file)
        write_run(folder, new_run(spec, author))
    return folder


def _already_sealed(file: Path) -> Path:
    folder = _folder_of(file)
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"the run of {file} is not sealed yet", advice=f"echo-node run new {file}")
    return folder


def _folder_of(file: Path) -> Path:
    """Return the folder of a run file's run.

    That is the file's own folder if the file is the copy in a run's folder, else the one beside
    it.
    """
    is_copy = file.name == RUN_FILE and (file.parent / MANIFEST).exists()
    return file.parent if is_copy else file.with_suffix("")


async def fetch_manifest(network: Network, wanted: ResolvedRun, choose: Choose) -> Opened[Manifest]:
    """Fetch the manifest of a run from peers."""
    if wanted.id is not None:
        return await find_manifest(network, wanted.id)
    found = await open_runs(network)
    if not found:
        raise PeerError(
            "no open run was found",
            advice="give a link, a run's id or its folder, or a --seed that knows one",
        )
    return await run_abandonable(partial(choose, found))
