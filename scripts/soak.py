"""A long run under random faults, on light processes with the scripted engines of tests/, and what
it lost: nothing, or this fails.

    python scripts/soak.py --steps 1000 --seed 1
        engines die, hang, refuse and talk nonsense, rewards are slow or hang
      -> steps 1000 faults N lost 0 repeated 0 rss_growth_mb X fds_growth N leftover 0
    python scripts/soak.py --kills 200  runs of all three scripts, killed with SIGKILL and resumed
      -> kills 200 lost 0 repeated 0
"""

import argparse
import functools
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter

import psutil

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import engines
import harness
import light
from buffer import Ledger


# ---- in the run -------------------------------------------------------------------------------------------
def slow_reward(args, sample):
    """One in fifty is slow, and one in two hundred hangs beyond its limit at the first try."""
    draw = random.Random(f"{sample.group_id} {sample.index}").random()
    if draw < 0.02:
        time.sleep(0.2)
    if draw > 0.995 and not sample.metadata.get("tried"):
        sample.metadata["tried"] = 1
        time.sleep(1.5)
    return sum(sample.response_tokens) % 7 / 7


class SoakWorker(light.TinyWorker):
    """Weights that hang on every batch before, and stay small."""

    def train(self, step, batch):
        metrics = super().train(step, batch)
        self.batches = [{"steps": step + 1, "digest": self.digest()}]
        return metrics

    def trained_steps(self):
        return self.batches[0]["steps"] if self.batches else None


# ---- faults -----------------------------------------------------------------------------------------------
def misbehave(fleet, draw):
    """One random fault of one engine."""
    i = draw.randrange(len(fleet.urls))
    kind = draw.choice(("kill", "stop", "kill while stopped", "500", "503", "429", "hang", "nonsense", "old version", "dies on order",
                        "fails in a sync"))
    if kind == "kill":
        fleet.signal(i, signal.SIGKILL)
    elif "stop" in kind:
        fleet.signal(i, signal.SIGSTOP)
        end = signal.SIGKILL if kind.startswith("kill") else signal.SIGCONT
        threading.Timer(draw.uniform(0.2, 4), fleet.signal, (i, end)).start()
    else:
        fleet.script(i, **{
            "500": {"refuse": 5, "status": 500}, "503": {"refuse": 5, "status": 503}, "429": {"refuse": 5, "status": 429},
            "hang": {"hang": 3, "seconds": 20}, "nonsense": {"answers": draw.choice(engines.NONSENSE), "count": draw.choice((3, 60))},
            "old version": {"answers": "old_version", "count": 1}, "dies on order": {"die": 3, "seconds": 0.01},
            "fails in a sync": {"refuse": 1, "verb": draw.choice(("update_weight_version", "flush_cache"))}}[kind])
    return kind


def soak(args, folder):
    model, draw = harness.make_model(os.path.join(folder, "model"), rows=2000), random.Random(args.seed)
    fleet = engines.Engines(3, vocab_size=250, lengths="3:1,1:10", unit_seconds=0.003, budget=24)
    words = harness.flags(
        model, folder, "run", fleet.urls, num_rollout=args.steps, staleness_threshold=1.0, partial_rollout=True, max_lag=3,
        rollout_max_response_len=24, custom_rm_path="soak.slow_reward", reward_timeout=1, generate_timeout=5, seed=args.seed,
        max_engine_restarts=10 ** 6, rollout_health_check_interval=1, rollout_health_check_timeout=1, update_weight_timeout=10,
        save_interval=100, engine_start_timeout=60)
    words += ["--no-record"]
    started, faults, samples = time.time(), Counter(), []
    process, path = light.start("train_fully_async.py", words, worker=light.TrainWorker if args.real else SoakWorker)
    run, metrics, due = psutil.Process(process.pid), os.path.join(folder, "run", "metrics.jsonl"), time.time() + 3
    try:
        while process.is_alive():
            time.sleep(0.1)
            if time.time() > due:
                faults[misbehave(fleet, draw)] += 1
                due = time.time() + draw.expovariate(1 / args.pause)
            if time.time() - started > args.limit:
                os.kill(process.pid, signal.SIGABRT)      # with the stacks of all its threads, in what is printed below
                break
            try:
                samples.append((run.memory_info().rss / 2 ** 20, run.num_fds()))
            except psutil.Error:
                pass
        status, output = light.end(process, path, timeout=60)
    finally:
        fleet.stop()
    steps = len(harness.read_jsonl(metrics))
    if status:
        print("\n".join(line for line in output.splitlines() if "frame #" not in line)[-6000:])
    lost, repeated = account(os.path.join(folder, "run"), steps)
    part = max(1, len(samples) // 5)
    (rss, fds), (last_rss, last_fds) = [[statistics.median(column) for column in zip(*rows)]
                                        for rows in (samples[part:2 * part], samples[-part:])]
    time.sleep(1)
    leftover = [p.cmdline() for p in psutil.process_iter() if p.pid in {process.pid, *(e.pid for e in fleet.processes)}]
    engine = Counter(r["state"] for r in Ledger.read(os.path.join(folder, "run", "ledger.jsonl")) if r["event"] == "engine")
    print(f"{time.time() - started:.0f} s; faults: {dict(faults)}; engines: {fleet.deaths} deaths, {dict(engine)}; dropped: "
          f"{drops(folder)}; rss {rss:.0f} -> {last_rss:.0f} MB, open files {fds:.0f} -> {last_fds:.0f}")
    print(f"steps {steps} faults {faults.total()} lost {lost} repeated {repeated} rss_growth_mb {last_rss - rss:.1f} "
          f"fds_growth {last_fds - fds:.0f} leftover {len(leftover)}")
    return status == 0 and steps == args.steps and not (lost or repeated or leftover)


def drops(folder):
    records = Ledger.read(os.path.join(folder, "run", "ledger.jsonl"))
    return dict(Counter(r["reason"].split(":")[0] for r in records if r["event"] == "drop"))


def account(run, steps):
    """(lost, repeated): drawn prompts that are nowhere, or steps that were not trained; groups that were trained more than once."""
    records = list(Ledger.surviving(os.path.join(run, "ledger.jsonl")))
    outcomes = Ledger.outcomes(os.path.join(run, "ledger.jsonl"))     # raises where a record does not follow from those before
    trained = Counter(group for r in records if r["event"] == "trained" for group in r["groups"])
    lost = set(range(max(outcomes) + 1)) - {group for group, end in outcomes.items() if end["outcome"]}
    missing = set(range(steps)) - {r["step"] for r in records if r["event"] == "trained"}
    rows = Counter((end["epoch"], end["row"]) for end in outcomes.values())
    return len(lost) + len(missing), sum(n > 1 for n in trained.values()) + sum(n > 1 for n in rows.values())


# ---- kills ------------------------------------------------------------------------------------------------
def kills(args, folder):
    """Runs of the tests' kill campaigns, each at random moments and at random records, until there were enough; of a hundred and
    more, the last six with real engines and Ray."""
    import scripted_engine
    import test_kills
    import test_stack

    whole = 6 if args.kills >= 100 else 0
    model, draw = harness.make_model(os.path.join(folder, "model"), rows=test_kills.ROWS), random.Random(args.seed)
    servers, names = scripted_engine.start(2, **test_kills.ENGINE), list(test_kills.RUNS)
    urls = [url for _, url in servers]
    done = lost = repeated = 0
    try:
        for i, name in enumerate(names):
            count, out = (args.kills - whole + i) // len(names), os.path.join(folder, str(i))
            deaths = [draw.uniform(0.1, 1.5) if draw.random() < 0.5 else test_kills.death(name, draw) for _ in range(count)]
            if deaths:
                test_kills.campaign(name, deaths, functools.partial(test_kills.words_of, model, out, urls), urls, out)
                steps = len(harness.read_jsonl(os.path.join(out, name, "metrics.jsonl")))
                missing, twice = account(os.path.join(out, name), steps)
                done, lost, repeated = done + count, lost + missing, repeated + twice
    finally:
        scripted_engine.stop(servers)
    if whole:
        test_stack.kill_and_resume(pathlib.Path(folder), whole)       # raises for what is lost or repeated
        done += whole
    print(f"kills {done} lost {lost} repeated {repeated}")
    return not (lost or repeated)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run under faults")
    parser.add_argument("--kills", type=int, help="so many kills instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between two faults")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which the run counts as hanging")
    parser.add_argument("--real", action="store_true", help="with Megatron and the broadcast instead of a trainer in a few lines")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        sys.exit(0 if (kills if chosen.kills else soak)(chosen, scratch) else 1)
