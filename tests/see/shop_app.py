"""The handlers of worker processes that are watched: `waypost worker tests.see.shop_app:post`."""

from __future__ import annotations

import os

from waypost import Constant, Dead, Message, Waypost

post = Waypost(os.environ["SHOP_URL"], namespace=os.environ["SHOP_NAMESPACE"], retry_budget=1)


@post.handler("orders", concurrency=4, retry=Constant(pause=0.01, attempts=5))
async def charge(body: str, message: Message[str]) -> None:
    """Fails at first for some, for ever for others, and tells the bookkeeper of the rest."""
    if body == "shaky" and message.attempts == 0:
        raise ConnectionError("the bank is closed")
    if body == "bad":
        raise Dead("rejected")
    post.publish("books", body)


@post.handler("mails")
def send(body: str) -> None:
    """Nothing to see here."""
