"""Check that a program may listen, and that the default ports are free.

They are those of the page and of a seed.
"""

from __future__ import annotations

import socket
from typing import Final

from echo_node.dashboard import PORT as PAGE
from echo_node.doctor.finding import Finding, point

SWARM: Final = 4_001
"""Default TCP port of a seed."""


def look() -> list[Finding]:
    return [_may_listen("127.0.0.1"), _may_listen("0.0.0.0"), _page(), _swarm()]  # noqa: S104 - to try it


def problem_of(host: str, port: int) -> str:
    """Return why nothing can listen there; empty if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _may_listen(host: str) -> Finding:
    problem = problem_of(host, 0)
    fix = "let the firewall, the container or the sandbox allow this program to listen"
    says = problem or "can listen"
    return point("ports", "loopback" if host == "127.0.0.1" else "any", fine=not problem, says=says, fix=fix)


def _page() -> Finding:
    problem = problem_of("127.0.0.1", PAGE)
    fix = "a node on a terminal takes another port by itself; or name one, such as --page 8421"
    return point(
        "ports", str(PAGE), fine=None if problem else True, says=problem or "free for the page", fix=fix
    )


def _swarm() -> Finding:
    problem = problem_of("0.0.0.0", SWARM)  # noqa: S104 - where a seed would listen
    fix = "a node takes any free port by itself; for a seed name another, such as --listen /ip4/0.0.0.0/tcp/4002"
    return point(
        "ports", str(SWARM), fine=None if problem else True, says=problem or "free for a seed", fix=fix
    )
