"""Packages that a contract needs: which travel with a run, which a node has.

Every node has this program's own requirements; those of its extras it may have. Pure Python that is
none of the former travels with the run. Native code does not, and is only ever one of the extras'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from echo_node.contract.registry import entry_of
from echo_node.contract.wheel_reader import ADVICE, WheelContent
from echo_node.contract.wheel_writer import distribution_name, is_native, write_wheel
from echo_node.errors import ContractError
from protocol import limits
from protocol.manifest import Wheel

OWN: Final = "echo-node"
_MODULES: Final = frozenset({"echo_node", "protocol"})
"""Modules of this program that a contract may import."""
_NOT_OF_RUNS: Final = frozenset({"dev", "fuzz", "trl"})
"""Extras of this program that are for its own tests."""
Wanted = tuple[str, frozenset[str]]
"""A package's name, and its extras that are wanted."""


def contract_wheels(name: str, version: str) -> list[tuple[Wheel, bytes]]:
    """Return the wheels of an installed contract and its requirements, by name."""
    found = entry_of(name, version)
    if found.dist is None:
        raise ContractError(f"the contract {name} {version} is of no package", advice="install it with pip")
    root = found.dist
    bundle: dict[str, Distribution] = {distribution_name(root): root}

    def visit(wanted: Requirement, needed_by: str) -> Iterable[str] | None:
        key = canonicalize_name(wanted.name)
        if key in own_packages():
            _check_version(wanted, distribution(key).version, needed_by)
            return None
        there = bundle.get(key) or _installed(wanted, needed_by)
        _check_version(wanted, there.version, needed_by)
        if is_native(there):
            if key not in extra_packages():
                raise ContractError(
                    f"{needed_by} needs {key}, which has native code and cannot travel with a run",
                    advice="only what echo-node or an extra of it requires may be native: do without it",
                )
            return None
        bundle[key] = there
        return there.requires or ()

    _walk({distribution_name(root): root.requires or ()}, visit)
    made = [write_wheel(bundle[key]) for key in sorted(bundle)]
    total = sum(wheel.size for wheel, _ in made)
    if len(made) > limits.WHEELS or total > limits.CODE_BYTES:
        raise ContractError(
            f"the contract {name} {version} needs {len(made)} packages of {total:,} bytes, and at most"
            f" {limits.WHEELS} of {limits.CODE_BYTES:,} may travel with a run",
            advice="do without some of them",
        )
    return made


def provided_modules(wheels: Iterable[WheelContent]) -> list[str]:
    """Return the modules of this machine that the code of these wheels may import.

    Refuse wheels that need what neither travels with them nor is here in a version that will do.
    """
    bundle = {each.name: each for each in wheels}
    provided: dict[str, frozenset[str]] = {}
    for each in bundle.values():
        _check_python(each)

    def visit(wanted: Requirement, needed_by: str) -> Iterable[str] | None:
        key = canonicalize_name(wanted.name)
        if key in bundle:
            _check_version(wanted, bundle[key].version, needed_by)
            return bundle[key].requires
        if key not in own_packages() and key not in extra_packages():
            raise ContractError(
                f"{needed_by} needs {key}, which neither travels with the run nor is part of this program",
                advice=ADVICE,
            )
        try:
            _check_version(wanted, distribution(key).version, needed_by)
        except PackageNotFoundError:
            extra = extra_packages()[key]
            raise ContractError(
                f"{needed_by} needs {key}, which is not installed here",
                advice=f"pip install 'echo-node[{extra}]'",
            ) from None
        provided[key] = provided.get(key, frozenset()) | wanted.extras
        return None

    _walk({name: each.requires for name, each in bundle.items()}, visit)
    names = own_packages().union(*(_closure(name, extras) for name, extras in provided.items()))
    return sorted(_MODULES | {module for name in names for module in _modules_of(name)})


def _walk(
    roots: Mapping[str, Iterable[str]], visit: Callable[[Requirement, str], Iterable[str] | None]
) -> None:
    """Follow requirements, each with its extras once, also around cycles."""
    seen: set[Wanted] = set()
    ahead: list[tuple[str, frozenset[str], Iterable[str]]] = [
        (name, frozenset(), requires) for name, requires in roots.items()
    ]
    while ahead:
        name, extras, requires = ahead.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for wanted in _active(requires, extras, name):
            key = canonicalize_name(wanted.name)
            further = visit(wanted, name)
            if further is not None:
                ahead.append((key, frozenset(wanted.extras), further))


def _active(requires: Iterable[str], extras: Iterable[str], needed_by: str) -> Iterator[Requirement]:
    """Yield the requirements that hold on this machine, with these extras."""
    for text in requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            raise ContractError(
                f"{needed_by} has a requirement that is none: {text!r}", advice=ADVICE
            ) from None
        if wanted.url is not None:
            raise ContractError(
                f"{needed_by} needs {wanted.name} from an address", advice="require it by its version"
            )
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield wanted


def _installed(wanted: Requirement, needed_by: str) -> Distribution:
    try:
        return distribution(canonicalize_name(wanted.name))
    except PackageNotFoundError:
        raise ContractError(
            f"{needed_by} needs {wanted.name}, which is not installed here",
            advice=f"pip install '{wanted.name}{wanted.specifier}'",
        ) from None


def _check_version(wanted: Requirement, found: str, needed_by: str) -> None:
    try:
        fits = wanted.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = not wanted.specifier
    if not fits:
        raise ContractError(
            f"{needed_by} needs {wanted.name}{wanted.specifier}, and here it is {found}",
            advice=f"install a release that fits, or change what {needed_by} requires",
        )


def _check_python(wheel: WheelContent) -> None:
    here = ".".join(map(str, sys.version_info[:3]))
    try:
        fits = SpecifierSet(wheel.requires_python).contains(here, prereleases=True)
    except InvalidSpecifier:
        fits = False
    if not fits:
        raise ContractError(
            f"{wheel.name} needs Python {wheel.requires_python}, and this is {here}",
            advice="install echo-node with another Python",
        )


@cache
def own_packages() -> frozenset[str]:
    """Return the packages that every node has: this program and what it requires."""
    return frozenset(_closure(OWN, ()))


@cache
def extra_packages() -> Mapping[str, str]:
    """Return the packages of this program's extras, each with its extra's name."""
    extras = sorted(set(distribution(OWN).metadata.get_all("Provides-Extra") or ()) - _NOT_OF_RUNS)
    found: dict[str, str] = {}
    for extra in reversed(extras):
        found |= dict.fromkeys(_closure(OWN, (extra,)) - own_packages(), extra)
    return found


def _closure(name: str, extras: Iterable[str]) -> set[str]:
    """Return the names of a package and all its requirements, installed or not."""
    found = {name}

    def visit(wanted: Requirement, _needed_by: str) -> Iterable[str]:
        key = canonicalize_name(wanted.name)
        found.add(key)
        return _requires(key)

    # Without their markers, which were evaluated with the extras of this package.
    _walk({name: [_bare(wanted) for wanted in _active(_requires(name), extras, name)]}, visit)
    return found


def _bare(wanted: Requirement) -> str:
    wanted.marker = None
    return str(wanted)


def _requires(name: str) -> Iterable[str]:
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:
        return ()


def _modules_of(name: str) -> set[str]:
    """Return the top-level modules of an installed package."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return set()
    files = [file for file in found.files or () if file.parts[0] != ".." and not file.is_absolute()]
    tops = {
        file.parts[0].partition(".")[0] for file in files if not file.parts[0].endswith(("-info", ".pth"))
    }
    return {top for top in tops if not top.startswith("__")}
