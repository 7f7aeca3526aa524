"""Pin vectors: check that a contract is the one that a run was made with.

A name is not code. A vector states: this key gives the prompt of this hash, and this text then gets
this score; of an environment the text is a script of turns, and its replies are pinned too. The
hash covers all that the model reads. The author of a run makes vectors, and every node that joins
checks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo_node.contract.api import (
    Contract,
    Prompt,
    Reply,
    own_answer,
    play,
    prompt_of,
    score_of,
    script_of,
)
from echo_node.errors import ContractError, one_line
from protocol import blob_id, canonical, limits
from protocol.manifest import ContractVector


def contract_vectors(contract: Contract, keys: Sequence[bytes]) -> tuple[ContractVector, ...]:
    """Make one pin vector per key.

    Every other one scores the previous prompt's answer, which is mostly wrong.
    """
    if not 1 <= len(keys) <= limits.CONTRACT_VECTORS:
        raise ContractError(
            f"a run has 1 to {limits.CONTRACT_VECTORS} vectors of its contract, not {len(keys)}"
        )
    prompts = [prompt_of(contract, key) for key in keys]
    answers = [_answer(contract, prompt) for prompt in prompts]
    return tuple(
        ContractVector(
            key=key,
            prompt=prompt_digest(prompt),
            replies=replies_digest(contract, prompt, text := answers[index - index % 2]),
            score=score_of(contract, prompt, text).value,
            text=text,
        )
        for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True))
    )


def prompt_digest(prompt: Prompt) -> bytes:
    """Return the hash of what the model reads: the text, or a chat's messages."""
    if not prompt.chat:
        return blob_id(prompt.text.encode())
    return blob_id(canonical.pack([[each["role"], each["content"]] for each in prompt.messages]))


def check_vectors(contract: Contract, vectors: Iterable[ContractVector]) -> None:
    """Raise a `ContractError` that names the first vector that does not hold."""
    for index, vector in enumerate(vectors):
        prompt = prompt_of(contract, vector.key)
        if prompt_digest(prompt) != vector.prompt:
            raise _mismatch(contract, index, vector, f"its prompt is another one, {prompt.text[:40]!r}")
        if replies_digest(contract, prompt, vector.text) != vector.replies:
            raise _mismatch(
                contract, index, vector, f"it answers the turns {vector.text[:40]!r} in another way"
            )
        score = score_of(contract, prompt, vector.text).value
        if score != vector.score:
            text = f"the text {vector.text[:40]!r} scores {score}, not {vector.score}"
            raise _mismatch(contract, index, vector, text)


def replies_digest(contract: Contract, prompt: Prompt, script: str) -> bytes | None:
    """Return the hash of an environment's replies to a script.

    None if the contract is no environment.
    """
    if not contract.has_environment:
        return None
    _, replies = play(contract, prompt, script_of(script))
    return blob_id(canonical.pack([_row(each) for each in replies]))


def _row(reply: Reply) -> list[str | bool]:
    return [reply.text, reply.done]


def _answer(contract: Contract, prompt: Prompt) -> str:
    """Return the contract's own answer, cut to fit into a vector."""
    fits = one_line(own_answer(contract, prompt)).encode()[: limits.TEXT_BYTES]
    return fits.decode(errors="ignore")


def _mismatch(contract: Contract, index: int, vector: ContractVector, what: str) -> ContractError:
    return ContractError(
        f"{contract.name} {contract.version} is not the contract of this run:"
        f" vector {index} (key {vector.key.hex()[:16]}…): {what}",
        advice="install the very package that the run names, and no other version of it",
    )
