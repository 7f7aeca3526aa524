"""What the llama.cpp decoder refuses: one clear error, no mixture of weights, no file left."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from echo_node.engine import llama_decoder
from echo_node.engine.base import Change
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.gguf import GgufFile
from echo_node.engine.gguf_map import read_plan
from echo_node.engine.host_resources import NoRoomError
from echo_node.engine.llama_decoder import LlamaDecoder, gpu_layers_for
from echo_node.engine.llama_ffi import LlamaModel, gpu_memory, offloads
from echo_node.errors import EngineError
from tests.engine import models
from tests.engine.deltas import Training
from tests.engine.references import Model, everything, gap


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    at = tmp_path_factory.mktemp("qwen3")
    return Model(models.folder(at, "Qwen3", head_dim=20, tie_word_embeddings=True), 30)


@pytest.fixture
def running():
    """Decoders that are closed when the test ends."""
    open_ones = []

    def run(model, kind="f32", **settings):
        decoder = model.decoder(kind, **settings)
        open_ones.append(decoder)
        decoder.load(model.weights)
        return decoder

    yield run
    for decoder in open_ones:
        decoder.close()


def test_an_update_that_breaks_off_leaves_no_mixture_to_compute_from(model, running):
    decoder = running(model, "f16")
    expected = everything(decoder, model.ids)

    def breaking_off():
        yield from Training(model.weights).step(1)
        raise OSError("the store went away")

    with pytest.raises(OSError, match="went away"):
        decoder.put(breaking_off())
    for call in (
        lambda: decoder.prefill([0], [model.ids]),
        lambda: decoder.decode(model.ids[:1]),
        lambda: decoder.score(model.ids, 1),
        lambda: decoder.make_room(1, 1),
        lambda: decoder.put([]),
    ):
        with pytest.raises(EngineError, match="no weights, or half of them"):
            call()
    decoder.load(model.weights)
    assert everything(decoder, model.ids) == expected


def test_a_value_that_f16_cannot_hold_is_one_clear_error(model, running):
    decoder = running(model, "f16")
    huge = Change("model.embed_tokens.weight", np.array([5]), np.array([0x4780], np.uint16))  # 65536
    with pytest.raises(
        EngineError, match=r"embed_tokens\.weight hold 65536 .*f16 ends at 65504 .*bf16 or f32"
    ):
        decoder.put([huge])
    with pytest.raises(EngineError, match="half of them"):
        decoder.score(model.ids, 1)
    other = running(model, "bf16")
    other.put([huge])
    assert np.isfinite(other.score(model.ids, 1)).all()


@pytest.mark.parametrize("damage", ["cut", "emptied", "another magic", "another name"])
def test_a_broken_file_is_one_clear_error_in_llama_cpps_words(model, tmp_path, capfd, damage):
    plan = read_plan(model.folder)
    file = GgufFile(tmp_path / "model.gguf", plan, "f16")
    file.close()
    whole = file.path.read_bytes()
    content, words = {
        "cut": (whole[:-5000], "not within the file bounds"),
        "emptied": (b"", "failed to read magic"),
        "another magic": (b"BORK" + whole[4:], "invalid magic characters"),
        "another name": (whole.replace(b"blk.0.attn_q.", b"blk.0.attn_x."), "attn_q.weight' not found"),
    }[damage]
    file.path.write_bytes(content)
    with pytest.raises(EngineError, match=f"cannot load the model's file.*{words}.*load the weights again"):
        LlamaModel(file.path, gpu_layers=0, mapped=True, repacked=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_breaks_while_it_is_in_use_is_one_clear_error(model, running):
    decoder = running(model, "q4_0")
    decoder._file._map[:4] = 0
    with pytest.raises(EngineError, match="cannot load the model's file"):
        decoder.put(Training(model.weights).step(32))
    with pytest.raises(EngineError, match="half of them"):
        decoder.score(model.ids, 1)


def test_what_llama_cpp_cannot_decode_is_one_clear_error_and_the_next_call_works(model, running, capfd):
    decoder = running(model)
    decoder.make_room(2, 40)
    with pytest.raises(EngineError, match=r"could not decode 2 tokens .*invalid token"):
        decoder.prefill([0], [np.array([1, 40])])
    assert gap(decoder.prefill([0], [model.ids]), model.logits[-1:]) < 1e-4
    assert capfd.readouterr() == ("", "")


def test_rows_that_are_not_there_or_too_short_are_refused(model, running):
    decoder = running(model)
    with pytest.raises(EngineError, match="make room first"):
        decoder.decode(model.ids[:1])
    decoder.make_room(2, 256)
    with pytest.raises(EngineError, match="257 positions for rows of 256"):
        decoder.prefill([0], [np.zeros(257, np.int64)])
    decoder.prefill([0, 1], [np.zeros(256, np.int64)] * 2)
    with pytest.raises(EngineError, match="257 positions for rows of 256"):
        decoder.decode(model.ids[:1])
    decoder.prefill([0], [model.ids])
    with pytest.raises(EngineError, match="31 positions of row 0, which has 30"):
        decoder.copy(0, 1, 31)


def test_rows_beyond_the_room_are_refused(model, running):
    decoder, ids = running(model), model.ids
    decoder.make_room(2, 40)
    decoder.prefill([0, 1], [ids[:3]] * 2)
    for wrong in (
        lambda: decoder.prefill([2], [ids]),
        lambda: decoder.prefill([-1], [ids]),
        lambda: decoder.copy(0, 2, 3),
        lambda: decoder.copy(2, 0, 3),
        lambda: decoder.decode(ids[:3]),
    ):
        with pytest.raises(EngineError, match="where there is room for 2"):
            wrong()


def test_room_is_kept_where_it_is_enough_and_made_anew_where_it_is_not(model, running):
    decoder = running(model)
    decoder.make_room(4, 40)
    room = decoder._room
    decoder.prefill([0, 1, 2, 3], [model.ids] * 4)
    decoder.make_room(2, 30)
    assert decoder._room is room
    small = decoder.memory_bytes
    decoder.make_room(8, 300)
    assert decoder.memory_bytes > small
    logits = decoder.prefill(range(8), [model.ids] * 8)
    assert gap(logits, np.repeat(model.logits[-1:], 8, axis=0)) < 1e-4


def test_more_rows_or_memory_than_there_is_are_refused_before_anything_is_taken(model, running):
    decoder = running(model)
    for rows in (0, 257):
        with pytest.raises(EngineError, match=f"1 to 256 rows at once, not {rows}"):
            decoder.make_room(rows, 10)
    with pytest.raises(NoRoomError, match=r"room for 256 rows of 8000000 positions would take .*fewer rows"):
        decoder.make_room(256, 8_000_000)
    with pytest.raises(NoRoomError, match=r"more than llama\.cpp can number"):
        decoder.make_room(256, 80_000_000)
    with pytest.raises(NoRoomError, match="room for 1 rows of 400000000 positions"):
        decoder.score(np.broadcast_to(np.int64(1), 400_000_000), 1)
    decoder.make_room(1, 30)
    assert gap(decoder.prefill([0], [model.ids]), model.logits[-1:]) < 1e-4


def test_weights_that_are_mapped_are_not_mistaken_for_free_memory(model, running):
    decoder = running(model)
    decoder._size = 2**60  # mapped pages: the system counts them as memory that can be had
    with pytest.raises(NoRoomError, match="and the weights would take"):
        decoder.make_room(1, 30)


def test_a_model_that_does_not_fit_is_refused_before_any_work(model, tmp_path):
    config = json.loads((model.folder / "config.json").read_text())
    huge = {
        "vocab_size": 200_000,
        "hidden_size": 65536,
        "intermediate_size": 262_144,
        "num_hidden_layers": 400,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **huge}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(NoRoomError, match=r"weights as f16 would take .* GB are free .*smaller one"):
        LlamaDecoder(tmp_path, threads=1, scratch=scratch)
    assert not list(scratch.iterdir())


def test_nothing_is_left_in_the_scratch_folder(model, tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    decoder = model.decoder("f16", scratch=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    decoder.load(model.weights)
    assert not list(tmp_path.iterdir())  # the file has no name: it ends with the process, however that ends
    decoder.score(model.ids, 1)
    decoder.close()
    decoder.close()
    unused = model.decoder("f16", scratch=tmp_path)
    unused.close()
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(EngineError, match="no weights"):
        decoder.score(model.ids, 1)


def test_what_cannot_be_made_is_refused_in_words(model, tmp_path):
    for settings, words in [
        ({"kind": "q5_k"}, "kind 'q5_k' .*f32, f16, bf16, q8_0, q4_0"),
        ({"threads": 0}, "0 threads"),
        ({"scratch": tmp_path / "nowhere"}, "another scratch folder"),
    ]:
        with pytest.raises(EngineError, match=words):
            LlamaDecoder(model.folder, **settings)
    decoder = model.decoder()
    with pytest.raises(EngineError, match="load those of a head first"):
        decoder.make_room(1, 1)
    decoder.close()


@pytest.mark.skipif(offloads(), reason="this build of llama.cpp has a GPU")
def test_a_build_without_a_gpu_offloads_nothing_and_refuses_one_that_is_asked_for(model):
    for device in ("auto", "cpu"):
        assert gpu_layers_for(device, layers=2, size=1000) == 0
    for device in ("cuda", "mps"):
        with pytest.raises(EngineError, match=rf"cannot use a GPU, and the device {device} .*--device cpu"):
            model.decoder("f16", device=device)


@pytest.mark.parametrize(
    ("device", "free", "layers"),
    [
        ("cpu", 10**9, 0),
        ("auto", 10**9, 11),  # all ten, and the output
        ("cuda", 10**9, 11),
        ("cuda", 1000, 7),
        ("auto", 100, 0),
        ("auto", 0, 0),  # a build for a GPU on a machine that has none
        ("mps", None, 11),
    ],
)
def test_as_many_layers_are_offloaded_as_fit(monkeypatch, device, free, layers):
    monkeypatch.setattr(llama_decoder, "offloads", lambda: True)
    monkeypatch.setattr(llama_decoder, "gpu_memory", lambda: free)
    assert gpu_layers_for(device, layers=10, size=1100) == layers


def test_a_gpu_on_which_no_layer_fits_is_refused(monkeypatch):
    monkeypatch.setattr(llama_decoder, "offloads", lambda: True)
    monkeypatch.setattr(llama_decoder, "gpu_memory", lambda: 100)
    with pytest.raises(NoRoomError, match="no layer of the model fits on cuda"):
        gpu_layers_for("cuda", layers=10, size=1100)


def test_the_layers_reach_llama_cpp_and_every_update_loads_the_file_again(model, monkeypatch):
    loads = []
    load = llama_cpp.llama_model_load_from_file

    def recorded(path, options):
        loads.append(options.n_gpu_layers)
        return load(path, options)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", recorded)
    monkeypatch.setattr(llama_decoder, "offloads", lambda: True)
    monkeypatch.setattr(llama_decoder, "gpu_memory", lambda: 10**9)
    training = Training(model.weights)
    with closing(make_engine(EngineSpec("llama/f32", model.folder, "cuda", 2, 1))) as engine:
        assert engine.describe().device == "gpu"
        decoder = engine._decoder
        decoder.load(model.weights)
        assert (loads, decoder.live) == ([3], False)
        decoder.put(training.step(decoder.granule))
        assert (loads, decoder.live) == ([3, 3], False)
        updated = everything(decoder, model.ids)
    with closing(model.decoder("f32", device="cpu")) as fresh:
        fresh.load(training.weights())
        assert loads[2] == 0
        assert all(np.array_equal(*pair) for pair in zip(updated, everything(fresh, model.ids), strict=True))


def test_the_memory_of_gpus_is_asked_for_without_a_crash():
    free = gpu_memory()
    assert free is None or free >= 0
    assert offloads() or not free


def test_the_librarys_log_is_silent(model, running, capfd):
    everything(running(model, "f16"), model.ids)
    assert capfd.readouterr() == ("", "")
