"""Inside the jail, for `bench.layers`: a zygote that can also fork, run and exit without isolation, and time that.

Run by path beside the guest's own modules, as `layers_guest.py --fd N`. It is the real zygote with one more order:

    order                             answer, with totals over all calls
    measure {fork, calls, source}     measured {cpu_ms, own_cpu_ms, failed}

Calls of one zygote run one after another, so no call waits in a queue. `cpu_ms` is the CPU time that the kernel counts
for the calls' processes, from fork to exit. `own_cpu_ms` is the CPU time of the zygote itself. This program uses only
the standard library.
"""

from __future__ import annotations

import fork_memory

if __name__ == "__main__":  # before all other imports, as in the real zygote
    fork_memory.use_one_heap()

import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

import confine
import output_files
import runner
import system_calls
import zygote

OUTPUT_BYTES = 1 << 16


class MeasuringZygote(zygote.Zygote):
    """The real zygote with one more order, `measure`, which `_on_measure` handles."""

    def _on_measure(self, header: dict[str, Any], *_data: memoryview) -> None:
        failed, before_s, cpu = 0, _children_cpu_s(), time.process_time_ns()
        for _ in range(header["calls"]):
            failed += self._run_bare(header["fork"], header["source"])
        cpu = time.process_time_ns() - cpu
        totals = {"cpu_ms": (_children_cpu_s() - before_s) * 1e3, "own_cpu_ms": cpu / 1e6}
        self.writer.add({"op": "measured", "failed": failed, **totals})

    def _run_bare(self, fork: str, source: str) -> bool:
        """Fork, compile, run and exit. Output goes to a memory file, as in a real call. Return whether it failed."""
        out = output_files.bounded_file(OUTPUT_BYTES)
        if fork == "os.fork":
            pid = os.fork()
        else:
            number, flags, *rest = self.confinement.fork_step(0)  # it forks a call from the template
            flags = flags & ~(confine.CLONE_NEWPID | confine.CLONE_PARENT) | signal.SIGCHLD
            pid = system_calls.invoke(number, flags, *rest)
        if pid == 0:
            _bare_child(source, out)
        _, status = os.waitpid(pid, 0)
        os.close(out)
        return status != 0


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _bare_child(source: str, out: int) -> NoReturn:
    try:
        os.dup2(out, 1)
        exec(compile(source, runner.SCRIPT, "exec"), {"__name__": "__main__"})
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    zygote.Zygote = MeasuringZygote
    zygote.HANDLERS["measure"] = MeasuringZygote._on_measure
    sys.argv[0] = zygote.__file__
    zygote.main()
