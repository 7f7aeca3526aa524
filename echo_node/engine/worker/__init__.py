"""An engine in a process of its own: client, RPC, and the process itself."""
