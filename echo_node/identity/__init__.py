"""The key of a node: its file, and its encrypted backup on paper."""
