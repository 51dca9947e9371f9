"""What the journal keeps of a message at level `full`: its envelope, or what the client's redact hook makes of it.

Every message gets its copy from the one function here, whichever way it takes into a store: published, sent on by a
handler, fired by a schedule, relayed, or written by Spark. The hook is given the body as it reads without a type
(bytes, text, or a JSON value) because that is what all of these ways have in common.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from msgspec.structs import replace

from waypost import codec
from waypost.errors import ConfigurationError
from waypost.values import Settlement

log = logging.getLogger("waypost")

#: (queue, body, headers) to the body and headers that the journal may keep.
Redact: TypeAlias = Callable[[str, Any, dict[str, str]], tuple[Any, dict[str, str]]]


def journal_copy(redact: Redact | None, queue: str, message_id: str, envelope: bytes) -> bytes | None:
    """Return what the journal may keep in place of an envelope, None if there is no redact hook."""
    if redact is None:
        return None
    try:
        opened = codec.open_envelope(envelope)
        body = codec.decode_body(opened.content_type, opened.data)
        redacted, headers = redact(queue, body, dict(opened.headers))
        encoded = codec.encode_body(redacted, faithful=False)
        return codec.make_envelope(message_id, encoded, codec.encode_head(type_name=encoded.type_name, headers=headers))
    except Exception as error:
        # A hook that fails must neither stop a publish nor let through what it was there to hide.
        log.warning(
            "the redact hook failed with %s; the journal keeps no body of message %s",
            type(error).__name__,
            message_id,
            extra={"event": "redact_failed", "queue": queue, "message_id": message_id},
        )
        return codec.make_envelope(message_id, codec.encode_body("(redact failed)"))


def redact_sent_on(redact: Redact, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
    """Return settlements with what the journal may keep of each message that they send on."""
    return [
        replace(
            settlement,
            then=tuple(
                replace(one, journal_copy=journal_copy(redact, one.queue, one.id, one.envelope))
                for one in settlement.then
            ),
        )
        if settlement.then
        else settlement
        for settlement in settlements
    ]


def find_redact(name: str) -> Redact:
    """Import a redact hook by its name, `module:function`."""
    module, separator, path = name.partition(":")
    if not separator or not module or not path:
        raise ConfigurationError(f"a redact hook is named module:function, as in shop.privacy:redact, not {name!r}")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the redact hook {name} cannot be imported here: {error}") from None
    if not callable(found):
        raise ConfigurationError(f"the redact hook {name} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
