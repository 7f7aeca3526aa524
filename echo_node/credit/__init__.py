"""The ledger of verified tokens, and signed statements about it."""
