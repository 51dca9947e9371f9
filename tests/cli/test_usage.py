"""How commands are called: help, the environment, exit codes, secrets, widths, and invalid input."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from scripts.command_reference import BEGIN, PAGE, written
from tests.cli.conftest import CommandRunner
from tests.cli.test_every_command import ELSEWHERE, list_commands
from waypost import formatting
from waypost.cli import exit_codes, output
from waypost.cli.exit_codes import CODES, exit_code_of
from waypost.cli.main import GROUPS, main, make_parser
from waypost.errors import (
    AccessDenied,
    InvalidUrl,
    MissingExtra,
    OutcomeUnknown,
    QueueFull,
    SchemaTooNew,
    SchemaTooOld,
    StoreUnavailable,
    WaypostError,
)

pytestmark = pytest.mark.promise("FACE-2")

ROOT = Path(__file__).parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process, as a shell does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WAYPOST_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", *arguments], capture_output=True, text=True,
        env=kept | {"PYTHONPATH": str(ROOT / "src")} | environment, timeout=120, check=False,
    )  # fmt: skip


def parser_of(path: str) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = make_parser()
    for name in path.split():
        (inner,) = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
        found = inner.choices[name]
    return found


# ---- help and reference --------------------------------------------------------------------------------------------


def test_the_help_lists_every_command_in_its_group_and_fits_80_columns() -> None:
    printed = make_parser().format_help()
    for names in GROUPS.values():
        for name in {path.split()[0] for path in list_commands(make_parser())} & set(names):
            assert re.search(rf"^  {name} +\S", printed, re.MULTILINE), name
    assert max(map(len, printed.splitlines())) <= 80
    assert "examples:" in printed
    assert all(f"  {code:<4} " in printed for code in CODES)


def test_without_a_command_the_list_of_commands_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out == make_parser().format_help()


@pytest.mark.parametrize("name", sorted({path.split()[0] for path in list_commands(make_parser())} - ELSEWHERE))
def test_every_command_has_help_with_an_example_that_can_be_parsed(name: str) -> None:
    printed = parser_of(name).format_help()
    examples = re.findall(r"^  (?:\S+ \| )?waypost (.+)$", printed.partition("examples:")[2], re.MULTILINE)
    assert examples, printed
    for example in examples:
        arguments = [
            argument.strip("'\"")
            for argument in re.findall(r"""'[^']*'|"[^"]*"|[^\s'"]+""", example.partition(" > ")[0])
        ]
        assert make_parser().parse_args(arguments).command == name


@pytest.mark.parametrize(
    "path", sorted(path for path in list_commands(make_parser()) if path.split()[0] not in ELSEWHERE)
)
def test_the_help_of_a_command_fits_80_columns_and_explains_every_argument(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = parser_of(path)
    printed, _, examples = found.format_help().partition("examples:")
    assert max(map(len, printed.splitlines())) <= 80
    assert max(map(len, examples.splitlines()), default=0) <= 90
    assert [action.dest for action in found._actions if not action.help] == []


def test_the_command_reference_matches_the_parser() -> None:
    page = PAGE.read_text()
    assert page.partition(BEGIN)[2] == written().partition(BEGIN)[2], "run python -m scripts.command_reference"
    assert all(f"\n### `waypost {path}`\n" in page for path in list_commands(make_parser()))
    printed = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    assert printed == {str(code): text for code, text in CODES.items()}


# ---- what was probably meant -----------------------------------------------------------------------------------


@pytest.mark.promise("FACE-6")
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("qeues",), "queues"),
        (("queues", "--jsn"), "--json"),
        (("dead", "lst"), "list"),
        (("dead", "redrive", "orders", "--reson=rejected"), "--reason"),
    ],
)
def test_a_command_or_option_that_is_nearly_right_is_named(
    arguments: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.promise("FACE-6")
def test_an_unknown_option_is_refused_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("dead", "list", "--bogus"))
    printed = capsys.readouterr().err
    assert printed.startswith("usage: waypost dead list [-h]")
    assert printed.endswith("waypost dead list: error: unrecognized arguments: --bogus\n")


@pytest.mark.promise("FACE-6")
@pytest.mark.parametrize(
    "command", [("stats",), ("peek",), ("dead", "list"), ("purge", "--state", "ready", "--yes"), ("timers", "list")]
)
def test_a_queue_that_does_not_exist_is_named_with_those_called_alike(
    command: tuple[str, ...], sqlite_cli: CommandRunner
) -> None:
    sqlite_cli.post.publish("orders", 1)
    name, *rest = command
    arguments = [name, "odrers", *rest] if name == "purge" else [*command, "odrers"]
    sqlite_cli.run(*arguments)
    assert "waypost: there is no queue odrers in this store; did you mean orders?\n" in sqlite_cli.stderr
    sqlite_cli.run("stats", "orders")
    assert sqlite_cli.stderr == ""


def test_dead_letters_of_all_queues_are_listed_if_none_is_named(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.bury("orders", 1)
    sqlite_cli.bury("mails", 2)
    lines = sqlite_cli.run("dead", "list").splitlines()
    assert [line.split()[0] for line in lines] == ["queue", "mails", "orders"]
    assert [letter["queue"] for letter in sqlite_cli.json("dead", "list")] == ["mails", "orders"]
    assert "queue" not in sqlite_cli.run("dead", "list", "orders")


# ---- which store ---------------------------------------------------------------------------------------------------


def test_the_store_comes_from_the_environment_if_no_option_names_it(sqlite_cli: CommandRunner, tmp_path: Path) -> None:
    with sqlite_cli.post as post:
        post.publish("orders", 1)
    environment = {"WAYPOST_URL": sqlite_cli.url, "WAYPOST_NAMESPACE": sqlite_cli.namespace}
    assert command("queues", "--names", **environment).stdout == "orders\n"
    other = command("queues", "--url", f"sqlite:///{tmp_path / 'other.db'}", **environment)
    assert (other.returncode, other.stdout) == (3, "")
    assert f"there is no file {tmp_path / 'other.db'}" in other.stderr


def test_a_missing_store_is_an_error_that_names_the_option(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.run_bare("stats", code=2)
    assert "no store was given: give its URL" in sqlite_cli.stderr


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("valkey://user:hunter2@127.0.0.1:1", 3),
        ("valkey://user:hunter2@127.0.0.1:99999", 2),
        ("postgresql://user:hunter2@127.0.0.1:1/shop", 3),
        ("postgresql+psycopg://user:hunter2@127.0.0.1/shop", 2),
        ("kafka://user:hunter2@127.0.0.1", 2),
        ("sqlite:////nowhere/hunter3/a.db", 3),
        ("hunter2", 2),
    ],
)
@pytest.mark.parametrize("name", ["stats", "doctor", "watch"])
def test_an_unreachable_store_is_reported_in_one_sentence_without_secrets(
    name: str, url: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--url", url, *(["--once"] if name == "watch" else [])]) == code
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "Traceback" not in printed.err
    assert "waypost: " in printed.err or "WRONG connection: " in printed.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "valkey://user:hunter2@127.0.0.1:1"),
        ("peek", "valkey://user:hunter2@127.0.0.1:1"),
        ("publish", "orders", "1", "valkey://user:hunter2@127.0.0.1:1"),
        ("worker", "valkey://user:hunter2@127.0.0.1:1"),
        ("stats", "--minutes", "valkey://user:hunter2@127.0.0.1:1"),
    ],
)
def test_a_url_in_a_wrong_place_is_not_repeated_with_its_password(
    arguments: tuple[str, ...], sqlite_cli: CommandRunner
) -> None:
    if arguments[0] == "worker":
        sqlite_cli.run_bare(*arguments, code=2)
    else:
        sqlite_cli.run(*arguments, code=2)
    assert "hunter2" not in sqlite_cli.stderr
    if arguments[0] in ("stats", "publish") and "--minutes" not in arguments:
        assert "two stores are given, valkey://127.0.0.1:1 and sqlite:///" in sqlite_cli.stderr


@pytest.mark.promise("FACE-6")
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("stats URL", "orders"),
        ("stats URL orders", "orders"),
        ("stats orders URL", "orders"),
        ("URL stats orders", "orders"),
        ("peek --state ready URL orders", "hello"),
        ("dead list URL", "no dead letters"),
        ("dead list orders URL --by-reason", "no dead letters"),
        ("publish URL orders 1", "queued"),
        ("publish orders URL 1", "queued"),
        ("publish orders 1 URL", "queued"),
        ("queues URL --url URL", "orders"),
        ("cancel orders --key sqlite:///key URL", "no such message"),
        ("timers reschedule --delay 5 URL -- mails sqlite:///key", "sqlite:///key is due"),
    ],
)
def test_the_url_of_a_store_may_stand_anywhere_among_the_arguments(
    arguments: str, printed: str, sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAYPOST_NAMESPACE", sqlite_cli.namespace)
    sqlite_cli.post.publish("orders", "hello")
    sqlite_cli.post.publish("mails", 1, key="sqlite:///key", delay=3600)
    given = [sqlite_cli.url if one == "URL" else one for one in arguments.split()]
    assert printed in sqlite_cli.run_bare(*given, code=1 if given[0] == "cancel" else 0)


@pytest.mark.promise("FACE-6")
def test_a_body_of_text_may_be_the_url_of_a_store(sqlite_cli: CommandRunner) -> None:
    for place in ("first", "last"):
        given = ["orders", "sqlite:///other.db"]
        given.insert(0 if place == "first" else 2, sqlite_cli.url)
        sqlite_cli.run_bare("publish", *given, "--text", "--namespace", sqlite_cli.namespace)
    assert [message.body for message in sqlite_cli.post.peek("orders")] == ["sqlite:///other.db"] * 2


@pytest.mark.promise("FACE-6")
@pytest.mark.parametrize(
    "arguments",
    ["queues ONE TWO", "stats ONE orders TWO", "queues ONE --url TWO", "publish orders 1 ONE TWO", "web ONE TWO",
     "pipeline run --lake lake ONE --store TWO"],
)  # fmt: skip
def test_two_stores_are_refused(arguments: str, sqlite_cli: CommandRunner) -> None:
    urls = {"ONE": "valkey://user:hunter2@127.0.0.1:1", "TWO": "sqlite:///two.db"}
    sqlite_cli.run_bare(*(urls.get(one, one) for one in arguments.split()), code=2)
    assert sqlite_cli.stderr == "waypost: two stores are given, valkey://127.0.0.1:1 and sqlite:///two.db: give one\n"


def test_a_custom_schema_is_found(sqlite_cli: CommandRunner, request: pytest.FixtureRequest) -> None:
    import psycopg

    server = request.getfixturevalue("postgres_server")
    options = ("--url", server.url, "--schema", "apart", "--namespace", sqlite_cli.namespace)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS apart")
    sqlite_cli.run_bare("migrate", *options)
    sqlite_cli.run_bare("publish", "orders", "1", *options)
    assert sqlite_cli.run_bare("queues", "--names", *options) == "orders\n"
    sqlite_cli.run_bare("queues", "--url", server.url, "--namespace", sqlite_cli.namespace, code=6)
    assert "waypost migrate" in sqlite_cli.stderr


# ---- invalid input ------------------------------------------------------------------------------------------

WRONG = [
    (("publish", "orders"), "give one thing to publish"),
    (("publish", "orders", "{"), "is not JSON"),
    (("publish", "orders", "1", "--file", "x"), "give one thing to publish"),
    (("publish", "or ders", "1"), "queue name 'or ders' is not allowed"),
    (("publish", "orders", "1", "--priority", "10"), "a whole number from 0 to 9"),
    (("publish", "orders", "1", "--delay", "soon"), "a duration looks like"),
    (("publish", "orders", "1", "--at", "2026-01-01T00:00:00"), "needs its zone"),
    (("publish", "orders", "1", "--delay", "5", "--at", "2026-01-01T00:00:00Z"), "delay"),
    (("publish", "orders", "1", "--header", "novalue"), "a header is NAME=VALUE"),
    (("publish", "orders", "1", "--key", "a", "--content-key"), "give one of --key"),
    (("publish", "orders", "1", "--key-field", "id"), "no field 'id'"),
    (("publish", "orders", "--file", "missing.json"), "missing.json cannot be read"),
    (("publish", "orders", "--many", "missing.ndjson"), "missing.ndjson cannot be read"),
    (("publish", "orders", "--many", "x", "--key", "a"), "are for one message"),
    (("peek", "orders", "--state", "gone"), "invalid choice"),
    (("peek", "orders", "-n", "0"), "a whole number from 1"),
    (("peek", "orders", "--id", "x\0"), "id"),
    (("history", "orders", ""), "id"),
    (("find",), "give its id, or --key"),
    (("find", "x", "--key", "k"), "give its id, or --key"),
    (("stats", "orders", "--minutes", "9999"), "a whole number from 0 to 1440"),
    (("configure", "orders", "lease"), "a setting is NAME=VALUE"),
    (("configure", "orders", "lease=soon"), "lease: a duration looks like"),
    (("configure", "orders", "flavor=red"), "unknown queue setting 'flavor'"),
    (("configure", "orders", "max_pending=0"), "max_pending must be"),
    (("configure", "orders", "max_pending=²"), "max_pending must be"),
    (("groups", "configure", "orders", "acme", "weight=--3"), "weight must be"),
    (("configure", "orders", "rate=fast"), "rate must look like"),
    (("cancel", "orders"), "give its id, or --key"),
    (("purge", "orders"), "--state"),
    (("dead", "redrive", "orders", "--all", "--rate", "fast"), "rate must look like"),
    (("dead", "redrive", "orders", "abc", "--all"), "give ids, or --reason, or --all"),
    (("dead", "list", ""), "queue name"),
    (("timers", "cancel", "mails"), "no timer was chosen"),
    (("timers", "reschedule", "mails", "a"), "--delay"),
    (("timers", "list", "mails", "--before", "noon"), "a time looks like"),
    (("schedules", "save", "a", "--queue", "q", "--cron", "0 25 * * *"), "hours: 25 is out of range"),
    (("schedules", "save", "a", "--queue", "q", "--every", "5", "--body", "{"), "--body is not JSON"),
    (("journal", "orders", "--after", "-1"), "a whole number from 0"),
    (("scheduler", "--ttl", "0"), "ttl must be seconds"),
    (("bench", "--messages", "1"), "a whole number from 10"),
    (("queues", "--schema", "apart"), "--schema is for PostgreSQL"),
    (("nonsense",), "invalid choice: 'nonsense'"),
]


@pytest.mark.parametrize(
    ("arguments", "printed"), WRONG, ids=lambda one: " ".join(one) if isinstance(one, tuple) else ""
)
def test_invalid_arguments_are_reported_in_one_sentence_and_nothing_is_done(
    arguments: tuple[str, ...], printed: str, sqlite_cli: CommandRunner
) -> None:
    sqlite_cli.run(*arguments, code=2)
    assert printed in sqlite_cli.stderr
    assert sqlite_cli.post.queues() == []


def test_an_invalid_line_stops_an_import_where_it_can_be_resumed(sqlite_cli: CommandRunner) -> None:
    lines = sqlite_cli.folder / "many.ndjson"
    lines.write_text('{"id": 1}\n\n{"id": 2}\nnonsense\n{"id": 3}\n')
    sqlite_cli.run("publish", "orders", "--many", str(lines), code=2)
    assert "line 4 is not JSON" in sqlite_cli.stderr
    assert "published before it: 2 messages; repair it and go on with --from-line 4" in sqlite_cli.stderr
    lines.write_text(lines.read_text().replace("nonsense", '{"id": 0}'))
    assert sqlite_cli.run("publish", "orders", "--many", str(lines), "--from-line", "4") == "orders: 2 queued\n"
    assert [message.body["id"] for message in sqlite_cli.post.peek("orders")] == [1, 2, 0, 3]


def test_lines_of_another_program_are_published_with_their_ids(
    sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\r\ntwo\n")))
    printed_text = sqlite_cli.run("publish", "orders", "-", "--text", "--ids").split()
    assert printed_text[::2] == ["queued", "queued"]
    assert [(message.id, message.body) for message in sqlite_cli.post.peek("orders")] == [
        (printed_text[1], "one"),
        (printed_text[3], "two"),
    ]


def test_an_import_into_a_full_queue_reports_how_many_were_published(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.post.configure("orders", max_pending=3)
    lines = sqlite_cli.folder / "many.ndjson"
    lines.write_text("1\n2\n3\n4\n")
    sqlite_cli.run("publish", "orders", "--many", str(lines), code=4)
    assert "max_pending is 3" in sqlite_cli.stderr
    assert "0 messages published" in sqlite_cli.stderr


# ---- exit codes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidUrl("x"), exit_codes.USAGE),
        (MissingExtra("x"), exit_codes.USAGE),
        (StoreUnavailable("x"), exit_codes.UNREACHABLE),
        (AccessDenied("x"), exit_codes.UNREACHABLE),
        (OutcomeUnknown("x"), exit_codes.FAILED),
        (QueueFull("x"), exit_codes.FAILED),
        (SchemaTooOld("x"), exit_codes.BEHIND),
        (SchemaTooNew("x"), exit_codes.AHEAD),
        (exit_codes.CommandError("x"), exit_codes.FOUND),
    ],
)  # fmt: skip
def test_an_error_has_the_exit_code_of_its_kind(error: WaypostError, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_interrupt_ends_a_command_with_its_own_code(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.post.publish("orders", 1)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", "journal", "orders", "--follow", *sqlite_cli.options],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # The process that runs the tests may ignore it (a shell's background), and then so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, printed_text = process.communicate(timeout=60)
    assert (process.returncode, printed_text) == (130, "waypost: interrupted\n")


def test_a_closed_pipe_ends_a_command_without_output(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.post.publish_many("orders", range(3_000))
    source = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", "journal", "orders", "--json", "-n", "3000",
         *sqlite_cli.options],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert source.stdout is not None
    assert source.stderr is not None
    source.stdout.readline()
    source.stdout.close()
    assert source.stderr.read() == ""
    assert source.wait(60) == 0
    source.stderr.close()


def test_an_import_whose_reader_has_gone_reports_where_it_stopped(
    sqlite_cli: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 0 the lines that were not published would be lost unnoticed."""
    many = tmp_path / "many"
    many.write_text("".join(f"{number}\n" for number in range(6)))
    monkeypatch.setattr("waypost.cli.commands.publish.BATCH_LINES", 2)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["publish", "orders", "--many", str(many), "--ids", *sqlite_cli.options]) == exit_codes.FOUND
        monkeypatch.undo()
    assert "2 messages published; go on with --from-line 3" in capsys.readouterr().err
    assert sqlite_cli.post.ledger("orders").ready == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_does_not_depend_on_the_encoding_of_the_terminal(
    encoding: str, sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_cli.post.publish("orders", "caf\u00e9 \u2013 \U0001f600")
    printed: dict[str, str] = {}
    for form in ("--state=ready", "--json"):
        with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(["peek", "orders", form, *sqlite_cli.options]) == 0
            printed[form] = stdout.buffer.getvalue().decode(encoding)
            monkeypatch.undo()
    assert json.loads(printed["--json"])[0]["body"] == "caf\u00e9 \u2013 \U0001f600"
    assert ("\u2013" if encoding == "utf-8" else r"\u2013") in printed["--state=ready"]


def test_a_command_runs_without_standard_streams(sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_cli.post.publish("orders", 1)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    codes = [
        main([*command, *sqlite_cli.options])
        for command in (["stats", "orders"], ["watch"], ["purge", "orders", "--state", "ready"])
    ]
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    monkeypatch.undo()
    assert codes == [0, exit_codes.USAGE, exit_codes.USAGE]
    assert sqlite_cli.post.ledger("orders").ready == 1


# ---- formatting --------------------------------------------------------------------------------------------


def test_message_text_cannot_move_the_cursor_of_a_terminal() -> None:
    assert output.one_line("a\x1b[2Jb\r\nc\x07") == r"a\x1b[2Jb c\x07"


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(None, "–"), (0.005, "5 ms"), (1.5, "1.5 s"), (150, "2.5 min"), (7_200, "2.0 h"), (10**6, "11.6 d"),
     (10**7, "116 d")],
)  # fmt: skip
def test_a_duration_is_formatted_in_a_few_characters(seconds: float | None, printed: str) -> None:
    assert formatting.format_age(None if seconds is None else timedelta(seconds=seconds)) == printed


def on_a_terminal(cli: CommandRunner, **environment: str) -> bytes:
    """Return what a command writes to a terminal."""
    main_end, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", "queues", *cli.options], stdout=other_end, stdin=other_end,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"} | environment,
    )  # fmt: skip
    os.close(other_end)
    printed = b""
    try:
        while part := os.read(main_end, 4096):
            printed += part
    except OSError:
        pass  # the other end is closed
    os.close(main_end)
    assert process.wait(60) == 0
    return printed


def test_colors_are_used_only_on_terminals_and_without_no_color(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.post.publish("orders", 1)
    assert b"\x1b[1m" in on_a_terminal(sqlite_cli)
    assert b"\x1b" not in on_a_terminal(sqlite_cli, NO_COLOR="1")
    assert "\x1b" not in sqlite_cli.run("queues")


def test_every_command_but_the_live_view_works_without_optional_packages(sqlite_cli: CommandRunner) -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'textual', 'shtab', 'redis', 'psycopg'): sys.modules[name] = None\n"
        "from waypost.cli.main import main\n"
        "place = sys.argv[1:]\n"
        "codes = [main([*given, *place]) for given in (['publish', 'orders', '1'], ['queues'], ['stats', 'orders'],\n"
        "    ['watch', '--once'], ['peek', 'orders'], ['dead', 'redrive', 'orders', '--all'], ['doctor'],\n"
        "    ['bench', '--messages', '20', '--pings', '10'])]\n"
        "codes += [main(['completion', 'bash']), main(['stats', '--url', 'valkey://127.0.0.1:1'])]\n"
        "codes += [main(['stats', '--url', 'postgresql://127.0.0.1:1/a'])]\n"
        "print(codes)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *sqlite_cli.options],
        capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 1, 0, 2, 2, 2]"
    for extra in ("cli", "valkey", "postgres"):
        assert f'pip install "waypost[{extra}]"' in ran.stderr
