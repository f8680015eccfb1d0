"""What the asynchronous modes gain where answers have a long tail: time per step relative to
train_sync.py, in one run.

    python scripts/bench_async.py [--steps 12] [--unit 0.25]

The loops, Ray, Megatron, the weight sync and the scheduling are the real ones. In place of SGLang
stands the scripted engine of the tests: 90 % of the answers take 1 unit of time, 10 % take 10; it
has as many slots as a batch has samples, and a training step is padded to 4 units. So a synchronous
step takes about 14 units, and nothing can be faster than the larger of training (4) and generation
work / slots (1.9). Prints each mode's seconds per step and, last, the ratios: `one_step_off 0.73
stale 0.73 partial 0.48 partial_k4 0.31 limit 0.29`.

With real engines, on two GPUs: scripts/gpu/bench_async_gpu.py.
"""

import argparse
import os
import statistics
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])   # for the actors

import ray

import harness
import placement
import scripted_engine
import train_async
import train_fully_async
import train_sync
from args import parse_args
from tracking import Tracker

GROUPS, SAMPLES, LONG, TRAIN = 8, 8, 10, 4                    # of a batch; units of a long answer and of a training step
ARMS = {"sync": (train_sync, {}), "one_step_off": (train_async, {}),
        "stale": (train_fully_async, dict(staleness_threshold=1.0)),
        "partial": (train_fully_async, dict(staleness_threshold=1.0, partial_rollout=True)),
        "partial_k4": (train_fully_async, dict(staleness_threshold=1.0, partial_rollout=True, update_weights_interval=4))}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each mode; the first 4 are not counted")
    parser.add_argument("--unit", type=float, default=0.25, help="seconds of a unit of time")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="modes to run; sync always is")
    return parser.parse_args(argv)


def main():
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        seconds = {name: figures(name, path, options.unit) for name, path in record(folder, options).items()}
    work = (0.9 + 0.1 * LONG) * options.unit
    ratios = {name: value / seconds["sync"] for name, value in seconds.items() if name != "sync"}
    ratios["limit"] = max(TRAIN * options.unit, work) / seconds["sync"]
    print(" ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


def record(folder, options):
    """Runs each mode. Returns {mode: folder of its run}."""
    servers = scripted_engine.start(1, lengths=f"90:1,10:{LONG}", unit_seconds=options.unit, slots=GROUPS * SAMPLES,
                                    budget=LONG, vocab_size=250)
    try:
        model, url = harness.make_model(folder), servers[0][1]
        placement.TrainWorker = harness.padded_worker(TRAIN * options.unit)
        return {name: run(name, model, folder, url, options) for name in dict.fromkeys(["sync", *options.arms])}
    finally:
        placement.stop([])
        scripted_engine.stop(servers)


def run(name, model, folder, url, options):
    """One mode, with processes of its own. Returns the folder of the run."""
    script, changes = ARMS[name]
    args = parse_args(harness.flags(model, folder, name, [url], num_rollout=options.steps, rollout_batch_size=GROUPS,
                                    n_samples_per_prompt=SAMPLES, rollout_max_response_len=LONG,
                                    sglang_server_concurrency=GROUPS * SAMPLES, **changes), script.__name__ + ".py")
    placement.write_flags(args)
    if not ray.is_initialized():
        placement.start_ray(args)
    trainers, rollout = placement.launch(args, [])
    tracker = Tracker(args, 0)
    script.train(args, trainers, rollout, tracker, 0)
    tracker.bar.close()
    for actor in [*trainers, rollout]:
        ray.kill(actor)
    return args.run_dir


def figures(name, run_dir, unit):
    """Prints and returns the seconds per step of a run."""
    rows = harness.read_jsonl(os.path.join(run_dir, "metrics.jsonl"))[4:]
    mean = statistics.fmean(row["perf/step_time"] for row in rows)
    waits = statistics.fmean(row["perf/wait_prev_gen"] for row in rows)
    lag = max(row["staleness/max"] for row in rows)
    print(f"{name}: {mean:.2f} s per step ({mean / unit:.1f} units), of it waiting {waits:.2f}; largest lag {lag}", flush=True)
    return mean


if __name__ == "__main__":
    main()
