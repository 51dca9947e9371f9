"""Views saved by name: the path of a page with its filters, for each user, in the store."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response

from waypost.web import documents, forms
from waypost.web.access import CSRF_FIELD
from waypost.web.problems import Problem
from waypost.web.reading import Place, answered
from waypost.web.service import Service, convert, read_body

if TYPE_CHECKING:
    from waypost.web.pages import Visit

KIND = "web-filters"
#: Views that a user can save, and users whose views are kept; those who saved first are forgotten first.
FILTERS_MAX, USERS_MAX = 50, 1_000
#: How often a save is tried again when another one of the same user came first.
TRIES = 5

_decode = msgspec.json.Decoder(list[documents.SavedFilter]).decode


def record_name(user: str) -> str:
    """The name of a user's record; any text may be a user's name."""
    return hashlib.sha256(user.encode(errors="replace")).hexdigest()[:32]


async def read(place: Place, user: str) -> tuple[list[documents.SavedFilter], int]:
    """The saved views of a user, and the version of their record."""
    async with answered():
        found = (await place.post.records(KIND, names=[record_name(user)])).records
    if not found:
        return [], 0
    try:
        return _decode(found[0].data), found[0].version
    except msgspec.DecodeError:
        return [], found[0].version


async def filters(place: Place, user: str) -> documents.SavedFilters:
    """The saved views of a user, by name."""
    found, _ = await read(place, user)
    return documents.SavedFilters(filters=sorted(found, key=lambda one: one.name))


async def change(place: Place, user: str, name: str, path: str | None) -> documents.Done:
    """Save a view under a name, or remove it."""
    for _ in range(TRIES):
        known, version = await read(place, user)
        kept = [one for one in known if one.name != name]
        if path is None and len(kept) == len(known):
            return documents.Done(changed=False, text=f"there is no saved view {name}")
        if path is not None:
            if len(kept) >= FILTERS_MAX:
                raise Problem(409, "too-many-filters", f"{FILTERS_MAX} views are saved: remove one first")
            kept.append(documents.SavedFilter(name=name, path=path))
        async with answered():
            saved = await place.post.save_record(
                KIND, record_name(user), msgspec.json.encode(kept), version=version, keep=USERS_MAX
            )
        if saved.saved:
            text = f"the view {name} is saved" if path is not None else f"the saved view {name} is removed"
            return documents.Done(changed=True, text=text)
    raise Problem(409, "changed-meanwhile", "the saved views were changed at the same time: try again")


def check_path(path: str, place: Place) -> str:
    """The path of a page of this store below its address, or a `Problem`."""
    start = f"/s/{place.name}"
    if not forms.safe_return(path, "") or not (path == start or path.startswith((f"{start}/", f"{start}?"))):
        raise Problem(422, "invalid-path", f"a saved view is a page of this store: it begins with {start}")
    return path


def refuse_read_only(service: Service) -> None:
    """A server that is read-only saves nothing."""
    if service.read_only:
        raise Problem(403, "read-only", "this server is read-only")


async def save_from_page(visit: Visit) -> Response:
    """Save or remove a view that a form of a page sent."""
    refuse_read_only(visit.service)
    sent = dict(parse_qsl((await read_body(visit.request)).decode(errors="replace"), keep_blank_values=True))
    visit.service.access.check_csrf(visit.caller, sent.pop(CSRF_FIELD, ""))
    root = visit.request.scope.get("root_path", "")
    target = forms.safe_return(sent.pop("return_to", ""), root) or visit.url(".")
    remove = sent.pop("remove", "") == "true"
    given: dict[str, Any] = {"name": sent.get("name", "").strip()}
    if remove:
        wanted = convert(given, documents.FilterReference)
        done = await change(visit.here, visit.caller.user.name, wanted.name, None)
    else:
        saved = convert(given | {"path": target.removeprefix(root)}, documents.SavedFilter)
        path = check_path(saved.path, visit.here)
        done = await change(visit.here, visit.caller.user.name, saved.name, path)
    return visit.go(target, done.text[:1].upper() + done.text[1:] + ".")
