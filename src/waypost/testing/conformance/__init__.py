"""The conformance suite: what a store must do, chapter by chapter, as tests that are its specification.

    publish    what is stored is what was sent, once, in order, within the cap
    keys       deduplication, conflicts, windows, generations
    unique     how long a message has its key
    removal    an empty queue is removed whole, and late calls for it do not reach the next queue of its name
    queue      pause, policy, limits, namespaces, listings
    groups     turns, order and limits of groups
    lease      claims, fences, counts, reclaim
    settle     outcomes, results, continuations, cancel
    chains     waiting for an end, chains over several queues, messages that wait for chains
    replay     lost replies, operations that may be forgotten, cloned sessions
    dead       dead letters and completed history
    timers     not early, in order, bounded
    expires    messages that lapse
    wake       which sleepers are woken, and when all of them are
    idle       polls of many queues at once
    journal    the exact history
    ledger     the sums
    workers    the register of workers
    records    small data that programs share
    schedules  each instant once, leaders, promotion
    clock_steps  a clock that is set forward or back
    side_effects  what a step does besides its work, and which waiters it wakes
    damage     damaged records, found and repaired

A test module that imports these classes and has the fixture `make_store` (see `waypost.testing.plugin`) runs them
sync and async. They need a manual clock: a store takes `clock=`, a function that returns milliseconds.
"""

from __future__ import annotations

from waypost.testing.conformance.chains import TestBlockers, TestChains, TestLinks, TestWaiting
from waypost.testing.conformance.clock_steps import TestClockSteps
from waypost.testing.conformance.damage import TestDamage
from waypost.testing.conformance.dead import TestChosenLetters, TestCompletedHistory, TestDeadLetters, TestRedrive
from waypost.testing.conformance.expires import TestExpiry
from waypost.testing.conformance.groups import (
    TestGroupLimits,
    TestGroupOrder,
    TestGroupSettings,
    TestGroupSwitches,
    TestTurns,
)
from waypost.testing.conformance.idle import TestPolls
from waypost.testing.conformance.journal import TestJournal, TestJournalReaders, TestLocate, TestTrace
from waypost.testing.conformance.keys import TestConflicts, TestGenerations, TestHolders, TestLiveKeys, TestWindows
from waypost.testing.conformance.lease import TestAtMostOnce, TestClaims, TestCounts, TestFences, TestReclaim
from waypost.testing.conformance.ledger import TestChanges, TestLedger, TestMinutes
from waypost.testing.conformance.publish import TestArrivals, TestCap, TestPublishing
from waypost.testing.conformance.queue import (
    TestIsolation,
    TestLimits,
    TestListings,
    TestPause,
    TestPolicy,
    TestPriorities,
)
from waypost.testing.conformance.records import TestSharedRecords
from waypost.testing.conformance.removal import (
    TestOperationsAcrossARemoval,
    TestRefusedRemovals,
    TestRemovals,
    TestRemovalsAtTheSameTime,
    TestUnknownQueues,
)
from waypost.testing.conformance.replay import (
    TestClonedSessions,
    TestForgottenOperations,
    TestLostReplies,
    TestOperations,
)
from waypost.testing.conformance.schedules import (
    TestFires,
    TestLeaders,
    TestOverlap,
    TestPromotion,
    TestSaving,
    TestScheduleState,
)
from waypost.testing.conformance.settle import TestCancel, TestContinuations, TestOutcomes, TestResults
from waypost.testing.conformance.side_effects import TestEndsInsideClaims, TestSideEffects
from waypost.testing.conformance.timers import TestReschedule, TestTimers
from waypost.testing.conformance.unique import TestLiveOrDead, TestUntilClaimed
from waypost.testing.conformance.wake import TestPollSoon, TestWakeUps
from waypost.testing.conformance.workers import TestWorkerRegister, TestWorkerRequests

__all__ = [
    "TestArrivals",
    "TestAtMostOnce",
    "TestBlockers",
    "TestCancel",
    "TestCap",
    "TestChains",
    "TestChanges",
    "TestChosenLetters",
    "TestClaims",
    "TestClockSteps",
    "TestClonedSessions",
    "TestCompletedHistory",
    "TestConflicts",
    "TestContinuations",
    "TestCounts",
    "TestDamage",
    "TestDeadLetters",
    "TestEndsInsideClaims",
    "TestExpiry",
    "TestFences",
    "TestFires",
    "TestForgottenOperations",
    "TestGenerations",
    "TestGroupLimits",
    "TestGroupOrder",
    "TestGroupSettings",
    "TestGroupSwitches",
    "TestHolders",
    "TestIsolation",
    "TestJournal",
    "TestJournalReaders",
    "TestLeaders",
    "TestLedger",
    "TestLimits",
    "TestLinks",
    "TestListings",
    "TestLiveKeys",
    "TestLiveOrDead",
    "TestLocate",
    "TestLostReplies",
    "TestMinutes",
    "TestOperations",
    "TestOperationsAcrossARemoval",
    "TestOutcomes",
    "TestOverlap",
    "TestPause",
    "TestPolicy",
    "TestPollSoon",
    "TestPolls",
    "TestPriorities",
    "TestPromotion",
    "TestPublishing",
    "TestReclaim",
    "TestRedrive",
    "TestRefusedRemovals",
    "TestRemovals",
    "TestRemovalsAtTheSameTime",
    "TestReschedule",
    "TestResults",
    "TestSaving",
    "TestScheduleState",
    "TestSharedRecords",
    "TestSideEffects",
    "TestTimers",
    "TestTrace",
    "TestTurns",
    "TestUnknownQueues",
    "TestUntilClaimed",
    "TestWaiting",
    "TestWakeUps",
    "TestWindows",
    "TestWorkerRegister",
    "TestWorkerRequests",
]
