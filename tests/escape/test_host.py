"""Attacks that learn facts about the machine, or predict random numbers of other calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.escape.targets import Host, Target, succeeds_without_jail, with_controls_of_root
from tests.executor.calling import executor

FACTS = {
    "the host name": "import platform\nif HOST['name'] in (socket.gethostname(), os.uname().nodename, platform.node()): breach(HOST['name'])",
    "mounts": "for path in ('/proc/mounts', '/proc/self/mountinfo', '/etc/mtab', '/proc/1/mounts'):\n    if read(path): breach(path)",
    "kernel addresses": """
for path in ("/proc/kallsyms", "/proc/modules", "/proc/self/stack", "/proc/self/maps", "/proc/iomem", "/sys/kernel/notes"):
    if read(path): breach(path)
""",
    "processes": "if any(map(str.isdigit, names('/proc'))): breach('/proc')",
    "hardware": "for path in ('/proc/cpuinfo', '/proc/meminfo', '/sys/class/dmi/id/product_name', '/proc/cmdline'):\n    if read(path): breach(path)",
    "directories of the host": "for path in (HOST['directory'], '/proc', '/sys', '/root', '/home', '/var', '/boot'):\n"
    "    if names(path): breach(path)",
    "whether a path exists": "if works(os.stat, HOST['file']): breach(HOST['file'])",
    "user accounts": "import pwd\nfor entry in pwd.getpwall():\n"
    "    if entry.pw_uid not in (0, 65534) and entry.pw_name != 'sandbox': breach(entry)",
    "paths of the server": "for part in (*sys.path, sys.prefix, sys.executable, os.__file__):\n"
    "    if part and not part.startswith(('/python', '/tmp', '/guest')): breach(part)",
    "environment variables of the server": "for name in os.environ:\n"
    "    if name not in 'PATH HOME LANG USER LOGNAME MPLBACKEND PYTHONHASHSEED PYTHONPATH OPENBLAS_NUM_THREADS OMP_NUM_THREADS "
    "MKL_NUM_THREADS MALLOC_ARENA_MAX LC_CTYPE TMPDIR PYTHONTZPATH'.split(): breach(name)",
    "the pid of the parent": "if os.getppid() not in (0, 1): breach(os.getppid())",
    "the number of processes": "if os.getpid() > 2: breach(os.getpid())",
    "the kernel log": "if raw('syslog', 10, None, 0) > 0 or read('/dev/kmsg', 10): breach('log')  # SYSLOG_ACTION_SIZE_BUFFER",
    "groups of the server": "if os.getgroups(): breach(os.getgroups())",
}


@pytest.mark.parametrize("attack", FACTS)
def test_a_call_cannot_learn(attack: str, target: Target) -> None:
    target.resists(FACTS[attack])


CONTROLS = [attack for attack in FACTS if attack not in ("groups of the server", "user accounts")]


@pytest.mark.parametrize("attack", with_controls_of_root(CONTROLS, "the kernel log"))
def test_learning_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, FACTS[attack], tmp_path)


RANDOM_SOURCES = {
    "random": "import random; random.random(), random.getrandbits(64), random.Random().random(), random.SystemRandom().random()",
    "the kernel's generator": "import os; os.urandom(8)",
    "secrets": "import secrets; secrets.token_hex(8)",
    "uuid": "import uuid; uuid.uuid4(), uuid.uuid1().time",
    "temporary names": "import tempfile; tempfile.mkdtemp(), tempfile.mktemp()",
    "OpenSSL": "import ssl; ssl.RAND_bytes(8)",
    "shuffles": "import random; x = list(range(50)); random.shuffle(x); x",
}


@pytest.mark.parametrize("source", RANDOM_SOURCES)
def test_random_numbers_of_calls_differ(source: str, target: Target) -> None:
    numbers = [target.caller.run(RANDOM_SOURCES[source].replace("; ", "\n")).value for _ in range(4)]
    assert None not in numbers
    assert len(set(numbers)) == 4


LIBRARIES = {
    "numpy": "import numpy\nnumpy.random.rand(), numpy.random.default_rng().random(), numpy.random.RandomState().rand()",
    "sympy": "from sympy.core.random import random\nrandom()",
    "mpmath": "import mpmath\nmpmath.rand()",
    "scipy": "from scipy import stats\nstats.norm.rvs(size=2)",
    "networkx": "import networkx\nnetworkx.gnp_random_graph(30, 0.5).edges()",
    "pandas": "import pandas\npandas.Series(range(99)).sample(9).tolist()",
}


@pytest.mark.runtime
def test_random_numbers_of_libraries_differ(guest_python: Path, target: Target) -> None:
    if target.name != "namespaces":
        pytest.skip("one level is enough: reseeding after the fork is the same at all levels")
    with executor(guest_python, isolation=target.level, profiles=("scientific",)) as caller:
        for source, code in LIBRARIES.items():
            numbers = [caller.run(code, timeout_s=60.0).value for _ in range(3)]
            assert None not in numbers, source
            assert len(set(numbers)) == 3, (source, numbers)
