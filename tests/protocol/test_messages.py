"""What holds for every type of message: round trips, limits, unknown, missing and mistyped fields,
contradictions.
"""

import dataclasses
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings

from protocol import canonical, decode, encode, wire
from protocol.errors import InconsistentError, OutOfRangeError, ProtocolError, SchemaError, TooLargeError

from .contradictions import CONTRADICTIONS
from .examples import MESSAGES
from .idl import definitions, edges, located
from .loose import loose_bytes
from .mutations import changed, malformed, spell, structural, tree_of
from .strategies import ANY

DEFINITIONS = definitions()
TYPES = {type(message).__name__: type(message) for message in MESSAGES.values()}


def every_wire_type() -> dict[str, type]:
    """All records and rows, those within others too."""
    found: dict[str, type] = {}
    for module in (
        "batch",
        "credit",
        "delivery",
        "blob",
        "envelope",
        "chain_sync",
        "inventory",
        "join",
        "link",
        "manifest",
        "peer_exchange",
        "receipt",
        "rollout_request",
        "slot_announcement",
        "election",
        "trajectory",
        "verdict",
        "weights",
    ):
        members = vars(__import__(f"protocol.{module}", fromlist=["_"]))
        found |= {
            name: thing
            for name, thing in members.items()
            if isinstance(thing, type) and hasattr(thing, "__wire__")
        }
    return found


def round_trips(kind: str, examples: int) -> None:
    @given(ANY[kind])
    @settings(
        max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
    )
    def round_trip(message):
        data = encode(message)
        again = decode(type(message), data)
        assert again == message
        assert encode(again) == data

    round_trip()


@pytest.mark.parametrize("kind", ANY)
def test_any_message_survives_the_round_trip(kind):
    round_trips(kind, examples=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ANY)
def test_thousands_of_messages_survive_the_round_trip(kind):
    round_trips(kind, examples=3000)


def test_the_spec_and_the_code_have_the_same_types():
    code = every_wire_type()
    assert set(code) == set(DEFINITIONS)
    for name, cls in code.items():
        told = DEFINITIONS[name]
        fields = [field.name for field in dataclasses.fields(cls)]
        assert (fields if told.row else sorted(fields)) == list(told.fields), name
        assert getattr(cls, "KIND", None) == told.kind, name
        assert getattr(cls, "LIMIT", None) == told.limit, name
        assert getattr(cls, "ITEMS", None) == told.items, name


FIELDS = [(name, field) for name, told in DEFINITIONS.items() for field in told.fields]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=[".".join(pair) for pair in FIELDS])
def test_each_limit_holds_at_its_edge_and_one_beyond(name, field):
    """The limits are those of SPEC.md; what lies on the edge passes the field, one beyond does not,
    either way.
    """
    notation = DEFINITIONS[name].fields[field]
    codec = wire._codec_of(get_type_hints(every_wire_type()[name], include_extras=True)[field], field)
    tried = edges(notation)
    assert tried.within or any(other in notation for other in DEFINITIONS), f"{notation} is not understood"
    for value in tried.within:
        assert codec.dump(codec.load(value)) == value
    for value in tried.beyond:
        for convert in (codec.load, codec.dump):
            with pytest.raises(SchemaError):
                convert(tuple(value) if convert is codec.dump and isinstance(value, list) else value)
        with pytest.raises(OutOfRangeError):
            codec.load(value)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_field_beyond_its_limit_is_named(kind):
    example = MESSAGES[kind]
    tree = tree_of(example)
    tried = 0
    for path, notation in located(type(example).__name__, tree):
        for value in edges(notation).beyond:
            data = canonical.pack(
                canonical.order(changed(tree, path, lambda _, value=value: value), items=400_000)
            )
            if len(data) > type(example).LIMIT:
                continue
            tried += 1
            with pytest.raises(SchemaError) as caught:
                decode(type(example), data)
            assert caught.value.where.startswith(spell(path).split("[")[0]), spell(path)
    assert tried


@pytest.mark.parametrize("kind", MESSAGES)
def test_unknown_missing_and_mistyped_fields_are_refused(kind):
    example = MESSAGES[kind]
    seen = set()
    for mutation in (*structural(example), *malformed(example)):
        with pytest.raises(ProtocolError) as caught:
            decode(type(example), mutation.data)
        assert caught.value.reason == mutation.error, mutation.name
        seen.add(mutation.error)
    assert {"unknown-field", "missing-field", "wrong-type", "truncated", "trailing-bytes"} <= seen


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_refused(what):
    message = CONTRADICTIONS[what]
    with pytest.raises(InconsistentError):
        decode(type(message), loose_bytes(message))
    with pytest.raises(InconsistentError):
        encode(message)


def test_loose_bytes_of_an_honest_message_are_its_bytes():
    """So what the contradictions show is not the fault of how they are written."""
    for message in MESSAGES.values():
        assert loose_bytes(message) == encode(message)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_beyond_its_size_is_refused_before_it_is_read(kind):
    cls = type(MESSAGES[kind])
    with pytest.raises(TooLargeError):
        decode(cls, b"\xc6" + (cls.LIMIT - 4).to_bytes(4) + bytes(cls.LIMIT - 4))


def test_a_message_beyond_its_size_is_not_written():
    head = MESSAGES["head"]
    swollen = dataclasses.replace(
        head,
        ext={"x": b"x" * 1000},
        routes=tuple(dataclasses.replace(head.routes[0], base=bytes([index]) * 32) for index in range(8)),
    )
    with pytest.raises(TooLargeError):
        encode(swollen)


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[31m", "\x00", "\x85", "\u202eevil", "\u2028", "\ufeff", "\u200f", "\u2066"]
)
def test_text_for_people_has_no_control_characters(text):
    with pytest.raises(OutOfRangeError):
        encode(dataclasses.replace(MESSAGES["join"], name=text))


def test_messages_are_frozen_and_keep_what_they_were_given():
    join = decode(TYPES["Join"], encode(MESSAGES["join"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        join.name = "another"
    with pytest.raises(TypeError):
        join.ext["more"] = 1


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_errors_of_a_message_are_short_however_long_the_fault(kind):
    example = MESSAGES[kind]
    tree = tree_of(example)
    field = next(iter(tree))
    data = canonical.pack(canonical.order(changed(tree, (field,), lambda _: "x" * 900)))
    with pytest.raises(ProtocolError) as caught:
        decode(type(example), data)
    assert len(str(caught.value)) < 200
