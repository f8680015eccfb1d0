"""Predicts step time, waiting, idle shares and lag of a run, and the best split of GPUs, before any GPU is rented.

    python scripts/simulate.py --mode fully_async --gpus 64 --staleness-threshold 0.5 --partial-rollout
    python scripts/simulate.py --mode fully_async --split 16/48 --sweep threshold --plot threshold.png
    python scripts/simulate.py --fit runs/my_run                            predicted beside measured
    python scripts/simulate.py --fit runs/my_run --mode one_step_off        the same lengths and rates in another mode
    python scripts/simulate.py --check                                      records five short runs and predicts them

The scheduler is the real one: buffer.Buffer, Gate and Stream, driven under a virtual clock in the order of the entry
scripts and of the rollout manager. What is modelled is only what takes time: a request occupies one of the engines' slots
for latency + tokens / rate seconds, whatever runs beside it; a training step takes a fixed time and one per token over
the training GPUs. Rewards take none, and all engines share one queue.
"""

import argparse
import heapq
import inspect
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from buffer import Buffer, Gate, Ledger, Sample, Stream

ROWS = [{"prompt": "", "prompt_tokens": [], "label": "", "metadata": {}}] * 4096     # epochs go on for ever
SCRIPTS = {"train_sync.py": "sync", "train_async.py": "one_step_off", "train_fully_async.py": "fully_async"}
SEARCH_STEPS, MOST_GPUS = 12, 1 << 15          # of each run of a search; of each side, when asking how many help
MODE_FLAGS = {"over_sampling_batch_size": None, "staleness_threshold": 0.0, "update_weights_interval": 1, "max_lag": None,
              "max_lag_policy": "wait", "partial_rollout": False}
COLUMNS = {"step": "9.3f", "wait": "9.3f", "sync": "9.3f", "train idle": "11.0%", "engines idle": "13.0%",
           "slots idle": "11.0%", "mean lag": "9.2f", "max lag": "8d", "length bias": "12.3f"}


# ---- the virtual clock ------------------------------------------------------------------------------------
@dataclass
class Events:
    """Stands where the ledger stands: numbers the events and shows them to watch(event, fields)."""
    watch: object
    seq: int = 0

    def write(self, event, **fields):
        self.seq += 1
        self.watch(event, fields)


@dataclass
class Job:
    """A sample and how far it is."""
    sample: Sample
    length: float                  # tokens in all
    done: float = 0.0              # tokens generated before `started`
    started: float = 0.0


@dataclass
class World:
    """Engines and clock. `heap` holds the running jobs by the time of their end, so its size is the slots in use."""
    o: SimpleNamespace             # the arguments of simulate()
    buffer: Buffer
    stream: Stream | None          # None: a batch at a time
    random: random.Random
    rows: list                     # of each step: see Result.steps
    now: float = 0.0
    order: int = 0
    held: bool = True
    version: int = 0
    heap: list = field(default_factory=list)         # (time of the end, order of the start, job)
    queue: deque = field(default_factory=deque)
    jobs: dict = field(default_factory=dict)         # group id -> its jobs, until it is trained or filtered out
    left: dict = field(default_factory=dict)         # group id -> samples that are still to end
    doomed: set = field(default_factory=set)         # groups that the filter will reject
    put_back: int = 0
    slot_seconds: float = 0.0
    busy_seconds: float = 0.0      # with at least one slot in use

    # ---- engines ----------------------------------------------------------------------------------------------
    def start(self, groups):
        for group in groups:
            if group.group_id not in self.jobs:
                first = group.group_id * len(group.samples)
                self.jobs[group.group_id] = [Job(sample, self.o.lengths(first + sample.index, self.random))
                                             for sample in group.samples]
                if self.random.random() < self.o.drop_share:
                    self.doomed.add(group.group_id)
            waiting = [job for job in self.jobs[group.group_id] if job.sample.status == "pending"]
            self.left[group.group_id] = len(waiting)
            self.queue.extend(waiting)
        self.dispatch()

    def dispatch(self):
        while self.queue and len(self.heap) < self.o.slots:
            job = self.queue.popleft()
            job.started = self.now
            self.order += 1
            end = self.now + self.o.latency + (job.length - job.done) / self.o.rate
            heapq.heappush(self.heap, (end, self.order, job))

    def advance(self, until=math.inf):
        """Lets the clock run to the next end of a sample, or to `until`; all that ends at that time has then ended."""
        when = min(self.heap[0][0] if self.heap else math.inf, until)
        if when == math.inf:
            raise RuntimeError(f"at {self.now:g} s nothing runs and nothing is due: {self.buffer.finished_count} of "
                               f"{self.o.rollout_batch_size} groups are finished")
        self.slot_seconds += len(self.heap) * (when - self.now)
        self.busy_seconds += (when - self.now) if self.heap else 0.0
        self.now = when
        while self.heap and self.heap[0][0] <= when:
            self.complete(heapq.heappop(self.heap)[2])
        self.dispatch()

    def sleep(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.advance(until)

    def complete(self, job):
        self.record(job, job.length)
        job.sample.status, job.sample.reward = "completed", 1.0
        group_id = job.sample.group_id
        self.left[group_id] -= 1
        if self.left[group_id] == 0:
            self.land(self.buffer.in_flight[group_id])

    def record(self, job, tokens):
        """The job has so many tokens now; the new ones are of the published version, and `unit` of them are kept as one."""
        job.done = tokens
        whole = max(1, round(tokens / self.o.unit)) if tokens == job.length else int(tokens / self.o.unit)
        new = whole - len(job.sample.response_tokens)
        if new > 0:
            job.sample.append([0] * new, [0.0] * new, self.version)

    def land(self, group):
        if group.group_id in self.doomed:
            self.buffer.drop(group, "filter")
            del self.jobs[group.group_id]
        else:
            self.buffer.finish(group)
        if self.stream:
            self.stream.landed(group)
        self.fill()

    # ---- as in rollout.RolloutManager -------------------------------------------------------------------------
    def fill(self):
        if self.held:
            return
        room = self.o.over_sampling_batch_size - self.buffer.finished_count - len(self.buffer.in_flight)
        self.start(self.stream.draw() if self.stream else self.buffer.draw(room))

    def wait_for_batch(self, step):
        started = self.now
        if self.stream:
            while not self.stream.ready(step):
                self.fill()                          # a drop by lag has opened the gate
                seen = self.buffer.ledger.seq
                while self.buffer.ledger.seq == seen:        # until a group has landed
                    self.advance()
            self.stream.take(step)
        else:
            while self.buffer.finished_count < self.o.rollout_batch_size:
                self.advance()
            self.abort()                             # what over-sampling has started too much
            self.buffer.take(step, self.o.rollout_batch_size)
        self.rows[step]["wait"] = self.now - started

    def launch(self):
        self.held = False
        self.fill()

    def sync(self, version):
        """Pause, send, publish, resume."""
        started = self.now
        if self.stream:
            self.abort() if self.o.partial_rollout else self.drain()
        self.sleep(self.o.sync_time)
        self.version = version
        if self.stream:
            self.stream.publish(version)
            self.launch()
        self.rows[version]["sync"] = self.now - started

    def drain(self):
        self.held = True
        while self.buffer.in_flight:
            self.advance()

    def abort(self):
        """All that runs goes back into the buffer, but for groups that went back to their prompt before: these are waited
        for, or long answers never end. Tokens are whole: the one in the making is lost."""
        groups = {group_id: group for group_id, group in self.buffer.in_flight.items() if not group.keep}
        stopped = [job for _, _, job in self.heap if job.sample.group_id in groups]
        self.heap = [entry for entry in self.heap if entry[2].sample.group_id not in groups]
        self.queue = deque(job for job in self.queue if job.sample.group_id not in groups)
        heapq.heapify(self.heap)
        for job in stopped:
            seconds = max(0.0, self.now - job.started - self.o.latency)
            self.record(job, job.done + math.floor(seconds * self.o.rate + 1e-9))
        for group_id, group in groups.items():
            self.buffer.put_back(group)
            self.put_back += 1
            if self.stream:
                self.stream.landed(group)
            for job in () if self.o.partial_rollout else self.jobs[group_id]:
                job.done = 0.0
        self.drain()

    def train(self, step):
        batch, row = self.buffer.waiting(step), self.rows[step]
        row["groups"] = [group.group_id for group in batch]
        tokens = sum(job.length for group_id in row["groups"] for job in self.jobs.pop(group_id))
        row["train"] = self.o.train_time + self.o.train_token_time * tokens
        for sample in [sample for group in batch for sample in group.samples]:
            for version, count in sample.version_runs:
                row["lags"][step - version] += count
        self.sleep(row["train"])
        (self.stream or self.buffer).trained(step)
        if self.stream:
            self.fill()
        self.sleep(self.o.overhead)
        row.update(end=self.now, busy=self.busy_seconds, slots=self.slot_seconds)


# ---- one run ----------------------------------------------------------------------------------------------
@dataclass
class Result:
    """Times in seconds, means over all steps but the first, which warms up."""
    step_time: float
    wait_prev_gen: float
    sync_time: float               # with the time that a sync waits for what runs
    train_idle_share: float
    rollout_idle_share: float      # time without a request, as in metrics.jsonl
    slots_idle_share: float
    lags: dict                     # lag -> share of the trained tokens
    masked_share: float            # tokens beyond --max-lag under the policy mask
    length_bias: dict              # Buffer.length_bias()
    drawn: int
    trained: int
    dropped: dict                  # reason -> groups
    put_back: int
    seconds: float                 # of the whole run
    steps: list                    # of each {"time", "end", "wait", "sync", "train", "lags": tokens by lag, "groups", ...}


def simulate(mode, *, slots, steps, lengths, rate=1.0, latency=0.0, train_time=0.0, train_token_time=0.0, sync_time=0.0,
             overhead=0.0, drop_share=0.0, rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=None,
             staleness_threshold=0.0, update_weights_interval=1, max_lag=None, max_lag_policy="wait", partial_rollout=False,
             unit=1.0, seed=0, watch=None):
    """One run under the virtual clock. Depends on nothing but its arguments. Returns a Result; RuntimeError when the trainer
    starves.

    mode: "sync" | "one_step_off" | "fully_async". lengths: (number of the sample, random.Random) -> tokens, or a list
    that is gone through again and again. A request takes latency + tokens / rate seconds, a training step train_time +
    train_token_time x tokens, the rest of a step overhead. unit: so many tokens are kept as one, for speed. watch: called as
    watch(world, event, fields) after every event of a group.
    """
    o = SimpleNamespace(**locals())
    o.lengths = lengths if callable(lengths) else lambda number, _: lengths[number % len(lengths)]
    o.over_sampling_batch_size = over_sampling_batch_size or rollout_batch_size
    o.max_lag = 1 if max_lag is None else max_lag
    events = Events(lambda event, fields: watch and watch(world, event, fields))
    buffer = Buffer(ROWS, n_samples_per_prompt, seed, events, shuffle=False, partial_rollout=partial_rollout)
    stream = None
    if mode == "fully_async":
        gate = Gate(rollout_batch_size, staleness_threshold, update_weights_interval, max_lag, steps)
        stream = Stream(buffer, gate, max_lag_policy)
    rows = [{"wait": 0.0, "sync": 0.0, "lags": Counter()} for _ in range(steps)]
    world = World(o, buffer, stream, random.Random(seed), rows)
    LOOPS[mode](world, steps)
    return summary(world, max_lag if max_lag_policy == "mask" else None)


def sync_loop(world, steps):
    for step in range(steps):
        world.sync(step)
        world.launch()
        world.wait_for_batch(step)
        world.train(step)


def one_step_off_loop(world, steps):
    for step in range(steps):
        if step == 0 or world.o.max_lag == 0:
            world.sync(step)
            world.launch()
        world.wait_for_batch(step)
        if world.o.max_lag == 1:
            if step > 0 and step % world.o.update_weights_interval == 0:
                world.sync(step)
            if step + 1 < steps:
                world.launch()
        world.train(step)


def fully_async_loop(world, steps):
    for step in range(steps):
        if step % world.o.update_weights_interval == 0:
            world.sync(step)
        world.wait_for_batch(step)
        world.train(step)


LOOPS = {"sync": sync_loop, "one_step_off": one_step_off_loop, "fully_async": fully_async_loop}


def summary(world, masked_beyond):
    rows, n = world.rows, world.o.n_samples_per_prompt
    ends = [0.0] + [row["end"] for row in rows]
    for row, start in zip(rows, ends):
        row["time"] = row["end"] - start
    counted, first = (rows[1:], rows[0]) if len(rows) > 1 else (rows, {"end": 0.0, "busy": 0.0, "slots": 0.0})
    mean = lambda name: statistics.fmean(row[name] for row in counted)
    per_second = lambda name: (rows[-1][name] - first[name]) / (rows[-1]["end"] - first["end"])
    lags = sum((row["lags"] for row in rows), Counter())
    tokens = sum(lags.values())
    masked = 0 if masked_beyond is None else sum(count for lag, count in lags.items() if lag > masked_beyond)
    groups = {fate: samples // n for fate, (samples, _) in world.buffer.lengths.items()}
    return Result(step_time=mean("time"), wait_prev_gen=mean("wait"), sync_time=mean("sync"),
                  train_idle_share=1 - mean("train") / mean("time"), rollout_idle_share=1 - per_second("busy"),
                  slots_idle_share=1 - per_second("slots") / world.o.slots,
                  lags={lag: lags[lag] / tokens for lag in sorted(lags)}, masked_share=masked / tokens,
                  length_bias=world.buffer.length_bias(), drawn=world.buffer.next_id, trained=groups.pop("trained"),
                  dropped=groups, put_back=world.put_back, seconds=world.now, steps=rows)


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


def read_run(folder):
    """-> (flags, rows of metrics.jsonl, ledger records in force) of a recorded run."""
    try:
        with open(os.path.join(folder, "args.json")) as args, open(os.path.join(folder, "metrics.jsonl")) as metrics:
            rows = [json.loads(line) for line in metrics if line.endswith("\n")]
            return json.load(args), rows, Ledger.surviving(os.path.join(folder, "ledger.jsonl"))
    except FileNotFoundError as error:
        raise ValueError(f"--fit {folder}: there is no {error.filename}") from None


def fit(folder):
    """What a recorded run says: (its flags, {COLUMNS: measured}). Both are by the names of the command line.

    Samples have their recorded length, and those beyond the record the length of a random one. Times are means over all
    steps but the first. Latency and rate are the line through (tokens, seconds) of the samples that were never aborted, a
    training step's times that through (tokens, seconds) of the steps.
    """
    args, rows, records = read_run(folder)
    ended = {record["group"]: record for record in records if record["event"] in ("finish", "drop")}
    if not (rows and ended):
        raise ValueError(f"--fit {folder}: not one step and one finished group are recorded")
    counted = rows[1:] or rows
    mean = lambda name, rows=counted: statistics.fmean(row.get(name, 0.0) for row in rows)
    flags = {name: args[name] for name in MODE_FLAGS} | {"mode": SCRIPTS[args["script"]], "steps": len(rows),
             "rollout_batch_size": args["groups_per_step"], "n_samples_per_prompt": args["n_samples_per_prompt"]}
    if flags["over_sampling_batch_size"] == flags["rollout_batch_size"]:
        flags["over_sampling_batch_size"] = None
    rollout = args["num_engines"] * args["rollout_num_gpus_per_engine"]
    flags["split"] = (args["world_size"], rollout)
    flags["slots_per_gpu"] = args["num_engines"] * args["sglang_server_concurrency"] / rollout

    n, aborted = flags["n_samples_per_prompt"], {record["group"] for record in records if record["event"] == "put_back"}
    known = {group * n + i: tokens for group, record in ended.items() for i, tokens in enumerate(record["tokens"]) if tokens}
    pool = list(known.values())
    flags["lengths"] = lambda number, numbers: known.get(number) or numbers.choice(pool)
    whole = [ended[group] for group in ended.keys() - aborted] or ended.values()
    flags["latency"], token_seconds = line([pair for record in whole for pair in zip(record["tokens"], record["seconds"])])
    flags["rate"] = 1 / max(token_seconds, 1e-9)
    by_filter = [record for record in ended.values() if record["event"] == "drop" and not record["reason"].startswith("lag")]
    flags["drop_share"] = len(by_filter) / len(ended)

    flags["train_time"], token_time = line([(row["rollout/tokens"], row["perf/train_time"]) for row in counted])
    flags["train_token_time"] = token_time * args["world_size"]
    synced = [row for row in counted if "sync/time" in row] or rows[:1]
    waits = flags["mode"] == "fully_async" and not flags["partial_rollout"]      # the pause is a drain then
    flags["sync_time"] = mean("sync/time", synced) - waits * (mean("sync/pause_time", synced)
                                                              - min(row["sync/pause_time"] for row in synced))
    parts = [mean(name) for name in ("perf/step_time", "perf/wait_prev_gen", "sync/time", "perf/train_time")]
    flags["overhead"] = max(0.0, parts[0] - sum(parts[1:]))

    tokens = lambda groups: [tokens for group in groups for tokens in ended[group]["tokens"]]
    trained = [group for record in records if record["event"] == "trained" for group in record["groups"]]
    fates = trained + [group for group, record in ended.items() if record["event"] == "drop"]
    return flags, {
        "step": parts[0], "wait": parts[1], "sync": parts[2], "train idle": 1 - parts[3] / parts[0],
        "engines idle": max(0.0, 1 - mean("perf/engine_busy_time") / parts[0]),
        "mean lag": statistics.fmean(row["staleness/mean"] for row in rows), "max lag": max(row["staleness/max"] for row in rows),
        "length bias": statistics.fmean(tokens(trained)) / statistics.fmean(tokens(fates))}


def line(points):
    """(a, b) of the least-squares line a + b x through [(x, y)], neither below 0. Where all x are equal, a is 0."""
    x, y = (statistics.fmean(column) for column in zip(*points))
    spread = sum((point[0] - x) ** 2 for point in points)
    slope = sum((point[0] - x) * (point[1] - y) for point in points) / spread if spread else math.inf
    slope = min(max(slope, 0.0), y / x)
    return y - slope * x, slope


# ---- splits of the GPUs -----------------------------------------------------------------------------------
def run(options, split=None, **changes):
    """One simulation, with so many training and rollout GPUs; those of train_sync.py --colocate count on both sides."""
    training, rollout = split or options.split
    flags = {name: value for name, value in vars(options).items() if name in inspect.signature(simulate).parameters}
    numbers = random.Random(0)
    mean = statistics.fmean(options.lengths(number, numbers) for number in range(1000))
    flags |= {"slots": max(1, int(rollout * options.slots_per_gpu)), "unit": max(1.0, mean / 8),
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
        best = min(tried, key=lambda split: results[split].step_time)
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
    seconds = lambda *split: run(options, split, steps=min(options.steps, SEARCH_STEPS)).step_time
    rollout = knee(lambda gpus: seconds(MOST_GPUS, gpus), MOST_GPUS)
    return knee(lambda gpus: seconds(gpus, rollout), MOST_GPUS), rollout


# ---- what is shown ----------------------------------------------------------------------------------------
def columns(r):
    return {"step": r.step_time, "wait": r.wait_prev_gen, "sync": r.sync_time, "train idle": r.train_idle_share,
            "engines idle": r.rollout_idle_share, "slots idle": r.slots_idle_share,
            "mean lag": sum(lag * share for lag, share in r.lags.items()), "max lag": max(r.lags),
            "length bias": r.length_bias["trained"]}


def table(head, rows):
    """rows: {name: {of COLUMNS: value}}; what was not measured is a dash."""
    width = max(len(label(name)) for name in [head, *rows])
    width_of = lambda form: int(form.split(".")[0].rstrip("d"))
    print(f"{head:>{width}}" + "".join(f"{name:>{width_of(form)}}" for name, form in COLUMNS.items()))
    for name, row in rows.items():
        print(f"{label(name):>{width}}" + "".join(f"{row[column]:{form}}" if column in row else f"{'-':>{width_of(form)}}"
                                                  for column, form in COLUMNS.items()))


def label(name):
    """A threshold, or a split as --split takes it."""
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


def plot(path, head, results, best):
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = [label(name) for name in results]
    figure, (times, shares) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    curves = {times: (("step", "step time"), ("wait", "wait_prev_gen"), ("sync", "sync, with its drain")),
              shares: (("train idle", "trainer idle"), ("slots idle", "engine slots idle"))}
    for axes, wanted in curves.items():
        for column, text in wanted:
            axes.plot(names, [columns(r)[column] for r in results.values()], "o-", markersize=4, label=text)
        axes.axvline(label(best), color="grey", linestyle=":", label=f"fastest: {label(best)}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    times.set_ylabel("seconds per step")
    shares.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    shares.set_ylabel("share of the time")
    shares.set_xlabel(head)
    shares.tick_params(axis="x", rotation=45)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


# ---- command line -----------------------------------------------------------------------------------------
def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--fit", metavar="RUN", help="folder of a recorded run: all flags below default to what it was and measured")
    p.add_argument("--check", action="store_true", help="runs scripts/bench_async.py and predicts its modes from the synchronous one")
    p.add_argument("--mode", choices=tuple(LOOPS), help="which entry script (default fully_async)")
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
    p.set_defaults(mode="fully_async", split=None, **MODE_FLAGS)
    own = measured = None
    if given.fit:
        flags, measured = fit(given.fit)
        p.set_defaults(**flags)
        own = read_values(p.parse_args([]))
        if given.mode not in (None, own.mode):
            p.set_defaults(**MODE_FLAGS)
    options = read_values(p.parse_args(argv))
    validate(options)
    options.own, options.measured = own, measured
    return options


def read_values(o):
    """Texts become what simulate() takes. --gpus has no split: it is searched."""
    try:
        o.lengths = parse_lengths(o.lengths) if isinstance(o.lengths, str) else o.lengths
        o.split = tuple(map(int, o.split.split("/"))) if isinstance(o.split, str) else o.split
    except ValueError as error:
        raise error if "--lengths" in str(error) else ValueError(f"--split {o.split}: give TRAINING/ROLLOUT, as in 2/6") from None
    o.split = None if o.gpus else o.split
    o.gpus = sum(o.split) if o.split else o.gpus or 8
    return o


def validate(o):
    for name in ("slots_per_gpu", "steps", "rollout_batch_size", "n_samples_per_prompt", "update_weights_interval"):
        if vars(o)[name] <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, is {vars(o)[name]}")
    k, stream = o.update_weights_interval, o.mode == "fully_async"
    problems = {
        f"--gpus {o.gpus}: training and rollout need one each": o.split is None and o.gpus < 2,
        f"--split {label(o.split)}: training and rollout need one GPU each": bool(o.split) and (len(o.split) != 2 or min(o.split) < 1),
        f"--max-lag {o.max_lag}: --mode one_step_off knows 0 and 1": o.mode == "one_step_off" and o.max_lag not in (None, 0, 1),
        "--mode sync is on-policy: leave --max-lag and --update-weights-interval out": o.mode == "sync" and (o.max_lag or k > 1),
        "--staleness-threshold and --max-lag-policy need --mode fully_async":
            not stream and (o.staleness_threshold or o.max_lag_policy != "wait"),
        f"--max-lag {o.max_lag} is below --update-weights-interval - 1 = {k - 1}":
            o.mode != "sync" and o.max_lag is not None and o.max_lag < k - 1,
        "--staleness-threshold must not be negative, and --drop-share in [0, 1)":
            o.staleness_threshold < 0 or not 0 <= o.drop_share < 1,
        "--partial-rollout needs --staleness-threshold above 0: at 0 nothing is in flight at a sync":
            stream and o.partial_rollout and not o.staleness_threshold and o.sweep != "threshold",
        "--over-sampling-batch-size must not be below --rollout-batch-size, and --mode fully_async does not know it":
            o.over_sampling_batch_size and (stream or o.over_sampling_batch_size < o.rollout_batch_size),
        "--sweep threshold needs --mode fully_async": o.sweep == "threshold" and not stream,
        "--plot needs --sweep": o.plot and not o.sweep}
    for problem, found in problems.items():
        if found:
            raise ValueError(problem)


def report(options):
    best = None
    if options.split is None:
        _, best = best_split(options)
        print(f"best split of {options.gpus} GPUs: {best[0]} training, {best[1]} rollout")
    result = run(options, best)
    rows = {best or options.split: columns(result)}
    if options.fit:
        rows = {"measured": options.measured, "predicted": columns(run(options.own)), **rows}
    table("", rows)
    print("tokens by lag: " + ", ".join(f"{lag}: {share:.1%}" for lag, share in result.lags.items()))
    print(f"groups: drawn {result.drawn}, trained {result.trained}, dropped {result.dropped or 0}, aborted "
          f"{result.put_back} times")
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
        best = min(results, key=lambda name: results[name].step_time)
    table(options.sweep, {name: columns(result) for name, result in results.items()})
    print(f"best {options.sweep}: {label(best)}")
    if options.plot:
        head = "training/rollout GPUs" if options.sweep == "split" else "--staleness-threshold"
        plot(options.plot, head, results, best)


def check():
    """Records the runs of scripts/bench_async.py and predicts each one's step time and waiting, from its own flags and from
    the lengths and rates of the synchronous one alone."""
    import bench_async
    with tempfile.TemporaryDirectory() as folder:
        recorded = {name: fit(path) for name, path in bench_async.record(folder, bench_async.parse([])).items()}
    errors = {"step": [], "wait": []}
    for name, (flags, measured) in recorded.items():
        own = {flag: flags[flag] for flag in (*MODE_FLAGS, "mode", "steps")}
        predicted = columns(run(SimpleNamespace(**{**recorded["sync"][0], **own})))
        table(name, {"measured": measured, "predicted": predicted})
        for column, found in errors.items():
            found.append(abs(predicted[column] - measured[column]) / measured["step"])
    print("all predicted from the lengths and rates of the synchronous run; errors as shares of the step time")
    print(f"prediction_error step_time {max(errors['step']):.1%} wait_prev_gen {max(errors['wait']):.1%}")


def main():
    options = parse()
    check() if options.check else sweep(options) if options.sweep else report(options)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
