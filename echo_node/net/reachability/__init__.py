"""Reachability behind NAT: AutoNAT, relays and circuits."""
