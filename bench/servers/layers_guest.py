"""Inside the jail, for `bench.layers`: a zygote that can also run calls with only some of the layers, and time them.

Run by path beside the guest's own modules, as `layers_guest.py --fd N`. It is the real zygote with one more order:

    order                             body                     answer, with totals over all calls
    measure {step, calls}             the frame of one call    measured {cpu_ms, wall_ms, own_cpu_ms, faults, failed}

Calls of one zygote run one after another, so what is measured is their cost and not a queue. `cpu_ms` is what the
kernel counts for the calls' processes (fork to exit) and `own_cpu_ms` is the zygote's share. Standard library only.
"""

from __future__ import annotations

import fork_memory

if __name__ == "__main__":  # before all other imports, as in the real zygote
    fork_memory.use_one_heap()

import marshal
import os
import resource
import sys
import time
from typing import Any, NoReturn

import confine
import fork_batch
import output_files
import protocol
import runner
import system_calls
import zygote

STEPS = ("floor", "os.fork", "namespaces", "tmpfs", "identity", "seccomp", "groups", "runner")
LAYERS: dict[str, set[int]] = {
    "namespaces": {system_calls.UNSHARE},
    "tmpfs": {system_calls.MOUNT},
    "identity": {
        *(system_calls.SETGROUPS, system_calls.SETRESGID, system_calls.SETRESUID, system_calls.CAPSET),
        *(system_calls.CHDIR, system_calls.SETRLIMIT, system_calls.PRCTL, system_calls.SETPGID),
    },
    "seccomp": {system_calls.SECCOMP},
    "groups": {system_calls.WRITE},
    "runner": {system_calls.OPEN, system_calls.CLOSE},
}
"""The system calls that each layer adds to the steps before it."""


class MeasuringZygote(zygote.Zygote):
    """The loop and the fork are the zygote's own; `_on_measure` is the only addition."""

    failed = 0
    is_mute = False

    def send(self, header: dict[str, Any], files: Any = ()) -> None:
        if not self.is_mute:
            super().send(header, files)

    def _on_measure(self, header: dict[str, Any], body: memoryview) -> None:
        step = header["step"]
        self.failed, self.is_mute = 0, True
        header_bytes, _ = protocol.LENGTHS.unpack_from(body)
        call_body = body[protocol.LENGTHS.size + header_bytes :]
        call = marshal.loads(body[protocol.LENGTHS.size : protocol.LENGTHS.size + header_bytes])
        source = bytes(call_body[: call["blobs"][0]])
        children_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        own_before = resource.getrusage(resource.RUSAGE_SELF)
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(header["calls"]):
            if step == "runner":
                self._run_whole_call(call, call_body)
            else:
                self._run_bare(step, call, source)
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.is_mute = False
        child_s = children.ru_utime + children.ru_stime - children_before.ru_utime - children_before.ru_stime
        own_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - own_before.ru_minflt
        faults = children.ru_minflt - children_before.ru_minflt + own_faults
        totals = {"faults": faults, "cpu_ms": child_s * 1e3, "own_cpu_ms": cpu / 1e6, "wall_ms": wall / 1e6}
        self.send({"op": "measured", "failed": self.failed, **totals})

    def _run_bare(self, step: str, call: dict[str, Any], source: bytes) -> None:
        """Fork, confine as far as `step`, compile, run and exit. Output goes to a memory file, as in a real call."""
        out = output_files.bounded_file(call["output_bytes"])
        pid = self._fork_plainly(step) if step in ("floor", "os.fork") else self._fork_confined(step, call, out)
        if pid == 0:
            self._bare_child(source, out)
        _, status = os.waitpid(pid, 0)
        if status:
            self.failed += 1
        os.close(out)

    def _fork_plainly(self, step: str) -> int:
        if step == "os.fork":
            return os.fork()
        number, flags, *rest = self.confinement.fork_step(0)
        return system_calls.invoke(number, flags & ~confine.CLONE_NEWPID, *rest)

    def _fork_confined(self, step: str, call: dict[str, Any], out: int) -> int:
        """Fork as the zygote does, without the confinement steps of the layers after `step`."""
        data_address = self.batch.data_addresses[0]
        steps, data = self.confinement.syscall_steps(call["slot"], call, [(out, 1)], data_address)
        omitted = set().union(*(LAYERS[name] for name in STEPS[STEPS.index(step) + 1 :]))
        # A step is a system call's number and its arguments, in a fixed number of words.
        size = fork_batch.STEP_WORDS
        chunks = [steps[start : start + size] for start in range(0, len(steps), size)]
        words = [word for chunk in chunks if chunk[0] not in omitted for word in chunk]
        self.batch.add(0, (0, 0, 0, 0), words, data)
        if self.batch.run(1) is None:
            return self.batch.child_pid(0)
        self.batch.raise_if_step_failed()
        return 0

    def _bare_child(self, source: bytes, out: int) -> NoReturn:
        try:
            os.dup2(out, 1)
            exec(compile(source, runner.SCRIPT, "exec"), {"__name__": "__main__"})
            os._exit(0)
        finally:
            os._exit(1)

    def _run_whole_call(self, call: dict[str, Any], body: memoryview) -> None:
        """Run a call as the zygote does: fork, runner and answer. Only the frame with the answer is not sent."""
        self.on_call(call, body)
        self.fork_pending()
        (running,) = self.running.values()
        pid, status, usage = os.wait4(running.pid, 0)
        del self.running[pid]
        self.send_ended(running, status, usage)
        self.deadlines.clear()
        if status:
            self.failed += 1


if __name__ == "__main__":
    zygote.Zygote = MeasuringZygote
    zygote.HANDLERS["measure"] = MeasuringZygote._on_measure
    sys.argv[0] = zygote.__file__
    zygote.main()
