"""The contracts that come with the program, by name and version. They use nothing but the room's `api` and its luck.

What needs a library of its own loads it when it is made, so that naming them all costs nothing.
"""

from typing import Final

from echo_node.contract.api import Contract
from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.contract.builtin.gym import KnightsKnaves, ReasoningGym, Sokoban
from echo_node.contract.builtin.math_verified import Math

BUILT_IN: Final[dict[tuple[str, str], type[Contract]]] = {
    (contract.name, contract.version): contract
    for contract in (DigitsReverse, KnightsKnaves, Math, ReasoningGym, Sokoban)
}
