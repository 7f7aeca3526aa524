"""The text of a systemd user unit that runs a node.

Every argument of the command reaches the node unchanged, whatever characters it has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError

NAME: Final = "echo-node.service"
MARK: Final = "# Written by `echo-node service install`, which may write it again."
_UNIT: Final = """{mark}
# It stops by `echo-node service uninstall`, or: systemctl --user disable --now echo-node

[Unit]
Description=A node of echo-node: {role}
StartLimitIntervalSec=10min
StartLimitBurst=10

[Service]
Type=exec
ExecStart={command}
WorkingDirectory=-{folder}
Restart=on-failure
RestartSec=10
# 2: what was written cannot be used as it stands, however often it is tried
RestartPreventExitStatus=2
# 143: it was stopped while it was still loading
SuccessExitStatus=143
KillSignal=SIGTERM
# only the node hears it, says goodbye and ends its engines itself
KillMode=mixed
TimeoutStopSec=60
# an engine that ran out of memory is started again by the node
OOMPolicy=continue
Environment=PYTHONUNBUFFERED=1

# Namespaces, Landlock and seccomp stay allowed: contracts are jailed by them.
NoNewPrivileges=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
LimitNOFILE=8192

[Install]
WantedBy=default.target
"""
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%"}
_MOST: Final = 100_000


def unit(interpreter: Path, words: Sequence[str], folder: Path, role: str) -> str:
    """Return the unit that runs `echo-node join` with these arguments in this folder."""
    # The colon in front turns off variables, so that `$` is a plain character. -P: modules are not
    # imported from the folder that the service starts in.
    command = [quoted(f":{interpreter}"), *map(quoted, ("-P", "-m", "echo_node", "join", *words))]
    text = _UNIT.format(mark=MARK, role=role, command=" ".join(command), folder=_plain_path(folder))
    if len(text) > _MOST:
        raise ConfigError("these are too many arguments for a service", advice="put them into the run's file")
    return text


def quoted(word: str) -> str:
    """Quote a word so that systemd reads the same one."""
    if "\0" in word or not _is_text(word):
        raise ConfigError(f"a service cannot take the argument {word!r}", advice="give it in UTF-8")
    return '"' + "".join(_ESCAPES.get(char) or _visible(char) for char in word) + '"'


def _visible(char: str) -> str:
    if ord(char) < 32 or ord(char) == 127:
        return f"\\x{ord(char):02x}"
    return f"\\u{ord(char):04x}" if 128 <= ord(char) < 160 else char


def _plain_path(folder: Path) -> str:
    """Escape `%` in a path; refuse what systemd cannot read in one."""
    path = str(folder)
    if (
        not _is_text(path)
        or re.search(r"[\x00-\x1f\x7f]", path)
        or path != path.strip()
        or path.endswith("\\")
    ):
        raise ConfigError(
            f"a service cannot be started in {path!r}", advice="install it from a folder with a plainer name"
        )
    return path.replace("%", "%%")


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
