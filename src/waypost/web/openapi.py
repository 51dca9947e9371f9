"""The OpenAPI document of the API, and its reference page, both made from the table of operations."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from waypost.release import VERSION
from waypost.web import documents, exports
from waypost.web.access import CSRF_HEADER
from waypost.web.actions import ACTIONS, Action
from waypost.web.api import READS, ROOT, STORE, Read
from waypost.web.problems import PROBLEM_TYPE, TITLES

REFERENCE = "#/components/schemas/{name}"
#: The problems that any operation may answer with.
COMMON_PROBLEMS = (400, 401, 403, 404, 409, 413, 421, 422, 429, 500, 502, 503, 504)
DESCRIPTION = (
    "Queues, messages, timers, schedules and workers of the stores that a server shows. Errors are problem documents "
    "(RFC 9457). Lists are paged by cursor. Writes take an `Idempotency-Key`, and a CSRF token unless they are sent "
    "with a bearer token."
)
PARAMETER_TEXTS = {"store": "The name of a store.", "queue": "The name of a queue.", "id": "The id of a message.",
                   "name": "The name of a worker.", "list": "The list."}  # fmt: skip


def openapi_document() -> dict[str, Any]:
    """The document, as OpenAPI 3.1 has it."""
    types: list[type] = [read.answer for read in READS] + [read.query for read in READS]
    for action in ACTIONS.values():
        types += [action.request, action.answer]
    types += [documents.SavedFilter, documents.FilterReference]
    _, schemas = msgspec.json.schema_components(dict.fromkeys(types), ref_template=REFERENCE)
    schemas["Problem"] = PROBLEM_SCHEMA
    paths: dict[str, dict[str, Any]] = {}
    for read in READS:
        paths.setdefault(ROOT + read.path.replace(":path", ""), {})["get"] = read_operation(read, schemas)
    for action in ACTIONS.values():
        paths.setdefault(ROOT + STORE + action.path, {})[action.method.lower()] = write_operation(action)
    for path, operations in other_paths().items():
        paths.setdefault(path, {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "waypost", "version": VERSION, "description": DESCRIPTION},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "waypost_session"},
            },
        },
        "security": [{"bearer": []}, {"session": []}],
    }


PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "An error (RFC 9457). `type` names it for programs, `detail` says it for people.",
    "type": "object",
    "properties": {
        "type": {"type": "string"}, "title": {"type": "string"}, "status": {"type": "integer"},
        "detail": {"type": "string"},
        "outcome": {"enum": ["done", "not done", "unknown"], "description": "Of an error of the store."},
    },
    "required": ["type", "title", "status", "detail"],
}  # fmt: skip


def path_parameters(path: str) -> list[dict[str, Any]]:
    """The parameters in a path."""
    return [
        {"name": name, "in": "path", "required": True, "description": PARAMETER_TEXTS[name],
         "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)(?::path)?\}", path)
    ]  # fmt: skip


def answers(kind: type) -> dict[str, Any]:
    """What an operation answers."""
    problem = {"content": {PROBLEM_TYPE: {"schema": {"$ref": REFERENCE.format(name="Problem")}}}}
    success = {"application/json": {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}
    found: dict[str, Any] = {"200": {"description": "Done.", "content": success}}
    return found | {str(status): {"description": TITLES[status] + ".", **problem} for status in COMMON_PROBLEMS}


def read_operation(read: Read, schemas: dict[str, Any]) -> dict[str, Any]:
    """A read."""
    query = schemas[read.query.__name__]
    parameters = path_parameters(read.path)
    for name, schema in query["properties"].items():
        described = dict(schema)
        parameter = {"name": name, "in": "query", "required": name in query.get("required", []), "schema": described}
        parameters.append(parameter)
    return {
        "operationId": read.name, "summary": read.summary, "description": f"Scope: `{read.scope}`.",
        "parameters": parameters, "responses": answers(read.answer),
    }  # fmt: skip


def other_paths() -> dict[str, dict[str, Any]]:
    """Files, and the writes that change nothing but the user's own views."""
    export = f"{STORE}/export/{{list}}"
    files = {form: {"schema": {"type": "string"} if form.startswith("text") else {"type": "object"}}
             for form in exports.FORMATS.values()}  # fmt: skip
    form = {"name": "format", "in": "query", "required": False, "schema": {"enum": list(exports.FORMATS)}}
    parameters = [*path_parameters(export), form]
    text = (
        f"Lists: {', '.join(f'`{name}`' for name in exports.LISTS)}; the parameters are those of the list, and `queue` "
        f"for messages and dead letters. At most {exports.EXPORT_MAX:,} rows: a cut file says so. Scope: `read`."
    )
    found: dict[str, dict[str, Any]] = {
        ROOT + export: {"get": {
            "operationId": "export", "summary": "A list as a file, CSV or JSON.", "description": text,
            "parameters": parameters, "responses": answers(documents.Done) | {
                "200": {"description": "The file.", "content": files}},
        }},
    }  # fmt: skip
    for name, path, request, summary in (
        ("save_filter", f"{STORE}/filters", documents.SavedFilter, "Save a page with its filters under a name."),
        ("remove_filter", f"{STORE}/filters/remove", documents.FilterReference, "Remove a saved view."),
    ):
        content = {"application/json": {"schema": {"$ref": REFERENCE.format(name=request.__name__)}}}
        found.setdefault(ROOT + path, {})["post"] = {
            "operationId": name, "summary": summary, "description": "Scope: `read`.",
            "parameters": path_parameters(path), "requestBody": {"required": True, "content": content},
            "responses": answers(documents.Done),
        }  # fmt: skip
    return found


def write_operation(action: Action) -> dict[str, Any]:
    """A write."""
    headers = [
        {"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128},
         "description": "A repeat with the same key gets the first answer."},
        {"name": CSRF_HEADER.title(), "in": "header", "required": False, "schema": {"type": "string"},
         "description": "From `session`; not needed with a bearer token."},
    ]  # fmt: skip
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(name=action.request.__name__)}}}
    return {
        "operationId": action.name, "summary": action.summary, "description": f"Scope: `{action.scope}`.",
        "parameters": [*path_parameters(STORE + action.path), *headers],
        "requestBody": {"required": bool(action.request is not documents.Nothing), "content": content},
        "responses": answers(action.answer),
    }  # fmt: skip
