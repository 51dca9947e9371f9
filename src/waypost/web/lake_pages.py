"""The page of a lake: its last audit, and its report, which is served apart from all other pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from waypost.web import lake
from waypost.web.problems import Problem

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: A report has a script inside, and is made of what others wrote: it runs without an origin, so that it has no
#: cookies and cannot ask this server for anything.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
)


async def show_lake(visit: Visit) -> Response:
    """What the lake of a store has."""
    found = await lake.describe_lake(visit.here.lake)
    if not found.configured:
        raise Problem(404, "no-lake", "this server was given no lake of this store: start it with --lake DIR")
    return visit.draw("lake.html", title="Lake", found=found)


async def show_report(visit: Visit) -> Response:
    """The report that `waypost pipeline report` wrote into the lake."""
    place = visit.here.lake
    content = None if place is None else await lake.read_file(place, lake.REPORT)
    if content is None:
        raise Problem(404, "no-report", "the lake has no report: `waypost pipeline report --lake DIR` writes one")
    return Response(content, media_type="text/html; charset=utf-8", headers={"content-security-policy": REPORT_POLICY})
