"""`sokoban@2`: push boxes onto goals in rounds; each reply shows the board.

The board is 6×6 with two boxes, found by a search of depth 20; an episode has at most four rounds
of 25 moves. A round's moves are the last line of a turn that has only the letters L, R, U and D, or
what stands in `<answer>` tags. The score is 1 for a solved board and otherwise a tenth of the share
of boxes on goals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from echo_node.contract.api import Params, Prompt, Reply, Score, Turn
from echo_node.contract.builtin.gym import Sokoban
from echo_node.contract.keyed_rng import random_from

WALL, FLOOR, GOAL = "+", "-", "X"
BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL = "@", "$", "*", "%"
_STEPS: Final = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "D": (1, 0)}
_TAGGED: Final = re.compile(r"<answer>\s*([LRUD\s]{1,400})\s*</answer>")
_LINE: Final = re.compile(r"^[ \t]*([LRUD][LRUD ,]{0,400})[ \t]*$", re.MULTILINE)
PARTIAL: Final = 0.1
"""Score of an unsolved board, for each whole share of boxes on goals."""
RULES: Final = (
    "Solve this Sokoban board: push every box onto a goal.\n"
    "* is you, % you on a goal, @ a box, $ a box on a goal, X a goal, + a wall, - empty.\n"
    "Answer with moves as a line of letters, such as LDRU: L left, R right, U up, D down.\n\n"
)


class Board:
    """A board of Sokoban in play."""

    def __init__(self, text: str) -> None:
        self._cells = [line.split() for line in text.strip().splitlines()]
        self._player = next(
            (row, column)
            for row, cells in enumerate(self._cells)
            for column, cell in enumerate(cells)
            if cell in {PLAYER, PLAYER_ON_GOAL}
        )

    def move(self, way: str) -> None:
        """Go one step, pushing a box if there is room behind it; else stay."""
        (row, column), (down, right) = self._player, _STEPS[way]
        ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if self._at(ahead) in {BOX, BOX_ON_GOAL}:
            if self._at(behind) not in {FLOOR, GOAL}:
                return
            self._put(behind, BOX_ON_GOAL if self._at(behind) == GOAL else BOX)
            self._put(ahead, GOAL if self._at(ahead) == BOX_ON_GOAL else FLOOR)
        if self._at(ahead) not in {FLOOR, GOAL}:
            return
        self._put(self._player, GOAL if self._at(self._player) == PLAYER_ON_GOAL else FLOOR)
        self._put(ahead, PLAYER_ON_GOAL if self._at(ahead) == GOAL else PLAYER)
        self._player = ahead

    @property
    def boxes(self) -> tuple[int, int]:
        """Return how many boxes are on goals, and how many there are."""
        flat = [cell for cells in self._cells for cell in cells]
        return flat.count(BOX_ON_GOAL), flat.count(BOX_ON_GOAL) + flat.count(BOX)

    def __str__(self) -> str:
        return "\n".join(" ".join(cells) for cells in self._cells)

    def _at(self, place: tuple[int, int]) -> str:
        row, column = place
        inside = 0 <= row < len(self._cells) and 0 <= column < len(self._cells[row])
        return self._cells[row][column] if inside else WALL

    def _put(self, place: tuple[int, int], cell: str) -> None:
        self._cells[place[0]][place[1]] = cell


class SokobanRounds(Sokoban):
    """Push the boxes onto the goals, in rounds.

    Parameters: `side` of the square (6), `boxes` (2), `depth` of the search (20), `moves` of a
    round (25), `chat` (false).
    """

    version = "2"

    def configure(self, params: Params) -> None:
        super().configure(params)
        self.moves = params.whole("moves", default=25, low=1, high=100)

    def prompt(self, key: bytes) -> Prompt:
        luck = random_from(key)
        item = self._item(*self.generator(luck), luck)
        board = Board(str(item["metadata"]["gamestr"]))
        data = {"board": str(board), "solution": str(item["answer"])}
        return Prompt(f"{RULES}{board}\n", data, chat=self.chat)

    def begin(self, prompt: Prompt) -> _Episode:
        return _Episode(Board(prompt.data["board"]), self.moves)

    def score(self, prompt: Prompt, completion: Any) -> Score:
        turns: Sequence[Turn] = completion
        episode = self.begin(prompt)
        for turn in turns:
            episode.step(turn.text)
        placed, boxes = episode.board.boxes
        if placed == boxes:
            return Score(1.0, f"solved in {len(turns)} rounds")
        return Score(PARTIAL * placed / boxes, f"{placed} of {boxes} boxes are on goals")

    def shape(self, prompt: Prompt, completion: Any, score: Score) -> Score:  # noqa: ARG002
        return score

    def act(self, prompt: Prompt, turns: Sequence[Turn]) -> str:
        done = self.moves * len(turns)
        return prompt.data["solution"][done : done + self.moves] or "L"


class _Episode:
    def __init__(self, board: Board, moves: int) -> None:
        self.board = board
        self._moves = moves

    def step(self, text: str) -> Reply:
        found = _moves(text)
        if found is None:
            return Reply("No moves were found: write a line such as LDRU.")
        for way in found[: self._moves]:
            self.board.move(way)
            placed, boxes = self.board.boxes
            if placed == boxes:
                return Reply(done=True)
        return Reply(f"The board is now:\n{self.board}\n")


def _moves(text: str) -> str | None:
    """Return the moves of a turn: those in tags, or the last line of moves alone."""
    tagged = _TAGGED.findall(text)
    lines = tagged or _LINE.findall(text)
    if not lines:
        return None
    return re.sub(r"[^LRUD]", "", lines[-1]) or None
