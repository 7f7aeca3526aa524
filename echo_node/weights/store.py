"""Blobs of the newest versions, for whoever asks. Knows hashes; what they are hashes of is others' business."""

from __future__ import annotations

from collections import OrderedDict

from protocol import ProtocolError, blob_id
from protocol.errors import OutOfRangeError


class BlobStore:
    """The blobs of the last few publications, oldest out first. Bounded, and shared by nothing."""

    def __init__(self, publications: int) -> None:
        self._publications: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
        self._most = publications

    def keep(self, name: bytes, blobs: dict[bytes, bytes]) -> None:
        """Hold what belongs to one head."""
        self._publications[name] = blobs
        while len(self._publications) > self._most:
            self._publications.popitem(last=False)

    def get(self, blob: bytes) -> bytes | None:
        for blobs in reversed(self._publications.values()):
            if blob in blobs:
                return blobs[blob]
        return None

    async def serve(self, _peer: bytes, asked: bytes) -> bytes:
        """Answer a request for one blob by its id."""
        found = self.get(asked)
        if found is None:
            raise OutOfRangeError("this node does not hold that blob", "blob")
        return found


def check_blob(blob: bytes, data: bytes) -> bytes:
    """The data, once they are what was asked for."""
    if blob_id(data) != blob:
        raise WrongBlobError("other bytes than those that were asked for", "blob")
    return data


class WrongBlobError(ProtocolError):
    """A peer sent other bytes than those that their hash names."""

    reason = "wrong-blob"
