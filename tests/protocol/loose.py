"""Write a message without any check, as a careless or hostile peer would."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from protocol import Identity, canonical, limits
from protocol.envelope import sign_body
from protocol.wire import of


def loose_tree(value: Any) -> Any:
    """The canonical value of a wire type whose own rules may be broken."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: loose_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return list(fields.values()) if _is_row(type(value)) else fields
    if isinstance(value, Mapping):
        return {key: loose_tree(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [loose_tree(inner) for inner in value]
    return value


def loose_bytes(message: object) -> bytes:
    return canonical.pack(canonical.order(loose_tree(message), items=limits.MANY_ITEMS))


def loose_seal(body: bytes, kind: str, identity: Identity, run: bytes, major: int = limits.MAJOR) -> bytes:
    """Seal bytes that need not be a message."""
    return canonical.pack([major, kind, run, identity.public, body, sign_body(kind, body, identity, run)])


def _is_row(cls: type) -> bool:
    return of(cls).dump.__name__ == "dump_row"
