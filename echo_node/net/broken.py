"""What libp2p raises on a stream whose other end, or the way there, is gone. Nobody's fault, and never a reason to end."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError

BROKEN: Final = (StreamError, SwarmException, StreamFailure, IOException, trio.TooSlowError, OSError)
