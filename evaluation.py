"""Evaluation: every set of --eval-prompt-data, with the published version, beside whatever else the engines do.

No weights change under it: the sync that would change them waits for its end (RolloutManager.rest), and an answer of any other
version than the one it began with is an error. It takes at most half of the engines' places, so that a generation beside it
goes on.
"""

import asyncio
import time

import numpy as np

from agent import gather
from buffer import Dropped, Group, Sample


async def evaluate(manager):
    """{"version": v, "NAME/reward": mean, "NAME/response_len", "NAME/truncated", "NAME/pass@k": ...} over every set, and when
    it "started" and its "seconds".

    pass@k for the powers of two up to --n-samples-per-eval-prompt, where that is above 1; a reward of at least 1 is a pass."""
    args, version, started = manager.args, manager.version, time.time()
    await manager.proved()
    manager.evaluated = [0, sum(map(len, manager.eval_rows.values())) * args.n_samples_per_eval_prompt]
    results, slots = {"version": version}, args.sglang_server_concurrency
    places = asyncio.Semaphore(len(manager.fleet.lanes) * (slots if args.eval_only else max(1, slots // 2)))
    for number, (name, rows) in enumerate(manager.eval_rows.items()):
        attempts = [[new_sample(rows[i], -1 - number, i, k) for k in range(args.n_samples_per_eval_prompt)]
                    for i in range(len(rows))]
        samples = [sample for row in attempts for sample in row]
        await gather(run_sample(manager, sample, places) for sample in samples)
        if manager.version != version:
            raise RuntimeError(f"evaluation {name}: begun with version {version}, ended with {manager.version}")
        results |= {f"{name}/{key}": value for key, value in summary(attempts).items()}
    return results | {"started": started, "seconds": time.time() - started}


async def run_sample(manager, sample, places):
    """Generates and rewards one sample. RuntimeError for one that could not be: a mean over the others would be a lie."""
    args, work = manager.args, manager.assign(Group(sample.group_id, sample.row, 0, [sample]))
    try:
        async with places:
            await manager.serve(work, sample, manager.eval_sampling)
        if work.aborting:
            raise manager.fleet.none_left()
        if sample.status == "pending":
            raise Dropped(f"error: engine {work.lane.url} aborted it")
        reward = await manager.call_reward([sample] if args.group_rm else sample)
    except Dropped as reason:
        raise RuntimeError(f"evaluation, row {sample.row}: {reason}") from None
    finally:
        work.move(None)
    sample.reward = manager.checked(reward[0] if args.group_rm else reward, sample)
    manager.evaluated[0] += 1
    manager.watchdog.alive()


def new_sample(row, group_id, number, index):
    return Sample(group_id=group_id, index=index, row=number, prompt=row["prompt"], label=row["label"],
                  prompt_tokens=row["prompt_tokens"], metadata=row["metadata"])


def summary(attempts):
    """Means over the samples of a set; attempts: for each prompt its n samples."""
    samples = [sample for row in attempts for sample in row]
    found = {"reward": float(np.mean([s.reward for s in samples])),
             "response_len": float(np.mean([len(s.response_tokens) for s in samples])),
             "truncated": float(np.mean([s.status == "truncated" for s in samples]))}
    n = len(attempts[0])
    right = [sum(s.reward >= 1 for s in row) for row in attempts]
    powers = [2 ** i for i in range(n.bit_length())] if n > 1 else []
    return found | {f"pass@{k}": float(np.mean([pass_at_k(n, c, k) for c in right])) for k in powers}


def pass_at_k(n, c, k):
    """The unbiased estimate, from n samples of which c are right, of the chance that one of k is right:
    1 - C(n - c, k) / C(n, k), as a product without large numbers. Chen et al., arXiv 2107.03374, eq. 1."""
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
