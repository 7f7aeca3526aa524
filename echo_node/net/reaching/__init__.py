"""Whether a node can be dialled, and what is done if not: AutoNAT, relays, circuits. It knows nothing of what is sent."""
