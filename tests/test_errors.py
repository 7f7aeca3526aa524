"""Who failed is named once, at the boundary where it happened."""

from __future__ import annotations

import pytest
import trio

from echo_node.errors import LONGEST, EchoError, EngineError, PeerError, StoreError, boundary


def test_an_escape_is_attributed_to_whoever_the_boundary_names():
    wanted = "reading a head: ValueError: 7 is no version"
    with (
        pytest.raises(PeerError, match=wanted) as caught,
        boundary(PeerError, "reading a head", advice="try another peer"),
    ):
        raise ValueError("7 is no version")
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value).endswith("(try another peer)")


def test_an_error_that_names_its_culprit_passes_unchanged():
    original = EngineError("out of memory")
    with pytest.raises(EngineError) as caught, boundary(PeerError, "serving a request"):
        raise original
    assert caught.value is original


def test_a_group_of_named_errors_passes_and_a_mixed_one_is_attributed():
    with pytest.raises(ExceptionGroup), boundary(PeerError, "serving"):
        raise ExceptionGroup("nursery", [EngineError("a"), StoreError("b")])
    with pytest.raises(PeerError, match="serving: KeyError"), boundary(PeerError, "serving"):
        raise ExceptionGroup("nursery", [KeyError("x"), StoreError("b")])


def test_stop_iteration_is_attributed_like_any_other_error():
    with pytest.raises(EngineError, match="StopIteration"), boundary(EngineError, "drawing"):
        next(iter(()))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_being_told_to_stop_is_no_failure(stop):
    with pytest.raises(stop), boundary(PeerError, "waiting"):
        raise stop


async def test_a_cancelled_wait_is_no_failure():
    with trio.move_on_after(0.01) as scope, boundary(PeerError, "waiting"):
        await trio.sleep_forever()
    assert scope.cancelled_caught


def test_text_from_a_stranger_is_one_printable_line_of_bounded_length():
    shown = str(PeerError("\x1b[2J\n\u202e" + "x" * 10_000))
    assert shown.isprintable()
    assert shown.startswith(r"\x1b[2J\n\u202e")
    assert len(shown) == LONGEST


def test_every_leaf_is_an_echo_error_and_drawn_in_the_tree():
    from echo_node import errors

    leaves = {leaf.__name__ for leaf in EchoError.__subclasses__() if leaf.__module__ == errors.__name__}
    assert leaves
    assert all(f"── {name} " in errors.__doc__ for name in leaves)


def test_a_panic_of_a_library_is_an_error_and_not_the_end():
    """Rust libraries raise what is no `Exception`; a stranger's tokenizer can make one do so."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    words.decoder = tokenizers.decoders.Strip(content="a", left=0, right=3)
    with pytest.raises(StoreError, match="gave up"), boundary(StoreError, "reading"):
        words.decode([0])
