"""Time that jumps, with what threads do done in place: a clock that jumps would not wait for them."""

from tests.terms.conftest import autojump_clock

__all__ = ["autojump_clock"]
