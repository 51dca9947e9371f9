"""URLs that name several hosts: of Sentinels, or of nodes of a Cluster."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis import connection
from redis.exceptions import RedisError

from waypost.errors import InvalidUrl
from waypost.urls import check_url, redact_text

SCHEMES = {"valkey": "redis", "redis": "redis", "valkeys": "rediss", "rediss": "rediss"}
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:,@/\s]+))(?::(\d{1,5}))?")


class MultiHostUrl(NamedTuple):
    """The parts of such a URL."""

    hosts: list[tuple[str, int]]
    #: The parts of the path.
    path: list[str]
    #: For a connection: user, password, and what stands behind the question mark.
    options: dict[str, Any]
    tls: bool
    #: Without user and password.
    display_name: str


def read_url(url: str, form: str, default_port: int) -> MultiHostUrl:
    """Read `scheme+form://[user:password@]host:port,host:port/path?options`. Errors never repeat the text."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    base = SCHEMES.get(scheme.removesuffix(f"+{form}"))
    if base is None:
        raise InvalidUrl(f"such a URL begins with valkey+{form}://, redis+{form}:// or, with TLS, valkeys+{form}://")
    place, question, query = rest.partition("?")
    authority, _, path = place.partition("/")
    user, at, names = authority.rpartition("@")
    hosts = []
    for name in names.split(","):
        found = HOST.fullmatch(name)
        if found is None or int(found[3] or default_port) > 65535:
            raise InvalidUrl(
                f"a host of this {scheme}:// URL cannot be read; write {scheme}://host1:{default_port},host2:{default_port}"
            )
        hosts.append((found[1] or found[2], int(found[3] or default_port)))
    try:
        # Through redis-py, which knows the types of its options; the host is a stand-in.
        read: Any = connection.parse_url
        options = read(f"{base}://{user}{at}host{question}{query}")
    except (ValueError, RedisError) as error:
        raise InvalidUrl(f"the Valkey URL cannot be used: {redact_text(str(error), url)}") from None
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    host_list = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)
    parts = [part for part in urlsplit(f"//host/{path}").path.split("/") if part]
    return MultiHostUrl(hosts, parts, dict(options), base == "rediss", f"{scheme}://{host_list}")
