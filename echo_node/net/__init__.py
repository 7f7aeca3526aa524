"""Networking: gossip, requests, provider records, peers and their scores.

`base` is the one interface that the rest of the program uses; each transport implements it. What
the bytes mean is decided by the validators and handlers that callers pass in.
"""
