"""The chain of a message as a graph: what is known of it, and where each message stands in the drawing. Pure.

A queue keeps the unfinished messages of the chains that began in it, the one that ended last, and those that wait for
the end; messages that ended before are forgotten. Where an id shows that one sent on another, the line is solid.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from waypost.formatting import format_count
from waypost.identity import continuation_id
from waypost.values import Links, chain_id, split_chain_id
from waypost.web.documents import Chain, ChainEdge, ChainNode, ChainRole

#: Messages of one column that are drawn; the list beside the drawing has all of them.
COLUMN_MAX = 6
NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y = 196, 54, 48, 14
#: How many ids of what a message may have sent on are tried to recognise one.
CHILDREN_TRIED = 16
TOKENS_TRIED = range(1, 9)

ROLE_TEXTS: dict[ChainRole, str] = {
    "blocker": "this message waits for its chain",
    "first": "first message of the chain",
    "this": "this message",
    "last": "ended last",
    "failed": "broke the chain",
    "open": "unfinished",
    "waiting": "waits for the end of the chain",
}
#: The column of each role, from left to right.
COLUMNS: dict[ChainRole, int] = {"blocker": 0, "first": 1, "this": 2, "last": 2, "failed": 2, "open": 3, "waiting": 4}


def make_chain(queue: str, id: str, links: Links, first_links: Links | None, tokens: Iterable[int]) -> Chain | None:
    """What is known of the chain of a message, None if it has none.

    `links` are its own, `first_links` those of the first message of its chain, `tokens` those of its claims.
    """
    name = chain_id(queue, id)
    began = links if links.begun.known else first_links
    chain = links.chain if links.chain is not None else name if links.begun.known else None
    if began is None or not began.begun.known:
        began = Links()
    if chain is None and not links.blockers:
        return None
    unfinished = name in began.members
    roles: dict[str, ChainRole] = {name: "first" if name == chain else "open" if unfinished else "this"}
    if chain is not None:
        roles.setdefault(chain, "first")
    if began.begun.failed is not None:
        roles.setdefault(began.begun.failed[0], "failed")
    if began.begun.last is not None:
        roles.setdefault(began.begun.last, "last")
    for members, role in ((began.members, "open"), (began.watchers, "waiting"), (links.blockers, "blocker")):
        for member in members:
            roles.setdefault(member, role)  # type: ignore[arg-type]
    nodes = [
        ChainNode(queue=one, id=member, role=role, text=ROLE_TEXTS[role], is_this=known == name)
        for known, role in sorted(roles.items(), key=lambda item: COLUMNS[item[1]])
        for one, member in (split_chain_id(known),)
    ]
    return Chain(
        id=chain,
        sentence=describe(chain, began, links),
        nodes=nodes,
        edges=edges_of(roles, name, chain, set(tokens)),
        more=max(0, began.begun.open - len(began.members)),
    )


def describe(chain: str | None, began: Links, links: Links) -> str:
    """How the chain stands, as a sentence."""
    state = began.begun
    waits = f"It waits for {format_count(len(links.blockers), 'chain')}." if links.blockers else ""
    if chain is None:
        return waits
    if not state.known:
        text = "Its chain has ended, and its first queue has forgotten it."
    elif state.failed is not None:
        text = f"Its chain is broken: {state.failed[1]}."
    elif state.open == 0:
        text = "Its chain is complete."
    else:
        text = f"Its chain goes on: {format_count(state.open, 'message is', 'messages are')} unfinished."
    return f"{text} {waits}".strip()


def is_sent_on(source: str, target: str, tokens: Iterable[int]) -> bool:
    """Whether the id of a message shows that another one sent it on."""
    source_id, target_id = split_chain_id(source)[1], split_chain_id(target)[1]
    return target_id[:9] == source_id[:9] and any(
        continuation_id(source_id, token, index) == target_id for token in tokens for index in range(CHILDREN_TRIED)
    )


def edges_of(roles: dict[str, ChainRole], name: str, chain: str | None, tokens: set[int]) -> list[ChainEdge]:
    """The lines between messages: from what came before to what comes after."""
    edges: list[ChainEdge] = []

    def join(source: str, target: str, tried: Iterable[int] | None) -> None:
        direct = tried is not None and is_sent_on(source, target, tried)
        edges.append(ChainEdge(source=source, target=target, direct=direct))

    middle = [one for one, role in roles.items() if role in ("this", "last", "failed") and one != chain]
    for one, role in roles.items():
        if role == "blocker":
            join(one, name, None)
        elif one in middle and chain is not None and (one != name or chain in roles):
            join(chain, one, TOKENS_TRIED)
        elif role == "open" and chain is not None:
            sources = [known for known in (name, *middle) if is_sent_on(known, one, tokens or TOKENS_TRIED)]
            join(sources[0] if sources else chain, one, tokens | set(TOKENS_TRIED))
        elif role == "waiting" and chain is not None:
            ends = [known for known, other in roles.items() if other == "open"] or middle or [chain]
            for end in ends[:COLUMN_MAX]:
                join(end, one, None)
    return edges


# ---- the drawing -------------------------------------------------------------------------------------------------


class Box(Struct, frozen=True):
    """A message in the drawing."""

    node: ChainNode
    column: int
    x: int
    y: int


class Line(Struct, frozen=True):
    """A line between two messages."""

    path: str
    direct: bool


class Drawing(Struct, frozen=True):
    """A chain as boxes and lines. `hidden` messages are in the list alone."""

    boxes: list[Box]
    lines: list[Line]
    width: int
    height: int
    hidden: int
    box_width: int = NODE_WIDTH
    box_height: int = NODE_HEIGHT


def draw_chain(chain: Chain) -> Drawing:
    """The places of messages in columns, and lines from the right of one to the left of the next."""
    columns = sorted({COLUMNS[node.role] for node in chain.nodes})
    sources = {edge.target: edge.source for edge in chain.edges}
    boxes: dict[str, Box] = {}
    rows = [0] * len(columns)
    for place, column in enumerate(columns):
        drawn = [node for node in chain.nodes if COLUMNS[node.role] == column][:COLUMN_MAX]
        for node in drawn:
            name = chain_id(node.queue, node.id)
            source = boxes.get(sources.get(name, ""))
            # A line that passes columns in between goes below what is there.
            passed = rows[place if source is None else source.column + 1 : place]
            row = max(rows[place], *passed, 0)
            rows[place] = row + 1
            boxes[name] = Box(node, place, 2 + place * (NODE_WIDTH + GAP_X), 2 + row * (NODE_HEIGHT + GAP_Y))
    lines = []
    for edge in chain.edges:
        before, after = boxes.get(edge.source), boxes.get(edge.target)
        if before is None or after is None or before.x >= after.x:
            continue
        x, y = before.x + NODE_WIDTH, before.y + NODE_HEIGHT // 2
        bend, end = x + GAP_X // 2, after.y + NODE_HEIGHT // 2
        lines.append(Line(f"M{x},{y} C{bend},{y} {bend},{end} {x + GAP_X},{end} L{after.x},{end}", edge.direct))
    return Drawing(
        boxes=list(boxes.values()),
        lines=lines,
        width=len(columns) * (NODE_WIDTH + GAP_X) - GAP_X + 4,
        height=max(rows) * (NODE_HEIGHT + GAP_Y) - GAP_Y + 4,
        hidden=len(chain.nodes) - len(boxes),
    )
