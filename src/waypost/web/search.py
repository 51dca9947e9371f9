"""Where is my message? By index where there is one, else by a bounded search of one queue that says how far it came.

id               in all queues, then in their journals, then in the lake
key              unfinished messages of all queues; of one queue dead letters and finished ones too
chain            the messages that the first queue of the chain knows
group, type,     one queue, message by message: no store has an index of these
header, correlation_id
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from waypost import StoredMessage
from waypost.errors import Undecodable
from waypost.identity import is_message_id
from waypost.values import Links, MessageState, split_chain_id
from waypost.web import documents, reading
from waypost.web.problems import Problem
from waypost.web.reading import Place, answered

#: One request reads at most so many messages, for at most so long, and lists at most so many.
SEARCHED_MAX, SEARCH_SECONDS, FOUND_MAX = 40_000, 1.0, 100
#: Messages and about how many bytes one call reads: bodies may be large.
CALL_MESSAGES, CALL_BYTES = 200, 2 * 1024 * 1024
FIRST_CALL_MESSAGES = 20
#: What is searched for message by message.
SCANNED: tuple[documents.SearchField, ...] = ("group", "type", "header", "correlation_id")
#: What only those may search for who may see headers: an answer tells what a message has.
NEEDS_BODIES = ("header", "correlation_id")
ENDED: tuple[MessageState, ...] = ("dead", "done")

Fits = Callable[[StoredMessage[Any]], bool]


async def search(place: Place, query: documents.SearchQuery, *, bodies: bool) -> documents.SearchAnswer:
    """What a request asks for."""
    given = [(name, text) for name in documents.SEARCH_FIELDS if (text := getattr(query, name)) is not None]
    if len(given) != 1:
        raise Problem(422, "no-choice", f"say what to search for, one of {', '.join(documents.SEARCH_FIELDS)}")
    (by, text), queue = given[0], query.queue
    if queue is not None:
        await reading.known_queue(place, queue)
    if by in SCANNED:
        if queue is None:
            raise Problem(422, "no-queue", f"a search by {by} goes through one queue: name it in queue")
        if by in NEEDS_BODIES:
            await require_bodies(place, queue, by, bodies=bodies)
        return await scan(place, queue, by, text, reading.STATES, query.cursor)
    if by == "key":
        return await search_key(place, text, queue, query.cursor)
    return await search_chain(place, text) if by == "chain" else await search_id(place, text)


def guess_field(text: str) -> documents.SearchField:
    """What a text in the search box is: the id of a message, that of a chain, or else a key."""
    if is_message_id(text):
        return "id"
    queue, id = split_chain_id(text)
    return "chain" if queue and is_message_id(id) else "key"


async def require_bodies(place: Place, queue: str, by: str, *, bodies: bool) -> None:
    """Refuse a search that would tell what a user may not see."""
    if not bodies:
        raise Problem(403, "missing-scope", f"a search by {by} tells what headers have: this needs the scope 'bodies'")
    async with answered():
        if not await place.may_show_bodies(queue, allowed=True):
            raise Problem(403, "hidden-bodies", f"the headers of {queue} are hidden, so it is not searched by {by}")


# ---- by index --------------------------------------------------------------------------------------------------


async def search_id(place: Place, id: str) -> documents.SearchAnswer:
    """A message by its id in all queues and their journals, else in the lake."""
    answer = await reading.search(place, id)
    if answer.found or place.lake is None:
        return answer
    try:
        known = await reading.read_lake(place, id)
    except Problem as problem:
        return structs.replace(answer, lake_problem=problem.detail)
    found = [
        documents.Found(queue=queue, id=id, condition=f"{events[-1].event} (in the lake)", published_at=events[0].at)
        for queue, events in known.items()
    ]
    return structs.replace(answer, found=found, lake_searched=True)


async def search_key(place: Place, key: str, queue: str | None, cursor: str | None) -> documents.SearchAnswer:
    """Unfinished messages by key; of one queue those that ended too, which no index finds."""
    found: list[documents.Found] = []
    if cursor is None:
        async with answered():
            holders = await place.post.find_key(key, queue)
        found = [
            documents.Found(queue=one.queue, id=one.id, condition=one.state or one.ended or "ended just now", key=key)
            for one in holders[:FOUND_MAX]
        ]
    if queue is not None:
        ended = await scan(place, queue, "key", key, ENDED, cursor)
        return documents.SearchAnswer(
            query=key, by="key", queue=queue, found=[*found, *ended.found], queues_searched=1,
            searched=ended.searched, total=ended.total, next=ended.next,
        )  # fmt: skip
    async with answered():
        names = await place.post.queues()
    return documents.SearchAnswer(query=key, by="key", found=found, queues_searched=len(names))


async def search_chain(place: Place, chain: str) -> documents.SearchAnswer:
    """The messages of a chain that its first queue knows."""
    queue, id = split_chain_id(chain)
    if not queue or not is_message_id(id):
        raise Problem(
            422, "invalid-chain", f"{chain!r} is not the id of a chain, which is QUEUE/ID of its first message"
        )
    async with answered():
        links = await place.post.links(queue, id)
    return documents.SearchAnswer(query=chain, by="chain", found=chain_members(chain, links), queues_searched=1)


def chain_members(chain: str, links: Links) -> list[documents.Found]:
    """The messages that a chain names, each once, with what it is to the chain."""
    if not links.begun.known:
        return []
    roles = {chain: "first message"}
    if links.begun.last is not None:
        roles.setdefault(links.begun.last, "ended last")
    if links.begun.failed is not None:
        roles[links.begun.failed[0]] = f"broke the chain: {links.begun.failed[1]}"
    for names, role in ((links.members, "unfinished"), (links.watchers, "waits for the end of the chain")):
        for name in names:
            roles.setdefault(name, role)
    return [
        documents.Found(queue=queue, id=id, condition=role)
        for (queue, id), role in ((split_chain_id(name), role) for name, role in roles.items())
    ]


# ---- message by message ----------------------------------------------------------------------------------------


class Position(Struct, frozen=True):
    """How far a search has come."""

    state: int = 0
    searched: int = 0
    cursor: str | None = None

    def encode(self) -> str:
        """As the next request brings it back."""
        return f"{self.state}.{self.searched}.{self.cursor or ''}"

    @classmethod
    def decode(cls, text: str | None, states: int) -> Position:
        """Where a request goes on."""
        if text is None:
            return cls()
        state, searched, cursor = (*text.split(".", 2), "", "")[:3]
        known = all(one.isascii() and one.isdecimal() and len(one) < 16 for one in (state, searched))
        if not known or int(state) >= states:
            raise Problem(422, "invalid-input", "this cursor was not given by this search: begin without one")
        return cls(int(state), int(searched), cursor or None)


async def scan(
    place: Place, queue: str, by: documents.SearchField, text: str, states: tuple[MessageState, ...], cursor: str | None
) -> documents.SearchAnswer:
    """Search messages of some states of a queue one by one, for a bounded time."""
    figures = await reading.known_queue(place, queue)
    at, fits = Position.decode(cursor, len(states)), matcher(by, text)
    begun, until, size = at.searched, time.monotonic() + SEARCH_SECONDS, FIRST_CALL_MESSAGES
    found: list[documents.Found] = []
    going_on = True
    while going_on and at.searched - begun < SEARCHED_MAX and len(found) < FOUND_MAX and time.monotonic() < until:
        async with answered():
            page = await place.post.page(queue, states[at.state], cursor=at.cursor, limit=size)
        found += [found_document(one) for one in page.messages if fits(one)]
        seen, following = len(page.messages), at.state if page.cursor is not None else at.state + 1
        at = Position(following, at.searched + seen, page.cursor)
        going_on = following < len(states)
        bytes_each = sum(one.size for one in page.messages) // max(1, seen)
        size = max(1, min(CALL_MESSAGES, size * 4, CALL_BYTES // max(1, bytes_each)))
    async with answered():
        completed = (await place.post.policy(queue)).completed
    held = {
        "ready": figures.ledger.ready, "leased": figures.ledger.leased, "delayed": figures.ledger.delayed,
        "waiting": figures.ledger.waiting, "dead": figures.ledger.dead_kept,
        "done": min(completed, figures.ledger.done),
    }  # fmt: skip
    total = max(at.searched, sum(held[state] for state in states))
    return documents.SearchAnswer(
        query=text, by=by, queue=queue, found=found, queues_searched=1, searched=at.searched,
        total=total if going_on else at.searched, next=at.encode() if going_on else None,
    )  # fmt: skip


def found_document(message: StoredMessage[Any]) -> documents.Found:
    """A message that a search found."""
    return documents.Found(
        queue=message.queue,
        id=message.id,
        condition=message.state,
        key=message.key,
        group=message.group,
        published_at=message.published_at,
    )


def matcher(by: documents.SearchField, text: str) -> Fits:
    """Whether a message is one that is searched for. A damaged one is none."""
    match by:
        case "group":
            return lambda message: message.group == text
        case "key":
            return lambda message: message.key == text
        case "type":
            wanted = text.casefold()
            return readable(lambda message: wanted in (message.open().type_name or "").casefold())
        case "correlation_id":
            return readable(lambda message: message.open().correlation_id == text)
    name, separator, value = text.partition("=")
    name = name.strip().casefold()

    def has_header(message: StoredMessage[Any]) -> bool:
        return any(
            one.casefold() == name and (not separator or content == value.strip())
            for one, content in message.open().headers.items()
        )

    return readable(has_header)


def readable(fits: Fits) -> Fits:
    """The same, and no match for a message that cannot be read."""

    def try_it(message: StoredMessage[Any]) -> bool:
        try:
            return fits(message)
        except Undecodable:
            return False

    return try_it
