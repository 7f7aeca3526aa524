"""Rollout groups on their way in: gossip validation, admission, references."""
