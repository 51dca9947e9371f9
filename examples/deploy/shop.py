"""The program that the files of this folder deploy: its store is the one of WAYPOST_URL."""

import os

from waypost import Waypost

post = Waypost(os.environ["WAYPOST_URL"])


@post.handler("orders", concurrency=20)
def charge(order: dict[str, int]) -> None: ...
