"""The jail: what stands around the process in which a contract runs, on Linux, macOS and Windows, that process's own
program (`serving`) and how the node sees it (`process`, `seat`).

A completion is hostile text, and some scorers execute what they score. The jail keeps such a text from the node and
from the machine: files, network, other processes, memory, time. It does not keep a contract from itself: a text that
its scorer executes can give itself any score, and colour those that the same process gives later.
"""

from echo_node.contract.jail.layer import Layer

__all__ = ["Layer"]
