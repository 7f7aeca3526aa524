"""Write requirements.lock: what is in .venv, each release with the hashes of all its files.

`python tools/lock.py` after a set-up that worked. The hashes are those that the package index
gives for every file of a release, so that one list serves all systems and Pythons. torch is left
without hashes: its CPU builds come from other places than the index, with other hashes. `setup.py`
installs from this list. Needs nothing but Python with pip, whose client it asks through.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link
from pip._internal.network.session import PipSession
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

LOCK: Final = Path(__file__).resolve().parent.parent / "requirements.lock"
UNHASHED: Final = {"torch": "its CPU builds are not those of the index"}
"""Packages whose files differ by where they come from, each with the reason."""
OWN: Final = {"echo-node", "pip"}
HEADER: Final = """\
# Written by tools/lock.py: every release that a set-up installs, with the hashes of all its files.
# tools/setup.py installs this list with --require-hashes; what stands in a comment it pins by version alone.
"""


def installed() -> dict[str, str]:
    """Return the version of each installed package, by its canonical name."""
    found = {canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions()}
    return {name: found[name].partition("+")[0] for name in sorted(found) if name not in OWN}


def version_in(filename: str) -> str:
    """Return the version that a file's name has; empty if it is neither wheel nor sdist."""
    try:
        parse = parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename
        return str(parse(filename)[1])
    except ValueError:
        return ""


def hashes_of(name: str, version: str, collector: LinkCollector, index: str) -> list[str]:
    """Return the SHA-256 of every file that the index has of a release."""
    page = collector.fetch_response(Link(f"{index.rstrip('/')}/{name}/"))
    links = [] if page is None else list(parse_links(page))
    return sorted({link.hash or "" for link in links if version_in(link.filename) == version} - {""})


def main() -> None:
    options, _ = create_command("download").parse_args([])  # the index that pip itself would ask
    lines = [HEADER]
    with PipSession(retries=5) as session:
        collector = LinkCollector.create(session, options=options)
        for name, version in installed().items():
            pinned = f"{name}=={version}"
            if name in UNHASHED:
                lines.append(f"# {pinned}: {UNHASHED[name]}\n")
                continue
            hashes = hashes_of(name, version, collector, options.index_url)
            if not hashes:
                sys.exit(f"lock: the index {options.index_url} has no file of {pinned}")
            lines.append(" \\\n".join([pinned, *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n")
            print(f"lock: {pinned}, {len(hashes)} files", flush=True)
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
