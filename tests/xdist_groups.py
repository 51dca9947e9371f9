"""How `--dist loadgroup` hands out tests here: as xdist does, but a process that dies does not stop the run.

xdist 3.8 gives all units of a process that died to others, those that are complete too, and hands out one unit at a
time. A process that is given a complete unit has nothing to run, reports nothing, and is never given another: the run
hangs, typically at its end. The test that killed the process would also be run again, and kill the next one.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

#: A process runs a test only when it knows the next one, so it must have more than one until there are no more.
PENDING_MIN = 3


class Groups(LoadGroupScheduling):
    """Tests of one group run in one process, others in any free one."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand the tests that a dead process did not finish to others; return the one that it died of."""
        units = self.assigned_work.pop(node)
        left = {scope: [test for test, complete in unit.items() if not complete] for scope, unit in units.items()}
        died_of = next((test for tests in left.values() for test in tests), None)
        for scope, tests in left.items():
            unit = {test: False for test in tests if test != died_of}
            if unit:
                self.workqueue[scope] = unit
        for other in self.nodes:
            self._reschedule(other)
        return died_of

    def _reschedule(self, node: WorkerController) -> None:
        # A process that has just been started has not reported its tests yet.
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < PENDING_MIN:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
