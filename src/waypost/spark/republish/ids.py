"""Ids and headers of messages that a backfill publishes."""

from __future__ import annotations

from typing import Final

from waypost.identity import ID_CHARACTERS
from waypost.spark.source.publishing import RowIds
from waypost.spark.source.tables import BACKFILL_PREFIX

#: The header that names the backfill of a message.
HEADER: Final = "waypost-backfill"


class BackfillIds(RowIds):
    """Message ids of rows by queue and key, the same whenever and however often a row is sent."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"backfill:{queue}", 0)

    def of_key(self, key: str) -> str:
        """The id of a row."""
        return (BACKFILL_PREFIX + self._digest("key", key))[:ID_CHARACTERS]
