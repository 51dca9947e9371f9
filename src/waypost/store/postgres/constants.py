"""The constants that Python and SQL share, with their names in the SQL files: `{LEASED}`, `{REPLAY_MAX}`.

They are written into the functions as literals when these are created, so that the planner sees constants, as the
predicates of partial indexes require. Migrations have numbers of their own: an old migration must not change.
"""

from __future__ import annotations

import re

from waypost import identity, policy
from waypost.values import TRACEBACK_MARK, MessageState

#: Only append: rows and indexes contain these numbers.
STATES: dict[MessageState, int] = {"ready": 0, "delayed": 1, "leased": 2, "waiting": 3, "dead": 4, "done": 5}
#: A state that no message can have.
NO_STATE = 7
#: The server cuts a longer channel name, so `channel` hashes it to this many hexadecimal digits.
CHANNEL_BYTES_MAX = 63
CHANNEL_HASH_DIGITS = 40
#: How the messages of a queue are stored: see `group_mode` in the migration 0016_groups. 0 is without regard to
#: groups.
MODE_FAIR, MODE_ORDERED = 1, 2
#: The `group_rank` of a message in an ordered group: age alone decides.
RANK_ORDERED = -1
#: Whether a group joins the line when its counts change: always, or only if it waits for the end of a lease.
JOINS, JOINS_IF_LIMITED = 1, 2
#: Messages and groups that one claim converts when the settings of a queue changed: more would delay it too much.
CONVERT_MAX = 3_000
#: Messages that are ready when a queue becomes ordered precede all later ones: their positions begin at minus this.
CONVERTED_OFFSET = 2**46
#: Changes of groups that a claim folds at a time.
FOLDED_MAX = 512
#: How often a redrive in the caller's transaction is tried again because another transaction published a key
#: meanwhile.
REDRIVE_TRIES = 5
#: The client's part of an operation is one value: session, mark, stamp (an int8) and, for a claim, nonce.
STAMP_BYTES = 8

_LIMITS = (
    "ARRIVAL_TTL_MS", "BURY_MAX", "CHANGES_KEPT", "CHUNK_MESSAGES_MAX", "ENDED_TTL_MS", "GROUPS_KEPT_MAX",
    "GROUPS_SKIPPED_MAX", "GROUP_RATE_PARTS", "GROUP_STRIDE", "HEAD_OFFSET",
    "JOURNAL_ERROR_CHARACTERS_MAX", "JOURNAL_SLACK_PART", "LAPSE_MAX", "LINKS_MAX", "MINUTES_KEPT", "NO_END_MS",
    "OLDEST_READ_MAX",
    "POLL_SOON_MESSAGES_MAX", "POLL_SOON_MS_MAX", "PRIORITY_DEFAULT",
    "PRIORITY_MAX", "PROMOTE_MAX", "RECLAIM_MAX", "RECORDS_SWEPT_MAX", "REMOVED_TTL_MS", "REPLAY_MAX",
    "SIDE_EFFECTS_MAX", "SLEEPER_TTL_MS",
    "STAMP_AHEAD_MS", "WORKERS_SWEPT_MAX",
)  # fmt: skip
_LAYOUT = ("ID_CHARACTERS", "MARK_BYTES", "NONCE_BYTES", "SESSION_BYTES")
_MARK_AT = identity.SESSION_BYTES + 1
_STAMP_AT = _MARK_AT + identity.MARK_BYTES

CONSTANTS: dict[str, int | str] = {
    **{state.upper(): number for state, number in STATES.items()},
    **{name: getattr(policy, name) for name in _LIMITS},
    **{name: getattr(identity, name) for name in _LAYOUT},
    "TRACEBACK_MARK": ord(TRACEBACK_MARK),
    "CHANNEL_BYTES_MAX": CHANNEL_BYTES_MAX,
    "UNTIL_CLAIMED": policy.UNIQUE_NUMBERS["until_claimed"],
    "LIVE_OR_DEAD": policy.UNIQUE_NUMBERS["live_or_dead"],
    "MODE_FAIR": MODE_FAIR,
    "MODE_ORDERED": MODE_ORDERED,
    "RANK_ORDERED": RANK_ORDERED,
    "JOINS": JOINS,
    "JOINS_IF_LIMITED": JOINS_IF_LIMITED,
    "CONVERT_MAX": CONVERT_MAX,
    "CONVERTED_OFFSET": CONVERTED_OFFSET,
    "FOLDED_MAX": FOLDED_MAX,
    "REDRIVE_TRIES": REDRIVE_TRIES,
    "CHANNEL_HASH_DIGITS": CHANNEL_HASH_DIGITS,
    "DEFAULT_LEASE_MS": policy.DEFAULT_POLICY.lease_ms or 0,
    # Ranks increase as priorities decrease, so that an index lists the highest priority first.
    "RANK_DEFAULT": policy.PRIORITY_MAX - policy.PRIORITY_DEFAULT,
    # The registration of a sleeper is renewed when half of its time has passed.
    "SLEEPER_RENEW_MS": policy.SLEEPER_TTL_MS // 2,
    "STAMP_BYTES": STAMP_BYTES,
    # Positions in a value, counted from 1 as in SQL.
    "MARK_AT": _MARK_AT,
    "STAMP_AT": _STAMP_AT,
    "NONCE_AT": _STAMP_AT + STAMP_BYTES,
    # A stored result begins with its mark, that of a claim continues with its nonce, both in hexadecimal digits.
    "MARK_DIGITS": 2 * identity.MARK_BYTES,
    "NONCE_DIGITS": 2 * identity.NONCE_BYTES,
    "RESULT_AT": 2 * identity.MARK_BYTES + 1,
    # An array, as PostgreSQL writes it.
    "POLICY_FIELDS": "{" + ",".join(policy.PolicyRecord.__struct_fields__) + "}",
}
_NAME = re.compile(r"\{([A-Z][A-Z_]*)\}")


def inject(text: str) -> str:
    """Return a SQL file with the values of its constants; `KeyError` for a name that is not defined."""
    return _NAME.sub(lambda match: str(CONSTANTS[match[1]]), text)
