"""LoRA runs: from a run's file to a folder, a base from peers, and what is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from echo_node.errors import ConfigError, PeerError
from echo_node.models import embedded
from echo_node.models.adapter import read_adapter, settings_file
from echo_node.net.memory import MemorySwarm
from echo_node.runs.adapter_folder import TABLE, check_adapter_folder
from echo_node.runs.model_download import download_run, is_downloaded
from echo_node.runs.run import Run, read_model
from echo_node.runs.spec import RunSpec, new_run, open_run, write_run
from echo_node.weights.export import export_version
from echo_node.weights.open_store import open_store
from echo_node.weights.publisher import Publisher
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import ZERO, Identity, blob_id, decode, encode, open_manifest, seal
from protocol.weights import ChunkTable
from tests.crafting import TRAINER, roster

NEWCOMER = Identity(bytes(31) + b"n")


def made_run(folder, **lora):
    spec = RunSpec(name="an adapter", trainers=[TRAINER.peer_id], lora={"rank": 4, **lora})
    write_run(folder, new_run(spec, TRAINER, nonce=bytes(32), out=folder))
    return open_run(folder)


def test_a_runs_file_becomes_a_base_and_an_adapter(tmp_path):
    run = made_run(tmp_path / "run")
    adapter = run.manifest.model.adapter
    assert (adapter.rank, adapter.alpha) == (4, 8.0)
    assert adapter.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert run.manifest.model.layout == blob_id(encode(layout_of(read_model(run.folder))))
    assert (run.folder / "model.safetensors").stat().st_size == (
        embedded.folder() / "model.safetensors"
    ).stat().st_size
    run.close()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["nose_proj"]}, "no linear module called 'nose_proj'"),
        ({"rank": 97}, "rank 97"),
        ({"rank": 0}, "rank"),
        ({"alpha": -1.0}, "alpha"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_a_table_that_makes_no_adapter_is_refused_in_words(tmp_path, lora, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        made_run(tmp_path / "run", **lora)
    assert not (tmp_path / "run" / "manifest").exists()


async def test_a_newcomer_gets_the_base_and_the_adapter_from_peers(tmp_path):
    run = made_run(tmp_path / "run")
    state = read_model(run.folder)
    with WeightsStore.temporary(run.rules, layout_of(state)) as store:
        Publisher(store, TRAINER, luck=lambda: bytes(32)).publish(state, step=0, roster=roster(), groups=())
        async with (
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as leader,
            WeightsSeeder(leader, store, files=run.files()).serve(),
            swarm.join(NEWCOMER) as newcomer,
        ):
            model = await download_run(newcomer, run.sealed_manifest, tmp_path / "newcomer")
    assert is_downloaded(model, run.manifest)
    assert read_model(model) == state
    assert (model / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()
    opened = Run.open(run.sealed_manifest.sealed, model)
    assert opened.files().keys() == run.files().keys(), "whoever has fetched it serves it"
    opened.close()
    run.close()


async def test_a_base_of_another_root_is_refused(tmp_path):
    """The table is the one that the manifest names; its root is not."""
    run = made_run(tmp_path / "run")
    model = run.manifest.model
    lie = dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, root=bytes(32)))
    manifest = open_manifest(seal(dataclasses.replace(run.manifest, model=lie), TRAINER, ZERO))
    from echo_node.runs.base_download import download_base
    from echo_node.runtime.resource_limits import EVERYTHING

    state = read_model(run.folder)
    with WeightsStore.temporary(run.rules, layout_of(state)) as store:
        async with (
            MemorySwarm() as swarm,
            swarm.join(TRAINER) as leader,
            WeightsSeeder(leader, store, files=run.files()).serve(),
            swarm.join(NEWCOMER) as newcomer,
        ):
            into = tmp_path / "newcomer"
            into.mkdir()
            with pytest.raises(PeerError, match="another root"):
                await download_base(
                    newcomer,
                    manifest.message.model.adapter,
                    into,
                    [TRAINER.public],
                    EVERYTHING,
                    lambda _: None,
                    lambda _: None,
                )
    assert not (into / "model.safetensors").exists()
    run.close()


async def test_a_download_that_was_broken_off_goes_on_and_a_torn_frame_is_fetched_again(tmp_path):
    from echo_node.runs.base_download import _right_frames

    run = made_run(tmp_path / "run")
    frames = list(decode(ChunkTable, (run.folder / TABLE).read_bytes()))
    whole = (run.folder / "model.safetensors").read_bytes()
    part = tmp_path / "part"
    assert _right_frames(part, frames) == 0
    part.write_bytes(whole[:-1])
    assert _right_frames(part, frames) == len(frames) - 1
    part.write_bytes(whole)
    assert _right_frames(part, frames) == len(frames)
    run.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 2}, "rank 4"),
        ({"alpha": 9.0}, "alpha 8"),
        ({"targets": ("q_proj",)}, "targets"),
        ({"layout": bytes(32)}, "base"),
        ({"table": bytes(32)}, "base"),
    ],
)
def test_an_adapter_of_another_base_rank_alpha_or_target_is_refused_by_name(tmp_path, change, words):
    run = made_run(tmp_path / "run")
    other = dataclasses.replace(run.manifest.model.adapter, **change)
    with pytest.raises(ConfigError, match=words):
        check_adapter_folder(run.folder, other)
    run.close()


def test_whole_models_and_adapters_do_not_stand_for_each_other(tmp_path):
    run = made_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="trains a whole model"):
        check_adapter_folder(run.folder, None)
    with pytest.raises(ConfigError, match="no adapter"):
        check_adapter_folder(embedded.folder(), run.manifest.model.adapter)
    assert read_adapter(embedded.folder()) is None
    run.close()


def test_an_export_opens_in_peft_and_merged_in_transformers(tmp_path):
    peft = pytest.importorskip("peft", reason="the extra `trl` is not installed")
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from tests.adapters import log_probs, lora_folder

    run = made_run(tmp_path / "run", alpha=8.0)
    state = read_model(lora_folder(tmp_path / "moved", moved=0.05))
    folder = tmp_path / "weights"
    with WeightsStore.open(folder, run.rules, layout_of(state)) as store:
        first = read_model(run.folder)
        writer = Publisher(store, TRAINER, luck=lambda: bytes(32))
        writer.publish(first, step=0, roster=roster(), groups=())
        writer.publish(state, step=1, roster=roster(), groups=())
    given = (run.manifest, run.rules, layout_of(state))
    export_version(folder, tmp_path / "adapter", *given, model=run.folder)
    export_version(folder, tmp_path / "merged", *given, model=run.folder, merged=True)
    base = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    prompt, ids = [10, 1, 2, 3, 4, 5, 11], np.array([5, 4, 3, 2, 1, 12])
    gap = np.abs(log_probs(apart, prompt, ids) - log_probs(merged, prompt, ids)).max()
    assert gap < 0.05, "merging rounds to bf16, and nothing else"
    with apart.disable_adapter():
        assert np.abs(log_probs(apart, prompt, ids) - log_probs(merged, prompt, ids)).max() > 0.1
    assert (
        settings_file(read_adapter(run.folder)) == (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    )
    run.close()


async def test_a_store_opens_with_the_adapter_of_a_folder(tmp_path):
    run = made_run(tmp_path / "run")
    async with (
        MemorySwarm() as swarm,
        swarm.join(NEWCOMER) as network,
        open_store(None, run.rules, network, model=run.folder) as store,
    ):
        assert store.flat.id == run.manifest.model.layout
    run.close()
