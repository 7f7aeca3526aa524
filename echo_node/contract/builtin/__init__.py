"""The contracts that come with the program, by name and version. They use nothing but the room's `api`."""

from typing import Final

from echo_node.contract.api import Contract
from echo_node.contract.builtin.digits_reverse import DigitsReverse

BUILT_IN: Final[dict[tuple[str, str], type[Contract]]] = {
    (contract.name, contract.version): contract for contract in (DigitsReverse,)
}
