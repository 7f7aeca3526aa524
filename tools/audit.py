"""Known vulnerabilities of everything that is installed here: `make check` calls this. It needs nothing but Python.

Packages of `.venv` are looked up in OSV, those of tests/interop by `npm audit`. What is found fails, with the package, the
advisory and the release that mends it. A service that cannot be asked (no network, a mirror without advisories) is one line
and no failure: nothing is known then, and the line says so. A vulnerability that OSV names and says no more of fails all the
same. An advisory that does not concern us stands in PASSED_OVER, with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parent.parent
OSV: Final = "https://api.osv.dev"
SECONDS: Final = 20.0
AT_ONCE: Final = 500
"""Packages in one question; OSV takes a thousand."""
FOLDERS: Final = (ROOT / "tests" / "interop", ROOT / "tests" / "interop" / "swarm")
PASSED_OVER: Final[Mapping[str, str]] = {}
"""Advisories, by id, that do not concern us, and why."""


class UnreachableError(Exception):
    """A service that says nothing about vulnerabilities."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A release that should not be used."""

    package: str
    version: str
    advisory: str
    what: str
    mended: str

    def __str__(self) -> str:
        fix = f"take {self.mended}" if self.mended else "no release is known to mend it"
        return f"{self.package} {self.version}: {self.advisory}: {self.what or 'no summary'} ({fix})"


def installed() -> dict[str, str]:
    """Every package of this Python but our own."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if name and name != "echo-node"}


def ask_osv(packages: Mapping[str, str], service: str) -> list[Finding]:
    """What OSV knows of these releases."""
    names = list(packages)
    findings: list[Finding] = []
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        queries = [
            {"package": {"name": name, "ecosystem": "PyPI"}, "version": packages[name].partition("+")[0]}
            for name in some
        ]
        answered = _ask(f"{service}/v1/querybatch", {"queries": queries}).get("results")
        if not isinstance(answered, list) or len(answered) != len(some):
            raise UnreachableError("it answered something else than was asked")
        for name, said in zip(some, answered, strict=True):
            advisories = [_advisory(each["id"], service) for each in said.get("vulns", ())]
            findings += _of_package(name, packages[name], advisories)
    return findings


def _advisory(id_: str, service: str) -> dict[str, Any]:
    """What is known of a vulnerability: at least that there is one."""
    try:
        return {"id": id_, **_ask(f"{service}/v1/vulns/{id_}")}
    except UnreachableError as error:
        return {"id": id_, "summary": f"OSV names it and cannot be asked more: {error}"}


def _of_package(name: str, version: str, advisories: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Each vulnerability once: the same one often has several ids."""
    known: set[str] = set()
    for told in advisories:
        ids = {told["id"], *told.get("aliases", ())}
        if ids & known or ids & PASSED_OVER.keys() or told.get("withdrawn"):
            continue
        known |= ids
        fixes = [
            event["fixed"]
            for affected in told.get("affected", ())
            if affected.get("package", {}).get("name", "").lower() == name.lower()
            for each in affected.get("ranges", ())
            if each.get("type") == "ECOSYSTEM"
            for event in each.get("events", ())
            if "fixed" in event
        ]
        what = told.get("summary") or told.get("details", "").partition("\n")[0]
        yield Finding(name, version, told["id"], what[:120], " or ".join(dict.fromkeys(fixes)))


def _ask(url: str, question: object = None) -> dict[str, Any]:
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 -- a constant, or a test's
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            told = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UnreachableError(str(getattr(error, "reason", error))) from error
    if not isinstance(told, dict):
        raise UnreachableError("it answered no object")
    return told


def ask_npm(folder: Path, npm: str) -> list[Finding]:
    """What npm's registry knows of the packages that a lock names."""
    command = [npm, "audit", "--json", "--package-lock-only"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(f"npm audit: {error}") from error
    if "vulnerabilities" not in told:
        why = told.get("message") or told.get("error", {}).get("summary") or "it said nothing"
        raise UnreachableError(str(why).partition(" - ")[0])
    return [_of_npm(name, each) for name, each in told["vulnerabilities"].items()]


def _of_npm(name: str, told: Mapping[str, Any]) -> Finding:
    via = [each for each in told.get("via", ()) if isinstance(each, dict)]
    advisory = via[0].get("url", "") if via else f"through {', '.join(map(str, told.get('via', ())))}"
    fix = told.get("fixAvailable")
    mended = (
        f"{fix['name']} {fix['version']}"
        if isinstance(fix, dict)
        else "what `npm audit fix` brings"
        if fix
        else ""
    )
    return Finding(name, told.get("range", "?"), advisory, via[0].get("title", "") if via else "", mended)


def audit(service: str, npm: str) -> int:
    """Ask everybody; how many vulnerabilities there are."""
    findings: list[Finding] = []
    packages = installed()
    try:
        findings += ask_osv(packages, service)
        print(f"audit: OSV was asked about {len(packages)} packages of Python")
    except UnreachableError as error:
        print(
            f"audit: OSV cannot be asked, so nothing is known of {len(packages)} packages of Python: {error}"
        )
    for folder in FOLDERS:
        shown = folder.relative_to(ROOT)
        try:
            findings += ask_npm(folder, npm)
            print(f"audit: npm was asked about {shown}")
        except UnreachableError as error:
            print(f"audit: npm cannot be asked, so nothing is known of {shown}: {error}")
    for finding in findings:
        print(f"audit: {finding}")
    return len(findings)


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--osv", default=OSV, help="another service that answers as OSV does")
    words.add_argument("--npm", default="npm", help="another npm")
    chosen = words.parse_args()
    sys.exit(1 if audit(chosen.osv, chosen.npm) else 0)
