"""Writes by a filter or an interval: made only with what was counted.

The form has the filters and the button of the write, so it works without scripts: it sends the filters as the page
shows them and as they were counted. If they differ, nothing is written, and the page counts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from waypost.web import forms
from waypost.web.actions import Action
from waypost.web.problems import Problem

#: The field that has the filters as they were counted.
FIELD = "counted"
#: The fields of a backfill that choose its instants.
INTERVAL = ("start", "end")
NOTICE = "Nothing was done: what the form chooses has changed since it was counted. This is the new count."


def is_counted(action: Action) -> bool:
    """Whether a write shows first how many messages it means."""
    return action.name.startswith("bulk_") or action.name == "backfill_schedule"


def pack(choice: Mapping[str, str]) -> str:
    """What was counted, as one field of the form."""
    return urlencode(choice)


def count_again(action: Action, sent: dict[str, str], *, requested: bool) -> dict[str, str] | None:
    """The parameters of the page that counts what a form chooses, if that is requested or was not counted yet.

    After None the form is left with the fields of the write.
    """
    before = dict(parse_qsl(sent.pop(FIELD, ""), keep_blank_values=True))
    if before and not requested and all(_is_same(name, sent.get(name, ""), text) for name, text in before.items()):
        sent.pop(forms.OLDER_THAN, None)
        # The form has whole seconds; what was counted may be more exact.
        sent.update({name: before[name] for name in INTERVAL if name in before})
        return None
    known = {*action.request.__struct_fields__, forms.OLDER_THAN} - {"confirm"}
    found = {name: text for name, text in sent.items() if name in known and (text.strip() or name in forms.MAY_BE_NONE)}
    if before.get(forms.OLDER_THAN):
        # That was counted by an age, and this is the time so long ago.
        found.pop(forms.age_field(action), None)
    return found


def _is_same(name: str, sent: str, before: str) -> bool:
    if name not in INTERVAL:
        return sent.strip() == before.strip()
    try:
        # Browsers leave out seconds that are zero.
        return forms.read_time(sent) == forms.read_time(before).replace(microsecond=0)
    except Problem:
        return False
