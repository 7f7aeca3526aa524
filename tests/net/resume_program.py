"""A process that downloads into a folder, for a test that kills it.

`python -m tests.net.resume_program folder size`

It writes a line when so much has arrived that it may be killed, and goes on slowly.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from echo_node.net.blobs.client import Want
from echo_node.net.rate_limit import UploadLimit
from protocol import blob_id
from tests.net.blob_nodes import MIB, site, some_bytes


async def main(folder: Path, size: int) -> None:
    data = some_bytes(size)

    def say(progress) -> None:
        if progress.done * 2 > progress.total:
            sys.stdout.write("half\n")
            sys.stdout.flush()

    async with site() as here:
        await here.source([data], uplink=UploadLimit(each=16 * MIB))
        await here.blobs().fetch_to(folder, [Want(blob_id(data), size)], progress=say)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
