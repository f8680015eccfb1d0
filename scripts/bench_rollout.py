"""The rollout manager's HTTP side: how many answers a minute it takes, and how much of a core that
costs it.

    python scripts/bench_rollout.py [--engines 64] [--in-flight 4096] [--seconds 60]
    python scripts/bench_rollout.py --profile                where its time goes

The manager, its buffer, stream and ledger are the real ones, in this process alone; the engines are
scripted, in processes of their own: an answer of --tokens tokens takes --answer-seconds. Last line:
`completions_per_minute 24310 manager_cores 0.71`.
"""

import argparse
import asyncio
import cProfile
import contextlib
import os
import pstats
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import harness
import rollout
import scripted_engine
from args import parse_args

SAMPLES, GROUPS = 8, 32      # of a group, of a step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=4096, help="requests that the engines work on at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--answer-seconds", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted, behind the first answers")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    servers = scripted_engine.start(options.engines, lengths=str(options.tokens), unit_seconds=options.answer_seconds / options.tokens,
                                    slots=-(-options.in_flight // options.engines), vocab_size=250)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure([url for _, url in servers], folder, options))
    finally:
        scripted_engine.stop(servers)


def make_manager(urls, folder, options):
    """With as many groups outstanding as fill the engines, and one step's more."""
    ahead = -(-options.in_flight // (SAMPLES * GROUPS))
    rollout.ray.put = lambda batch: batch                      # no cluster: what would be sent to the trainers is thrown away
    args = parse_args(harness.flags(
        harness.make_model(folder), folder, "run", urls, num_rollout=10 ** 6, rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=options.tokens, max_tokens_per_gpu=4096, staleness_threshold=ahead, record=None, no_record=True,
        sglang_server_concurrency=-(-options.in_flight // options.engines)), "train_fully_async.py")
    manager = rollout.RolloutManager(args)
    manager.connect(urls)
    return manager


async def measure(urls, folder, options):
    manager = make_manager(urls, folder, options)
    await manager.publish(0, [], [])
    profiler, answers, step, begun = cProfile.Profile() if options.profile else contextlib.nullcontext(), 0, 0, None
    with profiler:
        while begun is None or time.time() - begun[0] < options.seconds:
            _, metrics = await manager.generate(step)
            if begun is None and step * GROUPS * SAMPLES >= options.in_flight:      # the first wave came all at once
                begun = time.time(), time.process_time()
            elif begun:
                answers += GROUPS * SAMPLES
            manager.trained(step)                              # and a sync that costs nothing
            step += 1
            manager.stream.publish(step)
            manager.fill()
            in_flight = sum(len(work.rids) for work in manager.works.values())
    seconds, cpu = time.time() - begun[0], time.process_time() - begun[1]
    print(f"{answers} answers of {options.tokens} tokens in {seconds:.1f} s from {options.engines} engines, {in_flight} requests in flight "
          f"at the end; {1e3 * cpu / answers:.2f} ms of a core for each")
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    print(f"completions_per_minute {60 * answers / seconds:.0f} manager_cores {cpu / seconds:.2f}")
    sys.stdout.flush()
    await stop(manager)


async def stop(manager):
    for task in list(manager.tasks):
        task.cancel()
    await asyncio.gather(*manager.tasks, return_exceptions=True)
    await manager.session.close()


if __name__ == "__main__":
    main()
