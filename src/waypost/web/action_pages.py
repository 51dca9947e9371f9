"""The page of actions: who did what, what became of it, and how it is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from waypost.policy import ACTIONS_MAX
from waypost.views import LoggedAction
from waypost.web import bulk, documents
from waypost.web.actions import ACTIONS
from waypost.web.forms import to_text
from waypost.web.reading import Place, answered

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: Bulk actions on the page; `waypost bulk list` and the API have all.
BULK_LIMIT = 10


async def logged_actions(place: Place, query: documents.ActionsQuery) -> documents.Actions:
    """A page of the log of actions."""
    async with answered():
        page = await place.post.actions(cursor=query.cursor, limit=query.limit)
    return documents.Actions(actions=[action_document(one) for one in page.actions], next=page.cursor)


def action_document(entry: LoggedAction) -> documents.Action:
    """An entry of the log."""
    undo = entry.undo
    return documents.Action(
        undo=None
        if undo is None
        else documents.ActionUndo(text=undo.text, action=undo.action, options=dict(undo.options)),
        **{name: getattr(entry, name) for name in documents.Action.__struct_fields__ if name != "undo"},
    )


async def show_actions(visit: Visit) -> Response:
    """Who did what."""
    query = visit.query(documents.ActionsQuery)
    listed = await logged_actions(visit.here, query)
    visit.here.bulk.start()
    many = []
    if query.cursor is None:
        newest = documents.ActionsQuery(limit=BULK_LIMIT)
        many = (await bulk.bulk_actions(visit.here, newest, bodies=visit.bodies)).bulk_actions
    return visit.draw(
        "actions.html", title="Actions", listed=listed, many=many, kept=ACTIONS_MAX, undo_fields=undo_fields,
        undo_url=lambda one: undo_url(visit, one),
        scopes={action.name: action.scope for action in ACTIONS.values()},
    )  # fmt: skip


def undo_fields(one: documents.Action) -> dict[str, str]:
    """The fields of the form that undoes an action."""
    options: dict[str, Any] = {} if one.undo is None else one.undo.options
    return {name: to_text(value) for name, value in options.items()}


def undo_url(visit: Visit, one: documents.Action) -> str:
    """The page that asks before it undoes an action."""
    assert one.undo is not None
    assert one.undo.action is not None
    action, fields = ACTIONS[one.undo.action], undo_fields(one)
    fields = {name: value for name, value in fields.items() if value}
    if "{queue}" not in action.path:
        return visit.url(".", "do", action.name, **fields)
    queue = fields.pop("queue", one.queue or "")
    return visit.url(".", "queues", queue, "do", action.name, **fields)
