"""`waypost doctor`: check a store, print what is wrong and what to do about it."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from waypost.cli.action_log import Entry, logged_action
from waypost.cli.doctor_checks import check_store
from waypost.cli.exit_codes import FOUND, exit_code_of
from waypost.cli.options import add_command, make_client
from waypost.cli.output import one_line, quiet_log, with_color, wrap_indented, write, write_json
from waypost.cli.prompts import add_yes, confirm
from waypost.client import Waypost
from waypost.errors import WaypostError
from waypost.store.checkup import Finding, wrong
from waypost.views import ActionUndo

MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "wrong": ("WRONG", "red")}


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "doctor", run, "check a store, and advise what to do", positional_url=True,
        more="Damaged records, server, durability, eviction, clock, schema, permissions, queues without handlers, "
        "readers that lag, open transactions, bytes in use. It changes nothing without --mend. Exit code 1: "
        "something is wrong.",
        examples=("waypost doctor postgresql://clerk@host/database", "waypost doctor --quiet", "waypost doctor --json",
                  "waypost doctor --mend"),
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="only problems and notes")
    parser.add_argument(
        "--mend", action="store_true",
        help="mend damaged records: messages that no claim can reach become ready, what has no body is dropped, "
        "counters are corrected; each change is journalled",
    )  # fmt: skip
    add_yes(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    # The warnings of the store at a connection are among the findings.
    with quiet_log():
        return run_checks(options)


def run_checks(options: argparse.Namespace) -> int:
    """Run the checks, print the findings, and return the exit code."""
    if options.mend:
        confirm(options, "Mend the damaged records of all queues of this store?")
    post = make_client(options)
    findings: list[Finding] = []
    code = 0
    try:
        with post, mend_entry(options, post) as entry:
            for finding in check_store(post, mend=options.mend, quiet=options.json):
                findings.append(finding)
                if not options.json and (finding.level != "ok" or not options.quiet):
                    print_finding(finding)
            entry.text = f"damaged records are mended; {len(findings)} findings"
            entry.undo = ActionUndo.of("mend")
    except WaypostError as error:
        code = exit_code_of(error)
        findings.append(wrong("connection", str(error), "repair this first; nothing else was checked"))
        if not options.json:
            print_finding(findings[-1])
    bad = sum(finding.level == "wrong" for finding in findings)
    if options.json:
        write_json({"store": post.store.kind, "namespace": post.store.namespace, "wrong": bad, "findings": findings})
    else:
        write(f"{len(findings)} findings, " + (f"{bad} wrong" if bad else "nothing wrong"))
    return code or (FOUND if bad else 0)


def mend_entry(options: argparse.Namespace, post: Waypost) -> AbstractContextManager[Entry]:
    """Log what `--mend` does; checks alone are in no log."""
    if not options.mend:
        return nullcontext(Entry())
    return logged_action(options, post, "mend", None, "post.check(queue, mend=True)")


def print_finding(finding: Finding) -> None:
    """Print one finding, and below it what to do."""
    mark, color = MARKS[finding.level]
    # A path or a command that is longer than a line is not broken: it is there to be copied.
    first, *rest = wrap_indented(one_line(f"{finding.check}: {finding.found}"), 6, break_long=False)
    write(f"{with_color(mark, color)} {first}")
    if finding.advice:
        advice, *more = wrap_indented(one_line(f"→ {finding.advice}"), 8, break_long=False)
        rest += [f"      {advice}", *more]
    for line in rest:
        write(line)
