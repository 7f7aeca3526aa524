"""Many streams over one connection: Yamux. It knows bytes and streams, and nothing of protocols or peers."""
