"""Engine and trainer share one GPU: plain, and with over-sampling and --partial-rollout. Memory of
both sides, sync time, log-prob parity from the first sync to the last, and on a real model the
reward.

    python scripts/gpu/colocate.py models/smollm2-135m --steps 50 [--sglang-...]
    python scripts/gpu/colocate.py 0.6B --steps 4  random weights, forced lengths with a long tail

Ends with a line for each run, with the peaks of memory and what the engine keeps while it is
training's turn. Parity is the mean |engine - trainer| of a token's log-prob on the same weights,
over the first and the last five syncs.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile

import resident
from resident import ROOT, Memory, RandomWorker

import placement
import smollm2
import train_sync
from bench_async_gpu import force_lengths, write_prompts
from shapes import make_shape

RUNS = {"plain": [], "over": ["--over-sampling-batch-size", "48", "--partial-rollout"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of SmolLM2, a shape of scripts/gpu/shapes.py, or tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output-dir", default=os.path.join(ROOT, "runs", "colocate"), help="folder of the runs")
    options, flags = parser.parse_known_args()
    options.name = os.path.basename(options.model.rstrip("/"))
    options.output_dir = os.path.join(options.output_dir, options.name)
    shutil.rmtree(options.output_dir, ignore_errors=True)                # of a run before
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--colocate", "--parity-interval", "1", *own_flags(options, folder), *flags]
        lines = measure(options, flags)
    print("\n".join(lines), flush=True)


def own_flags(options, folder):
    """What a shape needs in place of the recipe's task; also makes its folder."""
    if os.path.isdir(options.model):
        return []
    longest = 1024 if options.device == "cuda" else 64
    options.model = make_shape(options.name, folder)
    prompts, few = write_prompts(options.model, 16), write_prompts(options.model, 16, "eval", 16)
    force_lengths(32, 8, longest // 16, longest)                        # the recipe's step
    placement.TrainWorker = RandomWorker
    return ["--prompt-data", prompts, "--custom-rm-path", "harness.token_reward", "--rollout-max-response-len", str(longest),
            "--eval-prompt-data", "sums", few, "--sglang-load-format", "dummy"]


def measure(options, flags):
    servers, lines = [], []
    args = smollm2.recipe(options, "engine", train_sync, flags, 1)
    placement.start_ray(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))              # so that `finally` is reached; Ray has put its own there
    try:
        gpus = resident.hold_gpus(1, args)
        resident.start_servers(args, gpus, servers)
        for name, own in RUNS.items():
            args = smollm2.recipe(options, name, train_sync, [*own, *flags], 1)
            with Memory(gpus[0]) as memory:
                rows = resident.run(train_sync, args, servers)
            lines.append(line(options, name, rows, memory))
            print(lines[-1], flush=True)
    finally:
        resident.stop(servers)
    return lines


def line(options, name, rows, memory):
    mean = lambda key, part: statistics.fmean(row[key] for row in part)
    ends = lambda key, form: " -> ".join(format(mean(key, part), form) for part in (rows[:5], rows[-5:]))
    tensors = max(row["perf/max_memory_allocated_gb"] for row in rows)
    return (f"colocate {options.name} {name} memory {memory.summary()}, the trainer's tensors {tensors:.1f} GB; sync "
            f"{mean('sync/time', rows[1:] or rows):.2f} s, parity {ends('parity/mismatch', '.5f')} over {len(rows)} syncs, "
            f"mean lag {mean('staleness/mean', rows):.2f}, reward {ends('rollout/reward', '.2f')}")


if __name__ == "__main__":
    main()
