"""Check the state folder: disk space, permissions, format, lock, key.

Nothing is written.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from echo_node.doctor.finding import Finding, point, well, wrong
from echo_node.errors import EchoError, StoreError, boundary
from echo_node.identity.keyfile import load
from echo_node.storage import state_dir as states

LEAST_ROOM: Final = 10**9
"""Bytes of free disk space."""
_ELSEWHERE: Final = "give another folder with --state"


def look(state: Path) -> list[Finding]:
    return [_room(state), _writable(state), _folder(state), *_key(states.StateDir(state))]


def _room(state: Path) -> Finding:
    there = _nearest(state)
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return wrong("disk", "room", f"looking at {there}: {error.strerror}", _ELSEWHERE)
    fix = "make room, or give a folder on another disk with --state"
    fine = None if free < LEAST_ROOM else True
    return point("disk", "room", fine=fine, says=f"{free / 1e9:.1f} GB free in {there}", fix=fix)


def _writable(state: Path) -> Finding:
    there = _nearest(state)
    fine = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    says = f"{there} can be written to" if fine else f"{there} is no folder that can be written to"
    return point("disk", "writing", fine=fine, says=says, fix=f"chown or chmod it, or {_ELSEWHERE}")


def _folder(state: Path) -> Finding:
    try:
        found = states.format_of(state)
        used = states.is_in_use(state)
    except EchoError as error:
        return wrong("state", "folder", error.what, error.advice or _ELSEWHERE)
    if found is None:
        return well("state", "folder", f"none yet: the first start makes {state}")
    says = f"{state}, format {found}, {'a node runs on it' if used else 'no node runs on it'}"
    return well("state", "folder", says)


def _key(place: states.StateDir) -> list[Finding]:
    try:
        with boundary(StoreError, f"looking at {place.key}", advice=_ELSEWHERE):
            there = place.key.exists()
        if not there:
            return [well("state", "key", "none yet: the first start makes one")]
        identity = load(place.key)
        backed_up = place.is_backed_up
    except EchoError as error:
        return [wrong("state", "key", error.what, error.advice or _ELSEWHERE)]
    says = "noted" if backed_up else f"only {place.key} says who this node is"
    return [
        well("state", "key", f"{identity.peer_id}, readable by its owner alone"),
        point("state", "backup", fine=True if backed_up else None, says=says, fix="echo-node keys backup"),
    ]


def _nearest(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    for each in (path, *path.parents):
        with suppress(OSError):  # a parent that may not be read
            if each.exists():
                return each
    return path
