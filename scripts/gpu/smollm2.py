"""SmolLM2-135M learns sums on GPUs, by three loops: reward over wall-clock time, evaluation before
and after.

    python scripts/make_smollm2.py models/smollm2-135m
    python scripts/gpu/smollm2.py models/smollm2-135m [--sglang-...]
        any flag of train_*.py; yours come last and win
    python scripts/gpu/smollm2.py --plot runs/smollm2_gpu  the picture, afterwards and anywhere

Two GPUs: `sync` is train_sync.py --colocate on both, `one_step_off` train_async.py and `partial`
train_fully_async.py with --partial-rollout, one GPU for each side. All see the same prompts in the
same order and take the same number of steps. Task and score are reasoning-gym's, the evaluation is
on 256 other sums. Last line: `smollm2 eval 0.14 -> 0.75`, of the last arm.
"""

import argparse
import itertools
import os
import shutil
import signal
import sys

import resident
from resident import ROOT

import placement
import train_async
import train_fully_async
import train_sync
from args import parse_args
from tracking import read_rows

TASK = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"
ARMS = {"sync": (train_sync, ["--colocate"]), "one_step_off": (train_async, []),
        "partial": (train_fully_async, ["--staleness-threshold", "1.0", "--partial-rollout"])}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of scripts/make_smollm2.py")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--output-dir", default=os.path.join(ROOT, "runs", "smollm2_gpu"), help="folder of the runs")
    parser.add_argument("--plot", metavar="FOLDER", help="only draw the runs that lie there, as FOLDER/smollm2.png")
    options, flags = parser.parse_known_args(argv)
    if not options.model and not options.plot:
        parser.error("the model's folder is missing")
    return options, flags


def recipe(options, name, script, own, gpus):
    """The arguments of one run on SmolLM2; `own` come last and win."""
    words = ["--hf-checkpoint", options.model, "--prompt-data", f"{TASK}&size=4000&seed=1", "--rollout-max-prompt-len", "32",
             "--num-rollout", str(options.steps), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8",
             "--rollout-max-response-len", "8", "--rm-type", "reasoning_gym",
             "--eval-prompt-data", "sums", f"{TASK}&size=256&seed=100000", "--eval-interval", "10",
             "--lr", "1e-5", "--adam-beta2", "0.95", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192", "--no-record",
             "--device", options.device, "--actor-num-gpus-per-node", str(gpus),
             "--output-dir", options.output_dir, "--run-name", name]
    if options.device == "cuda":
        words += ["--bf16", "--sglang-mem-fraction-static", ".4"]
    return parse_args([*words, *own], f"{script.__name__}.py")


def main():
    options, flags = parse()
    if options.plot:
        return plot(options.plot)
    for name in options.arms:                                      # of a run before
        shutil.rmtree(os.path.join(options.output_dir, name), ignore_errors=True)
    servers, args = [], recipe(options, "engines", train_sync, ["--colocate", *flags], 2)
    placement.start_ray(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))        # so that `finally` is reached; Ray has put its own there
    try:
        resident.start_servers(args, resident.hold_gpus(2, args), servers)
        for name in options.arms:
            script, own = ARMS[name]
            print(f"\n{name}", flush=True)
            args = recipe(options, name, script, [*own, *flags], 2 if script is train_sync else 1)
            if not args.colocate:
                servers[0].stop()                                  # its GPU is the trainer's alone from now on
            resident.run(script, args, servers if args.colocate else servers[1:])
            say(name, args.run_dir)
    finally:
        resident.stop(servers)
    before, after = ends(args.run_dir)
    print(f"smollm2 eval {before:.2f} -> {after:.2f}", flush=True)


def ends(run_dir):
    values = [row["sums/reward"] for row in read_rows(os.path.join(run_dir, "eval.jsonl"))]
    return values[0], values[-1]


def curve(run_dir):
    """[(seconds since the first step began, mean reward of the step's batch)]."""
    rows = read_rows(os.path.join(run_dir, "metrics.jsonl"))
    return list(zip(itertools.accumulate(row["perf/step_time"] for row in rows), (row["rollout/reward"] for row in rows)))


def say(name, run_dir):
    times, rewards = zip(*curve(run_dir))
    before, after = ends(run_dir)
    level = next((f"{t:.0f} s" for t, r in zip(times, rewards) if r >= 0.5), "never")
    print(f"{name}: eval {before:.3f} -> {after:.3f}; {len(times)} steps in {times[-1]:.0f} s; reward 0.5 first after {level}",
          flush=True)


def plot(folder):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for i, name in enumerate(ARMS):
        run_dir = os.path.join(folder, name)
        if not os.path.exists(os.path.join(run_dir, "eval.jsonl")) or not curve(run_dir):
            continue
        times, rewards = zip(*curve(run_dir))
        axis.plot(times, rewards, color=f"C{i}", alpha=0.35)
        evals = read_rows(os.path.join(run_dir, "eval.jsonl"))     # of version v: the weights after v steps
        axis.plot([(0.0, *times)[row["version"]] for row in evals], [row["sums/reward"] for row in evals], "o-", color=f"C{i}",
                  markersize=4, label=name)
    axis.set(xlabel="seconds since the first step began", ylabel="reward",
             title="SmolLM2-135M, sums of one and two digits, two GPUs: batches (pale), evaluation (dots)")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(os.path.join(folder, "smollm2.png"), dpi=120)
    print(f"plot: {folder}/smollm2.png")


if __name__ == "__main__":
    main()
