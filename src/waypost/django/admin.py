"""Pages of the admin for dead letters: list them, read one, redrive and purge.

The permissions are those of the model without a table: view, change (redrive) and delete (purge). What is done is in
waypost's log of actions, with the name of the user.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode

from waypost.client import Waypost
from waypost.django.clients import configuration, use_client
from waypost.django.models import DeadLetter
from waypost.errors import InvalidInput, WaypostError
from waypost.message import StoredMessage
from waypost.views import LoggedAction

PAGE = 50
BODY_CHARACTERS_MAX = 20_000
FILTERS = ("reason", "error_type")


@admin.register(DeadLetter)
class DeadLetterAdmin(admin.ModelAdmin):
    """Dead letters, read from the store."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: a message dies, none is added."""
        return False

    def get_urls(self) -> list[URLPattern]:
        """Return the pages."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="waypost_deadletter_changelist"),
            path("act/", view(self.act), name="waypost_deadletter_act"),
            path("<str:queue>/<str:id>/", view(self.letter), name="waypost_deadletter_letter"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """List the dead letters of a queue, page by page."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        queue, filters = request.GET.get("queue", ""), chosen_filters(request.GET)
        context: dict[str, Any] = {"queues": [], "letters": [], "cursor": None}
        try:
            with use_client() as post:
                names = post.queues()
                stats = post.stats_many(names)
                context["queues"] = [
                    (one.queue, one.ledger.dead_kept) for one in stats if one.ledger.dead_kept or one.queue == queue
                ]
                queue = queue or next((name for name, _ in context["queues"]), "")
                if queue:
                    context |= list_letters(post, queue, filters, request.GET.get("cursor") or None)
        except WaypostError as error:
            messages.error(request, str(error))
        return self._respond(request, "dead_letters", {
            **context, **(extra_context or {}), "queue": queue, "filters": filters,
            "may_redrive": self.has_change_permission(request), "may_purge": self.has_delete_permission(request),
        })  # fmt: skip

    def letter(self, request: HttpRequest, queue: str, id: str) -> HttpResponse:
        """Show one dead letter: its error, body, headers and history."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        with use_client() as post:
            try:
                found = next(iter(post.dead_letters(queue, id=id, limit=1)), None)
            except InvalidInput:
                found = None
            if found is None:
                raise Http404("there is no such dead letter any more")
            hidden = post.policy(queue).hide_bodies
            context = {
                "letter": found, "queue": queue, "history": post.history(queue, id),
                "body": None if hidden else body_text(found), "headers": {} if hidden else headers_of(found),
                "traceback": None if hidden else found.traceback,
                "may_redrive": self.has_change_permission(request),
            }  # fmt: skip
        return self._respond(request, "dead_letter", context)

    def act(self, request: HttpRequest) -> HttpResponse:
        """Redrive or purge."""
        action, queue = request.POST.get("action", ""), request.POST.get("queue", "")
        allowed = {"redrive": self.has_change_permission, "purge": self.has_delete_permission}.get(action)
        if request.method != "POST" or allowed is None or not allowed(request):
            raise PermissionDenied
        ids, filters = request.POST.getlist("id"), chosen_filters(request.POST)
        back = f"{reverse('admin:waypost_deadletter_changelist')}?{urlencode({'queue': queue, **filters})}"
        user, text = request.user.get_username(), None
        try:
            with use_client() as post:
                if action == "purge" and request.POST.get("confirmed") != "yes":
                    counted = None if ids else post.count_messages(queue, "dead", **filters)  # type: ignore[arg-type]
                    context = {"queue": queue, "filters": filters, "ids": ids, "counted": counted, "back": back}
                    return self._respond(request, "confirm_purge", context)
                if action == "redrive":
                    text = redrive(post, queue, ids, filters, user)
                else:
                    text = purge(post, queue, ids, filters)
                post.log_action(
                    LoggedAction(user=user, via="django admin", action=action, queue=queue, ok=True, text=text)
                )
        except WaypostError as error:
            messages.error(request, str(error))
        if text is not None:
            messages.success(request, text)
        return HttpResponseRedirect(back)

    def _respond(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        shared = {
            **self.admin_site.each_context(request), "opts": self.model._meta, "title": "Dead letters",
            "web_url": configuration().web_url,
        }  # fmt: skip
        return TemplateResponse(request, f"waypost/admin/{template}.html", {**shared, **context})


def chosen_filters(given: Any) -> dict[str, str]:
    """Return the filters of a request."""
    return {name: given[name] for name in FILTERS if given.get(name)}


def list_letters(post: Waypost, queue: str, filters: dict[str, str], cursor: str | None) -> dict[str, Any]:
    """Return one page of dead letters, how many were searched for it, and the cursor of the next one."""
    page = post.page(queue, "dead", reason=filters.get("reason"), cursor=cursor, limit=PAGE)
    wanted = filters.get("error_type")
    letters = [one for one in page.messages if wanted is None or one.error_type == wanted]
    return {"letters": letters, "searched": len(page.messages), "cursor": page.cursor}


def redrive(post: Waypost, queue: str, ids: list[str], filters: dict[str, str], user: str) -> str:
    """Redrive some letters by their ids, or all that the filters choose; return what it did."""
    if not ids and "error_type" in filters:
        started = post.start_bulk(queue, "redrive", user=user, via="django admin", **filters)  # type: ignore[arg-type]
        action = post.run_bulk(started.id)
        moved, left = action.done, action.left
    else:
        done = post.redrive(queue, ids=ids or None, reason=None if ids else filters.get("reason"))
        moved, left = len(done.moved), len(done.duplicates)
    in_use = f"; {left} stay, their keys are in use" if left else ""
    return f"{moved} of {queue} redriven{in_use}"


def purge(post: Waypost, queue: str, ids: list[str], filters: dict[str, str]) -> str:
    """Purge some letters by their ids, or all that the filters choose; return what it did."""
    removed = post.purge(queue, ids=ids) if ids else post.purge(queue, "dead", **filters)  # type: ignore[arg-type]
    return f"{removed} of {queue} purged"


def body_text(letter: StoredMessage[Any]) -> str:
    """Return the body for a page, cut."""
    try:
        body = letter.body
    except WaypostError as error:
        return str(error)
    text = body if isinstance(body, str) else repr(body) if isinstance(body, bytes) else json.dumps(body, indent=2)
    return text if len(text) <= BODY_CHARACTERS_MAX else text[:BODY_CHARACTERS_MAX] + "…"


def headers_of(letter: StoredMessage[Any]) -> dict[str, str]:
    """Return the headers, none of a message that cannot be read."""
    try:
        return letter.headers
    except WaypostError:
        return {}
