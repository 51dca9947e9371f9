"""Leases given by this process, remembered until they are settled: a settle then need not search messages by id.

No decision depends on it. A lease that is found here is settled only if its row still has the claim's nonce and token;
all others are searched in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: More than a worker holds. The oldest are forgotten first.
LEASES_MAX = 16_384

#: A leased message without key and chain, with what the event of its end needs: seq, token, priority, group,
#: deliveries, attempts, size, claimed_ms, worker.
KnownLease = tuple[int, int, int, str | None, int, int, int, int, str]


class KnownLeases:
    """The leases of one store object, by the nonce of their claim and their id. Safe to use from several threads."""

    __slots__ = ("_claims", "_count")

    def __init__(self) -> None:
        self._claims: dict[bytes, dict[str, KnownLease]] = {}
        self._count = 0

    def keep(self, nonce: bytes, ids: Sequence[str], leases: Iterable[KnownLease]) -> None:
        """Remember the leases of a claim."""
        self._count += len(ids) - len(self._claims.get(nonce, ()))
        self._claims[nonce] = dict(zip(ids, leases, strict=True))
        while self._count > LEASES_MAX and len(self._claims) > 1:
            # Another thread may have removed it meanwhile.
            self._count -= len(self._claims.pop(next(iter(self._claims)), ()))

    def find(self, nonce: bytes, ids: Iterable[str]) -> list[KnownLease] | None:
        """Return leases of one claim; None if one of them is not known."""
        leases = list(map(self._claims.get(nonce, {}).get, ids))
        return None if None in leases else leases  # type: ignore[return-value]

    def drop(self, nonce: bytes, id: str) -> None:
        """Forget one lease, if it is known."""
        claim = self._claims.get(nonce)
        if claim is not None and claim.pop(id, None) is not None:
            self._count -= 1
            if not claim:
                self._claims.pop(nonce, None)

    def forget(self, nonce: bytes, ids: Sequence[str]) -> None:
        """Forget leases that were settled."""
        claim = self._claims.get(nonce, {})
        if len(claim) == len(ids):
            # The whole claim: all its ids were found, each once.
            self._claims.pop(nonce, None)
        else:
            for id in ids:
                claim.pop(id, None)
        self._count -= len(ids)
