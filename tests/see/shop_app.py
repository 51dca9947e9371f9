"""The handlers of worker processes whose metrics are read: `waypost worker tests.see.shop_app:post`."""

from __future__ import annotations

import os

from waypost import Constant, Dead, Message, Waypost

post = Waypost(os.environ["SHOP_URL"], namespace=os.environ["SHOP_NAMESPACE"], retry_budget=1)


@post.handler("orders", concurrency=4, retry=Constant(pause=0.01, attempts=5))
async def charge(body: str, message: Message[str]) -> None:
    """Fail once for some orders, always for others, and publish a sale for the rest."""
    if body == "shaky" and message.attempts == 0:
        raise ConnectionError("the bank is closed")
    if body == "bad":
        raise Dead("rejected")
    post.publish("sales", body)


@post.handler("mails")
def send(body: str) -> None:
    """Do nothing."""
