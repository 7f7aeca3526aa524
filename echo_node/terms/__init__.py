"""Who leads a run, and what happens when nobody does: heartbeats, votes, grants, and the checkpoints that a successor needs.

It knows the chain of heads (`weights`), and neither training nor any role.
"""
