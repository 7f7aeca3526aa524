"""Frames of weights made by hand: zstd without a compressor, and deltas with one fault each. Stored
blocks only, so that their bytes are the same whatever version of zstd is installed; what zstd
itself wrote stands here in hexadecimal.
"""

from __future__ import annotations

import dataclasses

import numpy as np

MAGIC = bytes.fromhex("28b52ffd")
SKIPPABLE = bytes.fromhex("502a4d1803000000") + b"abc"


def header(size: int, *, flags: int = 0, window: int | None = None, width: int = 4) -> bytes:
    """A frame header that states its content's size in so many bytes; one segment unless it has a
    window byte.
    """
    code = {0: 0, 1: 0, 2: 1, 4: 2, 8: 3}[width]
    segment = 0x20 if window is None else 0
    stated = (size - 256 if width == 2 else size).to_bytes(8, "little")[:width]
    return MAGIC + bytes([code << 6 | segment | flags]) + bytes([] if window is None else [window]) + stated


def stored(data: bytes, *, last: bool = True) -> bytes:
    """A block that holds its bytes as they are."""
    return (len(data) << 3 | last).to_bytes(3, "little") + data


def repeated(byte: int, count: int, *, last: bool = True) -> bytes:
    """A block that is one byte so many times."""
    return (count << 3 | 1 << 1 | last).to_bytes(3, "little") + bytes([byte])


def plain_frame(body: bytes) -> bytes:
    """A frame of one stored block."""
    return header(len(body)) + stored(body)


def body(gaps: bytes, steps: bytes, full: bytes = b"", *, length: int | None = None) -> bytes:
    """The three columns of a delta, behind the number of gap bytes."""
    return (len(gaps) if length is None else length).to_bytes(4, "little") + gaps + steps + full


def patterns(text: str) -> np.ndarray:
    """16-bit patterns from their little-endian bytes in hexadecimal."""
    return np.frombuffer(bytes.fromhex(text), "<u2").astype(np.uint16)


def hexed(chunk: np.ndarray) -> str:
    return chunk.astype("<u2").tobytes().hex()


@dataclasses.dataclass(frozen=True)
class Story:
    """Two chunks, and a frame that leads from the first to the second where it is not made of one
    stored block.
    """

    base: np.ndarray
    new: np.ndarray
    frame: bytes | None = None


def _noise(elements: int) -> list[int]:
    """Numbers below 2^16 without a pattern, the same on every machine."""
    drawn, noise = 12_345, []
    for _ in range(elements):
        drawn = (1_103_515_245 * drawn + 12_345) % 2**31
        noise.append(drawn >> 15)
    return noise


def _chunk(elements: int) -> np.ndarray:
    """Patterns like those of small weights: both signs, a few exponents, any mantissa."""
    return (np.array(_noise(elements), np.uint16) & 0x83FF) | 0x3C00


def _moved(base: np.ndarray, changes: dict[int, int]) -> np.ndarray:
    new = base.copy()
    for at, step in changes.items():
        new[at] = (int(new[at]) + step) % 65_536
    return new


def stories() -> dict[str, Story]:
    """Deltas that are right, by name."""
    few, many = _chunk(8), _chunk(1200)
    special = patterns("00000080807f80ff817fc17fffff0100")
    everywhere = _moved(many, dict.fromkeys(range(1200), 1))
    noise = [drawn % 61 for drawn in _noise(2400)[1200:]]
    spread = _moved(many, {at: (1, -1, 2, -1, 1, -3, 300, 1)[n % 8] for at, n in enumerate(noise) if n < 20})
    return {
        "the first element": Story(few, _moved(few, {0: 1})),
        "the last element": Story(few, _moved(few, {7: -1})),
        "a chunk of one": Story(few[:1], _moved(few[:1], {0: 2})),
        "every element": Story(few, _moved(few, {at: at - 9 for at in range(8)})),
        "the longest short steps": Story(few, _moved(few, {1: 127, 2: -127})),
        "the shortest long steps": Story(few, _moved(few, {1: 128, 2: -128})),
        "the longest step of all": Story(few, _moved(few, {5: 32_768})),
        "a step around the end of the patterns": Story(special, _moved(special, {0: -1, 6: 1})),
        "signs of zero, infinities, NaN payloads, subnormals": Story(special, special[::-1].copy()),
        **{
            f"a gap of {gap}": Story(many, _moved(many, {3: 1, 4 + gap: 1}))
            for gap in (0, 1, 254, 255, 256, 509, 510, 511, 765)
        },
        "a first gap of 255": Story(many, _moved(many, {255: 1})),
        "runs, in blocks of one byte": Story(
            many,
            everywhere,
            header(2404)
            + stored((1200).to_bytes(4, "little"), last=False)
            + repeated(0, 1200, last=False)
            + repeated(2, 1200),
        ),
        "a window, and an empty last block": Story(
            few,
            _moved(few, {2: 1}),
            header(6, window=0) + stored(body(b"\2", b"\2"), last=False) + stored(b""),
        ),
        "a size of one byte": Story(
            few, _moved(few, {2: 1}), header(6, width=1) + stored(body(b"\2", b"\2"))
        ),
        "a size of eight bytes": Story(
            few, _moved(few, {2: 1}), header(6, width=8) + stored(body(b"\2", b"\2"))
        ),
        "as zstd 1.5.7 wrote it": Story(many, spread, bytes.fromhex(BY_ZSTD)),
        "as zstd 1.5.7 wrote it at level 19": Story(many, spread, bytes.fromhex(BY_ZSTD_19)),
    }


def faulty_zstd(good: bytes) -> dict[str, bytes]:
    """What is not one zstd frame of the allowed form, though its content would be right."""
    size = len(good)
    return {
        "another magic number": b"\x27" + plain_frame(good)[1:],
        "a skippable frame": SKIPPABLE,
        "a skippable frame before it": SKIPPABLE + plain_frame(good),
        "a skippable frame behind it": plain_frame(good) + SKIPPABLE,
        "two frames": plain_frame(good) * 2,
        "one byte behind it": plain_frame(good) + b"\0",
        "a magic number alone": MAGIC,
        "a header that ends early": header(size)[:-1],
        "a header alone": header(size),
        "a block that ends early": plain_frame(good)[:-1],
        "no last block": header(size) + stored(good, last=False),
        "a block of the reserved type": header(size) + (size << 3 | 7).to_bytes(3, "little") + good,
        "a compressed block that is none": header(size) + (size << 3 | 5).to_bytes(3, "little") + good,
        "a dictionary": MAGIC + bytes([0xA1, 7]) + size.to_bytes(4, "little") + stored(good),
        "a checksum": header(size, flags=0x04) + stored(good) + bytes(4),
        "the reserved bit": header(size, flags=0x08) + stored(good),
        "the unused bit": header(size, flags=0x10) + stored(good),
        "no size of the content": MAGIC + bytes([0, 0]) + stored(good),
        "a size of the content that is too small": header(size - 1) + stored(good),
        "a size of the content that is too large": header(size + 1) + stored(good),
        "a size of nothing": header(0) + stored(b""),
        "a window just beyond 8 MiB": header(size, window=13 << 3 | 1) + stored(good),
        "the largest window": header(size, window=0xFF) + stored(good),
    }


def faulty_bodies() -> dict[str, tuple[np.ndarray, bytes]]:
    """Bodies with one fault, each with the chunk that it is for."""
    few, many = _chunk(8), _chunk(1200)
    near = {step: (int(few[0]) + step).to_bytes(2, "little") for step in (0, 1, 127, -127)}
    far = (int(few[0]) + 128).to_bytes(2, "little")
    return {
        "no number of gaps": (few, b"\1\0\0"),
        "gaps that end early": (few, body(b"\0\0", b"", length=3)),
        "more gaps than a body can have": (few, body(b"\0", b"\2", length=2**32 - 1)),
        "no gaps": (few, body(b"", b"")),
        "no gaps, and bytes behind them": (few, body(b"", b"\2")),
        "a gap that ends with a skip": (many, body(b"\0\xff", b"\2")),
        "only a skip": (many, body(b"\xff", b"")),
        "a change one beyond the last element": (few, body(b"\x08", b"\2")),
        "changes that add up to one beyond": (few, body(b"\3\4", b"\2\2")),
        "more gaps than elements": (few, body(bytes(9), b"\2" * 9)),
        "a skip beyond the last element": (few, body(b"\xff\0", b"\2")),
        "no steps": (few, body(b"\0\0", b"")),
        "a step too few": (few, body(b"\0\0", b"\2")),
        "a step too many": (few, body(b"\0", b"\2\2")),
        "a step of zero": (few, body(b"\0", b"\0")),
        "one step of zero among others": (few, body(b"\0\0\0", b"\2\0\2")),
        "no full pattern for an escape": (few, body(b"\0", b"\xff")),
        "half a full pattern": (few, body(b"\0", b"\xff", far[:1])),
        "one byte more than a full pattern": (few, body(b"\0", b"\xff", far + b"\0")),
        "a full pattern too many": (few, body(b"\0", b"\xff", far * 2)),
        "a full pattern without an escape": (few, body(b"\0", b"\2", far)),
        **{
            f"a full pattern for a step of {step}": (few, body(b"\0", b"\xff", full))
            for step, full in near.items()
        },
    }


def bombs() -> dict[str, bytes]:
    """Frames that hold far more than a chunk of eight elements can need."""
    return {
        "one byte more than there can be": header(37) + repeated(0, 37),
        "128 kB out of one byte": header(131_072) + repeated(0, 131_072),
        "a size of 2^63": header(2**63, width=8) + repeated(0, 131_072),
        "an honest size of 2 MB": header(2**21)
        + repeated(0, 131_072, last=False) * 15
        + repeated(0, 131_072),
    }


BY_ZSTD = (
    "28b52ffd607c02a4050076192b15a0258574ffffffffff0f507bac6da411b2b7942905250025002300a201a3d0e4f3a4"
    "0397870339a1f53429dd673aaf9c5ba802fd9dec7a91f2a6f3d211971e203f7fe1450006bf762dab36e55e49d7b81683"
    "380577499405c3052a3bf2bd24adfc2e01d7038eba580fcaf0304eee762d491faba49a2b2da252b58a7206e48ed22a27"
    "97990f39451afb9cc1a7cf9dd9ded1bee2aab72fda9510e68512a294c8454d77a3df98825c73db570101001b00286404"
    "0006d81e0dd0a503000000000000116f255f1b001b0018005b1340930fa46a2027235c4f4a3c20c404950b15893ac362"
    "5a4923d0e8a8c8e098e3c88bfba3184062280383668e8cc5e80d01a5285635d15b52df810da456324a97158ca8803257"
    "7e2e3d2eaccd337e059453d2c6aa4f2236ab49c1d44a609b854254535ec83604005f05681da8d4c021bcb72a0a510200"
    "f6bd1dbec2bdc13ef1bfa03f683ea6bf40beebc0b3bd613e88bd903f533df040543e4140f23d753dcfc0373f6b3d98c0"
    "cd3e0c402240c040b340aebfb13e0e3ffbbfc740c4bd94be053f"
)
BY_ZSTD_19 = (
    "28b52ffd607c02b50d000635672c704b92e1f0e9f802001e503c226bed9307c1915c8250bfff5cd0078e516bb9ab7384"
    "e3f9df36dbc8963b2519560053004a003656d196b4484ba27bc084ba72a774295a45f5921bb953329513297f9a120d29"
    "214d9965d17f35551e404a4e0260c4b82c8d656942ce86265661ec96cb5a5292a4d12a2a32244948aaca94ebd62c4532"
    "ba6426978c10efcd9ee7baf951161525b2481629634a5199956a52daa2742bb52431cad08c69bde5749154316b699493"
    "e545a528d53292642899680d991895a58a727fc986d24b17a9779396b4d2b48c80a58c5e6995e54c51abe673f418f75e"
    "f7ffdef99f77b3eedbf8f18f9eadf9f39ef7ff8dd979e39e59e37b7ff6f9ed3d1f7fdf1ce33c9e75d7a731befdcf4cf5"
    "99fdf6d9bcfe9b3bff319bf334ba77a367470f0f530121a201b2c162c44380c3824505c805c805a400248083c385040a"
    "060f03171d281a5084801c7024807ca040f0781071e05010b970e1a1026241c1b1e031c102840343244305818888f7f9"
    "ffb9b99f55ffb7b3d5b36ff54dcd66f7edc6cd519fcedfef66bbeb3bfeeea6fffecc3e335db78ff35d07004626b75f09"
    "cb408124aa0b9c6a9f7e56624a1a1414"
)
