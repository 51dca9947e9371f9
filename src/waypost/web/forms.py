"""Forms of pages: from what a browser sends, which is text, to the documents that the writes take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct, structs

from waypost.web import documents
from waypost.web.actions import Action
from waypost.web.problems import Problem

#: What each setting does, for the form, and its kind: a number, a choice, or text; `?` where it may be empty.
SETTING_TEXTS: dict[str, tuple[str, str]] = {
    "lease": ("number?", "Seconds that a worker holds a message before it must renew. Empty: at most once."),
    "max_deliveries": ("number?", "A message handed out so often becomes a dead letter. Empty: no limit."),
    "max_pending": ("number?", "Past so many messages publishes are refused, wait or drop. Empty: no limit."),
    "overload": ("raise block drop_oldest", "What a publish to a full queue does."),
    "max_running": ("number?", "At most so many run at once, over all workers. Empty: no limit."),
    "rate": ("text?", "At most so many are handed out, as in 100/m, 5/s or 10/500ms. Empty: no limit."),
    "journal": ("off failures all full", "What the journal keeps: timelines need all; full keeps bodies too."),
    "journal_max": ("number", "Events that the journal keeps."),
    "dead_max": ("number?", "Dead letters that are kept; older ones are removed. Empty: all."),
    "dead_keep": ("number?", "Seconds that dead letters are kept. Empty: until they are purged."),
    "completed": ("number", "Finished messages that are kept to be listed. 0: none."),
    "hide_bodies": ("false true", "Whether these pages show bodies, headers and results of its messages to no user."),
    "tracebacks": ("true false", "Whether the traceback of a message's last error is kept with it."),
    "fair": ("false true", "Whether claims take turns between groups, so that none delays another."),
    "order": ("text?", "group: the messages of a group are handed out one at a time, in order. Empty: in any order."),
    "on_failure": ("hold pass", "Whether a failed message of an ordered group holds it or lets the next one pass."),
    "group_max_running": ("number?", "At most so many of each group run at once. Empty: no limit."),
    "group_rate": ("text?", "At most so many of each group are handed out, as in 100/m. Empty: no limit."),
    "group_max_pending": ("number?", "As max_pending, for each group. Empty: no limit."),
}  # fmt: skip
#: What the form of a bulk action asks for to choose messages: name, label, help. An age becomes a time when it is sent.
OLDER_THAN = "older_than"
FILTER_TEXTS = (
    ("reason", "Reason", ""),
    ("group", "Group", ""),
    ("key_prefix", "Key begins with", ""),
    ("type_name", "Type", "The whole name, as the list shows it."),
    ("header", "Header", "NAME=VALUE, or NAME."),
    (OLDER_THAN, "Older than", "As in 30min, 2h or 7d: {since} so long ago."),
)
AGE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|m|min|h|d)")
AGE_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days"}
#: Filters of dead letters for which empty text means those that have none.
MAY_BE_NONE = ("error_type", "error")


class Field(Struct, frozen=True):
    """One field of a form."""

    name: str
    kind: str
    value: str = ""
    label: str = ""
    help: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False


def to_text(value: Any) -> str:
    """A value as a form carries it."""
    return "" if value is None else json.dumps(value) if isinstance(value, bool | list) else f"{value}"


def setting_fields(detail: documents.QueueDetail) -> list[Field]:
    """The form of all settings, with what each does."""
    fields = []
    for name, (kind, text) in SETTING_TEXTS.items():
        value = to_text(getattr(detail.settings, name)).removesuffix(".0")
        choices = tuple(kind.split()) if " " in kind else ()
        fields.append(Field(name, "choice" if choices else kind.rstrip("?"), value, name, text, choices))
    return fields


def changed_settings(sent: Mapping[str, str], detail: documents.QueueDetail) -> dict[str, Any]:
    """The settings that a form changes."""
    before = {field.name: field.value for field in setting_fields(detail)}
    return {
        name: setting_value(name, text.strip())
        for name, text in sent.items()
        if name in SETTING_TEXTS and text.strip() != before[name]
    }


def setting_value(name: str, text: str) -> Any:
    """The value of a setting from a field of a form."""
    kind = SETTING_TEXTS[name][0]
    if not text and kind.endswith("?"):
        return None
    if name in ("hide_bodies", "tracebacks", "fair"):
        return text == "true"
    if not kind.startswith("number"):
        return text
    try:
        return float(text) if name in ("lease", "dead_keep") else int(text)
    except ValueError:
        raise Problem(422, "invalid-input", f"{name} is a number, not {text[:40]!r}") from None


def from_query(action: Action, query: Mapping[str, str]) -> dict[str, str]:
    """The fields of a write that its link has filled in."""
    fields = action.request.__struct_fields__
    return {name: query[name] for name in fields if query.get(name) or (name in MAY_BE_NONE and name in query)}


def time_before(text: str, now: datetime) -> datetime:
    """The time that was so long ago."""
    found = AGE.fullmatch(text.strip())
    if found is None:
        raise Problem(422, "invalid-input", f"older than is a time as in 30min, 2h or 7d, not {text[:40]!r}")
    try:
        return now - timedelta(**{AGE_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise Problem(422, "invalid-input", f"older than {text[:40]!r} is before all times") from None


def read_time(text: str) -> datetime:
    """A time of a form in UTC, which it is unless it says otherwise."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise Problem(422, "invalid-time", f"{text[:40]!r} is no time, as in 2026-03-06T09:00:00") from None


def age_field(action: Action) -> str:
    """The filter by which the messages of a bulk action are older than a time."""
    return "died_before" if "died_before" in action.request.__struct_fields__ else "published_before"


def filter_fields(action: Action, given: Mapping[str, str], older_than: str, *, bodies: bool) -> list[Field]:
    """The fields that choose the messages of a bulk action; what they do not ask for stays as the link has it."""
    questions = []
    if action.name in ("bulk_cancel", "bulk_prioritize"):
        states = ("ready", "delayed", "waiting") if action.name == "bulk_cancel" else ("ready", "delayed")
        questions.append(Field("state", "choice", given.get("state", "ready"), "State", "", states))
    since = "died" if age_field(action) == "died_before" else "published"
    for name, label, text in FILTER_TEXTS:
        if (name == "header" and not bodies) or (name != OLDER_THAN and name not in action.request.__struct_fields__):
            continue
        value = older_than if name == OLDER_THAN else given.get(name, "")
        questions.append(Field(name, "text", value, label, text.format(since=since)))
    return questions


def to_document(action: Action, sent: Mapping[str, str]) -> dict[str, Any]:
    """What a form sent, as the document that the write takes."""
    known = action.request.__struct_fields__
    unknown = sorted(set(sent) - set(known))
    if unknown:
        raise Problem(422, "invalid-input", f"the form has a field that this write does not have: {unknown[0][:40]!r}")
    if action.name == "configure":
        return {name: setting_value(name, text) for name, text in sent.items() if name in SETTING_TEXTS}
    document: dict[str, Any] = {}
    for name, text in sent.items():
        match name:
            case "ids":
                document[name] = [one for one in text.split(",") if one]
            case "all" | "keep_body":
                document[name] = text == "true"
            case "body" | "headers" if text.strip():
                document[name] = parse_json(name, text)
            case "limit" | "max_fires" | "priority" if text.strip():
                document[name] = parse_number(name, text, int)
            case "delay" | "every" | "grace" | "jitter" | "expires" if text.strip():
                document[name] = parse_number(name, text, float)
            case "exclude":
                document[name] = text.replace(",", " ").split()
            case "missed":
                document[name] = int(text) if text.isdecimal() else text or "skip"
            case _:
                if text.strip() or name in MAY_BE_NONE:
                    document[name] = text
    return document


def parse_json(name: str, text: str) -> Any:
    """A value written as JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Problem(422, "invalid-input", f"{name} is no JSON: {error}") from None


def parse_number(name: str, text: str, kind: type[int] | type[float]) -> float:
    """A number."""
    try:
        return kind(text)
    except ValueError:
        raise Problem(422, "invalid-input", f"{name} is a number, not {text[:40]!r}") from None


def fields_of(action: Action, given: Mapping[str, str], detail: documents.QueueDetail | None) -> list[Field]:
    """The fields of a write: those that its link filled in, and those that are asked for."""
    match action.name:
        case "purge" | "remove":
            visible = [Field("confirm", "text", "", "Type the name of the queue", "This cannot be undone.", (), True)]
        case "bulk_purge" | "bulk_cancel":
            visible = [Field("confirm", "text", "", "Type the name of the queue", "This cannot be undone.", (), True)]
        case "redrive" | "bulk_redrive":
            visible = [Field("rate", "text", "", "Rate", "At most this fast, as in 50/s. Empty: at once.")]
        case "bulk_prioritize":
            visible = [Field("priority", "number", "9", "Priority", "0 to 9; the highest is claimed first.", (), True)]
        case "reschedule" | "bulk_reschedule":
            visible = [Field("delay", "number", "0", "Seconds from now", "0 makes it due now.", (), True)]
        case _:
            visible = []
    names = {field.name for field in visible}
    hidden = [Field(name, "hidden", value) for name, value in given.items() if name not in names]
    return [*hidden, *(structs.replace(field, value=given.get(field.name, field.value)) for field in visible)]


def schedule_fields() -> list[Field]:
    """The form of a schedule."""
    return [
        Field("name", "text", "", "Name", "", (), True),
        Field("queue", "text", "", "Queue", "It publishes to this queue.", (), True),
        Field("cron", "text", "", "Cron pattern", "As in 0 9 * * mon-fri, several separated by semicolons; or give an "
              "interval below."),
        Field("every", "number", "", "Or every so many seconds", ""),
        Field("tz", "text", "UTC", "Time zone", "UTC, +05:30 or Europe/Madrid; of a cron pattern."),
        Field("exclude", "text", "", "Not on these days", "As in 2026-12-25, 2027-01-01; of a cron pattern."),
        Field("missed", "text", "skip", "Missed fires", "skip them, fire once for all of them, or a number: catch up "
              "with so many."),
        Field("overlap", "text", "allow", "Overlap", "At an instant while the last run has not ended: allow, skip, or "
              "queue_one, which fires when the run ends."),
        Field("grace", "number", "60", "Grace", "Seconds. A fire that is later than this is missed."),
        Field("jitter", "number", "0", "Jitter", "Seconds over which its fires are spread."),
        Field("start", "text", "", "Start", "No fire before this time, as 2026-03-06T00:00:00Z. Empty: now."),
        Field("end", "text", "", "End", "No fire after this time. Empty: never."),
        Field("max_fires", "number", "", "At most so many fires", "Empty: no limit."),
        Field("priority", "number", "5", "Priority", "Of its messages, 0 to 9."),
        Field("group", "text", "", "Group", "Of its messages."),
        Field("expires", "number", "", "Expiry", "Seconds. A message that is not claimed so long after its fire is "
              "dropped. Empty: never."),
        Field("body", "area", "null", "Body", "JSON, the body of its messages."),
    ]  # fmt: skip


def safe_return(target: str, root_path: str) -> str:
    """A page of this app to go to, or nothing: never one of another site."""
    if not target.startswith(root_path + "/") or target.startswith("//") or "\\" in target:
        return ""
    return "" if any(ord(one) < 33 for one in target) else target
