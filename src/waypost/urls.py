"""URLs of servers, and how to show one without its secrets.

Every URL in an error, a log line, a `repr` or a page comes from `redact_url`. It never raises, and
for an ambiguous text it returns the scheme at most. `check_url` refuses such a text before a
driver gets it, because a driver may quote it in an error. `redact_text` is for texts of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from waypost.errors import InvalidUrl
from waypost.formatting import printable

HIDDEN: Final = "…"
#: No supported scheme is longer; a longer one is a mistake, and may be a secret.
SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,31}")
#: A name, an address in brackets, or libpq's spelling of a socket's folder.
HOST: Final = re.compile(
    r"(?:\w[\w.\-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._\-]{1,16})?\]|%2F(?:%2F|[\w.\-]){1,107})(?::[0-9]{1,5})?",
    re.IGNORECASE,
)
#: Names of databases, services, topics and virtual hosts, with the slashes between them.
PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~\-]{0,64}){1,16}")
#: Schemes whose text after `://` is a path or a name on this machine, without a user and a password.
LOCAL: Final = frozenset(("sqlite", "lake", "memory", "file"))
#: Names of parameters and settings whose values are secrets, as URLs, libpq, librdkafka and object stores have them.
SECRET_NAME: Final = re.compile(
    r"pass|pwd|secret|token|credential|access_?key|account_?key|api_?key|sasl|signature|^sig$|^key$|auth|sslkey|jaas",
    re.IGNORECASE,
)
_ASSIGNED: Final = re.compile(
    r"(?i)\b([\w.\-]*(?:pass(?:word|wd|file|phrase)?|pwd|secret|token|credentials?|(?:access|account|api)[_.\-]?key)[\w.\-]*)"
    r"(\s*[=:]\s*)(?:'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?|[^\s&,;)\]}]+)"
)
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,31}://\S*")
#: What ends a URL in a sentence.
_CLOSING: Final = "'\"`)]}>,;.:!"
#: A shorter secret may appear in a text by chance.
_SHORT: Final = 4
#: Texts are cut here before they are searched.
TEXT_CHARACTERS_MAX: Final = 8_192


#: A longer file is not one with a URL.
FILE_CHARACTERS_MAX: Final = 8_192


class Url(NamedTuple):
    """A URL of a server in its parts. Hosts, path and query are as they were written."""

    scheme: str
    #: The text before the last @ of the authority, None if there is no @.
    user_info: str | None
    hosts: tuple[str, ...]
    path: str
    query: str
    fragment: str


def unescape(text: str) -> str:
    """Return a part of a URL without percent signs."""
    if "%" not in text:
        return text
    from urllib.parse import unquote  # most URLs do not need it

    return unquote(text)


def read_url(text: str) -> Url | None:
    """Return the parts of a URL, or None if it is ambiguous or invalid.

    An @ after the first /, ? or # may be the end of a password, and the text before it may be the password;
    the same holds for an invalid host or port.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or SCHEME.fullmatch(scheme) is None or _holds_odd_characters(rest):
        return None
    found = re.search(r"[/?#\\]", rest)
    end = len(rest) if found is None else found.start()
    authority, tail = rest[:end], rest[end:]
    if "@" in tail or "\\" in tail:
        return None
    user_info, at, names = authority.rpartition("@")
    hosts = () if re.fullmatch(r"(?::\d{0,5})?", names) else tuple(names.split(","))
    if not all(HOST.fullmatch(host) for host in hosts):
        return None
    place, _, fragment = tail.partition("#")
    path, _, query = place.partition("?")
    return Url(scheme, user_info if at else None, hosts, path, query, fragment)


def _holds_odd_characters(text: str) -> bool:
    """Return whether a character is a space or not printable: no URL has one, and a password may continue after it."""
    return any(character == " " or not character.isprintable() for character in text)


def redact_url(url: object) -> str:
    """Return a URL without user, password and parameters: scheme, hosts and path, if they are certain. Never raises."""
    if not isinstance(url, str):
        return HIDDEN
    scheme, separator, rest = url.partition("://")
    if not separator or SCHEME.fullmatch(scheme) is None:
        return HIDDEN
    if scheme in LOCAL and (rest.startswith("/") or scheme == "memory"):
        return _redact_local(scheme, rest)
    parts = read_url(url)
    if parts is None:
        return f"{scheme}://{HIDDEN}"
    is_safe = not parts.path or scheme == "unix" or PATH.fullmatch(parts.path)
    path = parts.path if is_safe else f"/{HIDDEN}"
    rest_hidden = f"?{HIDDEN}" if parts.query or parts.fragment else ""
    return f"{scheme}://{','.join(parts.hosts)}{path}{rest_hidden}"


def _redact_local(scheme: str, rest: str) -> str:
    path, question, _ = rest.partition("?")
    if scheme == "memory" and "@" in path:
        return f"{scheme}://{HIDDEN}"
    return f"{scheme}://{printable(path)}" + (f"?{HIDDEN}" if question else "")


def resolve_url(url: str) -> str:
    """Return the URL itself, or the one in the file that it names: `file:///run/secrets/waypost_url`.

    So a password is in no argument and no variable of a process. Errors have the path and nothing of the contents.
    """
    scheme, separator, rest = url.partition("://")
    if scheme != "file" or not separator:
        return url
    path = unescape(rest)
    if not path.startswith("/") or "\0" in path:
        raise InvalidUrl(
            "a file:// URL names a file by its absolute path, with three slashes: file:///run/secrets/waypost_url"
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(FILE_CHARACTERS_MAX + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidUrl(f"the URL of the store cannot be read from the file {printable(path)}: {reason}") from None
    if not text or len(text) > FILE_CHARACTERS_MAX or len(text.split()) > 1 or text.startswith("file:"):
        raise InvalidUrl(f"the file {printable(path)} must have one line: the URL of the store, as valkey://host:6379")
    return text


def check_url(url: str) -> Url:
    """Return the parts of the URL of a server, or raise `InvalidUrl`, which contains only its scheme."""
    parts = read_url(url)
    if parts is None:
        scheme, separator, _ = url.partition("://")
        prefix = f"{scheme}://" if separator and SCHEME.fullmatch(scheme) else ""
        raise InvalidUrl(
            f"the host or port of this {prefix} URL cannot be read: it is SCHEME://USER:PASSWORD@HOST:PORT/PATH, and "
            "in a user, a password and a parameter % is written as %25, / as %2F, @ as %40, : as %3A, ? as %3F, # as "
            "%23 and a space as %20"
        )
    return parts


def check_percent(parts: Url) -> None:
    """Refuse a % that does not start an escape: libpq would quote it together with the text around it."""
    for name, text in (("user or password", parts.user_info or ""), ("path", parts.path), ("parameters", parts.query)):
        if re.search(r"%(?![0-9A-Fa-f]{2})|%00", text):
            raise InvalidUrl(
                f"the {name} of this {parts.scheme}:// URL holds a % that is not followed by two hexadecimal digits, "
                "or stands for NUL; write % as %25"
            )


def holds_secret(url: str) -> bool:
    """Return whether a URL has, or may have, a password: before its host or among its parameters."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in LOCAL:
        return any(SECRET_NAME.search(name) for name, _ in _parameters(rest.partition("?")[2]))
    parts = read_url(url)
    if parts is None:
        return True
    if parts.user_info is not None and (":" in parts.user_info and not parts.user_info.endswith(":")):
        return True
    return any(SECRET_NAME.search(name) for name, _ in _parameters(parts.query))


def parameter_names(url: str) -> list[str]:
    """Return the names of the parameters of a URL. Values, and texts that may not be names, may be secrets."""
    found = _parameters(url.partition("#")[0].partition("?")[2])
    return [name for name, value in found if value and re.fullmatch(r"[a-z_]{1,40}", name)]


def _parameters(query: str) -> list[tuple[str, str]]:
    pairs = (pair.partition("=") for pair in re.split(r"[&;]", query) if pair)
    return [(unescape(name), value) for name, _, value in pairs]


def secrets_of(url: str) -> frozenset[str]:
    """Return all possible secrets of a URL, in each encoding in which a program could quote them."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in LOCAL:
        return frozenset()
    parts = read_url(url)
    if parts is None:
        found = {rest or url, *re.split(r"[:/@?#&=,;\s]+", rest or url)}
    else:
        user, _, password = (parts.user_info or "").partition(":")
        found = {parts.user_info or "", password}
        if not password:
            found.add(user)  # a token, as in NATS URLs
        found |= {value for name, value in _parameters(parts.query) if SECRET_NAME.search(name)}
    from urllib.parse import quote  # few programs come here

    spelled = set()
    for one in found - {""}:
        for form in (one, unescape(one)):
            spelled |= {form, quote(form, safe=""), quote(form), repr(form)[1:-1], ascii(form)[1:-1]}
    return frozenset(spelled - {""})


def redact_text(text: str, *urls: object, values: Iterable[str] = (), ours: bool = False) -> str:
    """Return a text of another program without the secrets of these URLs, of URLs in it, and of `password=` etc.

    `values` are secrets outside of URLs. If a secret is so short that it may appear in the text by chance, nothing
    of the text is returned, unless it is `ours`: a text of waypost itself, which contains at most whole URLs.
    """
    text = text[:TEXT_CHARACTERS_MAX]
    secrets = set(values) - {""}
    for url in urls:
        if isinstance(url, str) and url:
            secrets |= secrets_of(url)
            for spelled in (url, repr(url)[1:-1], ascii(url)[1:-1]):
                text = text.replace(spelled, redact_url(url))
    for secret in sorted(secrets, key=len, reverse=True):
        if secret not in text or (ours and len(secret) < _SHORT):
            continue
        if len(secret) < _SHORT:
            return HIDDEN
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = "\n".join(map(_redact_line, text.split("\n")))
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


def _redact_line(line: str) -> str:
    """Return one line of a text without the secrets of the URLs in it."""
    done = []
    while (found := _URL.search(line)) is not None:
        url = found[0]
        bare = url.rstrip(_CLOSING)
        end = found.end() - (len(url) - len(bare))
        # A password may contain spaces and quotes: it may extend up to the last @ of the line.
        if "@" in line[found.end() :] and "://" not in line[found.end() :]:
            end = line.rindex("@") + 1
            bare = f"{bare.partition('://')[0]}://@@/@"
        done += [line[: found.start()], redact_url(bare)]
        line = line[end:]
    return "".join([*done, line])
