"""Hostile completions against every contract that ships: the least score, and no effect."""

from __future__ import annotations

import hashlib

import pytest

from echo_node.contract.builtin import BUILT_IN
from echo_node.contract.sandbox import Sandbox, score_or_zero

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(2)]
DEEDS = (
    "__import__('os').mkdir({marker!r})",
    "__import__('os').system('touch {marker}')",
    "open({marker!r}, 'w').write('x')",
    "open({secret!r}).read()",
    "__import__('socket').create_connection(('127.0.0.1', 9))",
    "__import__('os').fork()",
    "'x' * 10**11",
    "9 ** 9 ** 9 ** 9",
    "(lambda f: f(f))(lambda f: f(f))",
    "[x for x in iter(int, 1)]",
)
WRAPPED = (
    "{deed}",
    "<answer>{deed}</answer>",
    r"\\boxed{{{deed}}}",
    "Answer: {deed}",
    "```python\n{deed}\n```",
)


@pytest.mark.parametrize(("name", "version"), sorted(BUILT_IN))
def test_it_is_worth_the_least_with_a_reason_and_nothing_outside_has_changed(name, version, tmp_path):
    marker, secret = tmp_path / "marker", tmp_path / "key"
    secret.write_bytes(b"the key of this node")
    deeds = [deed.format(marker=str(marker), secret=str(secret)) for deed in DEEDS]
    texts = [wrap.format(deed=deed) for deed in deeds for wrap in WRAPPED]
    with Sandbox(name, version, seconds=20.0) as sandbox:
        low, _ = sandbox.range
        for prompt in sandbox.prompts(KEYS):
            for text, found in zip(texts, sandbox.scores([(prompt, text) for text in texts]), strict=True):
                score = score_or_zero(found, low)
                assert score.value <= max(low, 0.0) + 0.05, (text, score)
                assert score.reason
                assert "the key of this node" not in score.reason
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]
    assert secret.read_bytes() == b"the key of this node"
