"""Reward contracts: prompts and scores, found by name and version.

A contract is a small pure class that anybody may write; `api` is all that its author needs.
Completions are hostile text to everything in this package.
"""

from echo_node.contract.api import Contract, Params, Prompt, Score, prompt_of, score_of
from echo_node.contract.keyed_rng import KeyStream, random_from
from echo_node.contract.pin_vectors import check_vectors, contract_vectors
from echo_node.contract.registry import available, find, load

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
