"""The verifier: groups in, signed verdicts out. It never imports the sampler or the trainer.

`evidence` is what one prefill says about a completion, `bands` how much of that is honest for an engine class, `judging`
the checks of a group from cheap to dear, `choosing` which groups are looked at, and `loop` the role.
"""
