"""One zstd frame (RFC 8878), bounded before it is opened; and the raw codec.

A frame says in its header how much it holds, and holds that. It is opened only if that is little
enough, and nothing may stand before, beside or behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zstandard

from protocol import limits
from protocol.errors import BadFrameError, InconsistentError, TooLargeError

RAW_CODEC: Final = "raw-zstd1"
"""Route codec with each chunk as it is in one zstd frame: for elements not 16 bits wide."""
_MAGIC: Final = bytes.fromhex("28b52ffd")
_CONTENT_BYTES: Final = (1, 2, 4, 8)
_PLAIN: Final = zstandard.ZstdCompressionParameters.from_level(1)
# Columns hold next to no repetition. Where zstd finds some all the same, it costs more than the
# Huffman code that it replaces: a table of 64 places hides it, and makes frames of deltas 1 %
# smaller.
_COLUMNS: Final = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)


def pack_columns(columns: Sequence[bytes]) -> bytes:
    """Pack columns into one frame.

    Each starts a block, and so has its own Huffman code.
    """
    job = zstandard.ZstdCompressor(compression_params=_COLUMNS).compressobj(size=sum(map(len, columns)))
    *earlier, last = [column for column in columns if column]
    done = [job.compress(column) + job.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for column in earlier]
    return b"".join((*done, job.compress(last), job.flush()))


def unpack(frame: bytes, most: int) -> bytes:
    """Unpack a frame that declares at most so many bytes."""
    if len(frame) > limits.FRAME_BYTES:
        raise TooLargeError(f"a frame of {len(frame)} bytes, of at most {limits.FRAME_BYTES}")
    size = _content_size(frame)
    if size > most:
        raise TooLargeError(f"a frame that holds {size} bytes, of at most {most}")
    try:
        content = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise BadFrameError(f"zstd cannot read it: {str(error)[:100]}") from error
    if len(content) != size:
        raise BadFrameError(f"a frame that says {size} bytes and holds {len(content)}")
    return content


def _content_size(frame: bytes) -> int:
    """Return the content size in a header of an allowed form."""
    if frame[:4] != _MAGIC or len(frame) < 6:
        raise BadFrameError("no zstd frame")
    descriptor = frame[4]
    if descriptor & 0x1F:
        raise BadFrameError("a dictionary, a checksum or a reserved bit")
    at, one_segment = 5, bool(descriptor & 0x20)
    if not one_segment:
        if descriptor >> 6 == 0:
            raise BadFrameError("a frame that does not say how much it holds")
        base = 1 << 10 + (frame[at] >> 3)
        if base + base // 8 * (frame[at] & 7) > limits.WINDOW_BYTES:
            raise BadFrameError(f"a window of more than {limits.WINDOW_BYTES} bytes")
        at += 1
    width = _CONTENT_BYTES[descriptor >> 6]
    if len(frame) < at + width:
        raise BadFrameError("a header that ends early")
    size = int.from_bytes(frame[at : at + width], "little") + (256 if width == 2 else 0)
    if size == 0:
        raise BadFrameError("a frame that holds nothing")
    return size


def encode_raw(chunk: bytes) -> bytes:
    """Encode a chunk as it is."""
    return zstandard.ZstdCompressor(compression_params=_PLAIN).compress(chunk)


def decode_raw(frame: bytes, size: int) -> bytes:
    """Decode a chunk of so many bytes."""
    chunk = unpack(frame, size)
    if len(chunk) != size:
        raise InconsistentError(f"a frame of {len(chunk)} bytes for a chunk of {size}")
    return chunk
