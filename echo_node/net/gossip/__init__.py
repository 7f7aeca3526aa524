"""Gossip: GossipSub v1.1. `mesh` decides, `wire` reads and writes, `node` talks. None of them knows what is said."""
