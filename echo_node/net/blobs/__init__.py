"""Content-addressed blobs, fetched from several peers by stream or bulk port."""
