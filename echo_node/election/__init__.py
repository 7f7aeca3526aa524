"""Leader election: heartbeats, leases, votes, grants and checkpoint replication."""
