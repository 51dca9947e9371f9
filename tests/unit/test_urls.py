"""Redacted URLs: never a secret, whatever the text, and enough to identify the server."""

from __future__ import annotations

import re
import string
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from waypost.errors import InvalidUrl
from waypost.formatting import printable
from waypost.urls import HIDDEN, check_percent, check_url, holds_secret, read_url, redact_text, redact_url

pytestmark = pytest.mark.promise("SEE-6")

CANARY = "Canary7Secret"
#: What people put around and into passwords, with every character that has a meaning in a URL.
AROUND = st.text(st.sampled_from("%:/@?#&=,;+ []\\'\"\t\n\x00\x1b\x9b\u202eäé漢aZ0-._~|*!$()"), max_size=6)
SCHEMES = (
    "postgresql", "postgres", "valkey", "valkeys", "redis", "rediss", "valkey+sentinel", "valkey+cluster",
    "valkey+stream", "nats", "tls", "amqp", "amqps", "kafka", "s3", "s3a", "http", "spark",
)  # fmt: skip
HOSTS = st.lists(
    st.sampled_from(("db", "10.0.0.1:5432", "[::1]:6379", "a-b.example:1", "h:26379")), min_size=1, max_size=3
)
PATHS = st.sampled_from(("", "/", "/shop", "/0", "/service/0", "/%2F", "/a/b.parquet"))


@st.composite
def secret(draw: st.DrawFn) -> str:
    """A password with the canary in it, raw or percent-encoded."""
    text = draw(AROUND) + CANARY + draw(AROUND)
    return quote(text, safe="") if draw(st.booleans()) else text


@st.composite
def url_with_password(draw: st.DrawFn) -> str:
    user, hosts, path = draw(st.sampled_from(("", "u", "us%40er"))), draw(HOSTS), draw(PATHS)
    each = draw(st.booleans())
    info = f"{user}:{draw(secret())}@"
    names = ",".join((info if each or not at else "") + host for at, host in enumerate(hosts))
    return f"{draw(st.sampled_from(SCHEMES))}://{names}{path}"


@st.composite
def url_with_token(draw: st.DrawFn) -> str:
    return f"{draw(st.sampled_from(SCHEMES))}://{draw(secret())}@{','.join(draw(HOSTS))}{draw(PATHS)}"


@st.composite
def url_with_parameter(draw: st.DrawFn) -> str:
    name = draw(
        st.sampled_from(
            ("password", "sslpassword", "passfile", "sentinel_password", "sasl.password", "secret_key", "token", "x")
        )
    )
    before = draw(st.sampled_from(("", "db=1&", "sslmode=require&")))
    return f"{draw(st.sampled_from(SCHEMES))}://u@{','.join(draw(HOSTS))}{draw(PATHS)}?{before}{name}={draw(secret())}"


@st.composite
def url_without_host(draw: st.DrawFn) -> str:
    """The user forgot the host: the rest resembles a host and a port. (Not one that is a valid URL by chance.)"""
    given = draw(secret().filter(lambda text: "@" not in text and not re.match(r"\d{0,5}[/,]", text)))
    return f"{draw(st.sampled_from(SCHEMES))}://u:{given}{draw(PATHS)}"


@st.composite
def keywords(draw: st.DrawFn) -> str:
    text = draw(secret())
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"host=db user=u password='{escaped}' dbname=shop"


@st.composite
def anything(draw: st.DrawFn) -> str:
    """A text that is not a URL."""
    text: str = draw(_anything().filter(lambda text: read_url(text) is None))
    return text


@st.composite
def _anything(draw: st.DrawFn) -> str:
    return draw(AROUND) + draw(st.sampled_from(("", "://", "postgresql:/", "//"))) + draw(secret())


URLS = st.one_of(
    url_with_password(), url_with_token(), url_with_parameter(), url_without_host(), keywords(), anything()
)


@settings(max_examples=2_000, deadline=None)
@given(URLS)
@example(f"postgresql://u:{CANARY}%@h/db")
@example(f"postgresql://u:12/{CANARY}@h")
@example(f"nats://{CANARY}@h")
@example(f"valkey://h?password=a@{CANARY}")
@example(f"postgresql://u:p@{CANARY}?x@h")
def test_no_secret_of_a_url_is_ever_printed(url: str) -> None:
    assert CANARY not in redact_url(url)
    assert redact_url(url).isprintable()


@settings(max_examples=1_000, deadline=None)
@given(URLS, st.sampled_from(("", "'", '"', "`", "(")))
def test_no_secret_of_a_known_url_is_left_in_the_text_of_a_driver(url: str, mark: str) -> None:
    for quoted in (url, repr(url), ascii(url)):
        assert CANARY not in redact_text(f"connection to {mark}{quoted}{mark} failed: no route", url)
    # A driver may quote the part that it could not read.
    rest = url.partition("://")[2] or url
    assert CANARY not in redact_text(f'invalid percent-encoded token: "{rest}"', url)


@settings(max_examples=500, deadline=None)
@given(url_with_password().filter(lambda url: "\n" not in url))
def test_no_secret_of_an_unknown_url_is_left_in_a_text(url: str) -> None:
    assert CANARY not in redact_text(f"connection to {url} failed")


@settings(max_examples=500, deadline=None)
@given(URLS)
def test_a_refused_url_is_not_repeated_in_the_error(url: str) -> None:
    found: InvalidUrl | None = None
    try:
        check_percent(check_url(url))
    except InvalidUrl as error:
        found = error
    assert CANARY not in str(found)
    assert found is None or (found.__cause__ is None and found.__context__ is None)


@given(st.one_of(st.none(), st.integers(), st.binary(), st.text(max_size=200), st.text(string.printable, max_size=60)))
def test_every_text_has_an_answer(text: Any) -> None:
    assert isinstance(redact_url(text), str)
    assert redact_url(text).isprintable()
    if isinstance(text, str):
        assert isinstance(redact_text(text, text), str)
        assert isinstance(holds_secret(text), bool)


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("postgresql://u:pa%ss@db:5432/shop", "postgresql://db:5432/shop"),
        ("postgresql://u:12/secret@db", f"postgresql://{HIDDEN}"),
        ("nats://token@n1:4222", "nats://n1:4222"),
        ("nats://a:b@n1:4222,c:d@n2:4222", "nats://n2:4222"),
        ("valkey+sentinel://u:p@a:1,b:2/orders/0?sentinel_password=x", f"valkey+sentinel://a:1,b:2/orders/0?{HIDDEN}"),
        ("valkey://:p@[::1]:6379/0", "valkey://[::1]:6379/0"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
        ("sqlite:////var/lib/orders@main.db", "sqlite:////var/lib/orders@main.db"),
        ("memory://orders", "memory://orders"),
        ("amqp://u:p@h/%2F", f"amqp://h/{HIDDEN}"),
        ("s3://AK:SK@bucket/lake", "s3://bucket/lake"),
        ("host=h password=x", HIDDEN),
        ("", HIDDEN),
    ],
)
def test_a_redacted_url_names_its_server(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("see 'valkey://u:p@h:1'. And postgresql://a/b; done", "see 'valkey://h:1'. And postgresql://a/b; done"),
        ("password='a b' user=u", f"password={HIDDEN} user=u"),
        ("sslpassword=x sasl.password: y", f"sslpassword={HIDDEN} sasl.password: {HIDDEN}"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_a_text_keeps_what_is_no_secret(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted


def test_a_short_password_hides_the_whole_text_of_a_driver() -> None:
    assert redact_text('port "p" is bad', "valkey://u:p@h") == HIDDEN
    assert redact_text("a port is a number", "valkey://u:p@h", ours=True) == "a port is a number"


def test_terminal_control_characters_are_escaped() -> None:
    assert (
        printable("a\x1b[2J\x07\x9b\u202e\nb c\u00a0ä\U000e0001")
        == "a\\x1b[2J\\x07\\x9b\\u202e\\nb c\u00a0ä\\U000e0001"
    )
