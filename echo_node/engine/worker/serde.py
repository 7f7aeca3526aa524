"""Serialization of requests, draws, scores and weights for the engine's pipe.

Plain values, arrays as bytes. Both sides of a worker share it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple
from typing import Any, Final, cast, get_args

import numpy as np

from echo_node.engine.base import (
    Change,
    Claim,
    Description,
    Draw,
    Dtype,
    Finish,
    Finished,
    Floats,
    Ids,
    Prefix,
    SamplingLimits,
    Scores,
    SlotRequest,
    Span,
    TensorBytes,
    TurnEnd,
    TurnReply,
)
from echo_node.errors import EngineError
from echo_node.runtime.ipc import Message, PipeError, field
from protocol.turns import TurnRules

PIECE_BYTES: Final = 2**20
"""Weights travel in pieces of this size at most."""
_PIECE_ELEMENTS: Final = 2**16
_SCORES: Final = ("logprobs", "low", "high", "squares_low", "squares_high", "squares")

if sys.byteorder != "little":
    raise ImportError("weights and rows of numbers are little-endian here")


def pack_limits(limits: SamplingLimits) -> Message:
    """Limits as fields of a message."""
    return {
        "max_tokens": int(limits.max_tokens),
        "temperature": float(limits.temperature),
        "end_tokens": [int(token) for token in limits.end_tokens],
        "vocab_size": int(limits.vocab_size),
    }


def unpack_limits(message: Message) -> SamplingLimits:
    """Limits out of the fields of a message."""
    ends = field(message, "end_tokens", list)
    if not all(type(token) is int for token in ends):
        raise PipeError("a message with an end token that is no number")
    return SamplingLimits(
        max_tokens=field(message, "max_tokens", int),
        temperature=field(message, "temperature", float),
        end_tokens=frozenset(ends),
        vocab_size=field(message, "vocab_size", int),
    )


def pack_request(request: SlotRequest) -> Message:
    """Return a request as fields of a message."""
    return {
        "prompt": pack_ids(request.prompt, "a prompt"),
        "slot_key": bytes(request.slot_key),
        "group_size": int(request.group_size),
        "drawn": [pack_prefix(prefix) for prefix in request.drawn],
        "turns": None
        if request.turns is None
        else [*astuple(request.turns)[:1], *astuple(request.turns)[2:]],
        **pack_limits(request.limits),
    }


def pack_prefix(prefix: Prefix) -> Message:
    """Return tokens of a completion as fields of a message."""
    return {
        "completion": prefix.completion,
        "ids": pack_ids(prefix.ids, "a prefix"),
        "logprobs": prefix.logprobs.astype(np.float64).tobytes(),
    }


def unpack_prefix(message: Any) -> Prefix:
    """Return the tokens of a completion in a message."""
    if type(message) is not dict:
        raise PipeError("a prefix that is no map")
    ids, logprobs = unpack_ids(message, "ids"), _floats(message, "logprobs")
    if ids.size != logprobs.size:
        raise PipeError("a prefix that contradicts itself")
    return Prefix(field(message, "completion", int), ids, logprobs)


def unpack_request(message: Message) -> SlotRequest:
    """Return the request in a message."""
    return SlotRequest(
        prompt=unpack_ids(message, "prompt"),
        slot_key=field(message, "slot_key", bytes),
        group_size=field(message, "group_size", int),
        limits=(limits := unpack_limits(message)),
        drawn=tuple(map(unpack_prefix, field(message, "drawn", list))),
        turns=_turn_rules(message.get("turns"), limits),
    )


def _turn_rules(packed: object, limits: SamplingLimits) -> TurnRules | None:
    match packed:
        case None:
            return None
        case [int(end), int(environment), int(max_tokens), int(most), int(tokens)]:
            return TurnRules(end, limits.end_tokens, environment, max_tokens, most, tokens)
    raise PipeError("a request with rules of turns that are none")


def pack_turn(ended: TurnEnd) -> Message:
    """Return an ended turn as fields of a message."""
    return {
        "request": ended.request,
        "completions": list(ended.completions),
        "ids": pack_ids(ended.ids, "a turn"),
        "start": ended.start,
        "turn": ended.turn,
        "environment": ended.environment,
    }


def unpack_turn(message: Message) -> TurnEnd:
    """Return the ended turn in a message."""
    completions = field(message, "completions", list)
    if not completions or not all(type(each) is int for each in completions):
        raise PipeError("a turn of no completion")
    return TurnEnd(
        field(message, "request", int),
        tuple(completions),
        unpack_ids(message, "ids"),
        field(message, "start", int),
        field(message, "turn", int),
        field(message, "environment", int),
    )


def pack_reply(ended: TurnEnd, reply: TurnReply) -> Message:
    """Return the answer to a turn as fields of a message."""
    return {
        "request": ended.request,
        "completion": ended.completions[0],
        "ids": None if reply.ids is None else pack_ids(reply.ids, "a reply"),
        "finish": reply.finish,
    }


def unpack_reply(message: Message) -> tuple[int, int, TurnReply]:
    """Return request, completion and answer in a message."""
    ids = None if message.get("ids") is None else unpack_ids(message, "ids")
    return field(message, "request", int), field(message, "completion", int), TurnReply(ids, _finish(message))


def _finish(message: Message) -> Finish:
    finish = field(message, "finish", str)
    if finish not in get_args(Finish):
        raise PipeError(f"a completion that ended as {finish!r}")
    return cast("Finish", finish)


def pack_finished(finished: Finished) -> Message:
    """Return a completion as fields of a message."""
    draw = finished.draw
    return {
        "request": finished.request,
        "completion": finished.completion,
        "ids": pack_ids(draw.ids, "a completion"),
        "logprobs": draw.logprobs.astype(np.float64).tobytes(),
        "finish": draw.finish,
        "spans": [[span.start, span.head_id] for span in draw.spans],
    }


def unpack_finished(message: Message) -> Finished:
    """Return the completion in a message."""
    ids, logprobs = unpack_ids(message, "ids"), _floats(message, "logprobs")
    finish = _finish(message)
    spans = field(message, "spans", list)
    if ids.size != logprobs.size:
        raise PipeError("a completion that contradicts itself")
    if not all(map(_is_span, spans)):
        raise PipeError("a completion whose spans are none")
    draw = Draw(ids, logprobs, finish, tuple(Span(*span) for span in spans))
    return Finished(field(message, "request", int), field(message, "completion", int), draw)


def _is_span(span: object) -> bool:
    match span:
        case [int(), bytes() | None]:
            return True
    return False


def pack_claim(claim: Claim) -> Message:
    """Return a claim as fields of a message."""
    return {"prompt": pack_ids(claim.prompt, "the prompt"), "ids": pack_ids(claim.ids, "the completion")}


def unpack_claim(message: Message) -> Claim:
    """Return the claim in a message."""
    return Claim(unpack_ids(message, "prompt"), unpack_ids(message, "ids"))


def pack_scores(scores: Scores) -> Message:
    """Scores as fields of a message."""
    return {name: getattr(scores, name).astype(np.float64).tobytes() for name in _SCORES}


def unpack_scores(message: Message) -> Scores:
    """Scores out of the fields of a message."""
    columns = [_floats(message, name) for name in _SCORES]
    if len({column.size for column in columns}) != 1:
        raise PipeError("scores of different lengths")
    return Scores(*columns)


def pack_description(description: Description) -> Message:
    """Return an engine's description as fields of a message."""
    return asdict(description)


def unpack_description(message: Message) -> Description:
    """Return the engine's description in a message."""
    context, speed = message.get("context"), message.get("tokens_per_second")
    return Description(
        engine_class=field(message, "engine_class", str),
        device=field(message, "device", str),
        parameters=field(message, "parameters", int),
        memory_bytes=field(message, "memory_bytes", int),
        context=None if context is None else field(message, "context", int),
        rows=field(message, "rows", int),
        tokens_per_second=None if speed is None else field(message, "tokens_per_second", float),
    )


def pack_shape(name: str, tensor: TensorBytes) -> list[Any]:
    """Return a tensor's name, type, shape and size, without its data."""
    return [name, tensor.dtype, [int(size) for size in tensor.shape], memoryview(tensor.data).nbytes]


def unpack_shape(entry: Any) -> tuple[str, tuple[Dtype, tuple[int, ...], int]]:
    """Return a tensor's name, type, shape and bytes.

    The engine checks that they fit together.
    """
    if type(entry) is not list or [type(part) for part in entry] != [str, str, list, int]:
        raise PipeError("a tensor without name, type, shape and size")
    name, dtype, shape, size = entry
    if not all(type(length) is int for length in shape) or size < 0:
        raise PipeError("a tensor whose shape is none")
    return name, (dtype, tuple(shape), size)


def pieces(tensor: TensorBytes) -> Iterator[memoryview]:
    """Yield a tensor's bytes in pieces, without a copy of the whole."""
    data = memoryview(tensor.data)
    if data.nbytes:
        data = data.cast("B")
        for start in range(0, data.nbytes, PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def pack_change(change: Change, granule: int) -> Iterator[Message]:
    """Yield a change as message fields, cut between whole runs of `granule`."""
    step = max(_PIECE_ELEMENTS // granule, 1) * granule
    values = change.values
    for start in range(0, change.positions.size, step):
        yield {
            "tensor": change.tensor,
            "positions": change.positions[start : start + step].astype(np.int64).tobytes(),
            "values": values[start : start + step].tobytes(),
            "width": values.itemsize,
        }


def unpack_change(message: Message) -> Change:
    """Return the changed elements in a message."""
    width = field(message, "width", int)
    if width not in {2, 4}:
        raise PipeError(f"changed elements of {width} bytes")
    positions = _row(message, "positions", np.dtype(np.int64))
    values = _row(message, "values", np.dtype(np.uint16 if width == 2 else np.uint32))
    if positions.size != values.size:
        raise PipeError(f"{positions.size} changed elements with {values.size} values")
    return Change(field(message, "tensor", str), positions, values)


def pack_ids(ids: Ids, name: str) -> bytes:
    """Return a row of token ids as bytes."""
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise EngineError(f"{name} is no row of token ids")
    return ids.astype(np.int64).tobytes()


def unpack_ids(message: Message, name: str) -> Ids:
    """Return the row of token ids in a message."""
    return cast("Ids", _row(message, name, np.dtype(np.int64)))


def _floats(message: Message, name: str) -> Floats:
    return cast("Floats", _row(message, name, np.dtype(np.float64)))


def _row(message: Message, name: str, dtype: np.dtype[Any]) -> Any:
    data = field(message, name, bytes)
    if len(data) % dtype.itemsize:
        raise PipeError(f"a message whose {name!r} is no row of {dtype}")
    return np.frombuffer(data, dtype).copy()  # writable, and in memory of its own
