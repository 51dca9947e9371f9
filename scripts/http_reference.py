"""Write docs/reference/http-api.md from the OpenAPI document of the web app.

    python scripts/http_reference.py

`make docs` runs it, and a test fails when the page is not what it would write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from waypost.web.openapi import openapi_document

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "http-api.md"
INTRODUCTION = """# The HTTP API

<!-- Written by scripts/http_reference.py (`make docs`): change the code that it describes. -->

`waypost web`, and an app made with `waypost.web.create_app`, serve this API under `/api/v1`; its OpenAPI document is
`/api/v1/openapi.json`. [How to start it, and who may use it](../how-to/web.md).

- **Who.** Scripts send `Authorization: Bearer SECRET`. Each operation needs a scope: `read`, `operate` (includes read)
  or `admin` (includes both). Bodies and headers of messages are shown to users with the scope `bodies` only.
- **Writes** that are not sent with a bearer token need the CSRF token of `GET /api/v1/session` as `X-CSRF-Token`. A
  write with an `Idempotency-Key` that was used before gets the first answer; keys are kept for an hour, in the process.
- **Pages.** A list answers `next`: give it back as `cursor` with the same filters; it is null at the end. A page may be
  short or empty and have a `next`, because filters are searched for in bounded steps.
- **Errors** are problem documents (RFC 9457, `application/problem+json`). `type` names the problem for programs,
  `detail` says it for people; `outcome` of a failed write says whether it was done, not done, or is unknown.
- **Times** are RFC 3339 in UTC, durations are seconds, tokens are text.
- **Limits.** 200 entries a page, 256 KiB a request, 64 KiB of a body, 10,000 dead letters a redrive.

    curl -H "Authorization: Bearer $SECRET" http://127.0.0.1:8480/api/v1/stores/main/queues
"""


def write_page() -> str:
    """Return the page."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    reads = [one for one in operations if one[1] == "GET"]
    writes = [one for one in operations if one[1] != "GET"]
    lines = [INTRODUCTION, "## Reads", ""]
    for path, method, operation in reads:
        lines += operation_lines(path, method, operation, schemas)
    lines += ["## Writes", ""]
    for path, method, operation in writes:
        lines += operation_lines(path, method, operation, schemas)
    lines += ["## Documents", ""]
    queries = {name for name in schemas if name.endswith("Query")} | {"Nothing"}
    for name, schema in schemas.items():
        if name not in queries:
            lines += schema_lines(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def operation_lines(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """The section of one operation."""
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    lines = [f"### {operation['operationId']}", "", f"`{method} {path}`", ""]
    lines += [f"{operation['summary']} {operation['description']} Answers {type_text(answer)}.", ""]
    if "requestBody" in operation:
        sent = operation["requestBody"]["content"]["application/json"]["schema"]
        if not sent["$ref"].endswith("/Nothing"):
            lines += [f"Takes {type_text(sent)}.", ""]
    parameters = [one for one in operation["parameters"] if one["in"] == "query"]
    if parameters:
        lines += ["| parameter | type | |", "|---|---|---|"]
        for one in parameters:
            text = [one["schema"].get("description", "")] + (["Required."] if one["required"] else [])
            if "default" in one["schema"] and one["schema"]["default"] not in (None, ""):
                text.append(f"Default `{one['schema']['default']}`.")
            lines.append(f"| `{one['name']}` | {type_text(one['schema'])} | {' '.join(filter(None, text))} |")
        lines.append("")
    return lines


def schema_lines(name: str, schema: dict[str, Any]) -> list[str]:
    """The section of one document."""
    lines = [f"### {name}", "", schema.get("description", ""), ""]
    if "properties" in schema:
        required = schema.get("required", [])
        lines += ["| field | type | |", "|---|---|---|"]
        for field, kind in schema["properties"].items():
            text = kind.get("description", "")
            default = kind.get("default")
            if field not in required and default not in (None, "", [], {}):
                text = f"{text} Default `{default}`.".strip()
            lines.append(f"| `{field}` | {type_text(kind)} | {text} |")
        lines.append("")
    return lines


def type_text(schema: dict[str, Any]) -> str:
    """A type in a few characters, with a link where it has a section."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_text(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {type_text(schema.get('items', {}))}"
        case "object":
            return (
                f"object of {type_text(schema['additionalProperties'])}"
                if schema.get("additionalProperties")
                else "object"
            )
        case "string" if schema.get("format") == "date-time":
            return "time"
        case None:
            return "any"
        case kind:
            return str(kind)


if __name__ == "__main__":
    PAGE.write_text(write_page())
