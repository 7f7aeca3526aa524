"""Which run a person means: a folder or a file on this machine, or one that has to be found among peers first.

    runs/mine, manifest       a run's folder, or its manifest's file
    mine.toml                 a run file; its run is sealed beside it, in a folder of that name, if it is not yet
    echo:…                    a link
    64 hexadecimal digits     a run's id
    nothing                   one of the open runs, which the person chooses

Commands about a run that this machine has take the same, also the first digits of its id, and look into the node's state. It reads names, and asks peers only for manifests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, PeerError, StoreError, boundary, looking_at
from echo_node.introducing import find_manifest, open_runs
from echo_node.net.base import Network
from echo_node.runfile import MANIFEST, RUN_FILE, new_run, read_run_file, write_run
from echo_node.threads import run_abandonable
from protocol import Identity, Link, Manifest, Opened, ProtocolError
from protocol.link import SCHEME

_ID: Final = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_SOME_DIGITS: Final = re.compile(r"[0-9a-f]{4,64}", re.IGNORECASE)
_FORMS: Final = (
    "give a run's folder, its manifest's or TOML file, its id of 64 digits, or its link from echo: on"
)
Choose = Callable[[Sequence[Opened[Manifest]]], Opened[Manifest]]
"""One of some runs, by a person."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A run that peers know: by its id, perhaps with a link that says where and since when, or any that is open."""

    id: bytes | None = None
    link: Link | None = None

    @property
    def seeds(self) -> tuple[str, ...]:
        return self.link.addresses if self.link else ()


def meant(text: str | None, author: Identity) -> Path | Sought:
    """What a person means by a word, or by none. `author` seals the run of a run file."""
    if text is None:
        return Sought()
    text = _bare(text)
    if not text:
        raise ConfigError("the run's name is empty", advice="give a link, an id, a folder or a file")
    if (link := pasted_link(text)) is not None:
        return Sought(link.run, link)
    path = Path(text)
    with looking_at(text, advice=_FORMS):
        is_there, is_file = path.exists(), path.is_file()
    if not is_there and _ID.fullmatch(text):
        return Sought(bytes.fromhex(text))
    if path.suffix == ".toml" and is_file:
        return _sealed(path, author)
    if not is_there:
        raise ConfigError(f"there is no run in {text}", advice=_FORMS)
    return path


def on_this_machine(text: str, state: Path) -> Path:
    """Where the run that a person means is: its folder or its manifest's file, or what the node's state holds of it."""
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
    """Without the spaces, quotes and brackets that come along with what is pasted from a letter."""
    text = text.strip()
    inner = text.strip("<>\"'").strip()
    return "".join(inner.split()) if inner.startswith(SCHEME) else text


def pasted_link(text: str) -> Link | None:
    """The link that somebody pasted, also where its first word was lost on the way. None if it is something else."""
    if not text.startswith(SCHEME):
        try:
            return Link.parse(SCHEME + text)
        except ProtocolError:
            return None
    try:
        return Link.parse(text)
    except ProtocolError as error:
        raise ConfigError(
            f"that is no whole link: {error}", advice="it goes from echo: to its last character"
        ) from None


def _sealed(file: Path, author: Identity) -> Path:
    """The folder of a run file's run, which is sealed once."""
    folder = _folder_of(file)
    if not (folder / MANIFEST).exists():
        told = read_run_file(file)
        write_run(folder, told, new_run(told, author))
    return folder


def _already_sealed(file: Path) -> Path:
    folder = _folder_of(file)
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"the run of {file} is not sealed yet", advice=f"echo-node run new {file}")
    return folder


def _folder_of(file: Path) -> Path:
    """Where the run of a run file is: beside it, if the file is the copy in a run's own folder."""
    is_copy = file.name == RUN_FILE and (file.parent / MANIFEST).exists()
    return file.parent if is_copy else file.with_suffix("")


async def seek(network: Network, sought: Sought, choose: Choose) -> Opened[Manifest]:
    """The manifest of what is sought, from peers."""
    if sought.id is not None:
        return await find_manifest(network, sought.id)
    found = await open_runs(network)
    if not found:
        raise PeerError(
            "no open run was found",
            advice="give a link, a run's id or its folder, or a --seed that knows one",
        )
    return await run_abandonable(partial(choose, found))
