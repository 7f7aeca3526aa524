"""Check the installed libraries against the program's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement

from echo_node.doctor.finding import Finding, lacking, well, wrong

_OURS: Final = "echo-node"
_EXTRAS: Final = ("torch", "llama", "page", "plot", "gym", "math")
"""Extras that a participant may want."""
_SHOWN: Final = frozenset({"libp2p", "torch", "transformers", "llama-cpp-python"})
"""Libraries whose version is always listed, since bug reports need it."""


def look(requires: Iterable[str] | None = None) -> list[Finding]:
    """Check requirements, by default those of the installed program."""
    if requires is None:
        try:
            requires = metadata.requires(_OURS) or ()
        except metadata.PackageNotFoundError:
            fix = "install it as the README says"
            return [lacking("libraries", _OURS, "runs without having been installed", fix)]
    points: dict[str, Finding] = {}
    others = 0
    for requirement, extra in _read(requires):
        found = _point(requirement, extra)
        if found.fine is not True or requirement.name in _SHOWN:
            points.setdefault(requirement.name, found)
        else:
            others += 1
    return [*points.values(), well("libraries", "others", f"{others} are as they should be")]


def _read(requires: Iterable[str]) -> Iterator[tuple[Requirement, str]]:
    """Yield each requirement with the extra that first brings it, "" for the program."""
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        for extra in ("", *_EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
                break


def _point(requirement: Requirement, extra: str) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    install = f'pip install "{name}{wanted}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if extra:
            says = f"not installed, and only {extra!r} needs it"
            return lacking("libraries", name, says, f'pip install "echo-node[{extra}]"')
        return wrong("libraries", name, "not installed", install)
    if requirement.specifier.contains(version, prereleases=True):
        return well("libraries", name, version)
    return wrong("libraries", name, f"{version}, and this program needs {wanted}", install)
