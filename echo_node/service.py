"""A node as a service of its person, by systemd: the unit's text, and where it lies.

Every word of the command comes out as it went in, whatever is in it. It writes the text and starts nothing.
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
    """The unit that runs `echo-node join` with these words in this folder."""
    # A colon in front: no word is taken for a variable, and `$` is a character like any other. -P: what lies in the folder
    # that the service starts in is not taken for a module.
    command = [quoted(f":{interpreter}"), *map(quoted, ("-P", "-m", "echo_node.cli", "join", *words))]
    text = _UNIT.format(mark=MARK, role=role, command=" ".join(command), folder=_plain_path(folder))
    if len(text) > _MOST:
        raise ConfigError("these are too many words for a service", advice="put them into the run's file")
    return text


def quoted(word: str) -> str:
    """A word such that systemd reads the same one: in quotes, with what it would take for something else escaped."""
    if "\0" in word or not _is_text(word):
        raise ConfigError(f"a service cannot be given the word {word!r}", advice="give it in UTF-8")
    return '"' + "".join(_ESCAPES.get(char) or _visible(char) for char in word) + '"'


def _visible(char: str) -> str:
    if ord(char) < 32 or ord(char) == 127:
        return f"\\x{ord(char):02x}"
    return f"\\u{ord(char):04x}" if 128 <= ord(char) < 160 else char


def _plain_path(folder: Path) -> str:
    """What systemd takes as a path is the path as it stands, but for `%`."""
    told = str(folder)
    if (
        not _is_text(told)
        or re.search(r"[\x00-\x1f\x7f]", told)
        or told != told.strip()
        or told.endswith("\\")
    ):
        raise ConfigError(
            f"a service cannot be started in {told!r}", advice="install it from a folder with a plainer name"
        )
    return told.replace("%", "%%")


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
