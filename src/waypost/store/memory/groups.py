"""Groups: turns, order and limits, as functions of a queue model.

A queue with `fair`, an order or a limit per group takes turns between its groups. All messages without a group share
one turn (the group "" here) and know no order and no limit.

Turns. The groups that may have something to hand out are in line, each with a number. A claim takes from the group
with the smallest number, of equal ones from the first by name. `turn` is the number of the last group that was taken
from. A group that joins the line, and one that goes on after a message was taken, gets `turn` plus `GROUP_STRIDE` /
weight. So no group saves anything up while it waits, and none can be passed more than once a round.

A group joins the line, unless it is in it, whenever it may be able to go on: a message of it became ready; the lease of
one ended, if it is ordered or limits its leases; a message that held it has ended or was skipped; its rate allows the
next one; it was resumed or configured. Whether it can go on is not asked then. A claim that reaches a group that cannot
go on, or has taken the last that it may hand out, takes the group out of the line. So a group that cannot go on costs
nothing to skip, and a claim does work only for what changed.

Order. With `order="group"` a group has at most one leased message, and hands them out by position: when each first
became ready. A message that is retried, snoozed, released or expires keeps its position; while it is delayed it holds
the group (`on_failure="hold"`), unless it was skipped. One that is redriven, and one that is postponed before it was
ever claimed, gets a new position when it is ready. When an order is switched on, the messages that are ready keep the
order in which they would have been claimed, and delayed ones join when they are ready.

Invariants: at most one leased message per ordered group; no more leases, and no more claims in any window, per group
than its limits; messages of an ordered group are claimed by position, except those that were passed or skipped while
they were delayed; of two groups that can go on all the time the one does not get more than its weight and one message
ahead of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from waypost.errors import InvalidPolicy
from waypost.identity import Operation
from waypost.policy import (
    BURY_MAX,
    CHUNK_MESSAGES_MAX,
    DEFAULT_GROUP,
    GROUP_RATE_PARTS,
    GROUP_STRIDE,
    GROUPS_KEPT_MAX,
    HEAD_OFFSET,
    LEASE_NEEDED,
    GroupSettings,
)
from waypost.store.memory.records import Record
from waypost.store.port import (
    Draft,
    format_changes,
    group_cursor,
    not_grouped,
    queue_full,
    read_cursor,
    too_many_groups,
)
from waypost.values import Damage, GroupPage, GroupRecord, HolderState, TurnLimit

if TYPE_CHECKING:
    from waypost.store.memory.queue import QueueModel

#: The messages without a group.
NO_GROUP = ""
IN_LINE = "put in line"


# ---- one group -------------------------------------------------------------------------------------------


def name_of(record: Record | Draft) -> str:
    """Return the group of a message, as the line has it."""
    return record.group or NO_GROUP


def settings_of(model: QueueModel, group: str) -> GroupSettings:
    """Return the settings of a single group."""
    return model.group_settings.get(group, DEFAULT_GROUP)


def is_ordered(model: QueueModel, record: Record) -> bool:
    """Return whether a message belongs to an ordered group."""
    return model.policy.order is not None and record.group is not None


def place(model: QueueModel, record: Record) -> tuple[int | str, ...]:
    """Return the place of a ready message in its group."""
    return (0 if is_ordered(model, record) else -record.priority, record.position, record.id)


def members(model: QueueModel, group: str) -> list[Record]:
    """Return the ready messages of a group in the order in which they are claimed."""
    found = [r for r in model.messages.values() if r.state == "ready" and name_of(r) == group]
    return sorted(found, key=lambda r: place(model, r))


def running(model: QueueModel, group: str) -> int:
    """Return how many messages of a group are leased."""
    return sum(r.state == "leased" and name_of(r) == group for r in model.messages.values())


def holding(model: QueueModel, group: str) -> list[Record]:
    """Return the delayed messages that hold a group, the first one first."""
    if model.policy.order is None or model.policy.on_failure == "pass" or group == NO_GROUP:
        return []
    found = [r for r in model.messages.values() if r.holds and name_of(r) == group]
    return sorted(found, key=lambda r: (r.position, r.id))


def leased_holder(model: QueueModel, group: str) -> Record | None:
    """Return the leased message of an ordered group; None while the queue has more leases than stores search."""
    if model.policy.order is None or group == NO_GROUP or model.count("leased") > CHUNK_MESSAGES_MAX:
        return None
    leased = (r for r in model.messages.values() if r.state == "leased" and name_of(r) == group)
    # Several if they were leased before there was an order.
    return min(leased, key=lambda r: r.id, default=None)


def most_running(model: QueueModel, group: str) -> int | None:
    """Return the limit of leases of a group, other than by its order."""
    return None if group == NO_GROUP else settings_of(model, group).max_running or model.policy.group_max_running


def limit_at(model: QueueModel, now: int, group: str) -> tuple[TurnLimit | None, int | None]:
    """Return the limit that a group is at, if any, and when its rate allows the next message."""
    most = most_running(model, group)
    if most is not None and running(model, group) >= most:
        return "max_running", None
    until = rate_until(model, now, group)
    return (None, None) if until is None else ("rate", until)


def can_go_on(model: QueueModel, now: int, group: str) -> bool:
    """Return whether a claim may take a message of this group now."""
    if settings_of(model, group).paused or not members(model, group) or limit_at(model, now, group)[0] is not None:
        return False
    if model.policy.order is None or group == NO_GROUP:
        return True
    return running(model, group) == 0 and not holding(model, group)


# ---- rates -----------------------------------------------------------------------------------------------


def rate_of(model: QueueModel, group: str) -> tuple[int, int] | None:
    """Return how many messages of a group may be claimed in how many milliseconds."""
    own = settings_of(model, group)
    if group == NO_GROUP:
        return None
    if own.rate_count is not None and own.rate_per_ms is not None:
        return own.rate_count, own.rate_per_ms
    if model.policy.group_rate_count is not None and model.policy.group_rate_per_ms is not None:
        return model.policy.group_rate_count, model.policy.group_rate_per_ms
    return None


def rate_until(model: QueueModel, now: int, group: str) -> int | None:
    """Return when the rate of a group allows the next message; None if it allows one now.

    The window is cut into `GROUP_RATE_PARTS` parts. A part counts until all of it is outside the window, so that never
    more than the limit are claimed in any window. Without a rate nothing is remembered.
    """
    rate = rate_of(model, group)
    if rate is None:
        return None
    count, per_ms = rate
    claimed = _claims_in_window(model, now, group, per_ms)
    used = sum(claimed.values())
    for at, number in sorted(claimed.items()):
        if used < count:
            break
        used -= number
        if used < count:
            return at + per_ms
    return None


def _claims_in_window(model: QueueModel, now: int, group: str, per_ms: int) -> dict[int, int]:
    """Return how many messages of a group were claimed in each part of its window, by the part's last millisecond."""
    claimed = {at: number for at, number in model.group_claims.get(group, {}).items() if at + per_ms > now}
    if any(at > _end_of_part(now, per_ms) for at in claimed):
        # The clock was set back. The whole window counts from now on, not until the clock reaches the old time.
        claimed = model.group_claims[group] = {_end_of_part(now, per_ms): sum(claimed.values())}
    return claimed


def _end_of_part(now: int, per_ms: int) -> int:
    part_ms = -(-per_ms // GROUP_RATE_PARTS)
    return now - now % part_ms + part_ms - 1


def count_claim(model: QueueModel, now: int, group: str) -> None:
    """Count a claimed message for the rate of its group."""
    rate = rate_of(model, group)
    if rate is None:
        return
    claimed = _claims_in_window(model, now, group, rate[1])
    end = _end_of_part(now, rate[1])
    model.group_claims[group] = claimed | {end: claimed.get(end, 0) + 1}


# ---- the line --------------------------------------------------------------------------------------------


def join(model: QueueModel, group: str) -> None:
    """Put a group that may be able to go on into the line, one step behind the last turn."""
    if model.policy.grouped and group not in model.line:
        model.line[group] = model.turn + GROUP_STRIDE // settings_of(model, group).weight


def join_again(model: QueueModel, now: int) -> None:
    """Put the groups into the line whose rate allows the next message by now, or whose time cannot be right."""
    for group, until in list(model.limited.items()):
        rate = rate_of(model, group)
        # Further ahead than a window: the clock was set back.
        if until <= now or rate is None or until > _end_of_part(now, rate[1]) + rate[1]:
            del model.limited[group]
            join(model, group)


def join_all(model: QueueModel) -> None:
    """Put all groups with ready messages into the line."""
    for group in {name_of(r) for r in model.messages.values() if r.state == "ready"}:
        join(model, group)


def _take_out(model: QueueModel, now: int, group: str) -> None:
    """Take a group that cannot go on out of the line; note when its rate allows the next message."""
    del model.line[group]
    limit, until = limit_at(model, now, group)
    if limit == "rate" and until is not None and members(model, group):
        model.limited[group] = until


def next_in_turn(model: QueueModel, now: int) -> Record | None:
    """Return the message that is claimed next, after taking groups that cannot go on out of the line."""
    while model.line:
        group = min(model.line, key=lambda name: (model.line[name], name))
        if can_go_on(model, now, group):
            return members(model, group)[0]
        _take_out(model, now, group)
    return None


def took(model: QueueModel, now: int, record: Record) -> None:
    """Move a group on after a message of it was claimed."""
    group = name_of(record)
    count_claim(model, now, group)
    model.turn = model.line[group]
    model.line[group] = model.turn + GROUP_STRIDE // settings_of(model, group).weight
    if not can_go_on(model, now, group):
        _take_out(model, now, group)


def next_allowed(model: QueueModel, now: int) -> int | None:
    """Return the time until the first rate of a group allows its next message."""
    return max(0, min(model.limited.values()) - now) if model.limited else None


def needs_claim(model: QueueModel, now: int) -> bool:
    """Return whether a claim may find something, or has groups to put into the line."""
    return bool(model.line) or next_allowed(model, now) == 0


def released(model: QueueModel, record: Record) -> None:
    """Note that a message ends its lease, or holds its group no more: its group may be able to go on."""
    if not model.policy.grouped:
        return
    group = name_of(record)
    if record.holds or is_ordered(model, record) or most_running(model, group) is not None:
        model.freed_groups.add(group)
        join(model, group)


def worth_waking(model: QueueModel, now: int) -> int:
    """Return how many sleepers the groups are worth that can go on since a step ended leases or holds of them.

    Those with messages that became ready in the same step are counted already. One more if only a rate keeps some of
    them back, and no claim has returned until when: the claim of that sleeper does.
    """
    freed = model.freed_groups - model.fresh_groups
    able = {group for group in freed if can_go_on(model, now, group)}
    return len(able) + any(waits_for_rate(model, now, group) for group in freed - able)


def waits_for_rate(model: QueueModel, now: int, group: str) -> bool:
    """Return whether a group could go on if its rate allowed it, and no claim has returned yet when it does."""
    if group in model.limited or settings_of(model, group).paused or not members(model, group):
        return False
    if model.policy.order is not None and (running(model, group) > 0 or holding(model, group)):
        return False
    return limit_at(model, now, group)[0] == "rate"


# ---- caps ------------------------------------------------------------------------------------------------


def most_pending(model: QueueModel, group: str) -> int | None:
    """Return how many ready, delayed and waiting messages a group may have."""
    return None if group == NO_GROUP else settings_of(model, group).max_pending or model.policy.group_max_pending


def later(model: QueueModel, group: str) -> int:
    """Return how many messages of a group are delayed or waiting."""
    return sum(r.state in ("delayed", "waiting") and name_of(r) == group for r in model.messages.values())


def over_caps(model: QueueModel, drafts: Iterable[Draft], concerned: set[str]) -> list[Record]:
    """Return what must be dropped so that no group has more than its `max_pending`; raises `QueueFull`."""
    doomed: list[Record] = []
    for group, added in sorted(Counter(map(name_of, drafts)).items()):
        cap = most_pending(model, group)
        if cap is None:
            continue
        pending = len(members(model, group)) + later(model, group)
        over = min(pending + added - cap, added + BURY_MAX)
        if over <= 0:
            continue
        choice = _droppable(model, group, concerned)
        if model.policy.overload != "drop_oldest" or len(choice) < over:
            raise queue_full(model.name, pending, cap, group)
        doomed += choice[:over]
    return doomed


def longest_first(model: QueueModel, count: int, concerned: set[str]) -> list[Record]:
    """Return what a full queue drops, fewer if there are not as many: one by one the oldest of the longest group."""
    groups = {name_of(r) for r in model.messages.values()}
    choices = {group: _droppable(model, group, concerned) for group in groups}
    lengths = {group: len(choice) for group, choice in choices.items() if choice}
    doomed: list[Record] = []
    while lengths and len(doomed) < count:
        longest = min(lengths, key=lambda group: (-lengths[group], group))
        doomed.append(choices[longest][len(choices[longest]) - lengths[longest]])
        lengths[longest] -= 1
        if not lengths[longest]:
            del lengths[longest]
    return doomed


def _droppable(model: QueueModel, group: str, concerned: set[str]) -> list[Record]:
    """Return the ready messages of a group that an overload may drop: by lowest priority, then age."""
    found = [r for r in members(model, group) if r.id not in concerned]
    return sorted(found, key=lambda r: (0 if is_ordered(model, r) else r.priority, r.position, r.id))


# ---- settings --------------------------------------------------------------------------------------------


def configured(model: QueueModel, *, ordered_before: bool) -> None:
    """Fit the messages to changed settings. Stores with many messages do this in bounded steps."""
    ordered = model.policy.order is not None
    if ordered and not ordered_before:
        grouped = [r for r in model.messages.values() if r.group is not None]
        ready = [r for r in grouped if r.state == "ready"]
        for record in sorted(ready, key=lambda r: (-r.priority, r.position, r.id)):
            model.sequence += 1
            record.position = model.sequence
        for record in grouped:
            if record.state == "delayed":
                record.position = 0
            elif record.state == "leased":
                # It was claimed before all that are ready, so it returns to a place before them.
                record.position = (record.claimed_ms or 0) - HEAD_OFFSET
    if not ordered:
        for record in model.messages.values():
            record.holds = False
    if model.policy.grouped:
        join_all(model)
    else:
        model.line, model.limited, model.group_claims, model.turn = {}, {}, {}, 0


def configure_group(model: QueueModel, now: int, group: str, changes: Mapping[str, Any]) -> bool:
    """Change the settings of a single group; return whether anything changed."""
    if not model.policy.grouped:
        raise not_grouped(model.name)
    before = settings_of(model, group)
    after = structs.replace(before, **changes)
    if after.limits and model.policy.lease_ms is None:
        raise InvalidPolicy(LEASE_NEEDED)
    if after == before:
        return False
    kept = model.group_settings.keys() - {group}
    if after != DEFAULT_GROUP and len(kept) >= GROUPS_KEPT_MAX:
        raise too_many_groups(model.name)
    model.group_settings = {name: model.group_settings[name] for name in kept}
    if after != DEFAULT_GROUP:
        model.group_settings[group] = after
    # Not the names of the queue's own settings: readers of the journal must not confuse the two.
    own = {f"own_{name}": value for name, value in changes.items()}
    model.note(now, "configured", None, None, group=group, cause=format_changes(own))
    model.limited.pop(group, None)
    join(model, group)
    return True


def worth_configuring(model: QueueModel, now: int, group: str) -> int:
    """Return how many sleepers a group is worth that was resumed or configured."""
    if not can_go_on(model, now, group):
        return int(waits_for_rate(model, now, group))
    return 1 if model.policy.order else len(members(model, group))


def skip_held(model: QueueModel, now: int, group: str, operation: Operation) -> str | None:
    """Let the next message of a group pass the delayed one that holds it; return that one's id."""
    if not model.policy.grouped:
        raise not_grouped(model.name)
    held = holding(model, group)
    if not held:
        return None
    released(model, held[0])
    held[0].holds = False
    model.note(now, "skipped", operation, held[0], cause="held")
    return held[0].id


# ---- reading ---------------------------------------------------------------------------------------------


def page(model: QueueModel, now: int, limit: int, cursor: str | None, group: str | None) -> GroupPage:
    """Return groups by name."""
    if not model.policy.grouped:
        raise not_grouped(model.name)
    names = {name_of(r) for r in model.messages.values() if r.state not in ("dead", "done")}
    names |= model.group_settings.keys()
    if group is not None:
        names &= {group}
    after = read_cursor(cursor, 1)
    behind = sorted(name for name in names if after is None or name > str(after[0]))
    found = [_record(model, now, name) for name in behind[:limit]]
    return GroupPage(found, group_cursor(behind[limit - 1]) if len(behind) > limit else None)


def _record(model: QueueModel, now: int, group: str) -> GroupRecord:
    ready, waits, own = members(model, group), later(model, group), settings_of(model, group)
    holder = next(iter(holding(model, group)), None) or leased_holder(model, group)
    held_by, held_state = (None, None) if holder is None else (holder.id, holder.state)
    (limited_by, limited_until), cap = limit_at(model, now, group), most_pending(model, group)
    return GroupRecord(
        group or None, len(ready), waits, running(model, group), now - ready[0].ready_ms if ready else None, own.paused,
        held_by, cast("HolderState | None", held_state),
        limited_by, limited_until, cap is not None and len(ready) + waits >= cap,
        own.weight, own.max_running, own.rate_count, own.rate_per_ms, own.max_pending,
    )  # fmt: skip


def check(model: QueueModel, now: int, *, mend: bool) -> Sequence[Damage]:
    """Find groups that can go on and are not in line."""
    groups = {name_of(r) for r in model.messages.values() if r.state == "ready"}
    damages = []
    for group in sorted(groups - model.line.keys() - model.limited.keys()):
        if model.policy.grouped and can_go_on(model, now, group):
            if mend:
                join(model, group)
                model.freed_groups.add(group)
                model.note(now, "configured", None, None, group=group or None, cause=f"mended group: {IN_LINE}")
            found = "it has messages to hand out and is not in line"
            damages.append(Damage(model.name, "group", group or None, found, IN_LINE if mend else None))
    return damages
