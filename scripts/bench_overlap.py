"""Does one-step-off training overlap? Time per step of train_async.py relative to train_sync.py, in
one process and one run.

    python scripts/bench_overlap.py [--pairs 5] [--steps 6] [--unit 0.6]

The loops, Ray, Megatron and the weight sync are the real ones. In place of SGLang stands the
scripted engine of the tests, whose answers take one unit of time, and a training step is padded to
one unit: two equal halves, whose overlap is what is measured. Prints each pair's ratio and, last,
the median as `one_step_off/sync 0.55`. The ideal is 0.5.
"""

import argparse
import copy
import os
import statistics
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])   # for the actors

import harness
import placement
import scripted_engine
import train_async
import train_sync
from args import parse_args
from tracking import Tracker


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="times that both loops are run, in turn")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run; the first is not counted")
    parser.add_argument("--unit", type=float, default=0.6, help="seconds of generation and of training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = scripted_engine.start(1, lengths="1", unit_seconds=options.unit, vocab_size=250)
        engines = []
        try:
            args = parse_args(harness.flags(harness.make_model(folder), folder, "bench", [servers[0][1]], num_rollout=1))
            placement.TrainWorker = harness.padded_worker(options.unit)
            placement.start_ray(args)
            trainers, rollout = placement.launch(args, engines)
            measure(args, trainers, rollout, options)
        finally:
            placement.stop(engines)
            scripted_engine.stop(servers)


def measure(args, trainers, rollout, options):
    """Runs the loops in turn on the same processes, each time over the next steps."""
    ratios, step = [], 0
    for pair in range(options.pairs):
        seconds = {}
        for name, loop in (("sync", train_sync.train), ("async", train_async.train)):
            part = copy.copy(args)
            part.num_rollout, part.run_dir = step + options.steps, os.path.join(args.run_dir, f"{name}{pair}")
            os.makedirs(part.run_dir)
            tracker = Tracker(part, step)
            loop(part, trainers, rollout, tracker, step)
            tracker.bar.close()
            rows = tracker.rows.read()[1:]     # batch 0 of one-step-off has nothing to overlap with
            seconds[name] = statistics.fmean(row["perf/step_time"] for row in rows)
            step += options.steps
        ratios.append(seconds["async"] / seconds["sync"])
        print(f"pair {pair}: sync {seconds['sync']:.3f} s, one step off {seconds['async']:.3f} s, ratio {ratios[-1]:.3f}", flush=True)
    print(f"one_step_off/sync {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
