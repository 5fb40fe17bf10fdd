"""Probes this machine, and plans the zygote pools of an executor: their number, slots and jails.

A zygote pool is one jail, its zygotes (interpreters that fork once per call) and its slots, each for one call at a
time.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import tempfile
from dataclasses import dataclass

from sandbox import jail, machine
from sandbox.executor.profile_choice import ProfileTree
from sandbox.guest.protocol import MAX_SLOTS_PER_POOL
from sandbox.runtime import build as runtime
from sandbox.settings.server import ExecutorConfig, resolve_capacity

log = logging.getLogger(__name__)

GUEST_ENV = {
    "PATH": "/python/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "MPLBACKEND": "Agg",
    "LD_BIND_NOW": "1",  # the reason is in guest/zygote.py
    "PYTHONHASHSEED": "0",  # so that the same code has the same output in every zygote
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 64 MiB of the address space that memory_mb limits
    # One thread for each library, since calls share the cores and a zygote with several threads cannot fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Environment variables of every call."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The zygote pools of an executor."""

    config: ExecutorConfig
    level: jail.Level
    cores: float
    """The executor's share of the setting `cores`."""
    granted_cores: int
    """Cores that the machine grants to this process and its calls."""
    slots: int
    long_slots: int
    sessions: int
    """Number of sessions that may be open at once."""
    wanted_fds: int
    """Number of descriptors that the configured slots need. If this process may open fewer, there are fewer slots."""
    profile_tree: ProfileTree
    specs: tuple[jail.JailSpec, ...]
    """The jail of each pool."""
    warnings: tuple[str, ...]
    """What this machine lacks, one sentence each."""

    @property
    def profiles(self) -> tuple[str, ...]:
        return (*self.config.profiles, *self.profile_tree.own_profiles)

    @property
    def slots_per_pool(self) -> tuple[int, int, int]:
        """Numbers of short slots, of long slots, and of slots of sessions of each pool."""
        short, long, sessions = (math.ceil(n / len(self.specs)) for n in (self.slots, self.long_slots, self.sessions))
        return short, long, sessions


def plan_pools(config: ExecutorConfig) -> PoolPlan:
    """Probe the machine, and plan the pools for it. Raises `IsolationError` if the machine lacks the isolation level.
    Raises `ConfigError` if the Python or a mount cannot be used."""
    granted_cores = machine.granted_cores()
    capacity = resolve_capacity(config, granted_cores)
    level = jail.choose_level(config.isolation).level
    has_uids = jail.host_uids(0, 1, level)[0] is not None
    jail.check_mounts(config.mounts, level, has_uids=has_uids)
    slots = max(1, min(capacity["slots"], jail.max_slots_for_fds()))
    long_slots = max(0, min(capacity["long_slots"], jail.max_slots_for_fds() - slots))
    has_sessions = level in (jail.Level.NSJAIL, jail.Level.NAMESPACES)
    sessions = max(0, min(capacity["sessions"], jail.max_slots_for_fds() - slots - long_slots)) if has_sessions else 0
    python = jail.Interpreter.find(config.python or str(runtime.default_python()))
    min_pools = math.ceil((slots + long_slots + sessions) / MAX_SLOTS_PER_POOL)
    pools = max(min(capacity["zygote_pools"], slots), min_pools)
    slots_of_pool = sum(math.ceil(number / pools) for number in (slots, long_slots, sessions))
    uid_ranges = [jail.host_uids(number, slots_of_pool, level, python) for number in range(pools)]
    share_uid = level in (jail.Level.NSJAIL, jail.Level.NAMESPACES) and any(base is None for base, _ in uid_ranges)
    limits_processes, warnings = True, list[str]()
    if share_uid and not (probed := jail.probe_process_limits()).ok:
        limits_processes = False
        warnings.append(f"the number of processes per call is limited only by cgroups: {probed.found}")
    scratch_parent_dir = _find_scratch_parent_dir(has_uids) if level is jail.Level.LANDLOCK else None
    specs = [
        jail.JailSpec(
            level,
            python,
            str(jail.GUEST_SOURCE_DIR),
            env=GUEST_ENV,
            uid_base=uid_base,
            uid_count=uid_count,
            data=config.mounts,
            user_namespace_per_call=share_uid and uid_base is None and limits_processes,
            scratch_root=scratch_parent_dir and f"{scratch_parent_dir}/rstar-sandbox-{secrets.token_hex(8)}",
        )
        for uid_base, uid_count in uid_ranges
    ]
    return PoolPlan(
        config,
        level,
        capacity["cores"],
        granted_cores,
        slots,
        long_slots,
        sessions,
        jail.fds_for_slots(capacity["slots"] + capacity["long_slots"]),
        ProfileTree(config.own_profiles),
        tuple(specs),
        tuple(warnings),
    )


def _find_scratch_parent_dir(has_uids: bool) -> str:
    """Return the host directory in which the scratch directories are created. Only level `landlock` uses one; at other
    levels a scratch directory is a tmpfs in the jail."""
    parent = jail.scratch_parent_dir(has_uids=has_uids)
    default = tempfile.gettempdir()
    reason = "" if parent == default else f" (the uids of calls cannot enter {default})"
    total_mib = shutil.disk_usage(parent).total >> 20
    shared = f"{parent}{reason}, {total_mib} MiB shared by all calls"
    log.info("scratch directories are on %s; disk_mb limits each file only", shared)
    return parent
