"""Encrypted paper backup of a key, in short lines with a checksum each.

    ECHO-NODE KEY BACKUP 1
    peer id: 12D3KooW…
    1: XXXX-XXXX-XXXX-XXXX-CCCC     ten bytes in Crockford's base32, four characters of checksum
    …
    7: XXXX-XXXX-XXXX-XXXX-CCCC

    bytes      format, log2 of scrypt's N, its r, its p, salt (18), sealed key (48)
    sealing    ChaCha20-Poly1305; key: the first 32 of scrypt's 44 bytes, nonce: the last 12,
               associated data: the first 4 bytes

A text to restore was typed by hand or written by a stranger, so everything in it is bounded.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from echo_node.errors import ConfigError
from protocol import Identity

TITLE: Final = "ECHO-NODE KEY BACKUP"
FORMAT: Final = 1
MOST_CHARACTERS: Final = 16_384
SHORTEST_PASSPHRASE: Final = 8
LONGEST_PASSPHRASE: Final = 1_024
_SALT: Final = 18
_SEALED: Final = 48
_BYTES: Final = 4 + _SALT + _SEALED
_LINE: Final = 10
_LINES: Final = _BYTES // _LINE
_CHARACTERS: Final = 20
_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DASHES: Final = re.compile("[\u2010-\u2015\u2212\uff0d]")
"""Dashes that word processors substitute for a hyphen."""
_LOOKS_LIKE: Final = str.maketrans("OIL", "011")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of trying one passphrase: scrypt's parameters, with N = 2 ** `doublings`.

    The default takes 128 MB and a second.
    """

    doublings: int = 17
    r: int = 8
    p: int = 1

    @property
    def is_sane(self) -> bool:
        """Return whether the cost is neither worthless nor too much for a small machine.

        A stranger may have chosen it.
        """
        return 14 <= self.doublings <= 18 and self.r == 8 and 1 <= self.p <= 4


def write_backup(identity: Identity, passphrase: str, cost: Cost | None = None) -> str:
    """Return the text to print and to keep."""
    cost = cost or Cost()
    head = bytes((FORMAT, cost.doublings, cost.r, cost.p))
    salt = secrets.token_bytes(_SALT)
    key, nonce = _stretched(passphrase, salt, cost)
    data = head + salt + ChaCha20Poly1305(key).encrypt(nonce, identity.seed, head)
    lines = []
    for number in range(1, _LINES + 1):
        body = _encoded(data[(number - 1) * _LINE : number * _LINE])
        lines.append(f"{number}: {_grouped(body + _check(number, body))}")
    return "\n".join((f"{TITLE} {FORMAT}", f"peer id: {identity.peer_id}", *lines)) + "\n"


def read_backup(text: str, passphrase: str) -> Identity:
    """Decrypt the key of a backup; errors name the faulty line."""
    data, peer = _parsed(text)
    cost = Cost(*data[1:4])
    if data[0] != FORMAT or not cost.is_sane:
        raise ConfigError(
            "this backup is of another format, or none", advice="was it written by another version?"
        )
    key, nonce = _stretched(passphrase, data[4 : 4 + _SALT], cost)
    try:
        seed = ChaCha20Poly1305(key).decrypt(nonce, data[4 + _SALT :], data[:4])
    except InvalidTag:
        raise ConfigError(
            f"that is not the passphrase of the backup of {peer}",
            advice="every line is as it was written, so only the passphrase can be off",
        ) from None
    identity = Identity(seed)
    if identity.peer_id != peer:
        raise ConfigError(
            f"the backup says {peer} and holds the key of {identity.peer_id}",
            advice="correct the line with the peer id, if that is who you are",
        )
    return identity


def peer_of(text: str) -> str:
    """Return the peer id of a backup after checking its lines; needs no passphrase."""
    return _parsed(text)[1]


def check_passphrase(passphrase: str) -> None:
    """Refuse a passphrase that is too short or too long."""
    if not SHORTEST_PASSPHRASE <= len(passphrase) <= LONGEST_PASSPHRASE:
        raise ConfigError(
            f"the passphrase has {len(passphrase)} characters",
            advice=f"take {SHORTEST_PASSPHRASE} to {LONGEST_PASSPHRASE}: four or five words that only you would put together",
        )


def _parsed(text: str) -> tuple[bytes, str]:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError("this is too long for a backup of a key", advice=f"it begins with {TITLE}")
    text = _DASHES.sub("-", text)
    title = re.search(r"ECHO[\s-]*NODE\s+KEY\s+BACKUP\s+(\S+)", text, re.IGNORECASE)
    if title is None:
        raise ConfigError("this is no backup of a key", advice=f"it begins with {TITLE}")
    if title[1] != str(FORMAT):
        raise ConfigError(
            f"a backup of format {title[1][:20]}, and this program reads {FORMAT}",
            advice="take the echo-node that wrote it, or a newer one",
        )
    rest = text[title.end() :]
    peer = re.search(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}(?!\w)", rest)
    if peer is None:
        raise ConfigError(
            "the backup's line with the peer id is missing or off",
            advice="it begins with 12D3KooW and has 52 characters, capitals and small letters as printed",
        )
    lines = _numbered(rest[peer.end() :])
    return b"".join(_decoded(number, lines.get(number)) for number in range(1, _LINES + 1)), peer[0]


def _numbered(text: str) -> dict[int, str]:
    """Split into lines by their numbers, or by length where there are none."""
    _, *pieces = re.split(r"(?<![\w-])(\d{1,2})[ \t]*:", text)
    if not pieces:
        plain = _plain(text)
        starts = range(0, len(plain), _CHARACTERS)
        return {place + 1: plain[start : start + _CHARACTERS] for place, start in enumerate(starts)}
    lines: dict[int, str] = {}
    for number, body in zip(map(int, pieces[::2]), map(_plain, pieces[1::2]), strict=True):
        if number in lines and lines[number] != body:
            raise ConfigError(f"line {number} of the backup is there twice", advice="leave the wrong one out")
        lines[number] = body
    return lines


def _decoded(number: int, line: str | None) -> bytes:
    if not line:
        raise ConfigError(
            f"line {number} of the backup is missing", advice=f"it has {_LINES}, numbered from 1"
        )
    if len(line) != _CHARACTERS:
        raise ConfigError(
            f"line {number} of the backup has {len(line)} characters, not {_CHARACTERS}",
            advice="compare it with the paper",
        )
    body = line[:-4]
    if any(character not in _DIGITS for character in line) or _check(number, body) != line[-4:]:
        raise ConfigError(f"line {number} of the backup is off", advice="compare it with the paper")
    value = 0
    for character in body:
        value = value * 32 + _DIGITS.index(character)
    return value.to_bytes(_LINE)


def _plain(text: str) -> str:
    """Drop layout and map letters that look like digits to those."""
    return re.sub(r"[\s-]", "", text).upper().translate(_LOOKS_LIKE)


def _encoded(data: bytes) -> str:
    value = int.from_bytes(data)
    return "".join(_DIGITS[value >> shift & 31] for shift in range(8 * len(data) - 5, -1, -5))


def _check(number: int, body: str) -> str:
    return _encoded(hashlib.sha256(f"echo-node backup line {number}: {body}".encode()).digest()[:5])[:4]


def _grouped(text: str) -> str:
    return "-".join(text[start : start + 4] for start in range(0, len(text), 4))


def _stretched(passphrase: str, salt: bytes, cost: Cost) -> tuple[bytes, bytes]:
    """Derive key and nonce from a passphrase.

    NFKC makes one byte sequence of what different keyboards type.
    """
    normal = unicodedata.normalize("NFKC", passphrase).encode("utf-8", "surrogatepass")
    stretched = Scrypt(salt=salt, length=44, n=2**cost.doublings, r=cost.r, p=cost.p).derive(normal)
    return stretched[:32], stretched[32:]
