"""Reward contracts: prompts and scores, found by name and version.

A contract is a small pure class that anybody may write; `api` is all that its author needs.
Completions are hostile text to everything in this package.
"""

from echo_node.contract.api import (
    Contract,
    Episode,
    Params,
    Prompt,
    Reply,
    Score,
    Turn,
    play,
    prompt_of,
    reply_of,
    score_of,
)
from echo_node.contract.keyed_rng import KeyStream, random_from
from echo_node.contract.pin_vectors import check_vectors, contract_vectors
from echo_node.contract.registry import available, find, load

__all__ = [
    "Contract",
    "Episode",
    "KeyStream",
    "Params",
    "Prompt",
    "Reply",
    "Score",
    "Turn",
    "available",
    "check_vectors",
    "contract_vectors",
    "find",
    "load",
    "play",
    "prompt_of",
    "random_from",
    "reply_of",
    "score_of",
]
