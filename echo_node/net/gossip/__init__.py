"""GossipSub v1.1: state machine (`mesh`), encoding (`wire`), I/O (`router`)."""
