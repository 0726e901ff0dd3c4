"""The same workloads on OpenVINO GenAI's continuous batching, from the same GGUF file. Prints one JSON line.

    pip install --group peers
    python bench/peers/openvino_genai_throughput.py MODEL.gguf --workload mixed

Prompts are token ids, greedy, the end of text ignored, prefix caching on, the KV cache large enough for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino_genai as ov_genai
from openvino import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
from octavo.bench.workloads import WORKLOADS, Work, rates


def answer(pipeline: ov_genai.ContinuousBatchingPipeline, work: list[Work]) -> float:
    """Seconds for all of it."""
    prompts = [Tensor(np.array([one.prompt], np.int64)) for one in work]
    configs = []
    for one in work:
        config = ov_genai.GenerationConfig()
        config.max_new_tokens = one.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        configs.append(config)
    start = time.perf_counter()
    results = pipeline.generate(prompts, configs)
    seconds = time.perf_counter() - start
    for one, result in zip(work, results, strict=True):
        assert len(result.m_generation_ids[0]) == one.max_tokens, "an answer is shorter than asked for"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    scheduler = ov_genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = workload.at_once or args.max_num_seqs
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    pipeline = ov_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU")
    warm_up, work = workload.draw(args.requests, args.vocab_size, args.seed)
    answer(pipeline, warm_up)
    batches = [[one] for one in work] if workload.at_once == 1 else [work]
    seconds = sum(answer(pipeline, batch) for batch in batches)
    print(json.dumps({"engine": "openvino-genai", "workload": args.workload} | rates(work, seconds)))


if __name__ == "__main__":
    main()
