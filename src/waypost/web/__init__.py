"""The web page and the HTTP API: see and manage queues in a browser, or from scripts.

    waypost web --store valkey://127.0.0.1:6379

or inside an ASGI app of your own:

    app.mount("/waypost", create_app(post, auth=find_user, hosts=["ops.example.com"]))

It needs the extra `web`: pip install "waypost[web]".
"""

from __future__ import annotations

from waypost.errors import MissingExtra

try:
    from waypost.web.access import Token, User, header_auth
    from waypost.web.app import create_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "waypost":
        raise
    raise MissingExtra(f'the web page needs {error.name}, which is not installed: pip install "waypost[web]"') from None

__all__ = ["Token", "User", "create_app", "header_auth"]
