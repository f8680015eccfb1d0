"""Repeats a recorded run without engines: `--replay RUN`.

`ReplayManager` stands where the RolloutManager stands. It carries out the decisions of RUN/ledger.jsonl, of the line that
survived, one by one with the real buffer and the real gate, and hands out the samples of RUN/samples. So it is not the record
that is believed: each draw must give the recorded prompt, the gate must be open for it, each batch must be the one that the
buffer picks, each token of the version that was published then. The first difference ends the run with its place.
"""

import asyncio

import ray

from args import samples_path
from batch import batch_metrics, load_groups, make_batch
from buffer import Ledger, Sample
from engine import NoEngineLeft
from rollout import load_tokenizer, make_buffer, make_stream, save_buffer

WAITING = ("batch", "trained", "sync", "revive")      # events that have to wait for the driver's loop


class ReplayManager:
    def __init__(self, args):
        self.args, self.path = args, f"{args.replay}/ledger.jsonl"
        self.buffer = make_buffer(args, load_tokenizer(args))
        self.stream = make_stream(args, self.buffer)
        self.records = complete_steps(Ledger.surviving(self.path))
        self.at = 0                       # the next record
        self.told = set()                 # how far the driver's loop is: (event of WAITING, step or version)
        self.published, self.steps = 0, 0
        self.news = asyncio.Event()
        between = [r["step"] for r in self.records if r["event"] == "resume" and r["step"] % args.update_weights_interval]
        if between and args.policy_old == "recompute":
            raise ValueError(f"--replay {args.replay} was resumed at step {between[0]}, between two syncs: its old log-probs "
                             f"were taken anew there, which a run without a stop does not do")

    # ---- the interface of RolloutManager ------------------------------------------------------------------
    def ready(self):
        """Answers once data and record are read."""

    def connect(self, urls, actors=()):
        """There are no engines."""

    async def generate(self, step):
        """The recorded batch of `step`, or (None, {}) where the record ends. Handed out again where the loop begins anew."""
        self.tell("batch", step)
        while self.buffer.waiting(step) is None and self.at < len(self.records):
            self.lose_engines()
            self.news.clear()
            try:
                await asyncio.wait_for(self.news.wait(), self.args.generate_timeout)
            except asyncio.TimeoutError:
                self.depart(f"the loop waits for the batch of step {step}, and this has not come to pass")
        groups = self.buffer.waiting(step)
        if groups is None:
            print(f"--replay {self.args.replay}: the record ends before step {step}", flush=True)
            return None, {}
        metrics = {**batch_metrics(self.args, step, groups), "perf/generate_time": 0.0, "perf/engine_busy_time": 0.0}
        return ray.put(make_batch(self.args, step, groups)), metrics

    def progress(self):
        return f"{self.at} of {len(self.records)} records"

    async def trained(self, step):
        self.steps = step + 1
        self.tell("trained", step)

    def trained_steps(self):
        return self.steps

    async def rest(self, version):
        """Nothing runs."""
        self.lose_engines()

    def lose_engines(self):
        """Where the loop of the recorded run began anew since no engine was left, this one does, too: its syncs and the cycles of
        its old log-probs are the same."""
        if self.at < len(self.records) and self.records[self.at]["event"] == "revive":
            raise NoEngineLeft("no engine was left in the recorded run")

    async def revive(self):
        self.tell("revive", self.records[self.at]["step"])

    async def updated(self):
        """There is no engine."""

    async def publish(self, version, sent, expected):
        self.tell("sync", version)
        return {"sync/bytes": 0}

    async def release_memory(self):
        """There is none."""

    def retire(self):
        """No engine is watched."""

    async def proved(self):
        """Nothing was sent."""

    def save(self, folder, step):
        return save_buffer(self.buffer, folder, step)

    # ---- the record ---------------------------------------------------------------------------------------
    def tell(self, what, number):
        """The loop has come to this point: goes on to the next record that has to wait for the loop."""
        self.told.add((what, number))
        while self.at < len(self.records):
            record = self.records[self.at]
            event = record["event"]
            if event in WAITING and (event, record.get("step", record.get("version"))) not in self.told:
                break
            self.apply(event, record)
            self.at += 1
        self.news.set()

    def apply(self, event, record):
        if event == "draw":
            self.draw(record)
        elif event in ("finish", "put_back", "drop"):
            self.land(event, record)
        elif event == "batch":
            self.take(record)
        elif event == "trained":
            (self.stream or self.buffer).trained(record["step"])
        elif event == "sync":
            self.published = record["version"]
            if self.stream:
                self.stream.publish(self.published)
        elif event == "resume":
            self.resumed(record["step"])
        # submit, abort, save, revive: they move no group

    def draw(self, record):
        if self.stream and self.stream.room == 0:
            self.depart("the gate is closed")
        group = (self.stream or self.buffer).draw(1)
        if not group or (group[0].group_id, group[0].row, group[0].epoch) != (record["group"], record["row"], record["epoch"]):
            found = f"group {group[0].group_id}, row {group[0].row}, epoch {group[0].epoch}" if group else "none"
            self.depart(f"the data give {found}")

    def land(self, event, record):
        """A group comes back as long as it was then. Its new tokens are of the version that is out; their ids come from the file
        of its batch, if it gets into one."""
        group, running = self.buffer.in_flight.get(record["group"]), True
        if group is None and event == "drop":
            group, running = self.buffer.finished.get(record["group"]), False
        if group is None:
            self.depart("the group is not in flight")
        for _ in record["tokens"][len(group.samples):]:        # made by an agent loop; all else is in the file of its batch
            group.samples.append(Sample(group.group_id, 0, group.row, "", "", [], part=1))
        for sample, length in zip(group.samples, record["tokens"]):
            new = length - len(sample.response_tokens)
            if new > 0:
                sample.append([0] * new, [0.0] * new, self.published)
        if event == "finish":
            for sample in group.samples:
                sample.status, sample.reward = "completed", 0.0
            self.buffer.finish(group)
        elif event == "put_back":
            self.buffer.put_back(group)
        else:
            self.buffer.drop(group, record["reason"])
        if self.stream and running:
            self.stream.landed(group)

    def take(self, record):
        step, wanted = record["step"], record["groups"]
        if self.buffer.finished_count < len(wanted) or self.stream and not self.stream.ready(step):
            self.depart(f"the batch is not ready: {self.buffer.finished_count} groups are finished")
        groups = self.stream.take(step) if self.stream else self.buffer.take(step, len(wanted))
        if [group.group_id for group in groups] != wanted:
            self.depart(f"the buffer picks {[group.group_id for group in groups]}")
        recorded = load_groups(samples_path(self.args.replay).format(step=step), "--replay")
        for group, found in zip(groups, recorded, strict=True):
            for sample, answer in zip(group.samples, found.samples, strict=True):
                if sample.part == 0:
                    self.compare(sample, answer)
                vars(sample).update(vars(answer))

    def compare(self, sample, answer):
        """What the buffer knows of a sample and its recorded answer must be of one piece. (An own generate function may date a
        tool's tokens back, so there only the oldest version is compared.)"""
        names = ("group_id", "index", "row", "prompt_tokens",
                 "oldest_version" if self.args.custom_generate_function_path else "version_runs")
        for name in names:
            here, there = getattr(sample, name), getattr(answer, name)
            if here != there:
                self.depart(f"{answer.name}: {name} is {here} by the decisions and the data, {there} in the samples")

    def resumed(self, step):
        """The recorded run was resumed here: what was in flight goes back to its prompt."""
        self.told.add(("sync", step))     # a resume publishes its weights; this loop may have come by without
        self.buffer.load_state(self.buffer.state())
        self.buffer.ledger.resume(step, self.buffer.ledger.seq)
        self.stream = make_stream(self.args, self.buffer, step)

    def depart(self, why):
        record = {name: value for name, value in self.records[self.at].items() if name != "time"}
        raise ValueError(f"--replay: the replay departs from {self.path} at record {record.pop('seq')}, {record}: {why}")


def complete_steps(records):
    """Without what comes behind the last step: its batch may have been handed out as the run was killed, and not be on disk."""
    trained = {r["step"] for r in records if r["event"] == "trained"}
    for i in range(len(records) - 1, -1, -1):
        if records[i]["event"] == "batch":
            return records if records[i]["step"] in trained else complete_steps(records[:i])
    return records
