"""What the servers of one store share through it: sessions that were ended, and the key of CSRF tokens.

Sessions are signed cookies, which every server with the same secret accepts. A session that was ended is a record in
the stores until it would have expired; a server reads it now and then, not with every request. Without a secret
there is nothing to derive the key of CSRF tokens from: the first server writes a random one into the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256

from waypost import AsyncWaypost
from waypost.errors import WaypostError

log = logging.getLogger("waypost.web")

ENDED_KIND, KEY_KIND, KEY_NAME = "waypost-web-ended", "waypost-web", "csrf-key"
KEY_BYTES = 32
#: How long a server takes a session as not ended before it reads again.
CHECK_SECONDS = 3.0
#: A store that does not answer this soon is not waited for, and not tried again for `CHECK_SECONDS`.
ANSWER_SECONDS = 1.0
#: Sessions that a server remembers; it reads one again that it forgot.
SESSIONS_MAX = 10_000


class Sharing:
    """Records in the stores of a server, read rarely. A store that is away is passed over: its pages show nothing."""

    def __init__(self, posts: Sequence[AsyncWaypost], clock: Callable[[], float] = time.monotonic) -> None:
        self._posts = list(posts)
        self._clock = clock
        #: When each session was last read, and whether it was ended.
        self._sessions: OrderedDict[str, tuple[float, bool]] = OrderedDict()
        self._key: bytes | None = None
        self._own_key = os.urandom(KEY_BYTES)
        self._key_tried_at = float("-inf")

    async def key(self) -> bytes:
        """The key that all servers of the first store share; one of this process while the store is away."""
        if self._key is None and self._clock() - self._key_tried_at >= CHECK_SECONDS and self._posts:
            self._key_tried_at = self._clock()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    saved = await self._posts[0].save_record(KEY_KIND, KEY_NAME, self._own_key, version=0)
            except (WaypostError, TimeoutError) as error:
                log.warning("the key of CSRF tokens cannot be shared with other servers now: %s", error,
                            extra={"event": "web_key_not_shared"})  # fmt: skip
            else:
                assert saved.record is not None
                self._key = saved.record.data
        return self._key or self._own_key

    async def is_ended(self, session: str) -> bool:
        """Whether a session was ended, by any server."""
        at, ended = self._sessions.get(session, (float("-inf"), False))
        if ended or self._clock() - at < CHECK_SECONDS:
            return ended
        found = await asyncio.gather(*(self._find(post, session) for post in self._posts))
        self._remember(session, any(found))
        return any(found)

    async def end(self, session: str, seconds: float) -> None:
        """End a session, for all servers of the stores, for as long as it would last."""
        self._remember(session, True)
        await asyncio.gather(*(self._end(post, session, seconds) for post in self._posts))

    async def _find(self, post: AsyncWaypost, session: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool((await post.records(ENDED_KIND, names=[name_of(session)])).records)
        except (WaypostError, TimeoutError):
            return False

    async def _end(self, post: AsyncWaypost, session: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await post.save_record(ENDED_KIND, name_of(session), b"", ttl=max(1.0, seconds))
        except (WaypostError, TimeoutError) as error:
            log.warning("other servers may accept a session that was ended: %s", error,
                        extra={"event": "web_session_end_not_shared"})  # fmt: skip

    def _remember(self, session: str, ended: bool) -> None:
        self._sessions[session] = (self._clock(), ended)
        self._sessions.move_to_end(session)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)


def name_of(session: str) -> str:
    """The name of the record of a session. Who reads the store must not learn what signs a session."""
    return sha256(session.encode()).hexdigest()
