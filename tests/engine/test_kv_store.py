import logging

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.kv_store import KVStore, available_memory, pool_size
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops.reference import ReferenceOps
from octavo.types import CopyPage

FORMAT = KVFormat("bf16", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
PAGE = FORMAT.page_bytes
PLENTY = 1 << 40


def size(context=128, available=PLENTY, **options):
    return pool_size(EngineConfig(**options), FORMAT, context, available)


def test_a_given_size_is_filled_with_whole_pages():
    assert size(kv_cache_memory_bytes=10 * PAGE + PAGE - 1) == (10, 128)


def test_without_a_size_every_sequence_fits_at_its_longest():
    assert size(max_num_seqs=5) == (5 * 8, 128)
    assert size(max_num_seqs=5, max_model_len=64) == (5 * 4, 64)


def test_without_a_size_the_pool_takes_a_part_of_what_is_free():
    assert size(max_num_seqs=1000, available=100 * PAGE) == (40, 128)


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_the_last_token_of_a_sequence_needs_no_slot(length, pages):
    assert size(kv_cache_memory_bytes=pages * PAGE, max_model_len=length) == (pages, length)
    if pages > 1:
        too_long = rf"max_model_len: .* {length} tokens takes {pages} pages and the pool has {pages - 1} "
        with pytest.raises(ConfigError, match=too_long):
            size(kv_cache_memory_bytes=(pages - 1) * PAGE, max_model_len=length)


def test_a_length_that_nobody_asked_for_is_cut_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert size(kv_cache_memory_bytes=3 * PAGE) == (3, 49)
    assert "max_model_len is 49 instead of the model's 128 tokens" in caplog.text


def test_errors_name_the_option_and_both_numbers():
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes: one page takes {PAGE:,} .* gives {PAGE - 1:,}"):
        size(kv_cache_memory_bytes=PAGE - 1)
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes: one page .* 40 % of the {PAGE:,} bytes"):
        size(available=PAGE)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        size(available=-5)
    with pytest.raises(ConfigError, match="max_model_len: 129 tokens are more than the model's context of 128"):
        size(max_model_len=129)


def test_page_operations_are_applied_in_order():
    store = KVStore(ReferenceOps(), FORMAT, 4)
    for page in range(4):
        store.pool.data[page] = page
    store.apply([CopyPage(0, 1), CopyPage(1, 2), CopyPage(3, 0)])
    assert [np.unique(page).tolist() for page in np.asarray(store.pool.data)] == [[3], [0], [0], [3]]


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
