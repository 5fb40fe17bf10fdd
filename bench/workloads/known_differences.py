"""Why a test of CPython's own suite fails in a call and not in a fresh interpreter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

EXCLUDED_MODULES: dict[str, str] = {
    "networks beyond TCP and UDP on 127.0.0.1": """
        test_smtpnet test_socket test_ssl test_telnetlib test_urllib2net test_urllibnet
    """,
    "shells, terminals and CGI programs, beside networks that a call may have": "test_asyncio test_httpservers",
    "terminals: the jail has no /dev/ptmx and no /dev/tty": "test_openpty test_pty test_termios test_tty",
    "a display: the jail has no Tk": """
        test_idle test_tcl test_tk test_tkinter test_ttk test_ttk_textonly test_turtle
    """,
    "other systems, debuggers and compilers": """
        test__osx_support test_android test_cext test_clinic test_cppext test_gdb test_generated_cases test_ioctl
        test_kqueue test_launcher test_msvcrt test_peg_generator test_perf_profiler test_startfile test_tools
        test_winapi test_winconsoleio test_winreg test_winsound test_wmi
    """,
    "minutes of time: process pools of each start method, and the suite's own runner": """
        test_concurrent_futures test_multiprocessing_fork test_multiprocessing_forkserver test_multiprocessing_spawn
        test_regrtest
    """,
}
"""Modules that `bench.conformance` leaves out unless `--modules` names them, by the reason."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason, and how a test with it is recognised."""

    text: str
    pattern: str
    """Regular expression for the name of the test, a colon, and the end of its traceback."""


REASONS: tuple[Reason, ...] = (
    Reason("the library's directory is read-only", r"Read-only file system|Permission denied: '/python"),
    Reason(
        "no terminals: the jail has no /dev/ptmx and no /dev/tty",
        r"out of pty devices|test_(openpty|termios|tty|pty)\.|PseudoterminalTests|test_\w*(tcgetpgrp|tcsetpgrp)",
    ),
    Reason(
        "no fork server in an interpreter that ignores PYTHONPATH: descriptors cannot be sent over a socket",
        r"SCM_RIGHTS|recvfds|ForkServerCmdLineTest|sendmsg cannot send descriptors",
    ),
    Reason(
        "files in the scratch directory cannot be executed: it is mounted noexec",
        r"Permission denied: '/tmp/|test_shutil.TestWhich|test_executable_without_cwd",
    ),
    Reason(
        "no shell and no programs but Python", r"'/bin/sh'|test_find_library_with_(gcc|ld)|No such file.*'(ls|sh|id)'"
    ),
    Reason(
        "changes of priority and cores are refused: a call could take cores that the server does not use",
        r"setscheduler|set_get_priority|setaffinity|cpu_count_affinity",
    ),
    Reason(
        "other ids than its own do not exist for a call: EINVAL instead of EPERM",
        r"POSIXProcessTestCase\.test_(user|group)\b",
    ),
    Reason("no IPv6, and no urgent data (MSG_OOB)", r"ftplib\.py:abort|test_imap4_host_default_value"),
    Reason("splice is refused: it puts page cache of shared files into pipes (Dirty Pipe)", r"splice"),
    Reason(
        "no locks between the processes of a call: no limit bounds the kernel's memory for locks",
        r"lockf|MultiprocessTests|test_lock_conflict",
    ),
    Reason(
        "watching directories and leases are refused: they report what other calls do", r"test_fcntl_64_bit|test_lease"
    ),
    Reason(
        "no /proc: a call would see mounts, memory maps and processes", r"/proc/|external_inspection|main_thread_exists"
    ),
    Reason("the working directory is the home directory, so pdb reads one .pdbrc twice", r"test_pdbrc"),
    Reason("the headers of C are not in the jail", r"pyconfig\.h"),
    Reason(
        "no warning that a process with threads forks: Python counts them in /proc", r"test_fork_warns_when_non_python"
    ),
    Reason(
        "a limit of the call: memory, threads, processes, open files, or the size of a file",
        r"fsize_ismax|File too large|Cannot allocate memory|"
        r"Too many open files|can't start new thread|Resource temporarily unavailable",
    ),
)


def excluded_modules() -> frozenset[str]:
    """The names of all modules in `EXCLUDED_MODULES`."""
    return frozenset(chain.from_iterable(names.split() for names in EXCLUDED_MODULES.values()))


def reason_for(test: str, detail: str) -> Reason | None:
    """The first reason whose pattern matches."""
    return next((reason for reason in REASONS if re.search(reason.pattern, f"{test}: {detail}", re.DOTALL)), None)
