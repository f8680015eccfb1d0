"""What stale data costs, and what each off-policy correction gives back: reward against lag on the
quick start's task.

    python scripts/study_offpolicy.py [--quick] [--seeds 0 1 2] [--lags 8 0 4 1 2] [--corrections naive tis ...]

The loop's pieces are the real ones: Ray, Megatron, the weight sync, and one SGLang server that
stays for all cells. A cell is a correction, a lag and a seed, with a trainer and a rollout manager
of its own; `lagged` is its loop, in which every batch but the first ones is exactly `lag` steps
old. `sync` and `one_step_off` are train_sync.py and train_async.py with their default, bypass. All
cells start from the same weights and take the same number of steps.

Each cell adds a line to OUT/cells.jsonl as it ends, and is skipped where it stands there already.
OUT/study.png is the plot. Two measures: `train`, the mean reward of the last tenth of the steps,
whose samples are `lag` steps old themselves; and `held out`, the mean reward of the final weights
on the prompts that were not trained on (8 samples each), which the last line has: `naive lag0 0.81
lag8 0.42 corrected lag8 0.63`. Corrected is TIS, chosen before anything was measured.
"""

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT                               # for the actors

import ray

import placement
import train_async
import train_sync
from args import parse_args
from sync_weights import sync_weights
from tracking import Tracker, read_rows

RECOMPUTE = ["--policy-old", "recompute"]                     # one update a step: the clip around it never acts
CORRECTIONS = {
    "naive": RECOMPUTE,                                       # as if the batch came from the weights that train on it
    "bypass": ["--policy-old", "rollout"],                    # PPO's clip around the policy that sampled
    "decoupled": [*RECOMPUTE, "--rollout-is", "token", "--rollout-is-threshold", "1e9"],
    "tis": [*RECOMPUTE, "--rollout-is", "token", "--rollout-is-threshold", "2.0"],
    "masked": [*RECOMPUTE, "--rollout-is", "token", "--rollout-is-threshold", "0.5_2.0"],
}
LOOPS = {"sync": (train_sync, 0), "one_step_off": (train_async, 1)}     # the scripts' own loops, and their lags
ARMS = [*CORRECTIONS, *LOOPS]
LAGS = (8, 0, 4, 1, 2)                                        # in this order: the ends say most
QUICK = [("naive", 0, 0), ("naive", 8, 0), ("tis", 8, 0)]     # (correction, lag, seed)


# ---- the loop ---------------------------------------------------------------------------------------------
def lagged(lag, args, trainers, rollout, tracker):
    """In step i version i generates the batch of step i + lag, and then the batch of step i is trained on. Version 0 makes the
    first lag + 1 batches, so batch i has the lag min(i, lag). Returns the number of steps."""
    waiting, made = collections.deque(), 0
    for step in range(args.num_rollout):
        tracker.note(sync_weights(trainers, rollout, version=step))
        with tracker.timer("perf/wait_prev_gen"):
            while made < min(step + lag + 1, args.num_rollout):
                waiting.append(ray.get(rollout.generate.remote(made)))
                made += 1
        batch, metrics = waiting.popleft()
        trained = ray.get([trainer.train.remote(step, batch) for trainer in trainers])
        ray.get(rollout.trained.remote(step))
        tracker.log_step(step, metrics, trained)
    return args.num_rollout


# ---- cells ------------------------------------------------------------------------------------------------
def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the cells that the last line names, one seed")
    parser.add_argument("--out", default=os.path.join(ROOT, "runs", "study_offpolicy"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=60, help="steps of a cell")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the data order; the engine's sampling "
                        "differs each time")
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS), help="lags, in the order of measuring")
    parser.add_argument("--corrections", nargs="+", default=ARMS, choices=ARMS, help="what to compare")
    return parser.parse_args(argv)


def cells(options):
    """(correction, lag, seed) in the order of measuring: seed by seed, so that an early end leaves whole tables."""
    if options.quick:
        return QUICK
    return [(name, lag, seed) for seed in options.seeds for lag in options.lags for name in options.corrections
            if name not in LOOPS or LOOPS[name][1] == lag]


def flags(model, options, name, lag, seed, urls):
    """The quick start's, but for steps, learning rate and correction."""
    return ["--hf-checkpoint", model, "--prompt-data", f"{model}/train.jsonl", "--rollout-max-prompt-len", "16",
            "--num-rollout", str(options.steps), "--rollout-batch-size", "16", "--n-samples-per-prompt", "8",
            "--rollout-max-response-len", "8", "--eval-prompt-data", "held_out", f"{model}/eval.jsonl",
            "--n-samples-per-eval-prompt", "8", "--eps-clip", "0.2", "--eps-clip-high", "0.28",
            "--lr", str(options.lr), "--adam-beta2", "0.95", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
            "--device", "cpu", "--no-record", "--seed", str(seed), "--output-dir", f"{options.out}/runs",
            "--run-name", f"{name}-lag{lag}-seed{seed}-steps{options.steps}-lr{options.lr:g}", *CORRECTIONS.get(name, []),
            *(["--rollout-external-engine-addrs", *urls] if urls else [])]


def measure(model, options, name, lag, seed, urls):
    """Runs one cell. Returns its line."""
    started, script = time.time(), LOOPS.get(name, (train_sync,))[0]
    words = flags(model, options, name, lag, seed, urls)
    shutil.rmtree(f"{options.out}/runs/{words[words.index('--run-name') + 1]}", ignore_errors=True)    # of a cell that was cut
    args = parse_args(words, f"{script.__name__}.py")
    with open(os.path.join(args.run_dir, "output.txt"), "w") as log, contextlib.redirect_stdout(log):
        trainers, rollout = placement.launch(args, [])
        tracker = Tracker(args, 0)
        loop = [args, trainers, rollout, tracker]
        steps = script.train(*loop, 0) if name in LOOPS else lagged(lag, *loop)
        placement.finish(args, steps, trainers, rollout, tracker, save=False)
        for actor in [*trainers, rollout]:
            ray.kill(actor)
    rows, evals = (read_rows(os.path.join(args.run_dir, file)) for file in ("metrics.jsonl", "eval.jsonl"))
    return {"correction": name, "lag": lag, "seed": seed, "steps": options.steps, "lr": options.lr,
            "first": rows[0]["rollout/reward"], "train": last_tenth(rows, "rollout/reward"),
            "held_out": evals[-1]["held_out/reward"], "staleness": rows[-1]["staleness/max"],
            "ess": last_tenth(rows, "correction/ess"), "kl": last_tenth(rows, "correction/kl"),
            "rewards": [row["rollout/reward"] for row in rows], "seconds": time.time() - started, "load": os.getloadavg()[0]}


def last_tenth(rows, name):
    return statistics.fmean(row[name] for row in rows[-max(1, len(rows) // 10):])


def run(options, todo, add):
    """Measures the cells `todo` with one Ray and one engine; add(line) after each."""
    model, engines = os.path.join(ROOT, "models", "tiny-seed0"), []
    subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "make_tiny_model.py"), model, "--seed", "0"], check=True)
    args = parse_args(flags(model, options, "engine", 0, 0, []), "train_sync.py")
    placement.start_ray(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))   # so that `finally` below is reached; Ray has put its own there
    try:
        engines += placement.start_engines(args, [], [])
        urls = ray.get([engine.start.remote() for engine in engines], timeout=args.engine_start_timeout)
        for name, lag, seed in todo:
            line = measure(model, options, name, lag, seed, urls)
            add(line)
            print(f"{name} lag {lag} seed {seed}: reward {line['first']:.3f} -> {line['train']:.3f}, held out "
                  f"{line['held_out']:.3f}; {line['seconds']:.0f} s at a load of {line['load']:.1f}", flush=True)
    finally:
        placement.stop(engines)


# ---- what came out ----------------------------------------------------------------------------------------
def gather(lines, measure):
    """{correction: {lag: values of the seeds}}, corrections in the order of their definition and lags in rising order."""
    found = {}
    for line in sorted(lines, key=lambda line: (ARMS.index(line["correction"]), line["lag"])):
        found.setdefault(line["correction"], {}).setdefault(line["lag"], []).append(line[measure])
    return found


def table(lines, measure):
    """Markdown: a row for each correction, a column for each lag; mean over seeds, and the lowest and highest of several."""
    found = gather(lines, measure)
    lags = sorted({lag for by_lag in found.values() for lag in by_lag})
    rows = [[measure.replace("_", " "), *(f"lag {lag}" for lag in lags)], ["---"] * (len(lags) + 1)]
    rows += [[name, *(text(by_lag.get(lag, [])) for lag in lags)] for name, by_lag in found.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def text(values):
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}" if values else ""


def last_line(lines):
    """The held-out reward of naive at lag 0 and 8 and of TIS at lag 8, as means over the seeds; nan where not measured."""
    found = gather(lines, "held_out")
    mean = lambda name, lag: statistics.fmean(found.get(name, {}).get(lag, [float("nan")]))
    return f"naive lag0 {mean('naive', 0):.2f} lag8 {mean('naive', 8):.2f} corrected lag8 {mean('tis', 8):.2f}"


def plot(lines, options, path):
    """Both measures against the lag: lines are means over seeds, dots the seeds."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    lags = sorted({line["lag"] for line in lines})
    start = statistics.fmean(line["first"] for line in lines)
    for axis, measure, title in zip(axes, ("train", "held_out"), ("last tenth of the steps", "held-out prompts, final weights")):
        axis.axhline(start, color="grey", linestyle=":", label="before")
        for name, by_lag in gather(lines, measure).items():
            i = ARMS.index(name)
            x = [lags.index(lag) + 0.06 * (i - 3) for lag in by_lag]             # apart, else the dots hide each other
            style = dict(color=f"C{i}", marker="D" if name in LOOPS else "o", markersize=5)
            axis.plot(x, [statistics.fmean(values) for values in by_lag.values()], label=name, **style)
            for at, values in zip(x, by_lag.values()):
                axis.plot([at] * len(values), values, ".", color=f"C{i}", alpha=0.5)
        axis.set(title=title, xlabel="lag in steps", xticks=range(len(lags)), xticklabels=lags, xlim=(-0.4, len(lags) - 0.6))
    axes[0].set_ylabel("mean reward")
    axes[1].legend(fontsize=8)
    seeds = ", ".join(map(str, sorted({line["seed"] for line in lines})))
    figure.suptitle(f"Reward after {options.steps} steps at learning rate {options.lr:g}; {len(lines)} cells, seeds {seeds}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    options = parse()
    options.out = os.path.abspath(options.out)
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, "cells.jsonl")
    key = lambda line: (line["correction"], line["lag"], line["seed"])
    ours = lambda: [line for line in (read_rows(path) if os.path.exists(path) else ())
                    if (line["steps"], line["lr"]) == (options.steps, options.lr)]

    def add(line):
        with open(path, "a") as f:
            f.write(json.dumps(line) + "\n")

    wanted = cells(options)
    done = {key(line) for line in ours()}
    todo = [cell for cell in wanted if cell not in done]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them in {path}", flush=True)
    if todo:
        run(options, todo, add)
    lines = [line for line in ours() if key(line) in wanted]
    plot(lines, options, os.path.join(options.out, "study.png"))
    print(f"\nplot: {options.out}/study.png\n\n{table(lines, 'train')}\n\n{table(lines, 'held_out')}\n\n{last_line(lines)}")


if __name__ == "__main__":
    main()
