"""The traceback that is kept with the last error of a message: the frames of the application, and not too many."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import pytest

from waypost import NoRetry, Waypost
from waypost.message import cut_text, format_failure, traceback_text
from waypost.policy import TRACEBACK_CHARACTERS_MAX
from waypost.values import TRACEBACK_MARK, split_error

pytestmark = pytest.mark.promise("DEAD-1")


E = TypeVar("E", bound=BaseException)


def raised(error: E, cause: BaseException | None = None) -> E:
    """Return an error that was raised, with a traceback."""
    with suppress(BaseException):
        raise error from cause
    return error


def test_a_traceback_has_the_frames_of_the_application() -> None:
    text = traceback_text(raised(ValueError("no room"), raised(KeyError("k"))))
    assert text is not None
    assert text.startswith("Traceback (most recent call last):")
    assert "in raised" in text
    assert "raise error from cause" in text
    assert "The above exception was the direct cause" in text
    assert text.endswith("ValueError: no room")


def test_errors_of_a_group_are_in_it() -> None:
    text = traceback_text(raised(ExceptionGroup("tasks", [raised(ValueError("first")), raised(OSError("second"))])))
    assert text is not None
    assert "ValueError: first" in text
    assert "OSError: second" in text


def test_an_error_without_frames_has_none() -> None:
    assert traceback_text(ValueError("never raised")) is None
    assert format_failure(ValueError("never raised")) == "never raised"


def test_a_long_traceback_keeps_its_end_and_long_lines_are_cut() -> None:
    def deeper(depth: int) -> None:
        if depth:
            return deeper(depth - 1)
        return step_zero()

    def step_zero() -> None:
        other = [deeper] * 2
        raise ValueError("x" * 100_000 if other else "")

    with pytest.raises(ValueError, match="x") as caught:
        deeper(3)
    text = traceback_text(caught.value)
    assert text is not None
    assert "in step_zero" in text
    assert max(len(line) for line in text.splitlines()) <= 300
    causes = raised(ValueError("0"))
    for number in range(1, 60):
        causes = raised(ValueError(str(number)), causes)
    text = traceback_text(causes)
    assert text is not None
    assert len(text) == TRACEBACK_CHARACTERS_MAX
    assert text.startswith("…")
    assert text.endswith("ValueError: 59")


def test_text_of_an_error_is_never_read_as_its_traceback() -> None:
    assert cut_text(f"a{TRACEBACK_MARK}b\0c\ud800") == "a\\x1eb\\0c\\ud800"
    kept = format_failure(raised(ValueError(f"a{TRACEBACK_MARK}b")))
    text, traceback = split_error(kept)
    assert text == "a\\x1eb"
    assert traceback is not None
    assert TRACEBACK_MARK not in traceback
    assert split_error(None) == (None, None)
    assert split_error("plain") == ("plain", None)


def test_an_error_that_cannot_be_formatted_is_kept_all_the_same() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

        def __getattribute__(self, name: str) -> object:
            if name == "__notes__":
                raise RuntimeError("no")
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("no")

    assert format_failure(raised(Hostile())).startswith("(the error has no text)")


def test_a_dead_letter_has_the_traceback_of_the_block_that_failed() -> None:
    with Waypost("memory://tracebacks") as post:
        post.publish("orders", 1)
        with pytest.raises(ZeroDivisionError), post.receive("orders", retry=NoRetry()):
            raise ZeroDivisionError("of an order")
        (letter,) = post.dead_letters("orders")
        assert (letter.error_type, letter.error) == ("ZeroDivisionError", "of an order")
        assert letter.traceback is not None
        assert 'raise ZeroDivisionError("of an order")' in letter.traceback
        assert "waypost/operations" not in letter.traceback
        post.redrive("orders")
        (again,) = post.peek("orders")
        assert (again.error, again.traceback) == (None, None)


class Awkward(Exception):
    """An error whose attributes are user code that fails, or gives what no one asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__waypost"):
            return 7
        raise KeyError(name)


def test_an_error_with_attributes_of_its_own_is_kept_all_the_same() -> None:
    error = Awkward("no")
    assert format_failure(error) == "no"
    assert format_failure(error) == "no"
