"""The program of a handler process: it reads calls from its worker, runs the handler, and sends the results.

It ends when its worker does, however that ends: the pipe between them is closed, which a thread notices while a handler
runs; and on Linux the kernel ends it even if a handler holds the GIL in C. It ignores stop signals, even if a terminal
or a supervisor sends them to all processes: the worker decides when it stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from waypost.errors import ProcessFailed, Undecodable
from waypost.message import CHOICES, Message, Outcome, Queue, check_returned
from waypost.policy import NoRetry
from waypost.worker.handler import Handler, find_object
from waypost.worker.process_protocol import (
    BEGUN,
    LENGTH_BYTES,
    Answer,
    Call,
    End,
    Hello,
    decode,
    encode_error,
    encode_outcome,
    frame,
    read_end,
)
from waypost.worker.signals import NAMES

#: The time limit for the `atexit` functions of an idle process whose worker has ended.
EXIT_SECONDS = 2.0
PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the worker closes the connection."""
    end_with_parent(parent)
    for name in NAMES:
        # Not SIG_IGN, which programs that a handler starts would inherit.
        signal.signal(getattr(signal, name), lambda number, stack: None)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    # A fork of this process that outlives it must not keep the connection to its worker open.
    os.register_at_fork(after_in_child=connection.close)
    frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, frames), name="waypost-parent", daemon=True).start()
    first = frames.get()
    if first is None:
        return
    connection.sendall(BEGUN)
    hello, handler, answer = decode(first, Hello), None, Answer()
    try:
        handler = find_handler(hello)
    except BaseException as error:
        answer = Answer(failure=encode_error(error))
    connection.sendall(frame(answer))
    while (data := frames.get()) is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(BEGUN)
        if handler is not None:
            answer = run_call(decode(data, Call), handler)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(frame(answer))
        del data


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, where the system supports that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # the parent ended before that


def _listen(connection: socket.socket, frames: queue.SimpleQueue[bytes | None]) -> None:
    """Read frames; when the worker has ended, end this process, even while a handler runs."""
    while (data := _read_frame(connection)) is not None:
        frames.put(data)
    frames.put(None)
    # The parent has ended, so the result of a running handler is not needed. An idle process ends at the None.
    threading.Event().wait(EXIT_SECONDS)
    os._exit(1)


def _read_frame(connection: socket.socket) -> bytes | None:
    head = _read(connection, LENGTH_BYTES)
    return None if head is None else _read(connection, int.from_bytes(head, "big"))


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


def find_handler(hello: Hello) -> Handler:
    """Return the handler that the worker names."""
    import importlib

    importlib.import_module(hello.module)  # its own error has more information
    function: Callable[..., Any] | None = find_object(hello.module, hello.name)
    if function is None:
        raise ProcessFailed(f"there is no {hello.module}.{hello.name} in the handler's process")
    target: str | Queue[Any] = hello.queue
    if hello.body_type is not None:
        target = Queue(hello.queue, find_object(*hello.body_type.split(":")))
    ttl = None if hello.result_ttl_ms is None else hello.result_ttl_ms / 1000
    return Handler(target, function, batch=hello.batch, retry=NoRetry(), result_ttl=ttl)


def run_call(call: Call, handler: Handler) -> Answer:
    """Run the handler for a call."""
    messages = [Message(handler.queue, lease, handler.as_type) for lease in call.leases]
    ends: dict[str, End] = {}
    readable: list[Message[Any]] = []
    for message in messages:
        try:
            if "body" in handler.parameter_kinds or handler.as_type is not None:
                _ = message.body
            else:
                message.open()
        except Undecodable as error:
            ends[message.id] = End(unreadable=encode_error(error))
        except BaseException as error:
            # The code of the body's type may end in any way. In a batch the other messages go on.
            if handler.batch is None:
                return Answer([End()], failure=encode_error(error))
            ends[message.id] = End(unreadable=encode_error(error))
        else:
            readable.append(message)
    encoded, failure = None, None
    if readable:
        try:
            result = check_returned(handler.function(*handler.arguments(readable)))
            if isinstance(result, Outcome):
                raise result
            handler.keep_result(readable[0], result)
        except CHOICES as outcome:
            encoded = encode_outcome(outcome)
        except BaseException as error:
            failure = encode_error(error)
            # A handler that decodes its body itself (`message.decode`) and fails: a retry would fail too.
            ends |= {one.id: End(unreadable=failure) for one in readable if one.undecodable is error}
        for message in readable:
            ends.setdefault(message.id, read_end(message))
    for stream in (sys.stdout, sys.stderr):
        # A process may be killed at any time; the output of its handlers should be visible by then.
        with contextlib.suppress(Exception):
            stream.flush()
    return Answer([ends[message.id] for message in messages], encoded, failure)
