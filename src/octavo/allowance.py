"""What the system lets this process have: memory, and cores. Linux, with control groups of version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what the system has free, or less where a control group has a limit.

    File pages that the kernel drops before it denies memory (a model file just read, say) count as unused.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for group, version in _groups("memory", root):
        if version == 2:
            limit, usage, cache = "memory.max", "memory.current", "inactive_file"
        else:
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        if (group / limit).exists() and (value := (group / limit).read_text().strip()) != "max":
            told = (group / "memory.stat").read_text() if (group / "memory.stat").exists() else ""
            stat = dict(line.split() for line in told.splitlines())
            free.append(int(value) - int((group / usage).read_text()) + int(stat.get(cache, 0)))
    return max(0, min(free))


def available_cores(root: Path = Path("/")) -> int:
    """Cores this process may keep busy: those it may run on, or fewer, rounded down, where a control group has a quota.

    More threads than that would all be stopped for the rest of each period, and those that wait for them with them.
    """
    cores = len(os.sched_getaffinity(0))
    for group, version in _groups("cpu", root):
        if version == 2:
            found = (group / "cpu.max").read_text().split() if (group / "cpu.max").exists() else ["max"]
        else:
            files = [group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
            found = [file.read_text().strip() for file in files if file.exists()]
        if len(found) == 2 and found[0] not in ("max", "-1"):
            cores = min(cores, int(found[0]) // int(found[1]))
    return max(1, cores)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that this process is in, from its own up, and their version."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
            if not top.exists():  # several in one
                top = root / "sys/fs/cgroup" / controllers
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, version
            if folder == top:
                break
