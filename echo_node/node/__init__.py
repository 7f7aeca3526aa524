"""Composition root: one node with an identity, a network and a role in a run.

node.py            Node: settings, and what a role reports
context.py         what every role is built from: run, key, folder, limits, store, engines
sampler_role.py    engine -> SamplerLoop -> outbox; the puller follows the weights chain
verifier_role.py   VerifierLoop with a torch engine -> signed verdicts, ledger
trainer_role.py    Standby until elected -> TrainerLoop -> Publisher -> WeightsSeeder
"""

from echo_node.node.node import Node

__all__ = ["Node"]
