"""Predicts step time, waiting, idle shares and lag of a run, and the best split of GPUs, before any
GPU is rented.

    python scripts/simulate.py --mode fully_async --gpus 64 --staleness-threshold 0.5 --partial-rollout
    python scripts/simulate.py --mode fully_async --split 16/48 --sweep threshold --plot threshold.png
    python scripts/simulate.py --fit runs/my_run  predicted beside measured
    python scripts/simulate.py --fit runs/my_run --mode one_step_off
        the same lengths and rates in another mode
    python scripts/simulate.py --check  records five short runs and predicts them

The scheduler is the real one, under a virtual clock: see virtual_clock.py.
"""

import argparse
import inspect
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]

from buffer import Ledger
from virtual_clock import simulate

MODES = {"train_sync.py": "sync", "train_async.py": "one_step_off", "train_fully_async.py": "fully_async"}
SEARCH_STEPS, MOST_GPUS = 12, 1 << 15          # of each run of a search; of each side, when asking how many help
MODE_FLAGS = {"over_sampling_batch_size": None, "staleness_threshold": 0.0, "update_weights_interval": 1, "max_lag": None,
              "max_lag_policy": "wait", "partial_rollout": False}
COLUMNS = {"step": ".3f", "wait": ".3f", "sync": ".3f", "train idle": ".0%", "engines idle": ".0%", "slots idle": ".0%",
           "mean lag": ".2f", "max lag": "d", "length bias": ".3f"}


# ---- lengths and rates ------------------------------------------------------------------------------------
def parse_lengths(text):
    """--lengths -> a function for simulate()."""
    try:
        if text.startswith("lognormal:"):
            median, sigma, cap = map(float, text.split(":")[1:])
            return lambda number, numbers: min(cap, max(1, round(median * math.exp(numbers.gauss(0.0, sigma)))))
        shares, values = zip(*(map(float, part.split(":")) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--lengths {text}: give SHARE:LENGTH,... or lognormal:MEDIAN:SIGMA:CAP") from None
    if min(values) <= 0 or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"--lengths {text}: lengths must be above 0, and shares not below")
    return lambda number, numbers: numbers.choices(values, shares)[0]


def mean_length(lengths, count=1000):
    numbers = random.Random(0)
    return statistics.fmean(lengths(number, numbers) for number in range(count))


def fit(folder):
    """What a recorded run says: (flags of the command line, {of COLUMNS: measured})."""
    try:
        with open(os.path.join(folder, "args.json")) as args, open(os.path.join(folder, "metrics.jsonl")) as metrics:
            args, rows = json.load(args), [json.loads(line) for line in metrics if line.endswith("\n")]
        records = Ledger.surviving(os.path.join(folder, "ledger.jsonl"))
    except FileNotFoundError as error:
        raise ValueError(f"--fit {folder}: there is no {error.filename}") from None
    ended = {record["group"]: record for record in records
             if record["event"] in ("finish", "drop") and any(record["tokens"])}
    if not (rows and ended):
        raise ValueError(f"--fit {folder}: not one step and one finished group are recorded")
    rollout = args["num_engines"] * args["rollout_num_gpus_per_engine"]
    flags = {**{name: args[name] for name in MODE_FLAGS}, "mode": MODES[args["script"]], "steps": len(rows),
             "rollout_batch_size": args["groups_per_step"], "n_samples_per_prompt": args["n_samples_per_prompt"],
             "split": (args["world_size"], rollout),
             "slots_per_gpu": args["num_engines"] * args["sglang_server_concurrency"] / rollout}
    for name, derived in (("over_sampling_batch_size", flags["rollout_batch_size"]),
                          ("max_lag", {"sync": 0, "one_step_off": 1}.get(flags["mode"]))):
        flags[name] = None if flags[name] == derived else flags[name]
    counted = rows[1:] or rows                       # the first step warms up
    return {**flags, **generation_rates(records, ended, flags["n_samples_per_prompt"]),
            **training_rates(counted, args)}, measured(rows, counted, records, ended)


def generation_rates(records, ended, n):
    """Samples have their recorded length, those beyond the record that of a random one. Latency and rate are the line through
    (tokens, seconds) of the samples that were never aborted, by its mean: then the work in all is right."""
    aborted = {record["group"] for record in records if record["event"] == "put_back"}
    known = {group * n + i: tokens for group, record in ended.items() for i, tokens in enumerate(record["tokens"][:n]) if tokens}
    pool = list(known.values())
    whole = [ended[group] for group in ended.keys() - aborted] or ended.values()
    pairs = [pair for record in whole for pair in zip(record["tokens"], record["seconds"])]
    latency, token_seconds = line(pairs, statistics.fmean)
    rejected = [record for record in ended.values() if record["event"] == "drop" and not record["reason"].startswith("lag")]
    return {"lengths": lambda number, numbers: known.get(number) or numbers.choice(pool), "latency": latency,
            "rate": 1 / max(token_seconds, 1e-9), "drop_share": len(rejected) / len(ended)}


def training_rates(rows, args):
    """Medians over the steps: a hiccup of the machine belongs to no mode."""
    seconds, token_seconds = line([(row["rollout/tokens"], row.get("perf/train_time", 0.0)) for row in rows], statistics.median)
    synced = [row for row in rows if "sync/time" in row] or [{"sync/time": 0.0, "sync/pause_time": 0.0}]
    drains = args["fully_async"] and not args["partial_rollout"]           # the pause is then a wait for what runs
    sync = statistics.median(row["sync/time"] - drains * row["sync/pause_time"] for row in synced)
    parts = ("perf/wait_prev_gen", "sync/time", "perf/train_time")
    rest = statistics.median(row["perf/step_time"] - sum(row.get(part, 0.0) for part in parts) for row in rows)
    return {"train_time": seconds, "train_token_time": token_seconds * args["world_size"], "overhead": max(0.0, rest),
            "sync_time": sync + drains * min(row["sync/pause_time"] for row in synced)}


def measured(rows, counted, records, ended):
    mean = lambda name: statistics.fmean(row.get(name, 0.0) for row in counted)
    length = lambda groups: statistics.fmean(tokens for group in groups for tokens in ended[group]["tokens"])
    trained = [group for record in records if record["event"] == "trained" for group in record["groups"]]
    dropped = [group for group, record in ended.items() if record["event"] == "drop"]
    evaluations = mean("sync/eval_wait_time")                  # that a sync waited for: a simulation has none
    step = mean("perf/step_time") - evaluations
    return {"step": step, "wait": mean("perf/wait_prev_gen"), "sync": mean("sync/time") - evaluations,
            "train idle": 1 - mean("perf/train_time") / step,
            "engines idle": max(0.0, 1 - (mean("perf/engine_busy_time") - evaluations) / step),
            "mean lag": statistics.fmean(row["staleness/mean"] for row in rows),
            "max lag": max(row["staleness/max"] for row in rows), "length bias": length(trained) / length(trained + dropped)}


def line(points, middle):
    """(a, b) of the line a + b x through [(x, y)], neither below 0: b is the median of the slopes between two points (Theil and
    Sen), which outliers do not move, a the middle (fmean or median) of what is left of y. Where all x are equal, a is 0."""
    some = points[::max(1, len(points) // 300)]
    slopes = [(y - v) / (x - u) for (x, y), (u, v) in itertools.combinations(some, 2) if x != u]
    x, y = (statistics.fmean(column) for column in zip(*points))
    slope = min(max(statistics.median(slopes), 0.0), y / x) if slopes else y / x
    return max(0.0, middle(y - slope * x for x, y in points)), slope


# ---- splits of the GPUs -----------------------------------------------------------------------------------
def run(options, split=None, **changes):
    """One simulation, with so many training and rollout GPUs; those of train_sync.py --colocate count on both sides."""
    training, rollout = split or options.split
    flags = {name: value for name, value in vars(options).items() if name in inspect.signature(simulate).parameters}
    flags |= {"slots": max(1, int(rollout * options.slots_per_gpu)), "unit": max(1.0, mean_length(options.lengths) / 8),
              "train_token_time": options.train_token_time / training}
    return simulate(**{**flags, **changes})


def best_split(options, points=12):
    """-> ({(training, rollout): Result} over splits of --gpus, the fastest of them): an even grid, and a finer one
    around its best. The runs have few steps and the same lengths, so that they compare."""
    results, low, high = {}, 1, options.gpus - 1
    for _ in range(2):
        for i in range(points):
            rollout = round(low + (high - low) * i / (points - 1))
            split = (options.gpus - rollout, rollout)
            if split not in results:
                results[split] = run(options, split, steps=min(options.steps, SEARCH_STEPS))
        tried = sorted(results, key=lambda split: split[1])
        best = min(tried, key=lambda split: results[split].means["step"])
        place = tried.index(best)
        low, high = tried[max(place - 1, 0)][1], tried[min(place + 1, len(tried) - 1)][1]
    return {split: results[split] for split in tried}, best


def knee(step_time, most):
    """The fewest GPUs whose step time is within 1 % of that with `most`. step_time: GPUs -> seconds, taken to fall."""
    low, high, limit = 1, most, 1.01 * step_time(most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if step_time(middle) <= limit else (middle + 1, high)
    return low


def enough(options):
    """(training, rollout) GPUs beyond which no number of GPUs makes a step shorter by more than 1 %, or 2 % for both."""
    seconds = lambda *split: run(options, split, steps=min(options.steps, SEARCH_STEPS)).means["step"]
    rollout = knee(lambda gpus: seconds(MOST_GPUS, gpus), MOST_GPUS)
    return knee(lambda gpus: seconds(gpus, rollout), MOST_GPUS), rollout


# ---- what is shown ----------------------------------------------------------------------------------------
def label(name):
    """A threshold, or a split as --split takes it."""
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


def table(rows):
    """rows: {name: {of COLUMNS: value}}; what was not measured is a dash."""
    width = max(len(label(name)) for name in rows)
    print(" " * width + "".join(f"{name:>13}" for name in COLUMNS))
    for name, row in rows.items():
        cells = [format(row[column], form) if column in row else "-" for column, form in COLUMNS.items()]
        print(f"{label(name):>{width}}" + "".join(f"{cell:>13}" for cell in cells))


def plot(options, head, results, best):
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (times, shares) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    curves = {times: {"step": "step", "wait": "wait_prev_gen", "sync": "sync, with its drain"},
              shares: {"train idle": "trainer", "slots idle": "engines' slots"}}
    for axes, names in curves.items():
        for column, text in names.items():
            values = [result.means[column] for result in results.values()]
            axes.plot([label(name) for name in results], values, "o-", markersize=4, label=text)
        axes.axvline(label(best), color="grey", linestyle=":", label=f"fastest step: {label(best)}")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    times.set(ylabel="seconds per step", ylim=(0, None))
    shares.set(ylabel="idle share", ylim=(0, 1.03), xlabel=head)
    shares.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    shares.tick_params(axis="x", rotation=45)
    figure.suptitle(f"{options.mode} on {options.gpus} GPUs, steps of {options.rollout_batch_size} groups of "
                    f"{options.n_samples_per_prompt}")
    figure.savefig(options.plot, dpi=120)
    print(f"plot: {options.plot}")


# ---- command line -----------------------------------------------------------------------------------------
def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--fit", metavar="RUN", help="folder of a recorded run: all flags below default to what it was and measured")
    p.add_argument("--check", action="store_true", help="run scripts/bench_async.py, predict its modes from the synchronous one")
    p.add_argument("--mode", choices=tuple(MODES.values()), help="which entry script (default fully_async)")
    gpus = p.add_mutually_exclusive_group()
    gpus.add_argument("--gpus", type=int, help="training and rollout GPUs together, whose best split is searched (default 8)")
    gpus.add_argument("--split", help="TRAINING/ROLLOUT GPUs")
    p.add_argument("--slots-per-gpu", type=float, default=64, help="samples that one rollout GPU generates at a time")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--rollout-batch-size", type=int, default=128, help="groups of a step")
    p.add_argument("--n-samples-per-prompt", type=int, default=8)
    p.add_argument("--over-sampling-batch-size", type=int)
    p.add_argument("--staleness-threshold", type=float)
    p.add_argument("--update-weights-interval", type=int)
    p.add_argument("--max-lag", type=int)
    p.add_argument("--max-lag-policy", choices=("wait", "drop", "mask"))
    p.add_argument("--partial-rollout", action=argparse.BooleanOptionalAction)
    p.add_argument("--lengths", default="lognormal:512:1.2:8192", help="tokens of a sample: SHARE:LENGTH,... | "
                                                                       "lognormal:MEDIAN:SIGMA:CAP")
    p.add_argument("--rate", type=float, default=50.0, help="tokens per second of one slot")
    p.add_argument("--latency", type=float, default=0.0, help="seconds of a request before its tokens, at each start")
    p.add_argument("--train-time", type=float, default=0.0, help="fixed seconds of a training step")
    p.add_argument("--train-token-time", type=float, default=3e-4, help="GPU-seconds of training per token")
    p.add_argument("--sync-time", type=float, default=0.0, help="seconds of a weight sync, without waiting for what runs")
    p.add_argument("--overhead", type=float, default=0.0, help="seconds of a step that are neither waiting, sync nor training")
    p.add_argument("--drop-share", type=float, default=0.0, help="share of the groups that the filter rejects")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--sweep", choices=("split", "threshold"), help="prints a table over splits or staleness thresholds")
    p.add_argument("--plot", help="PNG file for the sweep; needs matplotlib")
    given = p.parse_args(argv)
    p.set_defaults(mode="fully_async", **MODE_FLAGS)
    own = measures = None
    if given.fit:
        flags, measures = fit(given.fit)
        p.set_defaults(**flags)
        own = read_values(p.parse_args([]))
        if given.mode not in (None, own.mode):
            p.set_defaults(**MODE_FLAGS)
    options = read_values(p.parse_args(argv))
    refuse(options)
    options.own, options.measured = own, measures
    return options


def read_values(o):
    """Texts become what simulate() takes. --gpus has no split: it is searched."""
    o.lengths = parse_lengths(o.lengths) if isinstance(o.lengths, str) else o.lengths
    try:
        o.split = tuple(map(int, o.split.split("/"))) if isinstance(o.split, str) else o.split
    except ValueError:
        raise ValueError(f"--split {o.split}: give TRAINING/ROLLOUT, as in 2/6") from None
    o.split = None if o.gpus else o.split
    o.gpus = sum(o.split) if o.split else o.gpus or 8
    return o


def refuse(o):
    """ValueError for flags that no run can have."""
    k, stream, over = o.update_weights_interval, o.mode == "fully_async", o.over_sampling_batch_size
    lag, threshold = o.max_lag, o.staleness_threshold
    small = [name for name in ("slots_per_gpu", "steps", "rollout_batch_size", "n_samples_per_prompt", "update_weights_interval")
             if vars(o)[name] <= 0]
    for found, problem in (
            (small, f"--{' and --'.join(small).replace('_', '-')} must be above 0"),
            (o.gpus < 2, f"--gpus {o.gpus}: training and rollout need one each"),
            (o.split and (len(o.split) != 2 or min(o.split) < 1), f"--split {label(o.split)}: not two numbers above 0"),
            (o.mode == "sync" and (lag or k > 1), "--mode sync is on-policy: leave --max-lag and --update-weights-interval out"),
            (o.mode == "one_step_off" and lag not in (None, 0, 1), f"--max-lag {lag}: --mode one_step_off knows 0 and 1"),
            (stream and lag is not None and lag < k - 1,
             f"--max-lag {lag} is below --update-weights-interval - 1 = {k - 1}"),
            (not stream and (threshold or o.max_lag_policy != "wait"),
             "--staleness-threshold and --max-lag-policy need --mode fully_async"),
            (threshold < 0 or not 0 <= o.drop_share < 1, "--staleness-threshold must be at least 0, --drop-share in [0, 1)"),
            (stream and o.partial_rollout and not threshold and o.sweep != "threshold",
             "--partial-rollout needs --staleness-threshold above 0: at 0 nothing is in flight at a sync"),
            (over and (stream or over < o.rollout_batch_size),
             "--over-sampling-batch-size must not be below --rollout-batch-size, and is not for --mode fully_async"),
            (o.sweep == "threshold" and not stream, "--sweep threshold needs --mode fully_async"),
            (o.plot and not o.sweep, "--plot needs --sweep")):
        if found:
            raise ValueError(problem)


def report(options):
    best = None
    if options.split is None:
        _, best = best_split(options)
        print(f"best split of {options.gpus} GPUs: {best[0]} training, {best[1]} rollout")
    result = run(options, best)
    rows = {best or options.split: result.means}
    if options.fit:
        own = run(options.own).means
        rows = {"measured": options.measured, "predicted": own, **({} if own == result.means else rows)}
    table(rows)
    print("tokens by lag: " + ", ".join(f"{lag}: {share:.1%}" for lag, share in result.lags.items()))
    print(f"groups: drawn {result.drawn}, dropped {result.dropped or 0}, aborted {result.put_back} times")
    if result.masked_share:
        print(f"tokens without loss: {result.masked_share:.1%}")
    for fate, length in result.length_bias.items():
        print(f"mean length of {fate} / of all that ended: {length:.3f}")
    training, rollout = enough(options)
    print(f"beyond {training} training and {rollout} rollout GPUs no number of GPUs makes a step much shorter")


def sweep(options):
    if options.sweep == "split":
        results, best = best_split(options)
    else:
        split = options.split or (options.gpus // 2, options.gpus - options.gpus // 2)
        results = {threshold: run(options, split, staleness_threshold=threshold)
                   for threshold in (0, 0.1, 0.25, 0.5, 1, 2, 4) if threshold or not options.partial_rollout}
        best = min(results, key=lambda name: results[name].means["step"])
    table({name: result.means for name, result in results.items()})
    print(f"best {options.sweep}: {label(best)}")
    if options.plot:
        head = "training/rollout GPUs" if options.sweep == "split" else "--staleness-threshold"
        plot(options, head, results, best)


def check():
    """Records the runs of scripts/bench_async.py and predicts each one's step time and waiting, from its own flags and from
    the lengths and rates of the synchronous one alone."""
    import bench_async
    with tempfile.TemporaryDirectory() as folder:
        recorded = {name: fit(path) for name, path in bench_async.record(folder, bench_async.parse([])).items()}
    rows, errors = {}, {"step": 0.0, "wait": 0.0}
    for name, (flags, measured) in recorded.items():
        own = {flag: flags[flag] for flag in (*MODE_FLAGS, "mode", "steps")}
        predicted = run(SimpleNamespace(**{**recorded["sync"][0], **own})).means
        rows |= {f"{name} measured": measured, f"{name} predicted": predicted}
        for column in errors:
            errors[column] = max(errors[column], abs(predicted[column] - measured[column]) / measured["step"])
    table(rows)
    print(f"all predicted from the lengths and rates of the synchronous run; errors as shares of the step time; load average "
          f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores (busy cores stretch what is measured)")
    print(f"prediction_error step_time {errors['step']:.1%} wait_prev_gen {errors['wait']:.1%}")


def main():
    options = parse()
    check() if options.check else sweep(options) if options.sweep else report(options)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
