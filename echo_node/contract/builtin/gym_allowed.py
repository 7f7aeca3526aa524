"""Allowed generators of reasoning-gym 0.1.25; each scorer was reviewed.

Allowed are scorers that compare, count or simulate the answer's text in bounded time, give the same
prompt and answer under every hash seed, and have a right answer. The others are refused, each with
its reason.
"""

from __future__ import annotations

from typing import Final

PACKAGE: Final = "reasoning-gym"
RELEASE: Final = "0.1.25"
"""The release that was read. Another one may score otherwise, or run what it is given."""

ALLOWED: Final = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation caesar_cipher
    calendar_arithmetic chain_sum circuit_logic color_cube_rotation count_bits count_primes course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification
    futoshiki game_of_life gcd group_anagrams gsm_symbolic jugs kakurasu knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack
    number_filtering number_format number_sequence palindrome_generation path_star
    polynomial_equations power_function prime_factorization products quantum_lock rearc rectangle_count rotate_matrix
    rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban
    spell_backward string_splitting string_synthesis sudoku survo syllogism tower_of_hanoi tsumego
    word_sequence_reversal word_sorting zebra_puzzles
    """.split()  # noqa: SIM905 -- a list as people read it
)

MADE_ANEW: Final = frozenset({"acre", "gsm_symbolic", "survo"})
"""Generators that use their seed at set-up, so each key needs a new instance."""

_EVALUATES = "its scorer evaluates the answer as Python"
_PARSES = "its scorer evaluates the answer as Python, through sympy's parser"
_ORDER = "its prompts depend on the order of a set, which differs from process to process"
_ANSWER_ORDER = "its answers depend on the order of a set, which differs from process to process"
_REPEATS = "its scorer repeats a move as often as the answer says, without end"
_NAN = "its scorer takes NaN for the right answer"
_NO_ANSWER = "it has no right answer of its own, so nothing shows whether its scorer works"

REFUSED: Final = {
    "binary_matrix": _EVALUATES,
    "n_queens": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "string_insertion": _EVALUATES,
    "countdown": _PARSES,
    "intermediate_integration": _PARSES,
    "polynomial_multiplication": _PARSES,
    "puzzle24": _PARSES,
    "simple_integration": _PARSES,
    "bitwise_arithmetic": "its scorer evaluates the problem as Python",
    "codeio": "it makes its prompts by running Python programs",
    "composite": "it is a mixture of the others",
    "coin_flip": "its scorer writes out every number of an answer such as 1e999999999",
    "propositional_logic": "the time of its scorer doubles with every variable in the answer",
    "rubiks_cube": _REPEATS,
    "rush_hour": _REPEATS,
    "complex_arithmetic": _NAN,
    "number_sorting": _NAN,
    "game_of_life_halting": "its scorer takes any text for the right answer",
    "time_intervals": "its prompts depend on today's date",
    "list_functions": "it draws from the luck of the whole process",
    "pool_matrix": "it draws from the luck of the whole process",
    "isomorphic_strings": _ORDER,
    "ransom_note": _ORDER,
    "knight_swap": _ANSWER_ORDER,
    "word_ladder": _ANSWER_ORDER,
    "palindrome_partitioning": "some of its right answers are too long",
    "string_manipulation": "some of its right answers are empty",
    "boxnet": _NO_ANSWER,
    "graph_color": _NO_ANSWER,
}
