"""The verifier role: trajectory groups in, signed verdicts out.

`selection` draws the groups that are checked, `replay_check` checks one by a prefill, `evidence` is
what the prefill says about a completion, `tolerance` how much of that is honest for an engine
class, and `loop` the role.
"""
