"""Look up known vulnerabilities of everything that is installed; part of `make check`.

Packages of `.venv` are looked up in OSV, those of tests/interop by `npm audit`. A finding fails
the check, with the package, the advisory and the release that fixes it. An unreachable service
(no network, a mirror without advisories) is one line and fails the check with exit code 2, unless
--allow-unreachable is given. A vulnerability that OSV names without details fails all the same.
Advisories that do not concern this project are in PASSED_OVER, with the reason. Needs nothing but
Python.
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
"""Packages per request; OSV takes a thousand."""
FOLDERS: Final = (ROOT / "tests" / "interop", ROOT / "tests" / "interop" / "swarm")
PASSED_OVER: Final[Mapping[str, str]] = {}
"""Ignored advisories by id, each with the reason."""


class UnreachableError(Exception):
    """A service that gives no answer about vulnerabilities."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A vulnerable release."""

    package: str
    version: str
    advisory: str
    what: str
    fixed_in: str

    def __str__(self) -> str:
        fix = f"take {self.fixed_in}" if self.fixed_in else "no fixed release is known"
        return f"{self.package} {self.version}: {self.advisory}: {self.what or 'no summary'} ({fix})"


def installed() -> dict[str, str]:
    """Return the version of every installed package except echo-node."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if name and name != "echo-node"}


def query_osv(packages: Mapping[str, str], service: str) -> list[Finding]:
    """Return what OSV knows of these releases."""
    names = list(packages)
    findings: list[Finding] = []
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        queries = [
            {"package": {"name": name, "ecosystem": "PyPI"}, "version": packages[name].partition("+")[0]}
            for name in some
        ]
        answered = _request(f"{service}/v1/querybatch", {"queries": queries}).get("results")
        if not isinstance(answered, list) or len(answered) != len(some):
            raise UnreachableError("its answer does not match the request")
        for name, result in zip(some, answered, strict=True):
            advisories = [_advisory(each["id"], service) for each in result.get("vulns", ())]
            findings += _of_package(name, packages[name], advisories)
    return findings


def _advisory(id_: str, service: str) -> dict[str, Any]:
    """Fetch the details of a vulnerability, or a placeholder where that fails."""
    try:
        return {"id": id_, **_request(f"{service}/v1/vulns/{id_}")}
    except UnreachableError as error:
        return {"id": id_, "summary": f"OSV gave no details: {error}"}


def _of_package(name: str, version: str, advisories: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield each vulnerability once: one often has several ids."""
    known: set[str] = set()
    for advisory in advisories:
        ids = {advisory["id"], *advisory.get("aliases", ())}
        if ids & known or ids & PASSED_OVER.keys() or advisory.get("withdrawn"):
            continue
        known |= ids
        fixes = [
            event["fixed"]
            for affected in advisory.get("affected", ())
            if affected.get("package", {}).get("name", "").lower() == name.lower()
            for each in affected.get("ranges", ())
            if each.get("type") == "ECOSYSTEM"
            for event in each.get("events", ())
            if "fixed" in event
        ]
        what = advisory.get("summary") or advisory.get("details", "").partition("\n")[0]
        yield Finding(name, version, advisory["id"], what[:120], " or ".join(dict.fromkeys(fixes)))


def _request(url: str, question: object = None) -> dict[str, Any]:
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 -- a constant, or a test's
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            found = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UnreachableError(str(getattr(error, "reason", error))) from error
    if not isinstance(found, dict):
        raise UnreachableError("its answer is no JSON object")
    return found


def query_npm(folder: Path, npm: str) -> list[Finding]:
    """Return what npm's registry knows of the packages in a lock file."""
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
        report = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(f"npm audit: {error}") from error
    if "vulnerabilities" not in report:
        why = report.get("message") or report.get("error", {}).get("summary") or "no reason given"
        raise UnreachableError(str(why).partition(" - ")[0])
    return [_of_npm(name, each) for name, each in report["vulnerabilities"].items()]


def _of_npm(name: str, entry: Mapping[str, Any]) -> Finding:
    via = [each for each in entry.get("via", ()) if isinstance(each, dict)]
    advisory = via[0].get("url", "") if via else f"through {', '.join(map(str, entry.get('via', ())))}"
    fix = entry.get("fixAvailable")
    fixed_in = (
        f"{fix['name']} {fix['version']}"
        if isinstance(fix, dict)
        else "what `npm audit fix` brings"
        if fix
        else ""
    )
    return Finding(name, entry.get("range", "?"), advisory, via[0].get("title", "") if via else "", fixed_in)


def audit(service: str, npm: str, *, allow_unreachable: bool) -> int:
    """Query all services and print the findings; return the exit code."""
    findings: list[Finding] = []
    unreachable = 0
    packages = installed()
    try:
        findings += query_osv(packages, service)
        print(f"audit: OSV checked {len(packages)} Python packages")
    except UnreachableError as error:
        unreachable += 1
        print(f"audit: OSV is unreachable, {len(packages)} Python packages are unchecked: {error}")
    for folder in FOLDERS:
        shown = folder.relative_to(ROOT)
        try:
            findings += query_npm(folder, npm)
            print(f"audit: npm checked {shown}")
        except UnreachableError as error:
            unreachable += 1
            print(f"audit: npm is unreachable, {shown} is unchecked: {error}")
    for finding in findings:
        print(f"audit: {finding}")
    if findings:
        return 1
    return 2 if unreachable and not allow_unreachable else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--osv", default=OSV, help="another service that answers as OSV does")
    parser.add_argument("--npm", default="npm", help="another npm")
    parser.add_argument(
        "--allow-unreachable", action="store_true", help="pass where a service cannot be asked"
    )
    chosen = parser.parse_args()
    sys.exit(audit(chosen.osv, chosen.npm, allow_unreachable=chosen.allow_unreachable))
