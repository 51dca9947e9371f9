"""`waypost migrate`: create or update the tables of a PostgreSQL store, finish or undo that; check them, print SQL.

On other stores clients bring what they need with them: there only `--finish` has something to do.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from waypost.cli.exit_codes import AHEAD, BEHIND, FOUND
from waypost.cli.options import add_command, get_namespace, get_url, open_client
from waypost.cli.output import write, write_json, write_stderr
from waypost.errors import ConfigurationError
from waypost.release import DATA_VERSION, FINISHED, SIDE_BY_SIDE, minor_of
from waypost.release import VERSION as RELEASE
from waypost.times import format_datetime

if TYPE_CHECKING:
    from waypost.store.postgres.schema_check import SchemaCheck


#: A migration that takes longer reports its steps.
REPORT_AFTER_SECONDS = 5.0


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "migrate", run, "create the tables of a PostgreSQL store, or update them",
        positional_url=True, json_text="one JSON object instead of lines for people",
        more="Safe to run twice and from several places at once. An update has two parts, and nothing stops for them: "
        "`waypost migrate` before the first process of the new release starts, `waypost migrate --finish` after the "
        "last one of the old release has ended. Other stores have no tables to migrate; there --finish allows settings "
        "that the release before does not know. Exit code 1: --finish or --undo found processes that need what it "
        "would remove; 6: --check found tables that this release cannot use; 7: they belong to a newer release.",
        examples=("waypost migrate postgresql://owner@host/database --grant clerk", "waypost migrate --check",
                  "waypost migrate --sql > tables.sql", "waypost migrate --finish",
                  "waypost migrate --finish --sql > finish.sql"),
    )  # fmt: skip
    parser.add_argument("--grant", metavar="ROLE", help="grant this role the least that it needs to use the tables")
    what = parser.add_mutually_exclusive_group()
    parser.add_argument(
        "--sql",
        action="store_true",
        help="print what would be run, and run nothing; needs a URL only with --finish and --undo",
    )
    what.add_argument("--finish", action="store_true", help="remove what only the release before needs")
    what.add_argument("--undo", action="store_true", help="take back an update that is not finished")
    parser.add_argument("--force", action="store_true", help="finish or undo although processes need what it removes")
    what.add_argument("--check", action="store_true", help="print what differs from this release, and change nothing")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    options.namespace = get_namespace(options)
    if options.sql and options.check:
        raise ConfigurationError("--sql prints what would be run, and --check runs nothing: use one of them")
    if options.force and not (options.finish or options.undo):
        raise ConfigurationError("--force belongs to --finish or --undo")
    if options.grant and (options.check or options.finish or options.undo):
        raise ConfigurationError("--grant belongs to a migration, without --check, --finish and --undo")
    named = options.url or options.url_option or os.environ.get("WAYPOST_URL")
    # What is to be removed depends on what is there.
    needs_url = bool(named) or not options.sql or options.finish or options.undo
    url = get_url(options) if needs_url else None
    if url and not has_tables(url, options.namespace):
        if options.sql and (options.finish or options.undo):
            raise ConfigurationError("only PostgreSQL has SQL to print; without --sql this works on every store")
        return migrate_data(options)
    options.schema = options.schema or "public"
    return migrate_tables(options, url)


def migrate_data(options: argparse.Namespace) -> int:
    """Do the same on a store whose clients bring what they need with them; return the exit code."""
    if not (options.check or options.finish or options.undo):
        text = f"nothing to do: only PostgreSQL has tables to migrate\n{describe_processes()}"
        return print_result(options, text, changed=False)
    kind, name = FINISHED
    with open_client(options) as post:
        found = post.records(kind, names=[name]).records
        is_finished = bool(found) and int(found[0].data) >= DATA_VERSION
        needed = [f"worker {one.name} of release {one.version} is registered" for one in post.workers()
                  if minor_of(one.version) != minor_of(RELEASE) and options.finish and not options.force]  # fmt: skip
        if options.finish and not is_finished and not needed:
            post.save_record(kind, name, b"%d" % DATA_VERSION)
    facts: dict[str, Any] = {"version": DATA_VERSION, "finished": is_finished, "changed": False}
    if options.undo and is_finished:
        raise ConfigurationError(
            "there is nothing to take back: the upgrade is finished, queues may have settings that the release before "
            "refuses"
        )
    if is_finished:
        return print_result(options, f"nothing to do: version {DATA_VERSION} of the data, finished", **facts)
    if not options.finish:
        text = f"version {DATA_VERSION} of the data, not finished: {describe_processes()}"
        return print_result(options, text, **facts)
    if needed:
        lines = "\n".join(f"  {reason}" for reason in needed)
        text = f"the upgrade is not finished:\n{lines}\nend these processes first, or use --force"
        print_result(options, text, needed=needed, **facts)
        return FOUND
    text = f"finished: version {DATA_VERSION} of the data, queues can have all settings of this release"
    return print_result(options, text, version=DATA_VERSION, finished=True, changed=True, needed=[])


def describe_processes() -> str:
    """Return which processes can run on a store whose upgrade is not finished."""
    if DATA_VERSION <= SIDE_BY_SIDE:
        return "processes of release 0.1 cannot use what this one writes: end them before the first of this one starts"
    return (
        "processes of the release before and of this one can run side by side; when the last old one has ended, run "
        "`waypost migrate URL --finish`"
    )


def has_tables(url: str, namespace: str) -> bool:
    """Whether a URL is of a store that has tables to migrate. Raises an error if it is of no known store."""
    from waypost.store.opening import open_store

    store = open_store(url, namespace=namespace, clock=None, replay_ttl_ms=0, durability="server")
    return store.capabilities.needs_migration


def migrate_tables(options: argparse.Namespace, url: str | None) -> int:
    """Print, check or migrate, and return the exit code."""
    from waypost.store.postgres import check, grants, migrate
    from waypost.store.postgres.schema import VERSION, sql_in_steps

    place = {"schema": options.schema, "namespace": options.namespace}
    if options.sql and not (options.finish or options.undo):
        since = 0 if not url else find_version(url, place)
        parts = [sql_in_steps(**place, since=since)] if since < VERSION else []
        parts += [grants(options.grant, **place)] if options.grant else []
        return print_sql(options, "\n".join(parts), since=since, version=VERSION)
    assert url is not None
    if options.check:
        return print_check(options, check(url, **place))
    if options.finish or options.undo:
        return finish_or_undo(options, url, place)
    with Progress() as progress:
        before = migrate(url, **place, grant=options.grant, report=progress.report)
    where = f"namespace {options.namespace} in schema {options.schema}"
    if before == VERSION:
        text = f"{where} is of version {VERSION} already"
    elif before == 0:
        text = f"created {where}, version {VERSION}"
    else:
        text = f"updated {where} from version {before} to {VERSION}"
    return print_result(options, text, before=before, version=VERSION, changed=before != VERSION)


class Progress:
    """Reports the steps of a migration that takes long on stderr, while it is entered."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        #: The step that is under way, and the text that was written last.
        self._step = self._written = ""
        # One step may take all of the time: an index of a large table, or one that waits for a long transaction.
        self._timer = threading.Timer(REPORT_AFTER_SECONDS, self._write)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def report(self, text: str) -> None:
        """Report a step, at once or when the migration has taken long enough."""
        with self._lock:
            self._step = text
        if time.monotonic() - self._began >= REPORT_AFTER_SECONDS:
            self._write()

    def _write(self) -> None:
        with self._lock:
            if self._step != self._written:
                write_stderr(f"waypost: {time.monotonic() - self._began:.0f} s: {self._step}")
                self._written = self._step


def finish_or_undo(options: argparse.Namespace, url: str, place: dict[str, Any]) -> int:
    """End an update, in one direction or the other, and return the exit code."""
    from waypost.store.postgres import finish, finish_sql, undo

    if options.sql:
        script, done = finish_sql(url, **place, force=options.force, back=options.undo)
        if not done.needed:
            return print_sql(options, script, removed=list(done.removed), needed=[])
    else:
        with Progress() as progress:
            done = (finish if options.finish else undo)(url, **place, force=options.force, report=progress.report)
    where = f"namespace {options.namespace} in schema {options.schema}"
    if done.needed:
        lines = "\n".join(f"  {reason}" for reason in done.needed)
        text = f"nothing was removed from {where}:\n{lines}\nrun this again when that is over, or use --force"
    elif done.removed:
        versions = ", ".join(map(str, done.removed))
        text = f"removed the functions of version {versions} from {where}"
    else:
        text = f"{where} has nothing to remove"
    print_result(options, text, removed=list(done.removed), needed=list(done.needed))
    return FOUND if done.needed else 0


def print_sql(options: argparse.Namespace, script: str, **facts: object) -> int:
    """Print a script, or the facts with it as JSON, and return 0."""
    script = script or "-- nothing to do\n"
    if options.json:
        write_json({**facts, "sql": script})
    else:
        write(script.removesuffix("\n"))
    return 0


def find_version(url: str, place: dict[str, Any]) -> int:
    """Return the version that the tables of this database have, 0 if there are none."""
    from waypost.store.postgres import check
    from waypost.store.postgres.schema import VERSION, Names, too_new

    version = check(url, **place).version or 0
    if version > VERSION:
        raise too_new(version, Names(place["schema"], place["namespace"]))
    return version


def print_check(options: argparse.Namespace, found: SchemaCheck) -> int:
    """Print the result of a check and return its exit code."""
    from waypost.store.postgres.schema import VERSION, Names, command_for

    repair = command_for(Names(options.schema, options.namespace))
    if found.version is None:
        text, code = f"there are no tables of namespace {options.namespace} here; run {repair}", BEHIND
    elif found.version < VERSION:
        text, code = f"the tables are of version {found.version}, this release needs {VERSION}; run {repair}", BEHIND
    elif found.version > VERSION:
        text, code = f"the tables are of version {found.version}, newer than this release ({VERSION})", AHEAD
    elif found.differences:
        text, code = "\n".join(["the tables differ from this release:", *found.differences]), BEHIND
    else:
        text, code = f"as this release needs them, version {VERSION}", 0
        if found.older:
            kept, end = ", ".join(map(str, found.older)), f"{repair.removesuffix('`')} --finish`"
            text += f"; functions of version {kept} are there too until {end} removes them"
            if found.finish_from:
                text += f", from {format_datetime(found.finish_from)} on"
    print_result(options, text, version=found.version, needs=VERSION, current=found.is_current,
         differences=list(found.differences), older=list(found.older),
         finish_from=found.finish_from and format_datetime(found.finish_from))  # fmt: skip
    return code


def print_result(options: argparse.Namespace, text: str, **facts: object) -> int:
    """Print the text, or the facts as JSON, and return 0."""
    fields = {"namespace": options.namespace, "schema": options.schema or "public", **facts}
    if options.json:
        write_json(fields)
    else:
        write(text)
    return 0
