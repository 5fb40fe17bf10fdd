"""Attacks for knowledge: of the machine, its other calls, and of random numbers that somebody else has drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.escape.targets import Host, Target, succeeds_without_jail
from tests.executor.calling import OWN_PYTHON, executor

FACTS = {
    "its name": "import platform\nif HOST['name'] in (socket.gethostname(), os.uname().nodename, platform.node()): breach(HOST['name'])",
    "its mounts": "for path in ('/proc/mounts', '/proc/self/mountinfo', '/etc/mtab', '/proc/1/mounts'):\n    if read(path): breach(path)",
    "its kernel's addresses": """
for path in ("/proc/kallsyms", "/proc/modules", "/proc/self/stack", "/proc/self/maps", "/proc/iomem", "/sys/kernel/notes"):
    if read(path): breach(path)
""",
    "its processes": "if any(map(str.isdigit, names('/proc'))): breach('/proc')",
    "its hardware": "for path in ('/proc/cpuinfo', '/proc/meminfo', '/sys/class/dmi/id/product_name', '/proc/cmdline'):\n    if read(path): breach(path)",
    "its folders": "for path in (HOST['directory'], '/proc', '/sys', '/root', '/home', '/var', '/boot'):\n"
    "    if names(path): breach(path)",
    "that a path exists": "if not isinstance(attempt(os.stat, HOST['file']), OSError): breach(HOST['file'])",
    "who uses it": "import pwd\nfor entry in pwd.getpwall():\n    if entry.pw_uid not in (0, 65534): breach(entry)",
    "our own server's paths": "for part in (*sys.path, sys.prefix, sys.executable, os.__file__):\n"
    "    if part and not part.startswith(('/python', '/tmp', '/guest')): breach(part)",
    "its environment": "for name in os.environ:\n"
    "    if name not in 'PATH HOME LANG USER LOGNAME MPLBACKEND PYTHONHASHSEED PYTHONPATH OPENBLAS_NUM_THREADS OMP_NUM_THREADS "
    "MKL_NUM_THREADS MALLOC_ARENA_MAX LC_CTYPE TMPDIR PYTHONTZPATH'.split(): breach(name)",
    "who started us": "if os.getppid() not in (0, 1): breach(os.getppid())",
    "how many are here": "if os.getpid() > 2: breach(os.getpid())",
    "its log": "if raw(103, 10, None, 0) > 0 or read('/dev/kmsg', 10): breach('log')",
    "its groups": "if os.getgroups(): breach(os.getgroups())",
}


@pytest.mark.parametrize("attack", FACTS)
def test_learning(attack: str, target: Target) -> None:
    target.resists(FACTS[attack])


@pytest.mark.parametrize("attack", [attack for attack in FACTS if attack not in ("its groups", "who uses it")])
def test_learning_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, FACTS[attack], tmp_path)


RANDOM_SOURCES = {
    "random": "import random; random.random(), random.getrandbits(64), random.Random().random(), random.SystemRandom().random()",
    "hashes": "hash(object()) and 0 or __import__('os').urandom(8)",
    "secrets": "import secrets; secrets.token_hex(8)",
    "uuid": "import uuid; uuid.uuid4(), uuid.uuid1().time",
    "temporary names": "import tempfile; tempfile.mkdtemp(), tempfile.mktemp()",
    "OpenSSL": "import ssl; ssl.RAND_bytes(8)",
    "shuffles": "import random; x = list(range(50)); random.shuffle(x); x",
}


@pytest.mark.parametrize("source", RANDOM_SOURCES)
def test_random_numbers_of_calls_differ(source: str, target: Target) -> None:
    drawn = [target.caller.run(RANDOM_SOURCES[source].replace("; ", "\n")).value for _ in range(4)]
    assert None not in drawn
    assert len(set(drawn)) == 4


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
        pytest.skip("once is enough: it is a matter of the fork, which is the same at all levels")
    assert OWN_PYTHON
    with executor(guest_python, isolation=target.level, profiles=("scientific",)) as caller:
        for source, code in LIBRARIES.items():
            drawn = [caller.run(code, timeout_s=60.0).value for _ in range(3)]
            assert None not in drawn, source
            assert len(set(drawn)) == 3, (source, drawn)
