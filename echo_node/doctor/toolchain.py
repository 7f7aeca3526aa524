"""Check for a C compiler and GMP's headers, which installing from source needs."""

from __future__ import annotations

import shutil
import subprocess
from typing import Final

from echo_node.doctor.finding import Finding, point

_SECONDS: Final = 5.0
"""Seconds for one run of the compiler."""
_COMPILERS: Final = ("cc", "gcc", "clang")
_FIX: Final = "only needed to install libraries from source: {}"
_INSTALL: Final = {
    "compiler": "sudo apt install build-essential, or on a Mac xcode-select --install",
    "GMP headers": "sudo apt install libgmp-dev, or on a Mac brew install gmp",
}


def look() -> list[Finding]:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    compiles = compiler is not None and _compiles(compiler, "int main(void) { return 0; }\n")
    has_gmp = compiler is not None and compiles and _compiles(compiler, "#include <gmp.h>\n")
    words = compiler or "none is on the path"
    return [
        _finding(
            "compiler",
            fine=compiles,
            says=words if compiles or not compiler else f"{compiler} does not compile",
        ),
        _finding(
            "GMP headers", fine=has_gmp, says="gmp.h is there" if has_gmp else "no compiler finds gmp.h"
        ),
    ]


def _finding(what: str, *, fine: bool, says: str) -> Finding:
    fix = _FIX.format(_INSTALL[what])
    return point("building", what, fine=True if fine else None, says=says, fix=fix)


def _compiles(compiler: str, source: str) -> bool:
    """Return whether the compiler accepts this source; nothing is written."""
    command = (compiler, "-fsyntax-only", "-x", "c", "-")
    try:
        done = subprocess.run(
            command, input=source.encode(), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
