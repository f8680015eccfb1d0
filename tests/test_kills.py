"""Runs of all three scripts, killed with SIGKILL at every kind of ledger event and at random moments, and resumed until they
have ended: no prompt is lost or repeated, and nothing of a discarded attempt is in the weights.

The trainer is light.TinyWorker, whose weights are the batches that it was trained on. OFFBEAT_KILLS=100 asks for so many kills
at random moments, and for each event once before its record is written and once after; else 12 are made and one of the two.
"""

import json
import os
import random
import shutil
import signal
import threading
from collections import Counter
from functools import partial

import pytest
import requests

import checkpoint
import harness
import light
import scripted_engine
from batch import load_groups
from buffer import Ledger

KILLS = int(os.environ.get("OFFBEAT_KILLS", 12))
ROWS, SAMPLES, MARK = 40, 2, 8.0             # log-probs of life i lie between -8 i - 4.1 and -8 i
RUNS = {                                     # script, flags
    "sync": ("train_sync.py", {}),
    "async": ("train_async.py", {}),
    "sync_again": ("train_sync.py", dict(over_sampling_batch_size=8)),
    "async_partial": ("train_async.py", dict(over_sampling_batch_size=8, partial_rollout=True)),
    "stream_stale": ("train_fully_async.py", dict(staleness_threshold=0.5, update_weights_interval=2)),
    "stream_partial": ("train_fully_async.py", dict(staleness_threshold=1.0, partial_rollout=True, max_lag=2))}
ENGINE = dict(vocab_size=250, lengths="3:1,1:10", unit_seconds=0.004, budget=24)
EXACT = ("sync", "async")                    # nothing hangs on who comes first: equal to a run without a kill, to the bit
ABORTING = ("sync_again", "async_partial", "stream_partial")
OF_GROUPS, OF_ABORTS = ["draw", "submit", "finish", "drop"], ["abort", "put_back"]
OF_STEPS = ["batch", "trained", "sync", "save", "resume"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"), rows=ROWS)


@pytest.fixture(scope="module")
def urls():
    engines = scripted_engine.start(2, **ENGINE)
    yield [url for _, url in engines]
    scripted_engine.stop(engines)


def keep(args, samples):
    return samples[0].group_id % 7 != 3      # whom the filter drops


# ---- in the run -------------------------------------------------------------------------------------------
def doom(life, death):
    """Marks all records of this life, which ends at `death`: (event, n, moment) of a record, or so many seconds from now."""
    write, count, die = Ledger.write, Counter(), partial(os.kill, os.getpid(), signal.SIGKILL)

    def write_and_die(self, event, **fields):
        count[event] += 1
        due = isinstance(death, tuple) and event == death[0] and count[event] == death[1]
        if due and death[2] == "before":
            die()
        write(self, event, life=life, **fields)
        if due and death[2] == "torn":
            os.truncate(self.path, os.path.getsize(self.path) - 5)
        if due:
            die()

    Ledger.write = write_and_die
    if isinstance(death, float):
        threading.Timer(death, die).start()


# ---- from outside -----------------------------------------------------------------------------------------
def lives(name, deaths, words, urls, out, exact):
    """Runs until each of `deaths` has come, then to the end, 3 steps after the last save. Returns (folder, steps, kills)."""
    script, _ = RUNS[name]
    folder, kills = os.path.join(out, name), Counter()
    for life, death in enumerate([*deaths, None]):
        saved = max(checkpoint.complete(os.path.join(folder, "checkpoints")), default=None)
        if saved is None:                    # nothing to go on from
            shutil.rmtree(folder, ignore_errors=True)
        steps = 1000 if death else (saved or 0) + 3
        for url in urls:
            requests.post(f"{url}/script", json={"logprob_shift": 0.0 if exact else MARK * life, "weights": "0"}, timeout=10)
        status, output = light.run(script, words(name, num_rollout=steps, load=folder if saved else None), timeout=60,
                                   worker=light.TinyWorker, prepare=partial(doom, life, death))
        assert status == (-signal.SIGKILL if death else 0), f"life {life}, {death}:\n{output[-3000:]}"
        kills["before the first save" if saved is None else "resumed"] += 1 if death else 0
    return folder, steps, kills


def check(folder, steps, exact):
    """The promises, from the trainer's weights, the buffer's state and the ledger's surviving line. Returns counts."""
    final = os.path.join(folder, "checkpoints", f"step_{steps:07d}")
    batches = light.trained_batches(final)
    with open(os.path.join(final, "buffer.json")) as f:
        state = json.load(f)
    records = [r for r in Ledger.surviving(os.path.join(folder, "ledger.jsonl")) if r["seq"] <= state["ledger_seq"]]
    Ledger.outcomes(os.path.join(folder, "ledger.jsonl"))        # raises where a record does not follow from those before

    # every prompt once: trained, dropped or in the buffer
    assert [batch["step"] for batch in batches] == list(range(steps))
    trained = [group for batch in batches for group in batch["group_ids"][::SAMPLES]]
    dropped = [r["group"] for r in records if r["event"] == "drop"]
    kept = [group["group_id"] for group in [*state["unfinished"], *state["finished"], *sum((b for _, b in state["in_hand"]), [])]]
    assert sorted(trained + dropped + kept) == list(range(state["next_id"]))
    assert all((group % 7 == 3) == (group in dropped) for group in trained + dropped)
    rows = {r["group"]: (r["epoch"], r["row"]) for r in records if r["event"] == "draw"}
    assert sorted(rows) == list(range(state["next_id"])) and len(set(rows.values())) == len(rows)
    assert all(epoch == group // ROWS and row < ROWS for group, (epoch, row) in rows.items())
    said = {r["step"]: r["groups"] for r in records if r["event"] == "trained"}
    assert said == {batch["step"]: batch["group_ids"][::SAMPLES] for batch in batches}

    # every token trained on is of an attempt that survived, and the recorded samples are those trained on
    attempts = surviving_attempts(records)
    for batch in batches:
        recorded = [s for group in load_groups(f"{folder}/samples/step_{batch['step']:07d}.npz") for s in group.samples]
        assert [s.rollout_logprobs for s in recorded] == batch["rollout_logprobs"]
        assert [s.prompt_tokens + s.response_tokens for s in recorded] == batch["tokens"]
        for s in recorded if not exact else ():
            marks = Counter(int(-logprob // MARK) for logprob in s.rollout_logprobs)
            assert marks == attempts[s.group_id][s.index], (batch["step"], s.name)
    every = Counter(r["group"] for r in Ledger.read(os.path.join(folder, "ledger.jsonl")) if r["event"] == "finish")
    return {"prompts": state["next_id"], "trained": len(trained), "dropped": len(dropped), "buffered": len(kept),
            "discarded attempts": sum(every.values()) - sum(r["event"] == "finish" for r in records),
            "samples over lives": sum(len(lives) > 1 for group in attempts.values() for lives in group)}


def surviving_attempts(records):
    """{group: [of each sample: Counter of its tokens by the life that generated them]}, from the records that survived. A group
    that is drawn while it is in flight was so at a save, and began again at its prompt."""
    tokens, flying = {}, set()
    for r in records:
        if r["event"] == "draw":
            if r["group"] in flying or r["group"] not in tokens:
                tokens[r["group"]] = [Counter() for _ in range(SAMPLES)]
            flying.add(r["group"])
        elif r["event"] in ("finish", "put_back"):
            flying.discard(r["group"])
            for so_far, total in zip(tokens[r["group"]], r["tokens"], strict=True):
                if total == 0:
                    so_far.clear()                # put back at its prompt
                elif total > so_far.total():
                    so_far[r["life"]] += total - so_far.total()
    return tokens


@pytest.fixture
def words(model, urls, tmp_path):
    return partial(words_of, model, tmp_path, urls)


def words_of(model, out, urls, name, run_name=None, **changes):
    return harness.flags(model, out, run_name or name, urls, **{
        "save_interval": 2, "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 24,
        "dynamic_sampling_filter_path": "test_kills.keep", **RUNS[name][1], **changes})


def campaign(name, deaths, words, urls, out):
    exact = name in EXACT
    folder, steps, kills = lives(name, deaths, words, urls, out, exact)
    print(f"{name}: {kills.total()} kills, {dict(kills)}, {steps} steps, {check(folder, steps, exact)}")
    if exact:
        for url in urls:
            requests.post(f"{url}/script", json={"logprob_shift": 0.0, "weights": "0"}, timeout=10)
        light.succeed(RUNS[name][0], words(name, "whole", num_rollout=steps), worker=light.TinyWorker)
        last = f"checkpoints/step_{steps:07d}"
        assert light.trained_batches(os.path.join(folder, last)) == light.trained_batches(os.path.join(out, "whole", last))


def events_of(name):
    return OF_GROUPS + OF_STEPS + (OF_ABORTS if name in ABORTING else [])


def number_of(event, draw):
    """Which one of its kind in a life."""
    return draw.randint(1, 1 if event == "resume" else 10 if event in OF_GROUPS else 3)


def death(name, draw):
    """A random one at a record. (A run that has not been saved yet has no resume.)"""
    event = draw.choice([event for event in events_of(name) if event != "resume"])
    return event, number_of(event, draw), draw.choice(("before", "after"))


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_every_event(name, words, urls, tmp_path):
    """Before the record of each event is written or after it, and once in the middle of one."""
    draw, events = random.Random(name), events_of(name)
    deaths = []
    for i, event in enumerate(draw.sample(events, len(events))):
        number = number_of(event, draw)
        moments = ("before", "after")
        deaths += [(event, number, moment) for moment in (moments if KILLS >= 100 else [moments[i % 2]])]
    campaign(name, [("save", 2, "torn"), *deaths], words, urls, str(tmp_path))


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments(name, words, urls, tmp_path):
    draw = random.Random(name)
    campaign(name, [draw.uniform(0.1, 1.5) for _ in range(-(-KILLS // len(RUNS)))], words, urls, str(tmp_path))
