"""Blobs by their hashes, from many peers at once, over streams or the TLS side channel. What a blob is, others know."""
