"""Checkpoints: training resumes bit for bit; a file is whole or skipped."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from echo_node.errors import ConfigError, EchoError, PeerError, StoreError
from echo_node.runs.algorithm import GrpoSettings
from echo_node.trainer.checkpoint import (
    Checkpoint,
    from_bytes,
    newest_checkpoint,
    read_checkpoint,
    to_bytes,
    write_checkpoint,
)
from tests.trainer.test_step import bits, new_step, ragged_batch, same

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def masters(step):
    return {name: part.view(torch.int32) for name, part in step._masters.parts.items()}


def alike(left, right):
    return (
        (left.step, left.notes, left.tensors.keys()) == (right.step, right.notes, right.tensors.keys())
        and all(left.tensors[name].dtype == right.tensors[name].dtype for name in left.tensors)
        and same(left.tensors, right.tensors)
    )


def small(step=7, **notes):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "nothing": torch.empty((0, 4)),
        "one": torch.tensor(3, dtype=torch.int64),
        "odd": torch.tensor([1, 2, 255], dtype=torch.uint8),
    }
    return Checkpoint(step, tensors, notes)


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 3), st.sampled_from([0.0, 0.1]))
def test_what_goes_on_from_a_file_is_what_would_have_gone_on(tmp_path_factory, seed, before, after, kl):
    folder = tmp_path_factory.mktemp("kept")
    batches = [ragged_batch(seed + number, groups=3) for number in range(before + after)]
    numbers = {"warm_up": 2, "weight_decay": 0.01, "grpo": GrpoSettings(kl=kl)}
    straight, interrupted = new_step(**numbers), new_step(**numbers)
    figures = [straight.step(batch) for batch in batches]
    for batch in batches[:before]:
        interrupted.step(batch)
    write_checkpoint(folder, interrupted.checkpoint())
    resumed = new_step(**numbers)
    resumed.restore(newest_checkpoint(folder))
    assert resumed.version == before
    assert [resumed.step(batch) for batch in batches[before:]] == figures[before:]
    assert same(bits(resumed), bits(straight))
    assert same(masters(resumed), masters(straight))
    assert alike(resumed.checkpoint(), straight.checkpoint())


def test_a_checkpoint_before_the_first_step_is_the_start():
    fresh, resumed = new_step(), new_step()
    resumed.step(ragged_batch(3))
    resumed.restore(from_bytes(to_bytes(fresh.checkpoint())))
    batch = ragged_batch(4)
    assert resumed.step(batch) == fresh.step(batch)
    assert same(masters(resumed), masters(fresh))


def test_training_goes_on_without_touching_a_checkpoint_and_the_other_way_round():
    step = new_step()
    step.step(ragged_batch(1))
    kept = step.checkpoint()
    before = to_bytes(kept)
    step.step(ragged_batch(2))
    other = new_step()
    other.restore(kept)
    other.step(ragged_batch(3))
    assert to_bytes(kept) == before


def test_what_others_have_added_travels_along_and_is_passed_over():
    step = new_step()
    step.step(ragged_batch(1))
    kept = step.checkpoint()
    more = dataclasses.replace(
        kept,
        tensors={**kept.tensors, "buffer.rewards": torch.ones(3, dtype=torch.float64)},
        notes={**kept.notes, "buffer.cursor": "é 17\n"},
    )
    read = from_bytes(to_bytes(more))
    assert alike(read, more)
    other = new_step()
    other.restore(read)
    assert same(masters(other), masters(step))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"learning_rate": 1e-3}, "learning_rate 0.0002"),
        ({"betas": (0.8, 0.99)}, "betas"),
        ({"temperature": 0.5}, "temperature"),
        ({"micro_batch_tokens": 64}, "micro_batch_tokens"),
        ({"grpo": GrpoSettings(clip_high=2.0)}, r"clip_high 1.28 \(now 2.0\)"),
        ({"grpo": GrpoSettings(kl=0.1)}, "kl"),
    ],
)
def test_other_settings_are_refused_by_name_and_nothing_changes(changed, named):
    kept, step = new_step().checkpoint(), new_step(**changed)
    step.step(ragged_batch(1))
    before = to_bytes(step.checkpoint())
    with pytest.raises(ConfigError, match=named):
        step.restore(kept)
    assert to_bytes(step.checkpoint()) == before


def test_a_number_that_an_older_node_did_not_know_had_its_default():
    kept = new_step().checkpoint()
    settings_note = json.loads(kept.notes["settings"])
    assert settings_note.pop("gradient_checkpointing") is False
    older = dataclasses.replace(kept, notes={**kept.notes, "settings": json.dumps(settings_note)})
    new_step().restore(older)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing False \(now True\)"):
        new_step(gradient_checkpointing=True).restore(older)


def test_what_does_not_fit_the_model_is_refused_and_nothing_changes():
    step = new_step()
    step.step(ragged_batch(1))
    kept = step.checkpoint()
    first = next(name for name in kept.tensors if name.startswith("master."))
    foul = torch.full_like(kept.tensors[first], torch.nan)
    wrong = [
        {name: tensor for name, tensor in kept.tensors.items() if name != first},
        {**kept.tensors, "master.more": torch.zeros(2)},
        {**kept.tensors, first: kept.tensors[first].double()},
        {**kept.tensors, first: kept.tensors[first][:-1]},
        {**kept.tensors, first: foul},
        {**kept.tensors, first.replace("master", "moment2"): torch.full_like(foul, -1.0)},
        {},
    ]
    other = new_step()
    before = to_bytes(other.checkpoint())
    for tensors in wrong:
        with pytest.raises(ConfigError, match="checkpoint"):
            other.restore(dataclasses.replace(kept, tensors=tensors))
    for notes in ({}, {**kept.notes, "settings": "[1"}, {**kept.notes, "random": "mt19937"}):
        with pytest.raises(ConfigError, match="checkpoint"):
            other.restore(dataclasses.replace(kept, notes=notes))
    assert to_bytes(other.checkpoint()) == before


def test_masters_that_round_to_what_was_published_stay_and_others_become_it():
    ahead, behind = new_step(), new_step()
    for seed in range(3):
        ahead.step(ragged_batch(seed))
        if seed < 2:
            behind.step(ragged_batch(seed))
    before, published = masters(behind), ahead.published()
    before = {name: part.clone() for name, part in before.items()}
    changed = behind.adopt(published, version=3)
    assert behind.version == 3
    assert same(bits(behind), bits(ahead))
    stayed = 0
    for name, part in behind._masters.parts.items():
        moved = part.view(torch.int32) != before[name]
        assert torch.equal(part[moved], published[name].float()[moved])
        assert torch.equal(behind._weights[name], published[name])
        stayed += int((~moved).sum())
    assert changed > 0
    assert stayed > 0
    assert behind.adopt(published) == 0
    assert behind.step(ragged_batch(9)).updated


def test_a_zero_of_the_other_sign_is_adopted():
    step = new_step()
    name, tensor = next(iter(step.published().items()))
    flat = tensor.clone().flatten()
    flat[:2] = torch.tensor([0.0, -0.0])
    step.adopt({**step.published(), name: flat.reshape(tensor.shape)})
    flat[:2] = -flat[:2]
    assert step.adopt({**step.published(), name: flat.reshape(tensor.shape)}) == 2
    assert torch.equal(step.published()[name].flatten()[:2].view(torch.int16), flat[:2].view(torch.int16))


def test_what_was_published_of_another_model_is_not_adopted():
    step = new_step()
    name, tensor = next(iter(step.published().items()))
    for wrong in (
        {name: tensor},
        {**step.published(), name: tensor.float()},
        {**step.published(), name: tensor[:1]},
    ):
        with pytest.raises(ConfigError, match="another model"):
            step.adopt(wrong)


def test_any_program_opens_the_file(tmp_path):
    kept = small(why="because")
    path = write_checkpoint(tmp_path, kept)
    assert path.name == "step-0000000007.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["note.why"] == "because"
        assert same({name: file.get_tensor(name) for name in file.keys()}, kept.tensors)  # noqa: SIM118
    assert alike(read_checkpoint(path), kept)


def test_the_newest_two_are_kept_and_nothing_beside_them(tmp_path):
    (tmp_path / "step-0000000001.safetensors.0123abcd.beside").write_bytes(b"torn by a crash")
    (tmp_path / "notes.txt").write_text("somebody else's")
    for step in (1, 2, 5):
        write_checkpoint(tmp_path, small(step))
    names = ["notes.txt", "step-0000000002.safetensors", "step-0000000005.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert newest_checkpoint(tmp_path).step == 5


def test_going_on_from_an_earlier_step_leaves_the_later_ones_behind(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path, small(step))
    write_checkpoint(tmp_path, small(15))
    assert [path.name[-14:] for path in sorted(tmp_path.iterdir())] == ["10.safetensors", "15.safetensors"]


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "not there") is None


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "renamed"])
def test_a_damaged_file_is_passed_over_with_a_warning_for_the_one_before(tmp_path, caplog, damage):
    write_checkpoint(tmp_path, small(1, of="old"))
    path = write_checkpoint(tmp_path, small(2))
    data = bytearray(path.read_bytes())
    data[-1] ^= damage == "flipped"
    path.write_bytes({"torn": data[:-5], "flipped": data, "empty": b""}.get(damage, to_bytes(small(3))))
    found = newest_checkpoint(tmp_path)
    assert (found.step, found.notes) == (1, {"of": "old"})
    assert "step-0000000002.safetensors" in caplog.text
    with pytest.raises(StoreError):
        read_checkpoint(path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_checkpoint(tmp_path, small(1))
    with pytest.raises(StoreError, match="complex"):
        write_checkpoint(tmp_path, Checkpoint(2, {"z": torch.zeros(1, dtype=torch.complex64)}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001.safetensors"]


@given(st.data())
def test_bytes_there_and_back(data):
    notes = data.draw(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
    names = data.draw(st.sets(st.text(max_size=9).filter(lambda name: name != "__metadata__"), max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        drawn = torch.randint(0, 2, shape, generator=generator)
        tensors[name] = drawn.to(data.draw(st.sampled_from(TYPES)))
    kept = Checkpoint(data.draw(st.integers(0, 2**53 - 1)), tensors, notes)
    assert alike(from_bytes(to_bytes(kept)), kept)


def test_no_bytes_are_read_but_those_that_were_written():
    whole = to_bytes(small(note="x"))
    for at in range(len(whole)):
        with pytest.raises(PeerError):
            from_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :], blame=PeerError)
    for cut in (*range(0, len(whole), 7), len(whole) - 1):
        with pytest.raises(StoreError):
            from_bytes(whole[:cut])
    with pytest.raises(StoreError):
        from_bytes(whole + b"\0")


def rehashed(data):
    """The bytes with a hash that fits them, as somebody would write who means harm."""
    start = 8 + len(b'{"__metadata__":{"blake3":"')
    blank = data[:start] + b"0" * 64 + data[start + 64 :]
    return blank[:start] + blake3(blank).hexdigest().encode() + blank[start + 64 :]


def test_whatever_is_hashed_well_is_a_checkpoint_or_an_error_with_a_culprit():
    draws, whole, read = random.Random(8), to_bytes(small(note="x")), 0
    length = int.from_bytes(whole[:8], "little")
    for _ in range(4000):
        data = bytearray(whole)
        for _ in range(draws.randint(1, 4)):
            at = draws.randrange(8 + length) if draws.random() < 0.9 else draws.randrange(len(data))
            match draws.randrange(3):
                case 0:
                    data[at] = draws.randrange(256)
                case 1:
                    data[at] = draws.choice(b'0123456789,:[]{}"-')
                case 2:
                    piece = draws.choice([b"-1", b"1e9", b"9" * 18, b"null", b"[" * 6, b'"', b"F64"])
                    data[at : at + len(piece)] = piece
        if len(data) < 200:
            continue
        try:
            found = from_bytes(rehashed(bytes(data)), blame=PeerError)
        except EchoError as error:
            assert type(error) is PeerError  # noqa: PT017
        else:
            read += 1
            assert all(type(text) is str for text in (*found.notes, *found.notes.values()))
            assert sum(tensor.nbytes for tensor in found.tensors.values()) <= len(data)
    assert 0 < read < 4000


@pytest.mark.parametrize(
    "metadata",
    [
        {"step": "1", "note.a": 3},
        {"step": 1},
        {"step": "-1"},
        {"step": "01"},
        {"step": "٣"},
        {"step": "9" * 17},
        {"step": "1", "other": "x"},
        {},
    ],
)
def test_a_header_that_says_something_else_is_refused(metadata):
    text = json.dumps({"__metadata__": {"blake3": "0" * 64, **metadata}}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(PeerError):
        from_bytes(rehashed(len(text).to_bytes(8, "little") + text), blame=PeerError)


def test_deep_and_wide_headers_are_refused_within_bounds():
    for text in (b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","step":' + b"[" * 100_000, b"{" * 100_000):
        with pytest.raises(PeerError):
            from_bytes(rehashed(len(text).to_bytes(8, "little") + text), blame=PeerError)
    with pytest.raises(PeerError, match="cut short"):
        from_bytes((1 << 62).to_bytes(8, "little") + bytes(1000), blame=PeerError)
