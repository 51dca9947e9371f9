"""`waypost doctor`: looks at a store and all around it, says what to do about what is wrong, and ends with 1 then."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from waypost.cli.asking import add_yes, confirm
from waypost.cli.checkup import queues, records
from waypost.cli.ending import FOUND, code_of
from waypost.cli.options import add_command, open_post
from waypost.cli.output import coloured, quiet_log, width, write, write_json
from waypost.client import Waypost
from waypost.errors import AccessDenied, WaypostError
from waypost.store.checkup import Finding, wrong
from waypost.values import RegisteredWorker

MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "wrong": ("WRONG", "red")}


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "doctor", run, "check a store, and say what to do", positional_url=True,
        more="Damaged records, server, durability, eviction, clock, schema, permissions, queues without handlers, "
        "readers that lag, open transactions, bytes in use. It changes nothing unless you say --mend. Exit code 1: "
        "something is wrong.",
        examples=("waypost doctor postgresql://clerk@host/database", "waypost doctor --quiet", "waypost doctor --json",
                  "waypost doctor --mend"),
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="only what is wrong, and notes")
    parser.add_argument(
        "--mend", action="store_true",
        help="mend damaged records: messages that no claim can reach become ready, what has no body is dropped, "
        "counters are corrected; each change is journalled",
    )  # fmt: skip
    add_yes(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    # What the store warns of at a connection is among the findings.
    with quiet_log():
        return run_quietly(options)


def run_quietly(options: argparse.Namespace) -> int:
    """The same, with nothing but findings to read."""
    if options.mend:
        confirm(options, "Mend the damaged records of all queues of this store?")
    post = open_post(options)
    findings: list[Finding] = []
    code = 0
    try:
        with post:
            for finding in examine(post, mend=options.mend, quiet=options.json):
                findings.append(finding)
                if not options.json and (finding.level != "ok" or not options.quiet):
                    tell(finding)
    except WaypostError as error:
        code = code_of(error)
        findings.append(wrong("connection", str(error), "repair that first; the rest was not looked at"))
        if not options.json:
            tell(findings[-1])
    bad = sum(finding.level == "wrong" for finding in findings)
    if options.json:
        write_json({"store": post.store.kind, "namespace": post.store.namespace, "wrong": bad, "findings": findings})
    else:
        write(f"{len(findings)} findings, " + (f"{bad} wrong" if bad else "nothing wrong"))
    return code or (FOUND if bad else 0)


def examine(post: Waypost, *, mend: bool = False, quiet: bool = True) -> Iterator[Finding]:
    """Everything, in order: the records, the store itself, then what lies in it."""
    checkup = post.store.checkup(post._connected())
    names, findings = checkup.check_list(post.queues(), mend=mend)
    yield from findings
    yield from records.check(post, names, mend=mend, quiet=quiet)
    found = records.readable_stats(post, names)
    workers: list[RegisteredWorker] | None = None
    with suppress(AccessDenied):  # the permissions below say so
        workers = post.workers()
    policies = {stats.queue: post.policy(stats.queue) for stats in found}
    yield from checkup.check_server(found)
    yield from queues.check_clock(post)
    yield from queues.check_ledgers(found)
    if workers is not None:
        yield from queues.check_workers(workers)
        yield from queues.check_served(found, workers)
    yield from queues.check_readers(found, policies)
    yield from queues.check_dead(found)


def tell(finding: Finding) -> None:
    """One finding, and below it what to do."""
    mark, colour = MARKS[finding.level]
    for line in wrapped(f"{finding.check}: {finding.found}", 6):
        write(f"{coloured(mark, colour)} {line}" if line[:1] != " " else line)
    if finding.advice:
        for line in wrapped(f"→ {finding.advice}", 8):
            write(line if line.startswith(" ") else f"      {line}")


def wrapped(text: str, indent: int) -> list[str]:
    """A text in lines that fit, those after the first with an indent."""
    from textwrap import wrap

    first, *rest = wrap(text, width() - indent, break_long_words=False) or [""]
    return [first, *(" " * indent + line for line in rest)]
