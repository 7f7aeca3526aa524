"""Seal and open a 64 kB group, against bare msgpack + BLAKE3 + Ed25519.

The bare side does just what has to be done to the same bytes, with the same libraries and no check:
it packs or unpacks body and envelope, hashes the body, signs or verifies the same short string. So
it signs a hash, as the wire does, which costs a sixth of signing 64 kB; the table shows that as
well.
"""

from __future__ import annotations

import json

import msgpack
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import interleaved, median_ratio, median_times
from protocol import TrajectoryGroup, limits, open_sealed, seal
from protocol.digest import context
from protocol.wire import of
from tests.protocol.examples import RUN, SAMPLER, group

REPEATS = 300


def main() -> None:
    made = group(completions=8, tokens=1540)
    sealed = seal(made, SAMPLER, RUN)
    assert 64_000 <= len(sealed) <= limits.GOSSIP_BYTES, len(sealed)
    tree = of(TrajectoryGroup).dump(made)
    private = Ed25519PrivateKey.from_private_bytes(SAMPLER.seed)
    name = context(TrajectoryGroup.KIND)

    def bare_seal() -> bytes:
        body = msgpack.packb(tree)
        identity = blake3(RUN + SAMPLER.public + body, derive_key_context=name).digest()
        signature = private.sign(name.encode() + b"\0" + identity)
        packed: bytes = msgpack.packb(
            [limits.MAJOR, TrajectoryGroup.KIND, RUN, SAMPLER.public, body, signature]
        )
        return packed

    def bare_open() -> object:
        _, _, run, signer, body, signature = msgpack.unpackb(sealed)
        identity = blake3(run + signer + body, derive_key_context=name).digest()
        Ed25519PublicKey.from_public_bytes(signer).verify(signature, name.encode() + b"\0" + identity)
        return msgpack.unpackb(body)

    assert bare_seal() == sealed, "both sides do the same work"
    whole_signature = private.sign(sealed)
    public = private.public_key()
    rows = {
        "seal": interleaved(lambda: seal(made, SAMPLER, RUN), bare_seal, REPEATS),
        "open": interleaved(lambda: open_sealed(sealed, TrajectoryGroup, RUN), bare_open, REPEATS),
    }
    whole = {
        "seal": interleaved(
            lambda: seal(made, SAMPLER, RUN), lambda: (bare_seal(), private.sign(sealed)), REPEATS
        ),
        "open": interleaved(
            lambda: open_sealed(sealed, TrajectoryGroup, RUN),
            lambda: (bare_open(), public.verify(whole_signature, sealed)),
            REPEATS,
        ),
    }
    table = Table(
        title=f"A group of {made.token_count:,} tokens, {len(sealed):,} bytes sealed; medians of 7 pairs"
    )
    for column in ("", "ours µs", "bare µs", "ours over bare", "… had bare signed all bytes too"):
        table.add_column(column, justify="right" if column else "left")
    for what, pairs in rows.items():
        mine, other = median_times(pairs)
        table.add_row(
            what,
            f"{mine * 1e6:.0f}",
            f"{other * 1e6:.0f}",
            f"{median_ratio(pairs):.2f}",
            f"{median_ratio(whole[what]):.2f}",
        )
    Console().print(table)
    print(f"{len(sealed) / made.token_count:.2f} bytes a token on the wire; 8 × 256 tokens: {_small():.2f}")
    print(json.dumps({f"{what}_over_bare": round(median_ratio(pairs), 3) for what, pairs in rows.items()}))


def _small() -> float:
    made = group(8, 256)
    return len(seal(made, SAMPLER, RUN)) / made.token_count


if __name__ == "__main__":
    main()
