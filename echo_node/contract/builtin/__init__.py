"""Built-in contracts, by name and version.

They use the public interface only. A contract that needs a library imports it when it is made.
"""

from typing import Final

from echo_node.contract.api import Contract
from echo_node.contract.builtin.calculator import Calculator
from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.contract.builtin.few_shot import FewShot
from echo_node.contract.builtin.guess_number import GuessNumber
from echo_node.contract.builtin.gym import KnightsKnaves, ReasoningGym, Sokoban
from echo_node.contract.builtin.math_verified import Math
from echo_node.contract.builtin.sokoban_rounds import SokobanRounds

BUILT_IN: Final[dict[tuple[str, str], type[Contract]]] = {
    (contract.name, contract.version): contract
    for contract in (
        Calculator,
        DigitsReverse,
        FewShot,
        GuessNumber,
        KnightsKnaves,
        Math,
        ReasoningGym,
        Sokoban,
        SokobanRounds,
    )
}
