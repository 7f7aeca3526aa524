"""`echo-node weights`: what a person sees of a store, in words, tables and exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.contract import load
from echo_node.errors import ConfigError, StoreError
from echo_node.models import embedded
from echo_node.runs.run import Run, draft, read_model
from echo_node.weights.publisher import Cadence, Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of
from protocol import Identity, Roster
from protocol.manifest import Sampling, Sync

TRAINER = Identity(b"t" * 32)


@pytest.fixture(scope="module")
def run():
    sealed = draft(
        name="a test",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={},
        sampling_=Sampling(group_size=2, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
        author=TRAINER,
        trainers=[TRAINER.public],
        nonce=b"n" * 32,
    )
    return Run.open(sealed, embedded.folder(), jailed=False)


@pytest.fixture
def folder(run, tmp_path):
    """A store with three versions of the embedded model."""
    state = read_model(embedded.folder())
    layout = layout_of(state)
    store_folder = tmp_path / "store"
    write_metadata(store_folder, run.sealed_manifest, layout)
    with WeightsStore.open(store_folder, run.rules, layout) as store:
        publisher = Publisher(store, TRAINER, luck=lambda: bytes(32), cadence=Cadence(squash_every=2))
        for step in range(3):
            publisher.publish(state, step=step, roster=Roster(()), groups=())
    return store_folder


def invoke(*words):
    return CliRunner().invoke(app, ["weights", *map(str, words)], catch_exceptions=True)


def test_the_log_is_a_table_or_lines_of_json(folder):
    shown = invoke("log", folder)
    assert shown.exit_code == 0, shown.output
    assert "The chain" in shown.output
    rows = [json.loads(line) for line in invoke("log", folder, "--json").output.splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert [row["held"] for row in rows] == [False, False, True]
    assert rows[0]["anchor_bytes"] > 700_000
    assert rows[2]["squash_bytes"] == 0, "nothing changed"
    assert {row["signer"] for row in rows} == {TRAINER.peer_id}
    assert len(invoke("log", folder, "--json", "--last", "1").output.splitlines()) == 1


def test_a_store_in_order_is_verified_and_a_damaged_one_is_not(folder):
    done = invoke("verify", folder)
    assert done.exit_code == 0, done.output
    assert "3 heads, every signature and hash is right; version 2 is held whole" in done.output
    frame = max((folder / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(frame.read_bytes())
    data[1000] ^= 1
    frame.write_bytes(data)
    done = invoke("verify", folder)
    assert done.exit_code == 1
    assert "damaged" in done.output
    assert all(line.strip() for line in done.stdout.splitlines()), "one line for each problem"


def test_an_exported_version_is_a_folder_that_transformers_opens(folder, tmp_path):
    out = tmp_path / "out"
    done = invoke("export", folder, out, "--version", 1, "--model", embedded.folder())
    assert done.exit_code == 0, done.output
    assert "missing" not in done.output
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(weight.numel() for weight in model.parameters()) > 300_000
    assert (out / "model.safetensors").read_bytes()[8:10] == b'{"'


def test_an_export_says_which_files_are_not_at_hand(folder, tmp_path):
    done = invoke("export", folder, tmp_path / "out")
    assert done.exit_code == 0
    assert "missing: config.json" in done.output
    again = invoke("export", folder, tmp_path / "out")
    assert isinstance(again.exception, ConfigError)
    nowhere = invoke("export", folder, tmp_path / "other", "--version", 9)
    assert isinstance(nowhere.exception, StoreError)
    assert "version 9 is not in this chain" in str(nowhere.exception)


def test_what_is_no_store_is_said_so_in_plain_words(tmp_path, folder):
    assert "is no store of weights" in str(invoke("log", tmp_path).exception)
    (folder / "manifest").unlink()
    assert "does not say of which run" in str(invoke("verify", folder).exception)
