"""Consent to the code that travels with a run.

It is asked once for each hash, and `--yes` never gives it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Final

from echo_node.cli.confirm import confirm
from echo_node.contract.code_folder import code_hash
from echo_node.errors import ConfigError
from echo_node.runtime.console import say
from echo_node.storage.state_dir import StateDir
from protocol import Manifest, Opened, peer_id

_HASH: Final = re.compile(r"[0-9a-f]{64}")


def check_code_consent(
    place: StateDir, manifest: Opened[Manifest], allowed: Collection[str], *, unsafe: bool = False
) -> None:
    """Refuse a run whose code the person has not consented to; ask at a terminal.

    The author of a run needs no consent of their own. `allowed` are hashes that the person gave,
    and `unsafe` says that they would run a contract without its jail.
    """
    for each in allowed:
        if not _HASH.fullmatch(each):
            raise ConfigError(
                f"--allow-code takes a hash of 64 digits, not {each!r}", advice="echo-node run show prints it"
            )
    wheels = manifest.message.contract.wheel
    if wheels is None or manifest.signer == place.identity().public:
        return
    found = code_hash(wheels).hex()
    if unsafe:
        raise ConfigError(
            "--unsafe-no-jail is not for code that travels with a run",
            advice="leave it out; echo-node doctor shows which layer of the jail this system lacks",
        )
    if found in place.allowed_code:
        return
    say(f"the run's contract is code of {peer_id(manifest.signer)}, which is new on this machine:", err=True)
    for wheel in wheels:
        say(f"  {wheel.name} {wheel.version}, {wheel.size:,} bytes", err=True)
    say(f"  hash {found}", err=True)
    if found not in allowed:
        if not sys.stdin.isatty():
            raise ConfigError(
                "this run brings code, and nobody has consented to it here; --yes does not",
                advice=f"pass --allow-code {found}",
            )
        if not confirm("Run this code, in a sandbox without network and files?", default=False):
            raise ConfigError("no consent to the run's code", advice="none of it was fetched or run")
    place.allow_code(found)
