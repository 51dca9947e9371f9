"""The texts of a failure in an event of Valkey's journal, without a server."""

from __future__ import annotations

import pytest

from waypost.store.valkey.packing import split_failure


@pytest.mark.promise("SEE-3")
@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (b"rejected\0ValueError", ("rejected", "ValueError", None)),
        (b"\0OSError", (None, "OSError", None)),
        (b"\0OSError\0no room", (None, "OSError", "no room")),
        ("grund\0Fehler…\0é\0x".encode(), ("grund", "Fehler…", "é\0x")),
        (b"\0\0only a text", (None, None, "only a text")),
        (b"", (None, None, None)),
    ],
)
def test_events_of_the_first_release_have_no_error(text: bytes, failure: tuple[str | None, ...]) -> None:
    assert split_failure(text) == failure
