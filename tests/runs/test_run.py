"""A run: drafted from a folder, opened by everybody else, and the same for all of them."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from echo_node.contract import Prompt, load
from echo_node.contract.sandbox import JailedContract
from echo_node.errors import ConfigError, ContractError
from echo_node.models import embedded
from echo_node.runs.run import Run, draft, read_model
from echo_node.weights.tensors import root_of
from protocol import ProtocolError, blob_id, seal
from protocol.digest import ZERO
from protocol.errors import BadSignatureError, WrongRunError
from protocol.manifest import Sampling, Sync
from tests.crafting import END, SAMPLERS, TRAINER, changed_run, forged, open_run

HEAD = b"h" * 32


def opened(sealed, folder):
    """As the author of the contract opens it: what is tried here is no jail."""
    return Run.open(sealed, folder, jailed=False)


def test_a_contract_is_jailed_unless_its_author_says_otherwise():
    run = Run.open(drafted(), embedded.folder())
    assert isinstance(run.contract, JailedContract)
    plain = opened(drafted(), embedded.folder())
    assert not isinstance(plain.contract, JailedContract)
    key = run.slot_key(b"h" * 32, TRAINER.public, 0)
    prompt, ids = run.prompt(key)
    assert prompt == plain.prompt(key)[0]
    answer = run.tokenizer.encode(plain.contract.answer(prompt))
    assert [score.value for score in run.scores(prompt, [answer, ids])] == [1.0, 0.0]
    assert run.scores(prompt, [answer, ids]) == plain.scores(prompt, [answer, ids])
    run.close()
    with pytest.raises(ContractError):
        run.prompt(key)


def drafted(folder=None, **changes) -> bytes:
    params = changes.pop("params", {})
    told = {
        "name": "a run",
        "folder": folder or embedded.folder(),
        "contract": load("digits-reverse", "1", params),
        "params": params,
        "algorithm": {},
        "sampling_": Sampling(group_size=2, max_prompt=7, max_tokens=6, temperature=1.0),
        "sync": Sync(async_from=None, head_every=1, in_flight=False, staleness=0),
        "author": TRAINER,
        "trainers": [TRAINER.public],
        "nonce": b"n" * 32,
    }
    return draft(**{**told, **changes})


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(embedded.folder(), tmp_path / "model")


def test_a_draft_opens_as_a_run_that_describes_its_model():
    run = opened(drafted(), embedded.folder())
    model = run.manifest.model
    assert model.root == root_of(read_model(embedded.folder()))
    assert (model.architecture, model.vocab_size, model.end_tokens) == ("Qwen3ForCausalLM", 16, (END,))
    assert [file.name for file in model.files] == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for file in model.files:
        assert blob_id((embedded.folder() / file.name).read_bytes()) == file.blob
    assert run.rules.trainers == (TRAINER.public,)
    assert run.limits.end_tokens == frozenset({END})
    assert len(run.manifest.contract.vectors) == 16


def test_the_same_draft_is_the_same_run_and_another_nonce_another():
    assert drafted() == drafted()
    assert opened(drafted(nonce=b"m" * 32), embedded.folder()).id != opened(drafted(), embedded.folder()).id


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_with_another_file_than_the_manifests_is_refused_by_its_name(folder, name):
    sealed = drafted(folder)
    assert opened(sealed, folder)
    (folder / name).write_text((folder / name).read_text() + " ")
    with pytest.raises(ConfigError, match=name):
        opened(sealed, folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        opened(sealed, folder)


def test_a_manifest_that_is_none_does_not_open():
    with pytest.raises(BadSignatureError):
        opened(forged(drafted()), embedded.folder())
    with pytest.raises(WrongRunError):
        opened(seal(open_run().manifest, TRAINER, b"r" * 32), embedded.folder())
    with pytest.raises(ProtocolError):
        opened(b"", embedded.folder())


def test_a_contract_that_this_machine_lacks_or_has_otherwise_is_refused():
    run = open_run()
    unknown = dataclasses.replace(run.manifest.contract, name="sudoku")
    with pytest.raises(ContractError, match="sudoku"):
        changed_run(run, contract=unknown)
    other_digits = dataclasses.replace(run.manifest.contract, params={"digits": 4})
    with pytest.raises(ContractError):
        changed_run(run, contract=other_digits)


def test_parameters_of_the_contract_reach_those_who_join():
    run = opened(drafted(params={"digits": 3}), embedded.folder())
    prompt, ids = run.prompt(b"k" * 32)
    assert (len(prompt.text), len(ids)) == (5, 5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("no json"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"),
        lambda folder: rewrite(folder, eos_token_id=None) or (folder / "generation_config.json").unlink(),
        lambda folder: rewrite(folder, eos_token_id=["$"]),
        lambda folder: rewrite(folder, architectures=[]),
    ],
)
def test_a_folder_that_is_no_model_cannot_be_drafted_from(folder, spoil):
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        drafted(folder)
    assert "\n" not in str(caught.value)


def test_a_prompt_and_an_answer_that_do_not_fit_the_context_cannot_be_drafted():
    with pytest.raises(ConfigError, match="exceed the model's context"):
        drafted(sampling_=Sampling(group_size=2, max_prompt=60, max_tokens=6, temperature=1.0))


def rewrite(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_several_end_tokens_are_all_taken_over_in_order(folder):
    rewrite(folder, eos_token_id=[13, 12])
    run = opened(drafted(folder), folder)
    assert run.manifest.model.end_tokens == (12, 13)
    assert run.limits.end_tokens == frozenset({12, 13})


def test_the_prompt_of_a_slot_is_the_same_for_all_and_another_for_each(folder):
    mine, yours = opened(drafted(), embedded.folder()), opened(drafted(), folder)
    keys, texts = set(), set()
    for sampler in SAMPLERS:
        for slot in range(5, 10):
            key = mine.slot_key(HEAD, sampler.public, slot)
            assert key == yours.slot_key(HEAD, sampler.public, slot)
            prompt, ids = mine.prompt(key)
            assert np.array_equal(ids, yours.prompt(key)[1])
            assert mine.tokenizer.decode(ids) == prompt.text
            keys.add(key)
            texts.add(prompt.text)
    assert len(keys) == 20
    assert len(texts) == 20


def test_a_run_is_asynchronous_from_the_version_that_its_manifest_names():
    def modes(start):
        sync = Sync(async_from=start, head_every=1, in_flight=False, staleness=2)
        run = opened(drafted(sync=sync), embedded.folder())
        return [run.is_async(version) for version in range(4)]

    assert modes(None) == [False] * 4
    assert modes(0) == [True] * 4
    assert modes(2) == [False, False, True, True]


# Scores


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("54321$", 1.0),
        ("54321", 1.0),
        ("12345$", 0.0),
        ("5432$", 0.0),
        ("543210", 0.0),
        ("$", 0.0),
        ("54321$$", 0.0),
        ("$54321", 0.0),
        ("54321$1", 0.0),
    ],
)
def test_the_end_token_is_no_part_of_the_answer_and_a_second_one_is(text, worth):
    run = open_run()
    prompt = Prompt("r12345=", {"answer": "54321"})
    assert run.score(prompt, run.tokenizer.encode(text)).value == worth


def test_only_the_runs_own_end_tokens_end_an_answer():
    """The folder's tokenizer may name another end than the manifest, and the manifest counts."""
    run = open_run()
    other = changed_run(run, model=dataclasses.replace(run.manifest.model, end_tokens=(13,)))
    prompt = Prompt("r12345=", {"answer": "54321"})
    ids = run.tokenizer.encode("54321")
    assert other.score(prompt, np.array([*ids, 13])).value == 1.0
    assert other.score(prompt, np.array([*ids, END])).value == 0.0
    assert other.score(prompt, np.array([*ids, END, 13])).value == 0.0
    assert other.score(prompt, ids[:0]).value == 0.0


def test_a_run_without_its_author_is_still_the_trainers():
    """Whoever drafts need not train."""
    sealed = drafted(author=SAMPLERS[0], verifiers=[SAMPLERS[1].public])
    run = opened(sealed, embedded.folder())
    assert run.sealed_manifest.signer == SAMPLERS[0].public
    assert run.rules.trainers == (TRAINER.public,)
    assert run.manifest.terms.electors == tuple(sorted((TRAINER.public, SAMPLERS[1].public)))
    assert run.sealed_manifest.run == ZERO
