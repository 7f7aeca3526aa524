"""A seed of the network: DHT server, relay and peer exchange in a process that needs no model.

It may import `protocol` and `echo_node.net`; of `echo_node` only `cli` imports it, when asked to.
It knows nothing of runs, engines or rewards.
"""
