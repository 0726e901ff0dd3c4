"""What the system lets the process have, in made-up control groups."""

import os

import pytest

from octavo.allowance import available_cores, available_memory


def machine(root, files):
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


STAT = "anon 1\ninactive_file 4096\ntotal_inactive_file 8192\n"


def test_free_memory_without_control_groups(tmp_path):
    assert available_memory(machine(tmp_path, {})) == 4000 * 1024
    assert available_memory() > 0


def test_free_memory_in_control_groups_of_version_2(tmp_path):
    groups = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "1000000\n",
        "sys/fs/cgroup/a/memory.current": "300000\n",
        "sys/fs/cgroup/a/memory.stat": STAT,
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert available_memory(machine(tmp_path, groups)) == 700000 + 4096


def test_free_memory_in_control_groups_of_version_1(tmp_path):
    groups = {
        "proc/self/cgroup": "4:cpu,memory:/c\n1:cpuset:/c\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/memory.stat": STAT,
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/c/memory.stat": STAT,
    }
    assert available_memory(machine(tmp_path, groups)) == 0


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_cores_under_a_quota_of_version_2(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    groups = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": f"{quota}\n",
        "sys/fs/cgroup/a/b/cpu.max": "900000 100000\n",
    }
    assert available_cores(machine(tmp_path, groups)) == cores


@pytest.mark.parametrize(
    ("group", "folder", "quota", "period", "cores"),
    [
        ("/c", "cpu/c", "-1", "50000", 8),
        ("/c", "cpu/c", "250000", "50000", 5),
        ("/not/visible/here", "cpu,cpuacct", "400000", "100000", 4),  # controllers that share a folder
    ],
)
def test_cores_under_a_quota_of_version_1(tmp_path, monkeypatch, group, folder, quota, period, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    groups = {
        "proc/self/cgroup": f"4:cpu,cpuacct:{group}\n1:memory:/c\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": f"{period}\n",
    }
    assert available_cores(machine(tmp_path, groups)) == cores


def test_cores_without_control_groups(tmp_path):
    assert available_cores(machine(tmp_path, {})) == len(os.sched_getaffinity(0))
