"""The same workloads on any server with /v1/completions that takes token ids and ignore_eos. Prints one JSON line.

    python -m bench.peers.openai_throughput http://127.0.0.1:8000 --workload mixed

Prompts are token ids, greedy, streamed, the end of text ignored; as many requests at once as the offline engine runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from urllib.parse import urlsplit
from urllib.request import urlopen

from bench.load import Connection, Reply, completion

from octavo.bench.workloads import WORKLOADS, Work, rates


async def answer(connection: Connection, model: str, work: Work) -> Reply:
    """One request's reply, which must have all the tokens asked for."""
    reply = await connection.post("/v1/completions", {"model": model, **completion(*work)})
    assert reply.status == 200, reply.body[:500]
    usage = [event["usage"] for event in reply.events if event.get("usage")][-1]
    assert usage["completion_tokens"] == work.max_tokens, "an answer is shorter than asked for"
    return reply


async def serve(host: str, port: int, model: str, work: list[Work], clients: int) -> tuple[float, list[Reply]]:
    """(seconds, replies) with clients that take the next request when theirs is answered."""
    queue = iter(work)
    replies: list[Reply] = []

    async def client() -> None:
        connection = await Connection.open(port, host)
        replies.extend([await answer(connection, model, one) for one in queue])
        connection.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(clients, len(work)))))
    return time.perf_counter() - start, replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="as the server names it; the first one if not given")
    args = parser.parse_args()
    address, workload = urlsplit(args.url), WORKLOADS[args.workload]
    host, port = address.hostname or "127.0.0.1", address.port or 80
    with urlopen(f"http://{host}:{port}/v1/models") as listed:
        model = args.model or json.load(listed)["data"][0]["id"]
    warm_up, work = workload.draw(args.requests, args.vocab_size, args.seed)
    clients = workload.at_once or args.max_num_seqs
    asyncio.run(serve(host, port, model, warm_up, clients))
    seconds, replies = asyncio.run(serve(host, port, model, work, clients))
    waits = [reply.first_at - reply.sent_at for reply in replies]
    about = {"engine": args.url, "workload": args.workload, "request_to_first_token_s": statistics.median(waits)}
    print(json.dumps(about | rates(work, seconds)))


if __name__ == "__main__":
    main()
