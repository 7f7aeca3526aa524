"""The interface for authors of contracts, and how untrusted contracts are treated."""

from __future__ import annotations

import dataclasses
import pickle
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node import contract
from echo_node.contract import (
    Contract,
    Prompt,
    Score,
    available,
    check_vectors,
    contract_vectors,
    find,
    load,
    prompt_of,
    random_from,
    registry,
    score_of,
)
from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.errors import LONGEST, ContractError
from protocol import blob_id, limits

KEY = bytes(range(32))


class Length(Contract):
    """A user's contract: the score is the share of `most` characters that were written."""

    name, version = "length", "1"

    def configure(self, params):
        self.most = params.whole("most", default=10, low=1, high=100)
        self.scale = params.real("scale", default=1, low=0.0, high=1.0)
        self.strict = params.flag("strict", default=False)
        self.unit = params.choice("unit", "letters", "words", default="letters")

    def prompt(self, key):
        return Prompt(f"Write about {random_from(key).choice(['cats', 'dogs'])}: ")

    def score(self, prompt, completion):
        return Score(self.scale * min(1.0, len(completion) / self.most), f"{prompt.text} {completion}")

    def answer(self, _prompt):
        return "é" * 2000


class LengthTwo(Length):
    version = "2"


class NoContract:
    name, version = "none", "1"


class Broken(Length):
    name, version = "broken", "1"

    def prompt(self, key):
        return {0: "text", 1: Prompt(b"bytes"), 2: Prompt("\ud800"), 3: None}[key[0]]

    def score(self, _prompt, completion):
        return {"type": 1.0, "nan": Score(float("nan"), ""), "high": Score(1.1, ""), "low": Score(-0.1, "")}[
            completion
        ]


def test_the_public_names_are_these():
    assert sorted(contract.__all__) == contract.__all__
    assert all(hasattr(contract, name) for name in contract.__all__)


# Luck


def test_luck_is_the_same_for_ever():
    luck = random_from(KEY)
    assert luck.take(8).hex() == "6bee36f515448b1f"
    assert [luck.below(n) for n in (1, 2, 10, 1000, 10**30)] == [0, 0, 7, 44, 316633386093403731584523840081]
    assert luck.digits(12) == "933859052185"
    assert luck.fraction() == 0.5693476769216814
    assert "".join(luck.shuffled("abcdefgh")) == "edfbchag"
    assert luck.between(-5, 5) == -5
    assert luck.choice("xyz") == "z"


@given(st.binary(min_size=32, max_size=32), st.integers(1, 2**80))
def test_a_draw_is_below_its_bound(key, bound):
    assert 0 <= random_from(key).below(bound) < bound


def test_draws_are_fair():
    luck = random_from(KEY)
    counts = [0] * 6
    for _ in range(6000):
        counts[luck.below(6)] += 1
    assert all(880 < count < 1120 for count in counts)
    assert 0.48 < sum(luck.fraction() for _ in range(5000)) / 5000 < 0.52


def test_the_stream_does_not_depend_on_how_it_is_read():
    whole, parts = random_from(KEY), random_from(KEY)
    assert whole.take(300) == b"".join(parts.take(n) for n in (1, 0, 63, 64, 65, 107))


@pytest.mark.parametrize("key", [b"short", bytes(33), bytearray(32), "x" * 32])
def test_luck_needs_a_key(key):
    with pytest.raises(ContractError, match="32 bytes"):
        random_from(key)


@pytest.mark.parametrize("bound", [0, -1])
def test_there_is_nothing_below_nothing(bound):
    with pytest.raises(ContractError):
        random_from(KEY).below(bound)
    with pytest.raises(ContractError):
        random_from(KEY).choice([])


# Parameters


def test_parameters_have_defaults_and_are_read_once():
    plain = Length()
    assert (plain.most, plain.scale, plain.strict, plain.unit) == (10, 1.0, False, "letters")
    given_ = Length({"most": 3, "scale": 0.5, "strict": True, "unit": "words"})
    assert (given_.most, given_.scale, given_.strict, given_.unit) == (3, 0.5, True, "words")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("most", 0),
        ("most", 101),
        ("most", True),
        ("most", 3.0),
        ("most", "3"),
        ("most", None),
        ("scale", float("nan")),
        ("scale", 2),
        ("scale", False),
        ("strict", 1),
        ("unit", "pages"),
        ("unit", ["words"]),
        ("colour", "red"),
        ("\x1b[2J", 1),
    ],
)
def test_a_bad_or_unknown_parameter_is_named(name, value):
    with pytest.raises(ContractError, match="length 1") as caught:
        Length({name: value})
    assert ascii(name)[1:-1].replace("\\", "") in str(caught.value).replace("\\", "")
    assert str(caught.value).isprintable()


# Prompts and scores


def test_a_prompt_is_frozen_and_travels_between_processes():
    data = {"answer": "1"}
    prompt = Prompt("ask", data)
    data["answer"] = "2"
    assert prompt.data["answer"] == "1"
    with pytest.raises(TypeError):
        prompt.data["answer"] = "2"
    with pytest.raises(AttributeError):
        prompt.text = "other"
    assert pickle.loads(pickle.dumps(prompt)) == prompt  # noqa: S301 -- our own bytes
    assert hash(prompt) == hash(Prompt("ask", {"answer": "1"}))


def test_a_reason_is_one_printable_line_whatever_it_quotes():
    reason = score_of(Length(), Prompt("p"), "\x1b[31m\n\u202e\x00" + "x" * 10**6).reason
    assert reason.isprintable()
    assert len(reason) == LONGEST


def test_a_score_has_one_zero():
    assert str(Score(-0.0, "").value) == "0.0"


@pytest.mark.parametrize("case", range(5))
def test_a_contract_that_makes_no_prompt_is_the_one_to_blame(case):
    with pytest.raises(ContractError, match="broken 1: making a prompt"):
        prompt_of(Broken(), bytes([case]) + bytes(31))


@pytest.mark.parametrize("completion", ["type", "nan", "high", "low", "unknown"])
def test_a_contract_that_gives_no_score_in_its_range_is_the_one_to_blame(completion):
    with pytest.raises(ContractError, match="broken 1: scoring"):
        score_of(Broken(), Prompt("p"), completion)


# Names


def plug_in(monkeypatch, *entries):
    """Pretend that installed packages declare these entries."""
    points = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points if group == registry.GROUP else [])


def test_a_built_in_contract_is_found_by_name_and_version():
    assert find("digits-reverse", "1") is DigitsReverse
    assert load("digits-reverse", "1", {"digits": 3}).digits == 3
    assert ("digits-reverse", "1", "") in [(each.name, each.version, each.package) for each in available()]


def test_a_plug_in_is_found_by_name_and_version(monkeypatch):
    here = __name__
    plug_in(monkeypatch, ("length@1", f"{here}:Length"), ("length@2", f"{here}:LengthTwo"))
    assert find("length", "1") is Length
    assert load("length", "2", {"most": 2}).version == "2"
    assert [each.version for each in available() if each.name == "length"] == ["1", "2"]
    plug_in(monkeypatch, ("length", f"{here}:Length"))
    assert find("length", "1") is Length


def test_what_is_missing_gets_an_error_that_says_what_to_install(monkeypatch):
    with pytest.raises(ContractError, match=r"no contract chess 1; it has .*digits-reverse.*pip install"):
        find("chess", "1")
    with pytest.raises(ContractError, match=r"version 9 is not: there is 1 \(built in\).*install"):
        find("digits-reverse", "9")
    plug_in(monkeypatch, ("length", f"{__name__}:LengthTwo"))
    with pytest.raises(ContractError, match="its version 1 is not: there is 2"):
        find("length", "1")


def test_only_the_wanted_plug_in_is_imported(monkeypatch):
    plug_in(monkeypatch, ("evil", "no.such.module:Contract"), ("length@9", "no.such.module:Contract"))
    assert find("digits-reverse", "1") is DigitsReverse
    assert available()
    with pytest.raises(ContractError, match="no contract length 1"):
        find("length", "1")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("evil", "no.such.module:Contract", "ModuleNotFoundError"),
        ("none", f"{__name__}:NoContract", "no subclass"),
        ("none", f"{__name__}:KEY", "no subclass"),
        ("other", f"{__name__}:Length", "calls itself length 1"),
    ],
)
def test_a_plug_in_that_cannot_be_used_says_why(monkeypatch, name, value, match):
    plug_in(monkeypatch, (name, value))
    with pytest.raises(ContractError, match=match):
        find(name, "1")


def test_a_range_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(Length, "high", float("inf"))
    plug_in(monkeypatch, ("length", f"{__name__}:Length"))
    with pytest.raises(ContractError, match="scores go from"):
        find("length", "1")


# Vectors


def test_a_contract_passes_its_own_vectors_and_fails_those_of_another():
    keys = [bytes([n]) * 32 for n in range(limits.CONTRACT_VECTORS)]
    vectors = contract_vectors(Length(), keys)
    assert [vector.key for vector in vectors] == keys
    assert all(len(vector.text.encode()) <= limits.TEXT_BYTES for vector in vectors)
    check_vectors(Length(), vectors)
    with pytest.raises(ContractError, match=r"vector 0 \(key 0000000000000000…\).*scores 0.5, not 1.0"):
        check_vectors(Length({"scale": 0.5}), vectors)
    with pytest.raises(ContractError, match=r"vector 0.*prompt is another one"):
        check_vectors(DigitsReverse(), vectors)


def test_the_first_vector_that_differs_is_named():
    vectors = list(contract_vectors(DigitsReverse(), [bytes([n]) * 32 for n in range(4)]))
    good = vectors[2]
    vectors[2] = dataclasses.replace(good, score=0.5)
    with pytest.raises(ContractError, match=r"vector 2 .*not 0\.5"):
        check_vectors(DigitsReverse(), vectors)


class Polite(Length):
    """The same words and scores as `Length`; what the system says before them is a parameter."""

    name = "polite"

    def configure(self, params):
        super().configure(params)
        self.says = params.text("says", default="Be polite.", longest=80)
        self.chats = params.flag("chats", default=True)

    def prompt(self, key):
        return Prompt(super().prompt(key).text, system=self.says, chat=self.chats)


@pytest.mark.parametrize("other", [{"says": "Be rude."}, {"says": ""}, {"chats": False}])
def test_what_the_system_says_is_pinned_by_the_vectors(other):
    vectors = contract_vectors(Polite(), [KEY])
    check_vectors(Polite(), vectors)
    with pytest.raises(ContractError, match=r"vector 0.*prompt is another one"):
        check_vectors(Polite(other), vectors)


def test_a_prompt_without_a_chat_is_pinned_by_its_text_alone():
    [vector] = contract_vectors(Length(), [KEY])
    assert vector.prompt == blob_id(Length().prompt(KEY).text.encode())


@pytest.mark.parametrize("count", [0, limits.CONTRACT_VECTORS + 1])
def test_a_run_has_some_vectors_and_not_too_many(count):
    with pytest.raises(ContractError, match="1 to 16"):
        contract_vectors(Length(), [KEY] * count)
