"""Dead letters on the pages: how many a filter means before something is done to them, and the form to edit one."""

from __future__ import annotations

import json
import time
from typing import Any

from waypost import StoredMessage
from waypost.errors import Undecodable
from waypost.formatting import error_line
from waypost.web import documents
from waypost.web.forms import Field
from waypost.web.problems import Problem
from waypost.web.reading import GROUPED_MAX, GROUPED_PAGE, GROUPED_SECONDS, Place, answered, known_queue


async def count_letters(
    place: Place, queue: str, wanted: documents.DeadFilter | documents.DeadQuery
) -> documents.DeadCount:
    """How many dead letters a filter means, as far as they can be read in bounded time."""
    check_times(wanted)
    figures = await known_queue(place, queue)
    total = figures.ledger.dead_kept
    if not any(getattr(wanted, name) is not None for name in wanted.__struct_fields__ if name not in NO_FILTER):
        return documents.DeadCount(count=total, searched=total, total=total)
    until, cursor, searched, count = time.monotonic() + GROUPED_SECONDS, None, 0, 0
    while True:
        async with answered():
            page = await place.post.page(queue, "dead", cursor=cursor, limit=GROUPED_PAGE)
        searched += len(page.messages)
        count += sum(fits(letter, wanted) for letter in page.messages)
        cursor = page.cursor
        if cursor is None or searched >= GROUPED_MAX or time.monotonic() > until:
            break
    return documents.DeadCount(count=count, searched=searched, total=max(searched, total))


def check_times(wanted: documents.DeadFilter | documents.DeadQuery) -> None:
    """Refuse times without a time zone."""
    for name in ("died_before", "died_after"):
        given = getattr(wanted, name)
        if given is not None and given.tzinfo is None:
            raise Problem(422, "invalid-time", f"{name} needs a time zone, as in 2026-03-06T09:00:00Z")


NO_FILTER = ("by", "rate", "confirm")


def fits(letter: StoredMessage[Any], wanted: documents.DeadFilter | documents.DeadQuery) -> bool:
    """Whether a filter means a letter; the same rule as that of bulk actions."""
    pairs = (
        (wanted.reason, letter.reason), (wanted.error_type, letter.error_type or ""), (wanted.group, letter.group),
        (wanted.error, error_line(letter.error) or ""),
    )  # fmt: skip
    if any(want is not None and want != have for want, have in pairs):
        return False
    ended = letter.ended_at
    if ended is not None and wanted.died_before is not None and ended >= wanted.died_before:
        return False
    if ended is not None and wanted.died_after is not None and ended < wanted.died_after:
        return False
    if wanted.key_prefix is not None and not (letter.key or "").startswith(wanted.key_prefix):
        return False
    try:
        return wanted.type_name is None or letter.open().type_name == wanted.type_name
    except Undecodable:
        return False


async def edit_fields(place: Place, queue: str, id: str, *, bodies: bool) -> list[Field]:
    """The form to edit a dead letter: its body and headers as JSON, if this user may see them."""
    if not await place.may_show_bodies(queue, allowed=bodies):
        raise Problem(403, "missing-scope", "to edit a message you must see it: this needs the scope 'bodies', and the "
                      "queue may be hidden")  # fmt: skip
    async with answered():
        found = (await place.post.page(queue, "dead", id=id, limit=1)).messages
    if not found:
        raise Problem(404, "unknown-letter", f"{queue} has no dead letter {id} any more")
    fields = [Field("id", "hidden", id)]
    try:
        envelope = found[0].open()
    except Undecodable:
        return [*fields, Field("body", "area", "", "Body", "JSON. The old one cannot be read.", (), True)]
    if envelope.content_type == "application/octet-stream":
        fields.append(Field("keep_body", "hidden", "true"))
    else:
        text = json.dumps(found[0].body, indent=2, ensure_ascii=False)
        help_text = "JSON; a text is in quotes. Its type and what else is not shown stay the same."
        fields.append(Field("body", "area", text, "Body", help_text, (), True))
    headers = json.dumps(dict(envelope.headers), indent=2, ensure_ascii=False)
    return [*fields, Field("headers", "area", headers, "Headers", "JSON: an object of texts.")]
