"""Where prompts leave and samples come back, and where none is lost on the way.

A group is the n samples of one prompt. Every arrow of its life is one method of Buffer and one line of the ledger:

    data --draw--> in flight --finish--> finished --take--> in hand --trained--> trained
                    |  ^   |                 |
           put_back |  |   `--- drop --------+---> dropped
                    v  | draw
                 unfinished

At a save, in this order:  ledger.write("save", step=step); state(); ledger.sync(); then the checkpoint becomes valid.
At a resume:               load_state(state); ledger.resume(step, state["ledger_seq"]).
A fresh start over the ledger of a run that died before its first save:  ledger.resume(0, 0).
"""

import array
import copy
import hashlib
import heapq
import json
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

FLAT_LISTS = ("prompt_tokens", "response_tokens", "loss_mask", "rollout_logprobs")


class Dropped(Exception):
    """Ends one group, not the run: its message is the reason in the ledger, its part before a colon the name in the metrics."""


@dataclass
class Sample:
    """One trajectory. `metadata` is the data row's, and reset() leaves it alone: keep nothing of a trajectory in it."""
    group_id: int
    index: int                     # 0..n-1 within the group
    row: int                       # of the data set
    prompt: str
    label: str
    prompt_tokens: list[int]
    metadata: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)    # own values of a trajectory for the trainer: {name: number, or one a token}
    response_tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)             # 1: sampled, 0: tool or environment
    rollout_logprobs: list[float] = field(default_factory=list)    # by the engine that sampled; 0.0 where the mask is 0
    version_runs: list[list[int]] = field(default_factory=list)    # [[version, number of tokens], ...], in order
    response: str = ""
    reward: float | None = None
    seconds: float = 0.0           # that its requests were with an engine
    status: str = "pending"        # "pending" | "completed" (stop token) | "truncated" (budget used up) | "failed"
    part: int = 0                  # above 0: a further training sample of the attempt `index`, with a prompt of its own
    messages: list[dict] = field(default_factory=list)     # of an agent loop: the turns so far, as chat messages
    experts: list[list] = field(default_factory=list)      # [first response token, tokens, SGLang's routed_experts of them]
    mismatch: str = ""             # of its token ids and the chat template's: see agent.compare

    def append(self, tokens, logprobs, version, mask=1):
        """The only way to extend a sample: here its columns keep one length.

        tokens: m ids; logprobs: m floats; version: of the weights that sampled them; mask: one value for all m.
        ValueError, naming the sample, for log-probs that are missing, not finite or not m: in the loss they would be
        a NaN without a sender.
        """
        logprobs = [] if logprobs is None else logprobs
        finite = [float(logprob) for logprob in logprobs if logprob is not None and math.isfinite(logprob)]
        if self.status != "pending":
            raise ValueError(f"{self.name} is {self.status}: only a pending sample takes more tokens")
        if not len(tokens) == len(logprobs) == len(finite):
            raise ValueError(f"{self.name}: {len(tokens)} tokens came with {len(logprobs)} log-probs, {len(finite)} of "
                             f"them finite")
        if not isinstance(version, int):
            raise ValueError(f"{self.name}: version {version!r} is not an int")
        if self.version_runs and self.version_runs[-1][0] == version:
            self.version_runs[-1][1] += len(tokens)
        elif tokens:
            self.version_runs.append([version, len(tokens)])
        self.response_tokens.extend(tokens)
        self.loss_mask.extend([mask] * len(tokens))
        self.rollout_logprobs.extend(finite)
        counted = sum(count for _, count in self.version_runs)
        assert len(self.response_tokens) == len(self.loss_mask) == len(self.rollout_logprobs) == counted, self.name

    def reset(self):
        """Back to the prompt: what is generated anew keeps nothing of older weights."""
        self.response_tokens, self.loss_mask, self.rollout_logprobs, self.version_runs = [], [], [], []
        self.columns, self.messages, self.experts, self.mismatch = {}, [], [], ""
        self.response, self.reward, self.seconds, self.status = "", None, 0.0, "pending"

    @property
    def name(self):
        return f"sample {self.index} of group {self.group_id}"

    @property
    def oldest_version(self):
        """Version of the oldest token, None without tokens. Lag = the step that trains on it - this."""
        return min((version for version, _ in self.version_runs), default=None)

    def to_json(self):
        """Plain dict that shares nothing with the sample. json writes floats so that they read back exactly."""
        return copy_fields(vars(self))

    @staticmethod
    def from_json(fields):
        return Sample(**copy_fields(fields))


def copy_fields(fields):
    """Deep copy of a sample's fields; long flat lists are sliced, because deepcopy visits every token."""
    return {name: value[:] if name in FLAT_LISTS else copy.deepcopy(value) for name, value in fields.items()}


@dataclass
class Group:
    """The n attempts at one prompt: the unit of every count, gate and ledger entry. An agent loop may make several samples of
    an attempt (`part` above 0); they stand behind the n."""
    group_id: int
    row: int
    epoch: int
    samples: list[Sample]
    keep: bool = False             # aborted and reset before: a second abort would keep long answers from ever ending
    generated: float = 0.0         # time.time() when its last answer came; what follows until it is finished is the reward's

    @property
    def attempts(self):
        """The n samples, without further parts of them."""
        return [sample for sample in self.samples if sample.part == 0]

    @property
    def oldest_version(self):
        """Version of the oldest token of any sample, None without tokens."""
        return min((sample.oldest_version for sample in self.samples if sample.version_runs), default=None)

    @property
    def response_lengths(self):
        """Tokens of each response so far."""
        return [len(sample.response_tokens) for sample in self.samples]

    @property
    def effort(self):
        """What the ledger keeps of an ended group: tokens of each response, seconds that engines took for them, and when the
        last answer came."""
        return {"tokens": self.response_lengths, "seconds": [round(sample.seconds, 4) for sample in self.samples],
                "generated": round(self.generated, 4)}

    def reset(self):
        self.samples = self.attempts
        for sample in self.samples:
            sample.reset()

    def to_json(self):
        return {**vars(self), "samples": [sample.to_json() for sample in self.samples]}

    @staticmethod
    def from_json(fields):
        return Group(**{**fields, "samples": [Sample.from_json(sample) for sample in fields["samples"]]})


# ---- the ledger -------------------------------------------------------------------------------------------
class Ledger:
    """Every scheduling decision of a run. Append-only JSONL with one writer: a line per event, numbered by `seq` from 1 and
    dated, flushed before write() returns, so that a kill -9 at any instant leaves the whole story. A path of None keeps
    nothing (tests, simulator)."""

    def __init__(self, path=None):
        self.path, self.seq, self.file = path, 0, None
        if path is None:
            return
        self.file = open(path, "a+b")
        self.seq = max((record["seq"] for record in Ledger.read(path)), default=0)
        size = self.file.seek(0, os.SEEK_END)
        self.file.seek(max(size - 1, 0))
        if self.file.read(1) not in (b"", b"\n"):  # torn by a kill: end it, so that the next record has its own line
            self.file.write(b"\n")

    def write(self, event, **fields):
        """Appends one record, whose number is then `self.seq`."""
        self.seq += 1
        if self.file:
            record = {"seq": self.seq, "time": round(time.time(), 4), "event": event, **fields}
            self.file.write(json.dumps(record).encode() + b"\n")
            self.file.flush()

    def sync(self):
        """Down to the disk: at a save, or a power cut could leave a checkpoint that is newer than its ledger."""
        if self.file:
            os.fsync(self.file.fileno())

    def resume(self, step, keep_seq):
        """The run goes on from the checkpoint of `step`: records after `keep_seq` are void from now on."""
        if self.file and keep_seq > self.seq:
            raise ValueError(f"ledger {self.path} ends at record {self.seq}, the checkpoint was saved at {keep_seq}: "
                             f"copy the ledger of the run that saved it to this path")
        self.write("resume", step=step, void_after=keep_seq)

    @staticmethod
    def read(path):
        """Yields all records, void ones too. What is not JSON was torn by a kill, and its number is used again; any
        other gap raises ValueError: a line is lost, or two runs wrote to one file."""
        expected = 1
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record["seq"] != expected:
                    raise ValueError(f"ledger {path}: record {record['seq']} stands where {expected} is due")
                expected += 1
                yield record

    @staticmethod
    def surviving(path):
        """List of the records in force: a resume takes away all that came after its checkpoint."""
        records = []
        for record in Ledger.read(path):
            while record["event"] == "resume" and records and records[-1]["seq"] > record["void_after"]:
                records.pop()
            records.append(record)
        return records

    @staticmethod
    def outcomes(path):
        """What became of every group in the surviving line.

        -> {group_id: {"outcome": "trained" | "dropped" | "buffered" | "in_flight", "row", "epoch", "step" (of its
        batch, else None), "reason" (why dropped, else None)}}. ValueError at a record that no correct run writes:
        trained twice, trained and dropped, a prompt skipped, a row drawn twice in an epoch, ...
        """
        groups, rows = {}, set()
        for record in Ledger.surviving(path):
            try:
                move(record, groups, rows)
            except ValueError as error:
                raise ValueError(f"ledger {path}: record {record['seq']} ({record['event']}): {error}") from None
        for group in groups.values():
            place = group.pop("place")
            group["outcome"] = "buffered" if place in ("unfinished", "finished", "in_hand") else place
        return groups


TRANSITIONS = {  # event: (where the group may be before, where it is after)
    "draw": (("data", "unfinished"), "in_flight"),
    "finish": (("in_flight",), "finished"),
    "put_back": (("in_flight",), "unfinished"),
    "drop": (("in_flight", "finished"), "dropped"),
    "batch": (("finished",), "in_hand"),
    "trained": (("in_hand",), "trained"),
}


def move(record, groups, rows):
    """Moves the groups of one record. groups: id -> where it is, and why; rows: (epoch, row) of all drawn so far."""
    event = record["event"]
    if event == "resume":
        for group in groups.values():              # in flight at the save: will be drawn again
            group["place"] = "unfinished" if group["place"] == "in_flight" else group["place"]
    if event not in TRANSITIONS:                   # submit, abort, sync, save, resume, revive, engine
        return
    before, after = TRANSITIONS[event]
    for group_id in record["groups"] if "groups" in record else [record["group"]]:
        if event == "draw" and group_id == len(groups) and (record["epoch"], record["row"]) not in rows:
            rows.add((record["epoch"], record["row"]))
            groups[group_id] = {"place": "data", "row": record["row"], "epoch": record["epoch"], "step": None,
                                "reason": None}
        group = groups.get(group_id, {"place": "not due: ids and the rows of an epoch come once, without a gap"})
        if group["place"] not in before:
            raise ValueError(f"group {group_id} is {group['place']}")
        if event == "trained" and group["step"] != record["step"]:
            raise ValueError(f"group {group_id} is in the batch of step {group['step']}, not {record['step']}")
        group["place"], group["step"], group["reason"] = after, record.get("step"), record.get("reason")


# ---- the buffer -------------------------------------------------------------------------------------------
class Buffer:
    """Hands out groups, takes them back, and knows where each of them is.

    rows: has len() and [i] -> {"prompt": str, "prompt_tokens": ids, "label": str, "metadata": dict}; only what is drawn
    is read. Each fresh prompt makes one group, so `next_id`, the number of groups made, is the whole cursor: epoch and
    place in it are its quotient and remainder by the number of rows.
    """

    def __init__(self, rows, n_samples_per_prompt, seed, ledger, *, shuffle=True, num_epoch=None,
                 partial_rollout=False, digest=""):
        if len(rows) == 0:
            raise ValueError("--prompt-data: no rows")
        self.rows, self.n_samples_per_prompt, self.seed, self.ledger = rows, n_samples_per_prompt, seed, ledger
        self.shuffle, self.num_epoch, self.partial_rollout = shuffle, num_epoch, partial_rollout
        self.next_id = 0
        self.order, self.order_epoch = None, None  # row numbers of one epoch, in the order of drawing
        self.unfinished = []                       # heap of (group id, group) to be drawn again
        self.in_flight = {}                        # group id -> group
        self.finished = {}                         # group id -> group
        self.by_age = []                           # heap of (oldest version, group id): `finished`, and some dropped
        self.in_hand = {}                          # step -> its batch, a list of groups, not yet trained
        self.lengths = {}                          # "trained" or why dropped -> (samples, tokens), since the run began
        self.identity = {"--prompt-data (rows)": len(rows), "--prompt-data (content)": hash_rows(rows),
                         "--prompt-data (bytes of the file)": digest, "--seed": seed,
                         "--rollout-shuffle": shuffle, "--n-samples-per-prompt": n_samples_per_prompt}

    @property
    def finished_count(self):
        return len(self.finished)

    @property
    def exhausted(self):
        """No fresh prompt is left (groups that were put back may be)."""
        return self.num_epoch is not None and self.next_id >= self.num_epoch * len(self.rows)

    def draw(self, k):
        """k groups, from now on in flight: unfinished ones first, lowest id first, then fresh prompts, across epochs.
        Fewer only when the data end."""
        groups = []
        while len(groups) < k and (self.unfinished or not self.exhausted):
            group = heapq.heappop(self.unfinished)[1] if self.unfinished else self._fresh_group()
            self.in_flight[group.group_id] = group
            self.ledger.write("draw", group=group.group_id, row=group.row, epoch=group.epoch)
            groups.append(group)
        return groups

    def _fresh_group(self):
        epoch, place = divmod(self.next_id, len(self.rows))
        if epoch != self.order_epoch:
            # not a list: each full garbage collection would go through a million of them
            self.order, self.order_epoch = array.array("q", range(len(self.rows))), epoch
            if self.shuffle:
                random.Random(self.seed + epoch).shuffle(self.order)
        row = self.order[place]
        data = self.rows[row]
        try:
            metadata = json.dumps(data["metadata"])            # fails here, and not hours later in the first save
        except TypeError as error:
            raise ValueError(f"--prompt-data: metadata of row {row} cannot be saved as JSON: {error}") from None
        samples = [Sample(self.next_id, index, row, data["prompt"], data["label"], list(data["prompt_tokens"]),
                          json.loads(metadata)) for index in range(self.n_samples_per_prompt)]
        self.next_id += 1
        return Group(self.next_id - 1, row, epoch, samples)

    def finish(self, group):
        """Accepted: every sample is done and rewarded. It stays, surplus or not, until a batch takes it."""
        for sample in group.samples:
            rewarded = sample.reward is not None and math.isfinite(sample.reward)
            if sample.status not in ("completed", "truncated") or not rewarded:
                raise ValueError(f"{sample.name} is not finished: {sample.status}, reward {sample.reward}")
        self._land(group)
        self._store_finished(group)
        self.ledger.write("finish", group=group.group_id, **group.effort)

    def put_back(self, group):
        """Aborted, and drawn again before any fresh prompt. With partial rollout it keeps its tokens, and its finished
        members stay as they are; without, it goes back to the prompt and must not be aborted again (`keep`)."""
        if all(sample.status != "pending" for sample in group.samples):
            raise ValueError(f"group {group.group_id} has nothing left to generate: finish or drop it")
        self._land(group)
        if not self.partial_rollout:
            group.reset()
            group.keep = True
        heapq.heappush(self.unfinished, (group.group_id, group))
        self.ledger.write("put_back", group=group.group_id, tokens=group.response_lengths)

    def drop(self, group, reason):
        """Gives up a group in flight or finished; the ledger keeps the reason."""
        if self.finished.pop(group.group_id, None) is None:
            self._land(group)
        self.ledger.write("drop", group=group.group_id, reason=reason, **group.effort)
        self._measure(reason.split(":")[0], [group])

    def drop_older(self, version, reason):
        """Drops the finished groups with a token older than `version`. Returns how many."""
        count = 0
        while self.by_age and self.by_age[0][0] < version:
            group = self.finished.get(heapq.heappop(self.by_age)[1])
            if group is not None:                  # else it was dropped meanwhile
                self.drop(group, reason)
                count += 1
        return count

    def take(self, step, k, chosen=()):
        """k finished groups become the batch of `step`: those `chosen`, then the oldest version first (its deadline is the
        nearest) and the lowest id, so that the batch does not depend on whose answer came first."""
        if step in self.in_hand:
            raise ValueError(f"step {step} has its batch already")
        if len(self.finished) < k:
            raise ValueError(f"step {step} takes {k} groups, but {len(self.finished)} are finished")
        batch = [self.finished.pop(group.group_id) for group in chosen]
        while len(batch) < k:
            _, group_id = heapq.heappop(self.by_age)
            if group_id in self.finished:          # else dropped meanwhile, or chosen
                batch.append(self.finished.pop(group_id))
        self.in_hand[step] = batch
        self.ledger.write("batch", step=step, groups=[group.group_id for group in batch])
        return batch

    def waiting(self, step):
        """The batch of `step` if it is in hand, as after a resume; else None."""
        return self.in_hand.get(step)

    def trained(self, step):
        """The batch of `step` is in the weights."""
        if step not in self.in_hand:
            raise ValueError(f"step {step} has no batch in hand")
        batch = self.in_hand.pop(step)
        self.ledger.write("trained", step=step, groups=[group.group_id for group in batch])
        self._measure("trained", batch)

    def _measure(self, fate, groups):
        samples, tokens = self.lengths.get(fate, (0, 0))
        lengths = [length for group in groups for length in group.response_lengths]
        self.lengths[fate] = (samples + len(lengths), tokens + sum(lengths))

    def length_bias(self):
        """{fate: mean length of its samples / of all that ended}, since the run began; a fate is "trained" or why a group
        was dropped. Above 1 for a reason, and below 1 for "trained": that reason takes the long answers away."""
        samples, tokens = (sum(column) for column in zip(*self.lengths.values())) if self.lengths else (0, 0)
        return {fate: total / count / (tokens / samples) for fate, (count, total) in self.lengths.items() if tokens}

    def _land(self, group):
        if self.in_flight.pop(group.group_id, None) is None:
            raise ValueError(f"group {group.group_id} is not in flight")

    def _store_finished(self, group):
        age = -1 if group.oldest_version is None else group.oldest_version
        self.finished[group.group_id] = group
        heapq.heappush(self.by_age, (age, group.group_id))

    @property
    def outstanding(self):
        """Groups that were drawn and are neither trained nor dropped."""
        return (len(self.in_flight) + len(self.unfinished) + len(self.finished)
                + sum(len(batch) for batch in self.in_hand.values()))

    def state(self):
        """All that a resume needs, as JSON values that later changes do not reach. Groups in flight are stored at their
        prompt, to be drawn again ahead of fresh ones: their answers will never arrive."""
        again = [Group.from_json(group.to_json()) for group in self.in_flight.values()]
        for group in again:
            group.reset()
        unfinished = [group for _, group in self.unfinished] + again
        return {"identity": dict(self.identity), "next_id": self.next_id, "ledger_seq": self.ledger.seq,
                "lengths": {fate: list(counted) for fate, counted in self.lengths.items()},
                "unfinished": [group.to_json() for group in unfinished],
                "finished": [group.to_json() for group in self.finished.values()],
                "in_hand": [[step, [group.to_json() for group in batch]] for step, batch in self.in_hand.items()]}

    def load_state(self, state):
        """Replaces all content. ValueError where data or flags are not those of the run that saved: the cursor would
        skip and repeat prompts."""
        for flag, value in self.identity.items():
            if state["identity"].get(flag, value) != value:       # older checkpoints say less
                raise ValueError(f"{flag}: the checkpoint has {state['identity'][flag]}, this run {value}; resume with "
                                 f"the data and flags of the run that saved it")
        self.next_id = state["next_id"]
        self.lengths = {fate: tuple(counted) for fate, counted in state["lengths"].items()}
        self.unfinished, self.in_flight, self.finished, self.by_age = [], {}, {}, []
        for group in map(Group.from_json, state["unfinished"]):
            if not self.partial_rollout:           # switched off since the save
                group.reset()
            heapq.heappush(self.unfinished, (group.group_id, group))
        for group in map(Group.from_json, state["finished"]):
            self._store_finished(group)
        self.in_hand = {step: [Group.from_json(group) for group in batch] for step, batch in state["in_hand"]}


def hash_rows(rows):
    """Recognises a data set by five rows, spread over its length: to read them all would take minutes."""
    picked = [rows[i * (len(rows) - 1) // 4] for i in range(5)]
    return hashlib.sha256(json.dumps([[row["prompt"], row["label"]] for row in picked]).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- fully asynchronous

@dataclass(frozen=True)
class Gate:
    """How far generation may run ahead of training: a bound on trained + outstanding groups.

    Since every bound is on that sum, nothing has to be counted: training moves a group from one term to the other, and a
    group that is dropped leaves the sum and so gives its place back by itself.
    """
    required: int                                  # groups of a step: rollout_batch_size x require_batches
    staleness_threshold: float                     # share by which more may be started than is trained between two syncs
    update_weights_interval: int                   # k: steps between two syncs
    max_lag: int | None = None                     # L: no group may wait longer; None: no such bound
    num_rollout: int | None = None                 # the last step: nothing is generated past it

    @cached_property
    def credits(self):
        """floor(required x (1 + threshold) x k), exactly: 100 x 1.15 is 115."""
        return math.floor(self.required * (1 + Fraction(str(self.staleness_threshold))) * self.update_weights_interval)

    def bound(self, published):
        """The most groups that may be trained + outstanding while version `published` (= steps trained by it) is out.

        So many credits from each sync on; and the lag's gate, that of AReaL (arXiv 2505.24298, eq. 3) made strict:
        (L + published + 1) x required.
        """
        bounds = [published * self.required + self.credits]
        if self.max_lag is not None:
            bounds.append((self.max_lag + published + 1) * self.required)
        if self.num_rollout is not None:
            bounds.append(self.num_rollout * self.required)
        return min(bounds)


class Stream:
    """What may start and what makes a batch when generation never stops. No clock and no engine: the rollout manager, the
    tests under a hand-made clock and a simulator drive it alike.

    policy, for --max-lag L: "wait": a step waits for running groups that later steps could not train in time (at step s at
    most (v + L - s + 1) x required groups of versions up to v are there, by the gate, and each step keeps it so); "drop":
    groups older than L are dropped when a batch is taken; "mask": they are kept, and their old tokens get no loss.
    sampler(groups, k) -> k of the finished groups (oldest first); None: the oldest.
    """

    def __init__(self, buffer, gate, policy="wait", trained_steps=0, sampler=None):
        self.buffer, self.gate, self.policy, self.sampler = buffer, gate, policy, sampler
        self.admission = gate if policy == "wait" else replace(gate, max_lag=None)    # the other policies act at consumption
        self.trained_steps = self.published = trained_steps
        self.running = Counter()                   # oldest version -> groups in flight: whose deadline comes first
        self.born = {}                             # group id -> its entry in `running`
        self.dropped_by_lag = 0                    # groups, since somebody set it to 0

    def draw(self, k=None):
        """The groups that may start now; k: at most so many of them."""
        groups = self.buffer.draw(self.room if k is None else min(k, self.room))
        for group in groups:
            self.born[group.group_id] = self.published if group.oldest_version is None else group.oldest_version
            self.running[self.born[group.group_id]] += 1
        return groups

    @property
    def room(self):
        """How many groups may start now. Unfinished ones always may: they are counted already."""
        used = self.trained_steps * self.gate.required + self.buffer.outstanding
        return len(self.buffer.unfinished) + max(0, self.admission.bound(self.published) - used)

    def landed(self, group):
        """The group is no longer in flight: finished, put back or dropped."""
        version = self.born.pop(group.group_id)
        self.running[version] -= 1
        if not self.running[version]:
            del self.running[version]

    def ready(self, step):
        """Whether the batch of `step` can be taken."""
        if self.gate.max_lag is not None and self.policy == "drop":
            self.dropped_by_lag += self.buffer.drop_older(step - self.gate.max_lag, "lag")
        if self.gate.max_lag is not None and self.policy == "wait" and self.too_many(step, self.under_way):
            return False                           # not all of what runs could be trained in time
        return self.buffer.finished_count >= self.gate.required

    @property
    def under_way(self):
        """Oldest version -> groups that run, or were interrupted and wait for an engine, as all do when the last one is lost."""
        begun = (group.oldest_version for _, group in self.buffer.unfinished)
        return self.running + Counter(version for version in begun if version is not None)

    def too_many(self, step, waiting):
        """How many of the groups in `waiting` (oldest version -> how many), each of which is due by the step version + max_lag,
        the steps after `step` could not train in time: the most over the deadlines."""
        due, most = 0, 0
        for version in sorted(waiting):
            due += waiting[version]
            steps = max(0, version + self.gate.max_lag - step)
            most = max(most, due - steps * self.gate.required)
        return most

    def take(self, step):
        """The batch of `step`. With a sampler, those of the oldest groups are in it that could not be trained in time else."""
        chosen = ()
        if self.sampler is not None:
            groups = sorted(self.buffer.finished.values(), key=lambda group: (group.oldest_version or 0, group.group_id))
            must = self.must_take(step, groups)
            chosen = groups[:must] + self.sample(step, groups[must:], self.gate.required - must)
        return self.buffer.take(step, self.gate.required, chosen)

    def must_take(self, step, groups):
        """How many of `groups`, the finished ones, oldest first, cannot wait for a later step."""
        if self.gate.max_lag is None or self.policy != "wait":
            return 0
        return self.too_many(step, self.under_way + Counter(group.oldest_version or 0 for group in groups))

    def sample(self, step, groups, k):
        """k distinct ones of `groups`, as the sampler says. ValueError for anything else that it says."""
        chosen = list(self.sampler(groups, k)) if k else []
        ids, known = [group.group_id for group in chosen], {group.group_id for group in groups}
        if len(ids) != k or len(set(ids)) != k or not known.issuperset(ids):
            raise ValueError(f"--custom-sampler-path: step {step} asked for {k} different groups out of {len(groups)}, the "
                             f"sampler returned {ids[:20]}")
        return chosen

    def trained(self, step):
        self.buffer.trained(step)
        self.trained_steps = step + 1

    def publish(self, version):
        self.published = version
