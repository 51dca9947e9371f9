"""Edit a dead letter and send it again: a new message replaces it, in one step of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waypost import codec
from waypost.checks import check_id, check_texts
from waypost.errors import InvalidInput, Undecodable
from waypost.operations.flow import ClientContext, Flow
from waypost.redaction import journal_copy
from waypost.store.port import Draft
from waypost.values import Page, Published, Stored

#: The header of an edited message with the id of the dead letter that it replaced.
EDITED_HEADER = "waypost-edited-from"


class Unchanged:
    """The type of `UNCHANGED`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCHANGED"


#: As a body: the body of the letter.
UNCHANGED: Any = Unchanged()


def replace_dead(
    context: ClientContext, queue: str, id: str, body: object, headers: Mapping[str, str] | None
) -> Flow[Published | None]:
    """Publish an edited message in place of a dead letter; None if there is no such letter (any more)."""
    given = None if headers is None else check_texts("headers", headers)
    page: Page = yield from context.attempt(context.store.peek(queue, "dead", 1, id=check_id(id)))
    if not page.messages:
        return None
    letter = page.messages[0]
    (new_id,) = context.session.message_ids(1)
    envelope = edited_envelope(letter, new_id, body, given)
    copy = journal_copy(context.redact, queue, new_id, envelope)
    draft = Draft(
        new_id, envelope, key=letter.key, priority=letter.priority, group=letter.group, journal_copy=copy
    )  # fmt: skip
    published = yield from context.operate_and_wake(
        queue, lambda operation: context.store.replace_dead(queue, letter.id, draft, operation)
    )
    if published is not None:
        stored = published.status in ("queued", "delayed")
        context.emit(
            "published" if stored else "duplicate", queue, "success" if stored else "skipped",
            message_id=published.id, key=letter.key, group=letter.group, priority=letter.priority, reason="edited",
        )  # fmt: skip
    return published


def edited_envelope(letter: Stored, new_id: str, body: object, headers: Mapping[str, str] | None) -> bytes:
    """Return the envelope of the message that replaces a letter: parts that are not edited stay as they are."""
    try:
        old = codec.open_envelope(letter.envelope)
    except Undecodable:
        if body is UNCHANGED:
            raise InvalidInput(f"message {letter.id} cannot be read, so it needs a new body") from None
        old = codec.Envelope(letter.id, "application/json", b"")
    if body is UNCHANGED:
        encoded = codec.Encoded(codec.CONTENT_TYPES.index(old.content_type), old.data, old.type_name)
    else:
        encoded = codec.encode_body(body)
    head = codec.head_of(
        old,
        # Handlers may be chosen by the type name: an edited body still has the same type.
        type_name=encoded.type_name or old.type_name,
        headers={**(old.headers if headers is None else headers), EDITED_HEADER: letter.id},
    )
    return codec.make_envelope(new_id, encoded, head)
