"""A batch: the groups of one step as columns for the trainer, as numbers for the log, and as a file of the record."""

import heapq
import json
import os
from collections import Counter

import numpy as np

from buffer import FLAT_LISTS, Group

DTYPES = (np.int32, np.int32, np.int8, np.float32)      # of FLAT_LISTS


def make_batch(args, step, groups):
    """Groups -> columns. Every list has one entry for each sample: S = groups x n, in the order of the groups. `update_sizes`:
    how many of them each optimizer step takes.

    With further samples of an attempt (agent loop) S is larger: they stand behind its first, and `shares` [S], 1 / samples of
    the attempt, lets it weigh as one in its group. A step still takes --global-batch-size attempts; where their samples do not
    divide by the data-parallel ranks, copies without any loss fill up, each in a group of its own below 0. `file_order`: the
    places here of the samples, without copies, as the groups' file has them: further ones behind all attempts of their group.
    """
    attempts = [[s for s in group.samples if s.index == attempt.index] for group in groups for attempt in group.attempts]
    samples, shares, update_sizes, filled = [], [], [], []
    for i in range(0, len(attempts), args.global_batch_size):
        chosen = attempts[i:i + args.global_batch_size]
        own = [s for attempt in chosen for s in attempt]
        filling = [min(own, key=lambda s: len(s.prompt_tokens) + len(s.response_tokens))] * (-len(own) % args.data_parallel_size)
        filled += range(len(samples) + len(own), len(samples) + len(own) + len(filling))
        samples += own + filling
        shares += [1 / len(attempt) for attempt in chosen for _ in attempt] + [1.0] * len(filling)
        update_sizes.append(len(own) + len(filling))
    filled = set(filled)
    places = {(s.group_id, s.index, s.part): i for i, s in enumerate(samples) if i not in filled}
    return {"step": step, "update_sizes": update_sizes, "shares": shares,
            "file_order": [places[s.group_id, s.index, s.part] for group in groups for s in group.samples],
            "group_ids": [-1 - i if i in filled else s.group_id for i, s in enumerate(samples)],
            "tokens": [np.array(s.prompt_tokens + s.response_tokens, dtype=np.int64) for s in samples],
            "response_lengths": [len(s.response_tokens) for s in samples],
            "loss_mask": [loss_mask(args, step, s) * (i not in filled) for i, s in enumerate(samples)],
            "rollout_logprobs": [np.array(s.rollout_logprobs, dtype=np.float32) for s in samples],
            "rewards": [s.reward for s in samples],
            "experts": [s.experts for s in samples],
            "columns": own_columns(samples),
            "versions": [[list(run) for run in s.version_runs] for s in samples]}


def own_columns(samples):
    """{name: [S] numbers or lists of one number a token}. ValueError, naming the sample, where one is missing."""
    names = sorted({name for s in samples for name in s.columns})
    for s in samples:
        if missing := [name for name in names if name not in s.columns]:
            raise ValueError(f"{s.name} has no column {missing[0]!r}, other samples of the batch have")
    return {name: [s.columns[name] for s in samples] for name in names}


def plain_column(sample, name):
    """sample.columns[name] as a float or a list of floats, which can be saved. ValueError where it does not fit the sample."""
    try:
        value = np.asarray(sample.columns[name], np.float64)
    except (TypeError, ValueError):
        value = np.zeros(0)
    if value.shape not in ((), (len(sample.response_tokens),)) or not value.shape and not np.isfinite(value):
        raise ValueError(f"{sample.name}: column {name!r} must be a number, or one for each of the "
                         f"{len(sample.response_tokens)} response tokens, is {str(sample.columns[name])[:60]}")
    return value.tolist()


def loss_mask(args, step, sample):
    mask = np.array(sample.loss_mask, dtype=np.float32)
    if args.fully_async and args.max_lag_policy == "mask" and args.max_lag is not None:
        lags = np.repeat([step - version for version, _ in sample.version_runs], [count for _, count in sample.version_runs])
        mask[lags > args.max_lag] = 0
    if args.mask_offpolicy_in_partial_rollout and len(sample.version_runs) > 1:
        mask[:-sample.version_runs[-1][1]] = 0     # only the newest version's tokens stay in the loss
    return mask


def batch_metrics(args, step, groups):
    samples = [sample for group in groups for sample in group.samples]
    lags = Counter()                               # lag -> tokens
    for version, count in (run for s in samples for run in s.version_runs):
        lags[step - version] += count
    talks = [s for s in samples if s.messages]
    talking = {"rollout/turns": float(np.mean([1 + sum(m["role"] == "assistant" for m in s.messages) for s in talks])),
               "rollout/template_mismatch": float(np.mean([s.mismatch.startswith("text") for s in talks])),
               "rollout/retokenized": float(np.mean([s.mismatch == "tokens" for s in talks]))} if talks else {}
    rewards = [s.reward for s in samples if s.part == 0]
    return {"rollout/reward": float(np.mean(rewards)), "rollout/reward_min": min(rewards), "rollout/reward_max": max(rewards),
            **talking,
            "rollout/response_len": float(np.mean([len(s.response_tokens) for s in samples])),
            "rollout/response_len_max": max(len(s.response_tokens) for s in samples),
            "rollout/truncated": float(np.mean([s.status == "truncated" for s in samples])),
            "rollout/zero_spread": float(np.mean([len({s.reward for s in g.samples}) == 1 for g in groups])),
            "rollout/tokens": lags.total(),
            "staleness/min": min(lags), "staleness/max": max(lags),
            "staleness/mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
            "staleness/off_policy_token_frac": 1 - lags[0] / lags.total(),
            "staleness/histogram": {str(lag): lags[lag] for lag in sorted(lags) if lags[lag]},
            "perf/lone_generate_time": makespan([s.seconds for s in samples], args.num_engines * args.sglang_server_concurrency)}


def makespan(seconds, slots):
    """How long these samples would take if they started together, first come first served, on so many slots: the generation of
    a synchronous step. Measured under whatever ran beside them, so it is an estimate."""
    ends = []
    for duration in seconds:
        heapq.heappush(ends, duration + (heapq.heappop(ends) if len(ends) == slots else 0.0))
    return max(ends)


# ---- files ------------------------------------------------------------------------------------------------
def save_groups(path, groups):
    """Writes groups so that load_groups returns them: an .npz with the long lists end to end as arrays (log-probs as float32,
    which is what the trainer takes) and all else as JSON. It is whole when it has its name."""
    samples = [sample for group in groups for sample in group.samples]
    flat = {name: np.concatenate([np.asarray(getattr(s, name), dtype) for s in samples])
            for name, dtype in zip(FLAT_LISTS, DTYPES)}
    brief = [{**vars(group), "samples": [{**vars(s), **{name: len(getattr(s, name)) for name in FLAT_LISTS}}
                                         for s in group.samples]} for group in groups]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".tmp", "wb") as f:
        np.savez(f, groups=np.frombuffer(json.dumps(brief).encode(), np.uint8), **flat)
    os.replace(path + ".tmp", path)


def load_groups(path, flag="--load-debug-rollout-data"):
    """The groups of one file. ValueError, with the flag that led here, where there is none."""
    if not os.path.exists(path):
        raise ValueError(f"{flag}: there is no {path}")
    with np.load(path, allow_pickle=False) as file:
        brief, flat = json.loads(file["groups"].tobytes()), {name: file[name] for name in FLAT_LISTS}
    place = dict.fromkeys(FLAT_LISTS, 0)
    for sample in (sample for group in brief for sample in group["samples"]):
        for name in FLAT_LISTS:
            count = sample[name]
            sample[name] = flat[name][place[name]:place[name] + count].tolist()
            place[name] += count
    return [Group.from_json(group) for group in brief]
