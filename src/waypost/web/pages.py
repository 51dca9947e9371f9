"""The pages: HTML made from the documents of the API. They work without scripts; scripts only keep them up to date."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from waypost.errors import WaypostError
from waypost.web import action_pages, counted, dead_letters, documents, failures, forms, lake_pages, reading, search
from waypost.web.access import CSRF_FIELD, SESSION_COOKIE, SESSION_SECONDS, Caller, address_of
from waypost.web.actions import ACTIONS, Action
from waypost.web.api import cookie_path, set_visit, store_summary
from waypost.web.chain_graph import draw_chain
from waypost.web.chart_views import CHART_MINUTES, draw_charts, show_charts
from waypost.web.charts import timeline_spans
from waypost.web.figures import RECENT_MINUTES
from waypost.web.guard import SAFE_METHODS
from waypost.web.problems import Problem
from waypost.web.saved_filters import filters, save_from_page
from waypost.web.schedule_views import show_backfill, show_form
from waypost.web.service import Service, as_problems, check_name, convert, read_body
from waypost.web.sparklines import draw_sparkline
from waypost.web.templates import render
from waypost.web.timer_views import show_timers
from waypost.web.worker_views import show_worker

FOLDER = Path(__file__).parent
NOTICE_COOKIE = "waypost_notice"
#: A queue that was read longer ago than this has that said beside its figures.
OLD_SECONDS = 15.0
LISTED_STATES = ("ready", "leased", "delayed", "waiting", "dead", "done")

View = Callable[["Visit"], Awaitable[Response]]


class Visit:
    """One request for a page: who makes it, which store it is about, and how its answer is drawn."""

    def __init__(self, service: Service, request: Request, caller: Caller) -> None:
        self.service = service
        self.request = request
        self.caller = caller
        self.path: dict[str, str] = request.path_params
        self.place = service.place(self.path["store"]) if "store" in self.path else None

    @property
    def here(self) -> reading.Place:
        """The store of the path."""
        assert self.place is not None
        return self.place

    @property
    def queue(self) -> str:
        """The queue of the path."""
        return check_name(self.path["queue"])

    @property
    def bodies(self) -> bool:
        """Whether this user may see bodies."""
        return self.service.may(self.caller, "bodies")

    def query(self, kind: type[Any], **given: Any) -> Any:
        """The parameters of the URL as a document; empty ones count as not given."""
        sent = {name: value for name, value in self.request.query_params.items() if value}
        known = {name: sent[name] for name in kind.__struct_fields__ if name in sent}
        return convert(known | given, kind, strict=False)

    @property
    def address(self) -> str:
        """This page with its filters, as a path."""
        here = URL(scope=self.request.scope)
        return here.path + (f"?{here.query}" if here.query else "")

    async def saved_filters(self) -> list[documents.SavedFilter]:
        """The views that this user has saved; none while the store is away."""
        try:
            return (await filters(self.here, self.caller.user.name)).filters
        except (Problem, WaypostError):
            return []

    def url(self, *parts: str, **query: str | None) -> str:
        """A URL of this app, wherever it is mounted; of the store of this page if it begins with a dot."""
        return make_url(self.request, self.place, *parts, **query)

    def draw(self, template: str, *, status: int = 200, title: str, **context: Any) -> Response:
        """The page."""
        notice = self.request.cookies.get(NOTICE_COOKIE, "")
        content = render(
            template, title=title, visit=self, url=self.url, place=self.place, stores=list(self.service.places),
            user=self.caller.user.name, via=self.caller.via, may=lambda scope: self.service.may(self.caller, scope),
            csrf=self.service.access.csrf_token(self.caller), once=secrets.token_hex(16),
            read_only=self.service.read_only, notice=read_notice(notice), page=self.request.url.path, **context,
        )  # fmt: skip
        response = Response(content, status, media_type="text/html")
        set_visit(response, self.request, self.caller)
        if notice:
            response.delete_cookie(NOTICE_COOKIE, path=cookie_path(self.request))
        return response

    def go(self, target: str, notice: str | None = None) -> Response:
        """Send the browser to another page, which says what was done."""
        response = RedirectResponse(target, 303)
        if notice is not None:
            content = msgspec.json.encode(notice[:500]).hex()
            response.set_cookie(
                NOTICE_COOKIE, content, max_age=60, path=cookie_path(self.request), httponly=True, samesite="lax",
                secure=self.request.url.scheme == "https",
            )  # fmt: skip
        return response


def read_notice(cookie: str) -> str | None:
    """What a write did, from the page before."""
    try:
        return msgspec.json.decode(bytes.fromhex(cookie), type=str)
    except (ValueError, msgspec.DecodeError):
        return None


def make_url(request: Request, place: reading.Place | None, *parts: str, **query: str | None) -> str:
    """A URL of this app from the parts of its path."""
    names = list(parts)
    if names and names[0] == ".":
        names = ["s", place.name if place is not None else "", *names[1:]]
    path = request.scope.get("root_path", "") + "/" + "/".join(quote(name, safe="") for name in names)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


# ---- the pages -------------------------------------------------------------------------------------------------


async def show_stores(visit: Visit) -> Response:
    """All stores, or the only one."""
    places = list(visit.service.places.values())
    if len(places) == 1:
        return visit.go(visit.url("s", places[0].name))
    found = [(store_summary(place), await reading.health(place)) for place in places]
    return visit.draw("stores.html", title="Stores", found=found)


async def show_overview(visit: Visit) -> Response:
    """Is anything wrong?"""
    query = visit.query(documents.QueuesQuery)
    await reading.refresh_page(visit.here, query)
    health = await reading.health(visit.here)
    if visit.here.watch.error is not None and not visit.here.watch.readings:
        return visit.draw("overview.html", title="Queues", health=health, listed=None, query=query, worst=None)
    listed = await reading.queues(visit.here, query)
    # Before the next request to the store: a queue may be removed meanwhile.
    sparklines = {queue.name: draw_sparkline(visit.here.watch.readings[queue.name].figures) for queue in listed.queues}
    ages = {queue.name: visit.here.watch.age(queue.name) for queue in listed.queues}
    first = reading.worst_queue(visit.here)
    worst = None if first is None else reading.queue_document(visit.here, first)
    failed = await failures.failures_if_known(visit.here)
    return visit.draw(
        "overview.html", title="Queues", health=health, listed=listed, query=query, recent_minutes=RECENT_MINUTES,
        failed=failed,
        worst=worst if worst is not None and worst.level in ("warning", "alarm") else None,
        sparklines=sparklines, ages=ages, old_seconds=OLD_SECONDS,
    )  # fmt: skip


async def show_queue(visit: Visit) -> Response:
    """One queue."""
    given = visit.request.query_params.get("minutes", "60")
    length = int(given) if given in CHART_MINUTES else 60
    queue = visit.queue
    detail = await reading.queue_detail(visit.here, queue, documents.QueueQuery(minutes=length))
    query = visit.query(documents.MessagesQuery)
    listed = await reading.messages(visit.here, queue, query, bodies=visit.bodies)
    counts = {
        "ready": detail.queue.ready, "leased": detail.queue.leased, "delayed": detail.queue.delayed,
        "waiting": detail.queue.waiting, "dead": detail.queue.dead, "done": detail.settings.completed,
    }  # fmt: skip
    return visit.draw(
        "queue.html", saved=await visit.saved_filters(),
        title=queue, detail=detail, listed=listed, query=query, counts=counts,
        chart_minutes=CHART_MINUTES, minutes=str(length),
        states=[state for state in LISTED_STATES if state != "done" or counts["done"]],
        charts=[row[0] for row in draw_charts([detail.history], length)],
    )  # fmt: skip


async def show_message(visit: Visit) -> Response:
    """One message and its timeline."""
    detail = await reading.message_detail(visit.here, visit.queue, visit.path["id"], bodies=visit.bodies)
    return visit.draw(
        "message.html", title=f"Message {detail.id}", detail=detail, spans=timeline_spans(detail.timeline),
        drawing=None if detail.chain is None else draw_chain(detail.chain),
    )  # fmt: skip


async def show_dead(visit: Visit) -> Response:
    """Dead letters by reason and error."""
    visit.here.bulk.start()
    groups = await reading.dead_groups(visit.here, visit.queue)
    return visit.draw("dead.html", title=f"Dead letters of {visit.queue}", groups=groups)


async def show_schedules(visit: Visit) -> Response:
    """All schedules."""
    listed = await reading.schedules(visit.here, visit.query(documents.SchedulesQuery, fires=3))
    return visit.draw("schedules.html", title="Schedules", listed=listed)


async def show_workers(visit: Visit) -> Response:
    """All workers."""
    return visit.draw("workers.html", title="Workers", listed=await reading.workers(visit.here))


async def show_search(visit: Visit) -> Response:
    """Where a message is; straight to it if the search box names one."""
    given = visit.request.query_params
    wanted, chosen, queue = given.get("q", "").strip()[:512], given.get("by", ""), given.get("queue", "").strip()
    queues, found, wrong = list[documents.Queue](), None, None
    if wanted:
        by = chosen if chosen in documents.SEARCH_FIELDS else search.guess_field(wanted)
        try:
            criteria = {by: wanted, "queue": queue or None, "cursor": given.get("cursor") or None}
            found = await search.search(visit.here, convert(criteria, documents.SearchQuery), bodies=visit.bodies)
        except Problem as problem:
            if problem.status not in (403, 404, 422):
                raise
            wrong = problem.detail
        if by == "id" and by != chosen and found is not None and len(found.found) == 1:
            # No queue is named after a message: its figures need not be read for this.
            return visit.go(visit.url(".", "queues", found.found[0].queue, "messages", found.found[0].id))
        if by != chosen:
            queues = await reading.named_queues(visit.here, wanted[:128])
            if found is not None and len(found.found) == 1 and not queues:
                return visit.go(visit.url(".", "queues", found.found[0].queue, "messages", found.found[0].id))
    names = (await visit.here.watch.list_names())[: documents.PAGE_LIMIT_MAX]
    return visit.draw(
        "search.html", title=f"Search: {wanted}" if wanted else "Search", wanted=wanted, by=chosen, queue=queue,
        found=found, queues=queues, wrong=wrong, names=names,
    )  # fmt: skip


# ---- writes ----------------------------------------------------------------------------------------------------


async def show_action(visit: Visit) -> Response:
    """What a write would do, before it is made: the form, the command, and what changes."""
    action = find_action(visit)
    given = forms.from_query(action, visit.request.query_params)
    await visit.service.require(visit.request, action.scope)
    if action.name == "save_schedule":
        return await show_form(visit)
    if action.name == "backfill_schedule":
        return await show_backfill(visit, given)
    queue = visit.queue if "queue" in visit.path else ""
    detail = None
    if queue:
        detail = await reading.queue_detail(visit.here, queue, documents.QueueQuery())
    if action.name == "configure":
        assert detail is not None
        fields = forms.setting_fields(detail)
        return visit.draw("settings.html", title=f"Settings of {queue}", detail=detail, fields=fields)
    if action.name == "edit_dead":
        edited = await dead_letters.edit_fields(visit.here, queue, given.get("id", ""), bodies=visit.bodies)
        return draw_confirm(visit, action, queue, given, detail, fields=edited)
    if action.name.startswith("bulk_"):
        return await show_bulk(visit, action, queue, given, detail)
    return draw_confirm(visit, action, queue, given, detail)


async def show_bulk(
    visit: Visit, action: Action, queue: str, given: dict[str, str], detail: documents.QueueDetail | None
) -> Response:
    """Which messages a bulk action means, and how many these are, before it is started."""
    older_than = visit.request.query_params.get(forms.OLDER_THAN, "").strip()
    if action.name in ("bulk_cancel", "bulk_prioritize"):
        given.setdefault("state", "ready")
    if older_than:
        now = visit.here.watch.store_now() or datetime.now(UTC)
        given[forms.age_field(action)] = forms.time_before(older_than, now).isoformat(timespec="milliseconds")
    chosen = {name: text for name, text in given.items() if name not in dead_letters.NO_FILTER}
    state = {
        "bulk_cancel": given.get("state"), "bulk_prioritize": given.get("state"), "bulk_reschedule": "delayed"
    }.get(action.name, "dead")  # fmt: skip
    wanted = convert(forms.to_document(action, chosen) | {"state": state}, documents.CountQuery, strict=False)
    meant = await dead_letters.count_letters(visit.here, queue, wanted, bodies=visit.bodies)
    bodies = await visit.here.may_show_bodies(queue, allowed=visit.bodies)
    questions = forms.filter_fields(action, given, older_than, bodies=bodies)
    return draw_confirm(visit, action, queue, given, detail, meant=meant, filters=questions)


def draw_confirm(
    visit: Visit,
    action: Action,
    queue: str,
    given: Mapping[str, str],
    detail: documents.QueueDetail | None,
    *,
    fields: list[forms.Field] | None = None,
    meant: documents.DeadCount | None = None,
    filters: Sequence[forms.Field] = (),
) -> Response:
    """The page that asks before a write; a bulk action with the form that chooses its messages."""
    choice = {field.name: field.value for field in filters}
    if fields is None:
        fields = [field for field in forms.fields_of(action, given, detail) if field.name not in choice]
    assumed = {"confirm": queue} if action.name in ("bulk_purge", "bulk_cancel") else {}
    assumed |= {"delay": "0"} if action.name == "bulk_reschedule" else {}
    assumed |= {"priority": given.get("priority", "9")} if action.name == "bulk_prioritize" else {}
    try:
        shortcuts = action.forms(queue, convert(forms.to_document(action, {**given, **assumed}), action.request))
    except Problem:
        shortcuts = None
    return visit.draw(
        "confirm.html", title=action.summary, action=action, queue=queue, shortcuts=shortcuts, detail=detail,
        fields=fields, given=given, changes=[],
        meant=meant, section=section_of(action), filters=filters, counted=counted.pack(choice),
    )  # fmt: skip


def find_action(visit: Visit) -> Action:
    """The write that a path names."""
    action = ACTIONS.get(visit.path["action"])
    if action is None or ("{queue}" in action.path) != ("queue" in visit.path):
        raise Problem(404, "unknown-action", "there is no such action")
    return action


async def run_action(visit: Visit) -> Response:
    """Make a write that a form of a page sent."""
    action = find_action(visit)
    sent = dict(parse_qsl((await read_body(visit.request)).decode(errors="replace"), keep_blank_values=True))
    caller = await visit.service.require(visit.request, action.scope)
    visit.service.access.check_csrf(caller, sent.pop(CSRF_FIELD, ""))
    queue = visit.queue if "queue" in visit.path else ""
    target = forms.safe_return(sent.pop("return_to", ""), visit.request.scope.get("root_path", ""))
    visit.request.state.idempotency_key = sent.pop("once", None) or None
    if action.name == "configure" and sent.pop("step", "") == "preview":
        return await preview_settings(visit, action, queue, sent)
    if action.name == "save_schedule" and sent.pop("step", "") == "preview":
        return await show_form(visit, sent)
    if counted.is_counted(action):
        requested = sent.pop("step", "") == "count"
        again = counted.count_again(action, sent, requested=requested)
        if again is not None:
            where = (".", "queues", queue, "do") if queue else (".", "do")
            return visit.go(visit.url(*where, action.name, **again), None if requested else counted.NOTICE)
    content = convert(forms.to_document(action, sent), action.request)
    done = await visit.service.act(action, visit.request, caller, visit.here, queue, content)
    text = done.text[:1].upper() + done.text[1:] + "."
    after = visit.url(".") if action.name == "remove" else target
    if not after and getattr(done, "bulk", None):
        after = visit.url(".", "actions")
    return visit.go(after or (visit.url(".", "queues", queue) if queue else visit.url(".", section_of(action))), text)


def section_of(action: Action) -> str:
    """The page that a write without a queue belongs to."""
    if action.name == "change_bulk":
        return "actions"
    return "workers" if action.name.endswith("_worker") else "schedules"


async def preview_settings(visit: Visit, action: Action, queue: str, sent: dict[str, str]) -> Response:
    """The difference that changed settings make, before they are saved."""
    detail = await reading.queue_detail(visit.here, queue, documents.QueueQuery())
    wanted = forms.changed_settings(sent, detail)
    if not wanted:
        return visit.go(visit.url(".", "queues", queue), "Nothing was changed.")
    document = convert(wanted | {"dry_run": True}, documents.SettingsChange)
    planned = await action.run(visit.here, queue, document)
    fields = [forms.Field(name, "hidden", forms.to_text(value)) for name, value in wanted.items()]
    return visit.draw(
        "confirm.html", title=f"Change the settings of {queue}", action=action, queue=queue, fields=fields,
        shortcuts=action.forms(queue, document), detail=detail, given={}, changes=getattr(planned, "changes", []),
        section="", meant=None, filters=(), texts=forms.SETTING_TEXTS,
    )  # fmt: skip


# ---- signing in ------------------------------------------------------------------------------------------------


def draw_sign_in(service: Service, request: Request, status: int = 200, wrong: str | None = None) -> Response:
    """The page that asks for the secret."""
    target = forms.safe_return(request.query_params.get("return_to", ""), request.scope.get("root_path", ""))
    content = render(
        "sign_in.html", title="Sign in", wrong=wrong, return_to=target,
        url=lambda *parts, **query: make_url(request, None, *parts, **query),
    )  # fmt: skip
    return Response(content, status, media_type="text/html")


def sign_in_endpoint(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of the sign-in page."""

    async def endpoint(request: Request) -> Response:
        if not service.access.has_sign_in:
            return RedirectResponse(make_url(request, None), 303)
        if request.method in SAFE_METHODS:
            return draw_sign_in(service, request)
        try:
            sent = dict(parse_qsl((await read_body(request)).decode(errors="replace")))
            _, cookie = service.access.sign_in(sent.get("secret", ""), address_of(request))
        except Problem as problem:
            return draw_sign_in(service, request, problem.status, problem.detail)
        target = forms.safe_return(sent.get("return_to", ""), request.scope.get("root_path", ""))
        response = RedirectResponse(target or make_url(request, None), 303)
        response.set_cookie(
            SESSION_COOKIE, cookie, max_age=SESSION_SECONDS, path=cookie_path(request), httponly=True, samesite="lax",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return response

    return endpoint


async def sign_out(visit: Visit) -> Response:
    """End the session."""
    sent = dict(parse_qsl((await read_body(visit.request)).decode(errors="replace")))
    visit.service.access.check_csrf(visit.caller, sent.get(CSRF_FIELD, ""))
    await visit.service.access.sign_out(visit.request.cookies.get(SESSION_COOKIE, ""))
    response = RedirectResponse(visit.url("sign-in"), 303)
    response.delete_cookie(SESSION_COOKIE, path=cookie_path(visit.request))
    return response


# ---- live updates ----------------------------------------------------------------------------------------------


async def stream_changes(visit: Visit) -> Response:
    """Server-sent events: which queues changed. Pages read themselves again when it concerns them."""
    watch = visit.here.watch
    if watch.is_full:
        raise Problem(503, "too-many-streams", "too many pages are open: this one reads every few seconds instead")

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(watch.changes()) as changes:
            async for change in changes:
                if change is None:
                    yield b": nothing new\n\n"
                else:
                    yield b"data: " + msgspec.json.encode(change) + b"\n\n"

    return EventStream(events())


class EventStream(StreamingResponse):
    """Events that end with their page, also if its browser goes away while one is being sent to it."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until one side ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


# ---- routes ----------------------------------------------------------------------------------------------------


def page_endpoint(service: Service, view: View) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a page: signed in, with problems as pages."""

    async def endpoint(request: Request) -> Response:
        try:
            async with as_problems():
                caller = await service.require(request, "read")
                return await view(Visit(service, request, caller))
        except Problem as problem:
            return draw_problem(service, request, problem)

    return endpoint


def draw_problem(service: Service, request: Request, problem: Problem) -> Response:
    """A problem as a page; who is not signed in is sent to the sign-in page."""
    if problem.kind == "not-signed-in" and service.access.has_sign_in and request.method == "GET":
        here = URL(scope=request.scope)
        path = here.path + (f"?{here.query}" if here.query else "")
        return RedirectResponse(make_url(request, None, "sign-in", return_to=path), 303)
    content = render(
        "problem.html", title=problem.title, problem=problem,
        url=lambda *parts, **query: make_url(request, None, *parts, **query),
    )  # fmt: skip
    headers = {name: value for name, value in problem.headers.items() if name != "WWW-Authenticate"}
    return Response(content, problem.status, headers, "text/html")


def routes(service: Service) -> list[Route | Mount]:
    """The routes of all pages."""
    store = "/s/{store}"
    queue = f"{store}/queues/{{queue}}"
    views: tuple[tuple[str, View, str], ...] = (
        ("/", show_stores, "GET"),
        (store, show_overview, "GET"),
        (f"{store}/events", stream_changes, "GET"),
        (f"{store}/schedules", show_schedules, "GET"),
        (f"{store}/timers", show_timers, "GET"),
        (f"{store}/workers", show_workers, "GET"),
        (f"{store}/workers/{{name:path}}", show_worker, "GET"),
        (f"{store}/charts", show_charts, "GET"),
        (f"{store}/filters", save_from_page, "POST"),
        (f"{store}/search", show_search, "GET"),
        (f"{store}/actions", action_pages.show_actions, "GET"),
        (f"{store}/lake", lake_pages.show_lake, "GET"),
        (f"{store}/lake/report", lake_pages.show_report, "GET"),
        (queue, show_queue, "GET"),
        (f"{queue}/dead", show_dead, "GET"),
        (f"{queue}/messages/{{id}}", show_message, "GET"),
        (f"{queue}/do/{{action}}", show_action, "GET"),
        (f"{queue}/do/{{action}}", run_action, "POST"),
        (f"{store}/do/{{action}}", show_action, "GET"),
        (f"{store}/do/{{action}}", run_action, "POST"),
        ("/sign-out", sign_out, "POST"),
    )
    return [
        *(Route(path, page_endpoint(service, view), methods=[method]) for path, view, method in views),
        Route("/sign-in", sign_in_endpoint(service), methods=["GET", "POST"]),
        Mount("/static", StaticFiles(directory=FOLDER / "static", packages=[("waypost.charts", "static")])),
    ]
