"""The log of actions: who did what, as records in the store, in a bounded number."""

from __future__ import annotations

import msgspec
from msgspec import structs

from waypost.checks import show
from waypost.errors import InvalidInput
from waypost.operations.flow import ClientContext, Flow
from waypost.operations.records import records, save_record
from waypost.policy import ACTIONS_MAX
from waypost.times import to_datetime
from waypost.values import SharedRecord
from waypost.views import LoggedAction, LoggedActions

KIND = "waypost-actions"
#: Longer texts are cut: an entry is one line for readers, and must fit into a record.
TEXT_CHARACTERS_MAX = 2_000


def log_action(context: ClientContext, action: LoggedAction) -> Flow[LoggedAction]:
    """Append an entry, with the time of the store's clock."""
    if not isinstance(action, LoggedAction):
        raise InvalidInput(f"an entry of the log of actions is a LoggedAction, not {show(action)}")
    texts = {name: getattr(action, name)[:TEXT_CHARACTERS_MAX] for name in ("user", "text", "command", "python")}
    (id,) = context.session.message_ids(1)
    entry = structs.replace(action, **texts, id=id, at=None)
    data = msgspec.json.encode(entry)
    saved = yield from save_record(context, KIND, id, data, version=0, keep=ACTIONS_MAX)
    return entry if saved.record is None else read_action(saved.record)


def actions(context: ClientContext, *, cursor: str | None, limit: int) -> Flow[LoggedActions]:
    """Return a page of the log, the newest first."""
    page = yield from records(context, KIND, cursor=cursor, limit=limit)
    return LoggedActions([read_action(record) for record in page.records], page.cursor)


def read_action(record: SharedRecord) -> LoggedAction:
    """Return an entry; of one that a newer release wrote in another format, the fields that this release knows."""
    at = to_datetime(record.created_ms)
    try:
        return structs.replace(msgspec.json.decode(record.data, type=LoggedAction), id=record.name, at=at)
    except msgspec.DecodeError:
        return LoggedAction("?", "?", "unreadable", None, False, "this entry cannot be read", id=record.name, at=at)
