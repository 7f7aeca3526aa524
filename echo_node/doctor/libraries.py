"""The libraries that are installed, against the versions that this program is made for, as its own metadata names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement

from echo_node.doctor.point import Point, lacking, well, wrong

_OURS: Final = "echo-node"
_EXTRAS: Final = ("torch", "llama", "page", "plot", "gym", "math")
"""Those that a person who takes part may want."""
_SHOWN: Final = frozenset({"libp2p", "torch", "transformers", "llama-cpp-python"})
"""Named even if all is well: what others ask for first when something is not."""


def look(requires: Iterable[str] | None = None) -> list[Point]:
    """`requires` is what the program's metadata says, if left out."""
    if requires is None:
        try:
            requires = metadata.requires(_OURS) or ()
        except metadata.PackageNotFoundError:
            fix = "install it as the README says"
            return [lacking("libraries", _OURS, "runs without having been installed", fix)]
    points: dict[str, Point] = {}
    others = 0
    for requirement, extra in _read(requires):
        found = _point(requirement, extra)
        if found.fine is not True or requirement.name in _SHOWN:
            points.setdefault(requirement.name, found)
        else:
            others += 1
    return [*points.values(), well("libraries", "others", f"{others} are as they should be")]


def _read(requires: Iterable[str]) -> Iterator[tuple[Requirement, str]]:
    """Each requirement, once for the program itself or for each extra that brings it."""
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        for extra in ("", *_EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
                break


def _point(requirement: Requirement, extra: str) -> Point:
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
