"""What is asked and what an answer is worth: reward contracts, and how they are found by name and version.

A contract is a small pure class that anybody may write; `api` is all that its author needs. Nothing here knows
tokens, models, peers or training. A completion is hostile text to everything in this room.
"""

from echo_node.contract.api import Contract, Params, Prompt, Score, prompt_of, score_of
from echo_node.contract.luck import KeyStream, random_from
from echo_node.contract.registry import available, find, load
from echo_node.contract.vectors import check_vectors, contract_vectors

__all__ = [
    "Contract",
    "KeyStream",
    "Params",
    "Prompt",
    "Score",
    "available",
    "check_vectors",
    "contract_vectors",
    "find",
    "load",
    "prompt_of",
    "random_from",
    "score_of",
]
