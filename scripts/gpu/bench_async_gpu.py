"""What the asynchronous modes gain, in samples trained per second, where answers have a long tail.

    python scripts/gpu/bench_async_gpu.py [--sglang-...]  Qwen3-0.6B's shape, 16 groups of 8 samples
    python scripts/gpu/bench_async_gpu.py --shape 2.5-3B --groups 32 --prompt-tokens 1024 \\
        --threshold 2 --max-tokens-per-gpu 9216
    python scripts/gpu/bench_async_gpu.py --gpus 8 --arms sync one_step_off:6+2 partial:4+4 ...
    python scripts/gpu/bench_async_gpu.py --device cpu  a rehearsal: the tiny model, lengths / 64

Any other flag goes to train_*.py or the server. Everything is real: SGLang, Megatron, Ray, the
weight sync. Weights are random, and so that this does not matter each sample has to be of a given
length: lognormal, median 512, 1 % above 8,192, where it is cut; the same in every arm, since it
follows from the prompt's row and the sample's index alone. So many consecutive prompts as a step has
groups have exactly this distribution's quantiles, shuffled: no arm has luck with its few steps.

    sync           train_sync.py --colocate: all GPUs generate, then all train
    one_step_off   train_async.py, half of the GPUs for each side, or 6+2: 6 train, 2 generate
    stale          train_fully_async.py: generation runs --threshold of a batch ahead, and is
                   drained before a sync
    partial        the same with --partial-rollout

All arms have the same flags besides, and old log-probs are the engine's (bypass). The first steps
of an arm are not counted. Last line: `async one_step_off 1.02 stale 0.98 partial 1.91`, samples per
second relative to sync. The stream's short samples come first, and then what was in flight meanwhile:
partial has as many uncounted steps as that takes, and each arm also says how long its samples were,
and its tokens per second. Beside each stands what scripts/simulate.py predicts from the lengths and
rates of the synchronous arm alone.
"""

import argparse
import functools
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from types import SimpleNamespace

import resident
from resident import ROOT, RandomWorker

import placement
import simulate
import train_async
import train_fully_async
import train_sync
from args import parse_args
from rollout import RolloutManager
from shapes import make_shape

SIGMA = math.log(16) / 2.326           # the 99th percentile is 16 times the median
SCRIPTS = {"sync": train_sync, "partial": train_fully_async, "one_step_off": train_async, "stale": train_fully_async}
STEPS = {"sync": (1, 1), "one_step_off": (1, 1), "stale": (1, 1), "partial": (4, 2)}     # not counted, and counted per --steps


def forced_length(row, index, groups, samples, median, longest):
    """Tokens of the answer number `index` to the prompt in `row` of the data: in each block of `groups` rows, a step's, the
    quantiles (k + 1/2) / count of the distribution, in an order that is the block's own."""
    order = list(range(groups * samples))
    random.Random(row // groups).shuffle(order)
    quantile = (order[row % groups * samples + index] + 0.5) / len(order)
    return max(1, min(longest, round(math.exp(statistics.NormalDist(math.log(median), SIGMA).inv_cdf(quantile)))))


class ForcedLengths(RolloutManager):
    """Lets every answer run to its given length, whatever the model says."""

    length = None                      # (row, index) -> tokens

    def __init__(self, args):
        super().__init__(args)
        self.stops = []

    async def continue_sample(self, work, sample, sampling):
        return await super().continue_sample(work, sample, {**sampling, "max_len": self.length(sample.row, sample.index)})

    async def ask(self, work, sample, payload):
        payload["sampling_params"]["ignore_eos"] = True
        return await super().ask(work, sample, payload)


def force_lengths(groups, samples, median, longest):
    """The rollout managers that are started from now on."""
    placement.RolloutManager = type("ForcedLengths", (ForcedLengths,), {"length": staticmethod(functools.partial(
        forced_length, groups=groups, samples=samples, median=median, longest=longest))})


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="0.6B", help="a shape of scripts/gpu/shapes.py")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a group")
    parser.add_argument("--threshold", type=float, default=1.0, help="--staleness-threshold of stale and partial")
    parser.add_argument("--steps", type=int, default=2, help="steps that are counted; twice as many of partial, "
                        "whose steps are short")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--longest", type=int, help="tokens of the longest answer, 16 times the median (8192; on the CPU 128)")
    parser.add_argument("--arms", nargs="+", default=list(SCRIPTS), help="arms to run, each with its split if that is not half; "
                        "ratios are to sync")
    parser.add_argument("--output-dir", default=os.path.join(ROOT, "runs", "bench_async_gpu"), help="folder of the runs")
    options, flags = parser.parse_known_args(argv)
    options.longest = options.longest or (8192 if options.device == "cuda" else 128)
    options.shape = options.shape if options.device == "cuda" else "tiny"
    options.arms = {arm: split_of(arm, options.gpus, parser) for arm in options.arms}
    for arm in options.arms:                                       # of a run before
        shutil.rmtree(os.path.join(options.output_dir, folder_of(arm)), ignore_errors=True)
    return options, flags


def split_of(arm, gpus, parser):
    """'one_step_off:6+2' -> (6, 2): GPUs that train and that generate. With sync both are all of them."""
    name, _, split = arm.partition(":")
    sides = tuple(int(side) for side in split.split("+") if side.isdigit()) if split else (gpus - gpus // 2, gpus // 2)
    if name not in SCRIPTS or len(sides) != 2 or sum(sides) != gpus or min(sides) < 1 or name == "sync" and split:
        parser.error(f"--arms {arm}: give {', '.join(SCRIPTS)}; all but sync may have a split of the {gpus} GPUs (--gpus), like "
                     f"one_step_off:{gpus - 1}+1")
    return (gpus, gpus) if name == "sync" else sides


def folder_of(arm):
    return arm.replace(":", "-")


def write_prompts(model, tokens, name="prompts", rows=4096):
    """Prompts of so many digits, each a token; all different, so that none is in the cache. Returns the file's path."""
    draw = random.Random(0)
    path = os.path.join(os.path.dirname(model), f"{name}.jsonl")
    prompts = ("".join(draw.choices("0123456789", k=tokens)) for _ in range(rows))
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt": prompt, "label": ""}) + "\n" for prompt in prompts)
    return path


def arm_args(arm, model, prompts, options, flags, num_rollout):
    """The arguments of an arm. Its own flags are its GPUs and, for the stream, how far it runs ahead."""
    name, (training, rollout) = arm.partition(":")[0], options.arms.get(arm, (options.gpus, options.gpus))
    own = {"sync": ["--colocate"], "one_step_off": [], "stale": ["--staleness-threshold", str(options.threshold)],
           "partial": ["--staleness-threshold", str(options.threshold), "--partial-rollout"]}[name]
    own += [] if name == "sync" else ["--rollout-num-gpus", str(rollout)]
    longest = options.prompt_tokens + options.longest
    fewest = min(split[1] for split in options.arms.values())       # the servers stay from arm to arm
    slots = min(768, 8 * math.ceil(options.groups * options.samples * (1 + options.threshold) / fewest / 8))   # may be in flight
    words = ["--hf-checkpoint", model, "--prompt-data", prompts, "--output-dir", options.output_dir, "--run-name", folder_of(arm),
             "--num-rollout", str(num_rollout), "--rollout-batch-size", str(options.groups),
             "--n-samples-per-prompt", str(options.samples), "--rollout-max-prompt-len", str(options.prompt_tokens),
             "--rollout-max-response-len", str(options.longest), "--custom-rm-path", "harness.token_reward",
             "--policy-old", "rollout", "--no-rollout-shuffle", "--use-dynamic-batch-size",
             "--max-tokens-per-gpu", str(max(2 * options.longest, longest)),
             "--use-distributed-optimizer", "--device", options.device, "--actor-num-gpus-per-node", str(training),
             "--sglang-server-concurrency", str(slots), "--sglang-load-format", "dummy", *own]
    if options.device == "cuda":
        words += ["--bf16", "--update-weight-buffer-size", str(2 << 30), "--sglang-mem-fraction-static", ".45",
                  "--sglang-cuda-graph-max-bs-decode", str(slots)]         # beyond it decoding would be several times slower
    return parse_args([*words, *flags], f"{SCRIPTS[name].__name__}.py")


def measure(arm, model, prompts, options, flags, servers):
    """Runs an arm. Returns its samples and tokens per second."""
    name = arm.partition(":")[0]
    warm, counted = STEPS[name][0], STEPS[name][1] * options.steps
    print(f"\n{arm}: {warm} + {counted} steps", flush=True)
    args = arm_args(arm, model, prompts, options, flags, warm + counted)
    rows = resident.run(SCRIPTS[name], args, servers, ahead=4 if args.fully_async else 0)[warm:]
    mean = lambda key: statistics.fmean(row[key] for row in rows)
    step, size, length = mean("perf/step_time"), options.groups * options.samples, mean("rollout/response_len")
    rate = size / step
    print(f"{arm}: {rate:.2f} samples/s, {rate * length:.0f} response tokens/s; {len(rows)} steps of {size} samples, {step:.2f} s "
          f"each = wait {mean('perf/wait_prev_gen'):.2f} + sync {mean('sync/time'):.2f} + train {mean('perf/train_time'):.2f} + other; "
          f"idle: engine {mean('perf/rollout_idle_share'):.0%}, trainer {mean('perf/train_idle_share'):.0%}; mean length {length:.0f}; "
          f"lag {mean('staleness/mean'):.2f}, at most {max(row['staleness/max'] for row in rows)}{predicted(args, options, arm)}",
          flush=True)
    return rate, rate * length


def predicted(args, options, arm):
    """What the simulator says of an arm's step from the lengths and rates of the synchronous one."""
    if "sync" not in options.arms or arm == "sync":
        return ""
    flags, _ = simulate.fit(os.path.join(options.output_dir, "sync"))
    own = {name: getattr(args, name) for name in ("staleness_threshold", "partial_rollout")}
    own |= {"mode": simulate.MODES[args.script], "steps": 12, "split": options.arms[arm]}
    result = simulate.run(SimpleNamespace(**{**flags, **own}))
    return f"; predicted from sync: {result.means['step']:.2f} s a step"


def main():
    options, flags = parse()
    servers, rates = [], {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_shape(options.shape, folder)
        prompts = write_prompts(model, options.prompt_tokens)
        force_lengths(options.groups, options.samples, options.longest // 16, options.longest)
        placement.TrainWorker = RandomWorker
        args = arm_args("sync", model, prompts, options, flags, 1)
        placement.start_ray(args)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))    # so that `finally` is reached; Ray has put its own there
        try:
            resident.start_servers(args, resident.hold_gpus(options.gpus, args), servers)
            for arm in sorted(options.arms, key=lambda arm: -options.arms[arm][1]):
                rollout = options.arms[arm][1]
                for server in servers[:-rollout]:                  # their GPUs are the trainer's alone from now on
                    server.stop()
                servers = servers[-rollout:]
                rates[arm] = measure(arm, model, prompts, options, flags, servers)
                say(rates)
        finally:
            resident.stop(servers)
    if "sync" in rates:
        print("async " + " ".join(f"{arm} {rates[arm][0] / rates['sync'][0]:.2f}" for arm in rates if arm != "sync")
              + (f" on {options.gpus} GPUs" if options.gpus > 2 else ""), flush=True)


def say(rates):
    base = rates.get("sync")
    for name, (samples, tokens) in rates.items() if base else ():
        print(f"so far: {name} {samples / base[0]:.2f} x sync in samples, {tokens / base[1]:.2f} in tokens", flush=True)


if __name__ == "__main__":
    main()
