"""The JSON HTTP API: a table of operations, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from waypost.web import (
    action_pages,
    bulk,
    chart_views,
    dead_letters,
    documents,
    exports,
    failures,
    lake,
    reading,
    saved_filters,
    schedule_views,
    search,
    timer_views,
    worker_views,
)
from waypost.web.access import CSRF_HEADER, VISIT_COOKIE, Caller, Scope
from waypost.web.actions import ACTIONS, Action
from waypost.web.problems import PROBLEM_TYPE, Problem
from waypost.web.service import Service, as_problems, check_name, convert, read_body

JSON = "application/json"
ROOT = "/api/v1"
STORE = "/stores/{store}"


class Call(Struct, frozen=True):
    """One request for a read."""

    service: Service
    caller: Caller
    request: Request
    query: Any

    @property
    def place(self) -> reading.Place:
        """The store that the path names."""
        return self.service.place(self.request.path_params["store"])

    @property
    def queue(self) -> str:
        """The queue that the path names."""
        return check_name(self.request.path_params["queue"])

    @property
    def bodies(self) -> bool:
        """Whether this user may see bodies."""
        return self.service.may(self.caller, "bodies")


class Read(Struct, frozen=True):
    """One operation that changes nothing."""

    name: str
    path: str
    summary: str
    answer: type[documents.Answer]
    run: Callable[[Call], Awaitable[documents.Answer]]
    query: type[documents.Request] = documents.Nothing
    scope: Scope = "read"


async def get_session(call: Call) -> documents.Session:
    """Who makes the request."""
    service, caller = call.service, call.caller
    return documents.Session(
        user=caller.user.name,
        scopes=[scope for scope in ("read", "operate", "admin", "bodies") if service.may(caller, scope)],
        read_only=service.read_only,
        csrf_token=service.access.csrf_token(caller),
    )


async def get_stores(call: Call) -> documents.Stores:
    """The stores of this server."""
    return documents.Stores(stores=[store_summary(place) for place in call.service.places.values()])


def store_summary(place: reading.Place) -> documents.StoreSummary:
    """What is shown of a store. Its URL is not: it may hold a password."""
    store = place.post.store
    return documents.StoreSummary(name=place.name, kind=store.kind, namespace=store.namespace)


async def get_message(call: Call) -> documents.MessageDetail:
    """One message."""
    return await reading.message_detail(call.place, call.queue, call.request.path_params["id"], bodies=call.bodies)


async def get_messages(call: Call) -> documents.Messages:
    """A page of messages."""
    return await reading.messages(call.place, call.queue, call.query, bodies=call.bodies)


async def count_letters(call: Call) -> documents.DeadCount:
    """How many messages a filter means."""
    return await dead_letters.count_letters(call.place, call.queue, call.query, bodies=call.bodies)


QUEUE = f"{STORE}/queues/{{queue}}"
READS: tuple[Read, ...] = (
    Read("session", "/session", "Who you are, your scopes, and the CSRF token for writes.",
         documents.Session, get_session),
    Read("stores", "/stores", "The stores that this server shows.", documents.Stores, get_stores),
    Read("health", f"{STORE}/health", "Whether anything is wrong, in one sentence.",
         documents.Health, lambda call: reading.health(call.place)),
    Read("failures", f"{STORE}/failures", "What failed in the last minutes, by queue and error, the newest first.",
         documents.Failures, lambda call: failures.recent_failures(call.place)),
    Read("queues", f"{STORE}/queues", "Queues with counts and what is wrong with each, those with alerts first.",
         documents.Queues, lambda call: reading.queues(call.place, call.query), documents.QueuesQuery),
    Read("queue", QUEUE, "A queue: settings, ledger, what limits it, and counters of its last minutes.",
         documents.QueueDetail, lambda call: reading.queue_detail(call.place, call.queue, call.query),
         documents.QueueQuery),
    Read("charts", f"{STORE}/charts", "The last minutes of one to four queues: counters, backlog, changes of settings.",
         documents.Charts, lambda call: chart_views.charts(call.place, call.query), documents.ChartsQuery),
    Read("messages", f"{QUEUE}/messages", "Messages of a state, page by page. Bodies need the scope `bodies`.",
         documents.Messages, get_messages, documents.MessagesQuery),
    Read("message", f"{QUEUE}/messages/{{id}}", "A message with its timeline, also after it left the queue.",
         documents.MessageDetail, get_message),
    Read("dead_groups", f"{QUEUE}/dead", "Dead letters grouped by reason and error; says how many were read.",
         documents.DeadGroups, lambda call: reading.dead_groups(call.place, call.queue)),
    Read("dead_count", f"{QUEUE}/dead/count", "How many dead letters a filter means; says how many were read.",
         documents.DeadCount, count_letters, documents.DeadQuery),
    Read("count", f"{QUEUE}/count", "How many messages of a state a filter means; says how many were read.",
         documents.DeadCount, count_letters, documents.CountQuery),
    Read("search", f"{STORE}/search", "Find messages: by id, key or chain, or one queue by something else.",
         documents.SearchAnswer, lambda call: search.search(call.place, call.query, bodies=call.bodies),
         documents.SearchQuery),
    Read("schedules", f"{STORE}/schedules", "Schedules with their next fires.",
         documents.Schedules, lambda call: reading.schedules(call.place, call.query), documents.SchedulesQuery),
    Read("filters", f"{STORE}/filters", "The views that you have saved by name.", documents.SavedFilters,
         lambda call: saved_filters.filters(call.place, call.caller.user.name)),
    Read("preview", f"{STORE}/schedules/preview", "When a rule of a schedule fires, or what is wrong with it.",
         documents.SchedulePreview, lambda call: schedule_views.read_preview(call.place, call.query),
         documents.PreviewQuery),
    Read("worker", f"{STORE}/workers/{{name:path}}", "A worker with the messages that it holds, and since when.",
         documents.WorkerDetail,
         lambda call: worker_views.worker_detail(call.place, call.request.path_params["name"])),
    Read("next_timers", f"{STORE}/timers/next", "Timers in the order of their due times, of all queues or of one.",
         documents.NextTimers, lambda call: timer_views.next_timers(call.place, call.query), documents.TimersQuery),
    Read("workers", f"{STORE}/workers", "Registered workers and their health.",
         documents.Workers, lambda call: reading.workers(call.place)),
    Read("actions", f"{STORE}/actions", "The log of actions: who did what, what became of it, how it is undone.",
         documents.Actions, lambda call: action_pages.logged_actions(call.place, call.query), documents.ActionsQuery),
    Read("bulk_actions", f"{STORE}/bulk", "Bulk actions, the newest first, and how far each is.",
         documents.BulkActions, lambda call: bulk.bulk_actions(call.place, call.query, bodies=call.bodies),
         documents.ActionsQuery),
    Read("bulk_action", f"{STORE}/bulk/{{id}}", "A bulk action, and how far it is.",
         documents.BulkAction,
         lambda call: bulk.bulk_action(call.place, call.request.path_params["id"], bodies=call.bodies)),
    Read("lake", f"{STORE}/lake", "The last audit of the store's lake, and whether the lake has a report.",
         documents.Lake, lambda call: lake.describe_lake(call.place.lake)),
    Read("timers", f"{STORE}/timers", "Queues that have timers, the soonest first.",
         documents.Timers, lambda call: reading.timers(call.place)),
)  # fmt: skip


def routes(service: Service) -> list[Route]:
    """The routes of all operations."""
    from waypost.web.openapi import openapi_document

    described = msgspec.json.encode(openapi_document())

    async def describe(request: Request) -> Response:
        return await answer_problems(request, lambda: describe_to(request))

    async def describe_to(request: Request) -> Response:
        await service.require(request, "read")
        return Response(described, media_type=JSON)

    reads = [Route(ROOT + read.path, read_endpoint(service, read), methods=["GET"]) for read in READS]
    writes = [
        Route(ROOT + STORE + action.path, write_endpoint(service, action), methods=[action.method])
        for action in ACTIONS.values()
    ]

    async def export(request: Request) -> Response:
        return await answer_problems(request, lambda: exports.export(service, request))

    others = [
        Route(f"{ROOT}{STORE}/export/{{list}}", export, methods=["GET"]),
        Route(f"{ROOT}{STORE}/filters", filter_endpoint(service, documents.SavedFilter), methods=["POST"]),
        Route(f"{ROOT}{STORE}/filters/remove", filter_endpoint(service, documents.FilterReference), methods=["POST"]),
        Route(f"{ROOT}/openapi.json", describe, methods=["GET"]),
    ]
    return [*reads, *writes, *others]


async def answer_problems(request: Request, run: Callable[[], Awaitable[Response]]) -> Response:
    """Answer a request, or the problem with it."""
    try:
        async with as_problems():
            return await run()
    except Problem as problem:
        return Response(problem.encode(), problem.status, problem.headers, PROBLEM_TYPE)


def read_endpoint(service: Service, read: Read) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a read."""

    async def run(request: Request) -> Response:
        caller = await service.require(request, read.scope)
        given = request.query_params
        if len(given.multi_items()) != len(given):
            raise Problem(422, "invalid-input", "a parameter was given twice")
        query = convert(dict(given), read.query, strict=False)
        answer = await read.run(Call(service, caller, request, query))
        response = Response(msgspec.json.encode(answer), media_type=JSON)
        set_visit(response, request, caller)
        return response

    async def endpoint(request: Request) -> Response:
        return await answer_problems(request, lambda: run(request))

    return endpoint


def write_endpoint(service: Service, action: Action) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a write."""

    async def run(request: Request) -> Response:
        caller = await service.require(request, action.scope)
        service.access.check_csrf(caller, request.headers.get(CSRF_HEADER, ""))
        place = service.place(request.path_params["store"])
        queue = check_name(request.path_params["queue"]) if "queue" in request.path_params else ""
        given = await read_json(request)
        done = await service.act(action, request, caller, place, queue, convert(given, action.request))
        return Response(msgspec.json.encode(done), media_type=JSON)

    async def endpoint(request: Request) -> Response:
        return await answer_problems(request, lambda: run(request))

    return endpoint


async def read_json(request: Request) -> Any:
    """The body of a request, which is a JSON document."""
    body = await read_body(request)
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Problem(415, "wrong-content-type", f"send the request as {JSON}")
    try:
        return msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise Problem(400, "invalid-json", f"the request is no JSON document: {error}") from None


def filter_endpoint(
    service: Service, request_type: type[documents.Request]
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that saves or removes a view of the user."""

    async def run(request: Request) -> Response:
        caller = await service.require(request, "read")
        saved_filters.refuse_read_only(service)
        service.access.check_csrf(caller, request.headers.get(CSRF_HEADER, ""))
        place = service.place(request.path_params["store"])
        given: Any = convert(await read_json(request), request_type)
        path = saved_filters.check_path(given.path, place) if request_type is documents.SavedFilter else None
        done = await saved_filters.change(place, caller.user.name, given.name, path)
        return Response(msgspec.json.encode(done), media_type=JSON)

    async def endpoint(request: Request) -> Response:
        return await answer_problems(request, lambda: run(request))

    return endpoint


def set_visit(response: Response, request: Request, caller: Caller) -> None:
    """Give a browser that has none the cookie that its CSRF token belongs to."""
    if caller.is_new_visit:
        response.set_cookie(
            VISIT_COOKIE, caller.nonce, path=cookie_path(request), secure=request.url.scheme == "https", httponly=True,
            samesite="lax",
        )  # fmt: skip


def cookie_path(request: Request) -> str:
    """Cookies are for this app only, wherever it is mounted."""
    return request.scope.get("root_path", "") or "/"
