"""Dead letters on the pages: how many a filter means before something is done to them, and the form to edit one."""

from __future__ import annotations

import json
from typing import Any

from waypost.errors import Undecodable
from waypost.web import documents
from waypost.web.access import Scope
from waypost.web.forms import Field
from waypost.web.problems import Problem
from waypost.web.reading import GROUPED_MAX, Place, answered, known_queue
from waypost.web.search import require_bodies

#: Fields of a request that choose no messages.
NO_FILTER = ("by", "rate", "confirm", "state", "delay", "at", "priority")
TIMES = ("died_before", "died_after", "published_before", "published_after")

Filter = documents.DeadFilter | documents.DeadQuery | documents.MessageFilter


async def count_letters(place: Place, queue: str, wanted: Filter, *, bodies: bool) -> documents.DeadCount:
    """How many messages a filter means, as far as a bounded number of them says."""
    await known_queue(place, queue)
    filters: Any = await filters_of(place, queue, wanted, bodies=bodies)
    async with answered():
        found = await place.post.count_messages(queue, getattr(wanted, "state", "dead"), limit=GROUPED_MAX, **filters)
    return documents.DeadCount(count=found.count, searched=found.searched, total=found.total)


async def filters_of(place: Place, queue: str, wanted: Filter, *, bodies: bool = True) -> dict[str, Any]:
    """The filters that a request names; a `Problem` if the user may not choose by a header."""
    check_times(wanted)
    if wanted.header is not None:
        await require_bodies(place, queue, "header", bodies=bodies)
    names = (name for name in wanted.__struct_fields__ if name not in NO_FILTER)
    return {name: value for name in names if (value := getattr(wanted, name)) is not None}


async def filter_scope(place: Place, wanted: Filter) -> Scope:
    """To choose by a header tells what messages have."""
    return "read" if wanted.header is None else "bodies"


def check_times(wanted: Filter) -> None:
    """Refuse times without a time zone."""
    for name in TIMES:
        given = getattr(wanted, name, None)
        if given is not None and given.tzinfo is None:
            raise Problem(422, "invalid-time", f"{name} needs a time zone, as in 2026-03-06T09:00:00Z")


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
