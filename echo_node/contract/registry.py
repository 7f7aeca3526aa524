"""Contracts by name and version: built-in ones and plug-ins.

Plug-ins are entry points of the group `echo_node.contracts`, named `NAME` or `NAME@VERSION`, that
point at the class. Only code whose entry has the wanted name is imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Final

from echo_node.contract.api import Contract
from echo_node.contract.builtin import BUILT_IN
from echo_node.errors import ContractError, boundary
from protocol import limits

GROUP: Final = "echo_node.contracts"
ADVICE: Final = "whoever wrote it can mend it; echo-node contract list names its package"


@dataclass(frozen=True, slots=True, order=True)
class Listing:
    """A contract on this machine.

    `package` is empty for a built-in one. `version` is empty for a plug-in whose entry names none,
    until the class is loaded.
    """

    name: str
    version: str
    package: str


def available() -> list[Listing]:
    """Every contract of this machine, without importing any plug-in."""
    built_in = [Listing(name, version, "") for name, version in BUILT_IN]
    return sorted(built_in + [_listing(entry) for entry in entry_points(group=GROUP)])


def is_built_in(name: str, version: str) -> bool:
    """Return whether a contract is part of this program."""
    return (name, version) in BUILT_IN


def entry_of(name: str, version: str) -> EntryPoint:
    """Return a plug-in's entry point, without importing it; refuse two of one name."""
    found = [
        entry
        for entry in entry_points(group=GROUP)
        if (listed := _listing(entry)).name == name and listed.version in {"", version}
    ]
    if not found:
        others = [f"{known} (built in)" for wanted, known in BUILT_IN if wanted == name]
        raise _missing(name, version, others)
    if len(found) > 1:
        packages = ", ".join(sorted(_listing(entry).package for entry in found))
        raise ContractError(
            f"the contract {name} {version} is declared more than once: {packages}",
            advice="uninstall all of these packages but the one that the run names",
        )
    return found[0]


def find(name: str, version: str) -> type[Contract]:
    """Return the class of a contract; an error says what to install."""
    if (name, version) in BUILT_IN:
        return BUILT_IN[name, version]
    others = [f"{known} (built in)" for wanted, known in BUILT_IN if wanted == name]
    for entry in entry_points(group=GROUP):
        listed = _listing(entry)
        if listed.name != name or listed.version not in {"", version}:
            continue
        found = _imported(entry)
        if found.version == version:
            return found
        others.append(f"{found.version} (package {listed.package})")
    raise _missing(name, version, others)


def _find_in(folder: str, name: str, version: str) -> type[Contract]:
    """Return the class of the contract that the packages of a folder declare."""
    entries = [
        entry
        for package in distributions(path=[folder])
        for entry in package.entry_points.select(group=GROUP)
        if (listed := _listing(entry)).name == name and listed.version in {"", version}
    ]
    if len(entries) != 1:
        raise ContractError(
            f"the run's wheels declare the contract {name} {version} {len(entries)} times, and not once",
            advice="its author can make the run anew: echo-node run new",
        )
    found = _imported(entries[0])
    if found.version != version:
        raise ContractError(
            f"the contract {name} of the run's wheels has the version {found.version}, and the run names {version}",
            advice="its author can make the run anew: echo-node run new",
        )
    return found


def find_only(name: str) -> type[Contract]:
    """Return the class of a contract that has only one version here."""
    listed = [listing for listing in available() if listing.name == name]
    if len(listed) > 1:
        known = ", ".join(f"{name}@{listing.version or '?'}" for listing in listed)
        raise ContractError(f"there is more than one {name}", advice=f"say which one: {known}")
    if listed and not listed[0].version:
        return next(_imported(entry) for entry in entry_points(group=GROUP) if entry.name == name)
    return find(name, listed[0].version if listed else "of any version")


def load(
    name: str,
    version: str,
    params: Mapping[str, object] | None = None,
    rows: Sequence[Mapping[str, str]] = (),
    *,
    folder: str | None = None,
) -> Contract:
    """Return a configured contract.

    `rows` are those of the run's data set, if it has one. `folder` has the code that travels with a
    run: the contract is then found there alone.
    """
    found = find(name, version) if folder is None else _find_in(folder, name, version)
    if rows and not found.reads_rows:
        raise ContractError(
            f"the contract {name} {version} reads no data set",
            advice="leave the data out, or take another one",
        )
    with (
        as_a_guest(name),
        boundary(ContractError, f"setting up the contract {name} {version}", advice=ADVICE),
    ):
        return found(params, rows) if found.reads_rows else found(params)


@contextmanager
def as_a_guest(name: str) -> Iterator[None]:
    """Contain plug-in code in this process: redirect its output, refuse its exit."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as end:
        raise ContractError(
            f"the contract {name} wanted to end the program, with {end.code!r}", advice=ADVICE
        ) from None


def _listing(entry: EntryPoint) -> Listing:
    name, _, version = entry.name.partition("@")
    return Listing(name, version, entry.dist.name if entry.dist is not None else "")


def _imported(entry: EntryPoint) -> type[Contract]:
    listed = _listing(entry)
    where = f"{entry.value} of the package {listed.package or 'that declares it'}"
    doing = f"loading the contract {entry.name} from {where}"
    with as_a_guest(entry.name), boundary(ContractError, doing, advice=ADVICE):
        found = entry.load()
        if not isinstance(found, type) or not issubclass(found, Contract):
            raise TypeError("it is no subclass of echo_node.contract.Contract")
        if found.name != listed.name or listed.version not in {"", found.version}:
            raise ValueError(f"it calls itself {found.name} {found.version}")
        if not -limits.REWARD <= found.low < found.high <= limits.REWARD or not math.isfinite(found.low):
            raise ValueError(f"its scores go from {found.low} to {found.high}")
        return found


def _missing(name: str, version: str, others: list[str]) -> ContractError:
    if others:
        return ContractError(
            f"the contract {name} is here, its version {version} is not: there is {', '.join(others)}",
            advice=f"install the release of its package that has version {version}",
        )
    known = ", ".join(sorted({listing.name for listing in available()}))
    return ContractError(
        f"this machine has no contract {name} {version}; it has {known}",
        advice=f"pip install the package that declares {name!r} under the entry points {GROUP!r};"
        " whoever runs this run can tell which one it is",
    )
