"""Built-in contracts share one process between texts: nothing of one text is left for the next."""

from __future__ import annotations

import pytest

from echo_node.contract.hostile_texts import TEXTS
from echo_node.contract.sandbox import Failed, Sandbox

CONTRACTS = {
    "digits-reverse": {},
    "knights-knaves": {},
    "sokoban": {},
    "math": {},
    "reasoning-gym": {},
}
KEYS = [bytes([number]) * 32 for number in range(3)]


def worth(results):
    return [result if not isinstance(result, Failed) else "failed" for result in results]


@pytest.mark.parametrize("name", CONTRACTS)
def test_scores_of_built_in_contracts_do_not_depend_on_texts_before_them(name):
    with Sandbox(name, "1", CONTRACTS[name], seconds=20.0) as sandbox:
        prompts = sandbox.prompts(KEYS)
        asked = [(prompt, answer) for prompt in prompts for answer in worth(sandbox.answers([prompt]))]
        asked += [(prompt, text) for prompt in prompts for text in ("", "perhaps", "1", "\\boxed{2}")]
        sandbox.renew()
        first = worth(sandbox.scores(asked))
        hostile = [(prompt, make("1")) for prompt in prompts for make in TEXTS.values()]
        sandbox.scores(hostile)
        assert worth(sandbox.scores(asked)) == first
        assert worth(sandbox.scores(asked[::-1])) == first[::-1]
        assert sandbox.prompts(KEYS) == prompts
