"""The log lines in the documentation are those of a real worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts import record_logs

pytestmark = pytest.mark.promise("FACE-6")


@pytest.mark.parametrize(
    ("title", "record"),
    # How often a worker logs that its store is away depends on how fast the machine is.
    [(title, record) for title, record in record_logs.SCENES.items() if record is not record_logs.record_lost_store],
)
def test_a_recording_on_the_page_is_what_a_worker_logs(title: str, record: Callable[[], str]) -> None:
    block = record_logs.block(title, record())
    assert block in record_logs.PAGE.read_text(), f"run python -m scripts.record_logs\n{block}"
