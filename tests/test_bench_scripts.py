"""The benchmarks that step engines themselves: page sizes in lockstep, a cache that is filled without computing, pages
that come back, the paper's memory.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from statistics import fmean

import pytest
from bench import growth, kernels, layouts, paging, paper_table, resume, scale
from bench.peers import compare

from octavo.bench.compare import variants
from octavo.bench.workloads import Work
from octavo.config import EngineConfig
from octavo.planner.known import MODELS


def test_page_sizes_take_the_same_steps(model_path: Path) -> None:
    cores = paging.engines(model_path, [16, 64], Namespace(threads=2, whole=[64], max_num_seqs=2))
    times = paging.lockstep(cores, [Work(list(range(100, 140)), 3), Work(list(range(200, 217)), 5)])
    assert [len(times[size]) for size in (16, 64)] == [5, 5]
    for core in cores.values():
        core.close()


def test_cached_pages_are_made_without_computing(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CACHED", [0, 40])
    args = Namespace(threads=2, steps=2, repeats=1, host_pages=0)
    bench = growth.Bench(growth.engine(model_path, "cached", args))
    bench.fill(40, random.Random(1))
    assert bench.core.cache.pool.num_cached == 40 and not bench.switch.idle
    times = bench.decode([[100, 101, 102], [103, 104]], steps=2)
    assert len(times) == 2 and all(0 < control < seconds for seconds, control in times)
    assert bench.core.cache.pool.num_referenced == 0
    bench.core.close()


def test_kernels_are_timed_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "kernels --kernels attention --steps 2x20x1 --kv-dtypes bf16,int8 --threads 1 --repeats 1"
    monkeypatch.setattr(sys, "argv", asked.split())
    kernels.main()
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["kernel"], one["dtype"]) for one in results] == [
        (kernel, dtype) for dtype in ("bf16", "int8") for kernel in ("rope_write", "attention")
    ]
    assert all(one["share"] > 0 for one in results)


@pytest.mark.parametrize(
    ("option", "value"),
    [("kernels", "linear,nope"), ("rows", "0"), ("steps", "1x2"), ("steps", "1x9x10"), ("threads", "a")],
)
def test_options_of_kernels_are_checked(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", f"--{option}", value])
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    assert f"argument --{option}: " in capsys.readouterr().err


def test_points_give_a_line(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "RUNNING", [1, 2, 3])
    monkeypatch.setattr(
        growth.Bench, "decode", lambda self, prompts, steps: [(0.5 + 2.0 * len(prompts), 0.25 * len(prompts))] * steps
    )
    args = Namespace(threads=2, steps=3, repeats=2, host_pages=0, control=False, watch=False)
    found = growth.measure(model_path, "running", args)
    assert found["x"] == [1, 2, 3] and found["step_s"] == [2.5, 4.5, 6.5]
    assert (found["slope_s"], found["intercept_s"], found["r2"]) == pytest.approx((2.0, 0.5, 1.0))
    assert found["control_slope_s"] == pytest.approx(0.25)


def test_a_full_pool_is_told_of_while_its_pages_go_down(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(growth, "framed", told.append)
    args = Namespace(threads=2, steps=4, repeats=1, host_pages=400, control=True, watch=True)
    bench = growth.Bench(growth.engine(model_path, "full", args), control=args.control, watch=args.watch)
    [(_, one), *_] = growth.full(bench, random.Random(1), args)
    assert bench.core.cache.pool.num_free <= 1
    assert len(one()) == 4 and told
    assert sum(bench.core.cache.tiers.stats.moved.values()) > 0
    bench.core.close()


def test_peers_are_compared_on_the_same_work_only() -> None:
    run = {"num_requests": 8, "prompt_tokens": 1441, "output_tokens": 1991, "seconds": 1.0}
    compare.check_same_work([run, run | {"seconds": 2.0}])
    with pytest.raises(SystemExit, match=r"\[\(8, 1441, 880\), \(8, 1441, 1991\)\]"):
        compare.check_same_work([run, run | {"output_tokens": 880}])


@pytest.mark.parametrize(("tier", "fetched"), [("host", 1.0), ("disk", 1.0), ("slow", 0.0)])
def test_a_prompt_comes_back_in_every_mode(model_path: Path, tmp_path: Path, tier: str, fetched: float) -> None:
    args = Namespace(lengths=[32], repeats=2, pool=10 << 20, threads=None, slowness=8.0)
    done: list[None] = []
    found = resume.measure(str(model_path), tier, str(tmp_path), args, lambda: done.append(None))
    assert [row["tokens"] for row in found["lengths"]] == args.lengths and len(done) == 2 * 3
    assert all(row["auto_fetched"] == fetched for row in found["lengths"])
    assert (found["page_s"]["disk" if tier == "slow" else tier] > found["page_s"]["computed"]) == (tier == "slow")


def test_layouts_are_counted_without_computing() -> None:
    """Forty times 17 to 20 tokens in memory for two reservations of 64 tokens, or eight pages."""
    model = MODELS["smollm2-135m"].model
    page_bytes = EngineConfig().kv_format(model).page_bytes
    base = EngineConfig(max_model_len=64, kv_cache_memory_bytes=8 * page_bytes)
    engines = variants(base, [16], without_cache=False)
    work = [Work(list(range(100 * number, 100 * number + 17)), 4) for number in range(1, 41)]
    contiguous, paged = (layouts.count(work, model, config, engines["contiguous"]) for config in engines.values())
    assert (contiguous["running"], contiguous["planned_running"], contiguous["kv_held"]) == (2, 2, 1)
    assert contiguous["kv_use"] == pytest.approx((17 + 18 + 19 + 20) / 4 / 64, abs=1e-3)
    assert contiguous["computed_tokens"] == paged["computed_tokens"] == 40 * 20
    assert paged["planned_running"] == 4 and 2 < paged["running"] <= 4
    assert paged["num_steps"] < contiguous["num_steps"] == 80


def test_made_up_lengths_have_the_papers_means() -> None:
    for name, (prompt, answer) in paper_table.MEANS.items():
        work = paper_table.lengths(name, 1000)
        assert fmean(one.prompt for one in work) == pytest.approx(prompt, abs=0.5)
        assert fmean(one.answer for one in work) == pytest.approx(answer, abs=0.5)
        assert max(one.prompt + one.answer for one in work) <= paper_table.LONGEST


def test_a_buddy_splits_and_joins() -> None:
    buddy = paper_table.Buddy(40)  # 32 and 8
    assert buddy.take(5) == (32, 8)
    assert [buddy.take(count) for count in (3, 4, 16, 9)] == [(0, 4), (4, 4), (16, 16), None]
    assert buddy.take(8) == (8, 8) and buddy.take(1) is None
    for piece in ((0, 4), (16, 16), (4, 4), (8, 8), (32, 8)):
        buddy.give(paper_table.Piece(*piece))
    assert buddy.take(32) == (0, 32)
    assert [paper_table.POLICIES[way](paper_table.Length(100, 33)) for way in ("max", "pow2", "oracle")] == [
        2048,
        164,
        132,
    ]


def test_pages_hold_more_than_reservations() -> None:
    """In the paper's order, and near its figures."""
    work = paper_table.lengths("sharegpt", 120)
    foreseen = paper_table.utilisation(work, "foreseen")
    assert foreseen["percent"] > 90 and foreseen["num_preemptions"] < 10
    found = {way: paper_table.utilisation(work, way) for way in (*paper_table.POLICIES, "paged")}
    shares, at_once = ([of[name] for of in found.values()] for name in ("percent", "at_once"))
    assert shares == sorted(shares) and at_once == sorted(at_once)
    assert found["max"]["at_once"] == 7
    assert found["paged"]["percent_of_pages"] > 96 and found["paged"]["percent"] > 94
    for way in found:
        percent, _ = paper_table.PAPER["sharegpt"][way]
        assert found[way]["percent"] == pytest.approx(percent, rel=0.25)


def test_choices_share_the_prompt_and_beams_more() -> None:
    """Two choices on a prompt of 20 tokens share one page of two, in the last three of four steps."""
    twins = paper_table.saved([paper_table.Length(20, 4)], "parallel", 2)
    assert twins == pytest.approx(100 * 3 / (2 + 3 * 4))
    work = paper_table.lengths("alpaca", 20)
    parallel, beam = ([paper_table.saved(work, kind, width) for width in (2, 4)] for kind in ("parallel", "beam"))
    assert 0 < parallel[0] < parallel[1] < beam[0] < beam[1] < 75


def test_the_simulator_is_timed_on_requests_that_are_made_as_they_come() -> None:
    found = scale.measure(200, 60.0, prefix_caching=False)
    made = list(scale.arrivals(200, 60.0, 1))
    assert found["finished"] == 200 and found["seconds"] > made[-1].at
    assert found["output_tokens"] == sum(one.num_output for one in made)
    assert found["times_real_time"] > 0 and found["peak_rss_bytes"] > 1 << 20
