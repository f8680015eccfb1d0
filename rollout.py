"""Generation: keeps the engines busy, rewards what comes back, and hands finished groups over as a batch.

`RolloutManager` becomes one asynchronous Ray actor. All its state is touched by one event loop, so there are no locks, and
a control call is answered while thousands of requests are open: those wait in `await`. Requests go straight to the
engines over HTTP; the engine actors only own the processes.
"""

import asyncio
import contextlib
import gc
import hashlib
import inspect
import json
import math
import os
import re
import resource
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import aiohttp
import ray

import checkpoint
from agent import Agent, gather, no_exit, no_exit_async, plain_generate
from args import load_function, read_config
from batch import batch_metrics, load_groups, make_batch, plain_column, save_groups
from buffer import Buffer, Dropped, Gate, Group, Ledger, Stream
from data import PromptRows, file_digest
from engine import api_key
from evaluation import evaluate
from fleet import Aborted, Fleet, Lane
from rewards import REWARDS
from watchdog import Watchdog


class Busy(Exception):
    """An engine says: not now, but in so many seconds (429, 503)."""

    def __init__(self, seconds):
        self.seconds = seconds


@dataclass(eq=False)
class Work:
    """A group on its way. `aborting` is read before each of its requests."""
    group: Group
    lane: Lane | None = None
    tokens: int = 0                   # its part of lane.tokens: given back as samples end
    rids: set = field(default_factory=set)
    aborting: bool = False

    def load(self, tokens):
        self.tokens += tokens
        self.lane.tokens += tokens

    def move(self, lane):
        """To this engine; None: the work has ended."""
        if self.lane:
            self.lane.tokens -= self.tokens
            self.lane.works.discard(self)
        self.lane = lane
        if lane:
            lane.tokens += self.tokens
            lane.works.add(self)


class RolloutManager:
    def __init__(self, args):
        self.args = args
        self.tokenizer = load_tokenizer(args)
        self.stops = stop_ids(args, self.tokenizer)
        self.vocab_size = read_config(args.hf_checkpoint, "--hf-checkpoint")["vocab_size"]
        self.buffer = make_buffer(args, self.tokenizer)
        self.stream = make_stream(args, self.buffer)
        self.fleet = Fleet(args, self.buffer.ledger if self.buffer else Ledger())
        self.watchdog = Watchdog("rollout manager", args, more=self.print_tasks)
        self.steps = 0                            # that the trainers' weights carry
        self.last_drop = None                     # the reason, for the message of a run that gives up
        self.tasks, self.failure, self.held, self.counts = set(), None, True, Counter()
        self.news = asyncio.Event()               # something landed
        self.eval_rows = {name: PromptRows(path, args, self.tokenizer) for name, path in args.eval_sets}
        self.version = None                       # published to all engines
        self.mismatch_shown = self.unrouted_shown = False     # warnings, once in a run
        self.evaluating, self.eval_wait = None, 0.0   # the evaluation that runs; how long the last sync waited for one
        self.evaluated = None                     # answers of it that are there, and all
        self.check_time = 0.0                     # of the last comparison of fingerprints
        self.works = {}                           # group id -> Work, of the groups in flight
        self.session = None
        self.threads = ThreadPoolExecutor(64, "reward")
        # the time limit of a reward is on running, not on waiting for a thread, or for one of rewards.CHECKERS
        self.reward_slots = asyncio.Semaphore(os.cpu_count() if args.rm_type == "math" and not args.custom_rm_path else 64)
        self.reward = REWARDS[args.rm_type]
        if args.custom_rm_path:
            self.reward = load_function(args.custom_rm_path, "--custom-rm-path", 2)
        self.sampling = {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
                         "max_len": args.rollout_max_response_len}
        self.eval_sampling = {"temperature": args.eval_temperature, "top_p": args.eval_top_p, "top_k": args.eval_top_k,
                              "max_len": args.eval_max_response_len}
        self.generate_sample = (load_function(args.custom_generate_function_path, "--custom-generate-function-path", 3)
                                if args.custom_generate_function_path else plain_generate)
        # a request has its own limit and tries; an own function, with its tools, has one for all its turns
        self.sample_limit = args.generate_timeout if args.custom_generate_function_path else None
        self.keep_group = (load_function(args.dynamic_sampling_filter_path, "--dynamic-sampling-filter-path", 2)
                           if args.dynamic_sampling_filter_path else keep_spread if args.dynamic_sampling_filter else None)

    def ready(self):
        """Answers once the data and the tokenizer are there."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))      # an open request is an open file
        gc.freeze()      # see placement.launch
        self.watchdog.start()

    def connect(self, urls, actors=()):
        """The engines that are up, and the actors that own them; without: external ones."""
        key = api_key(self.args)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.fleet.connect(urls, actors)

    # ---- the batch of a step ------------------------------------------------------------------------------
    async def generate(self, step):
        """The batch of `step`: (reference to its columns, metrics), or (None, {}) when the data have ended."""
        started, self.loop = time.time(), asyncio.get_running_loop()
        with self.watchdog.at(f"the generation for step {step}"):
            groups, counts = await self.next_groups(step)
        if groups is None:
            return None, {}
        await self.proved()
        seconds = time.time() - started
        for path in filter(None, (self.args.record_path, self.args.save_debug_rollout_data)):
            await asyncio.to_thread(save_groups, path.format(step=step), groups)
        self.show_mismatch(groups)
        metrics = {**batch_metrics(self.args, step, groups), **counts, **self.lane_metrics(seconds),
                   "perf/generate_time": seconds, "sync/check_time": self.check_time}
        if self.buffer:
            metrics.update({f"length_bias/{fate}": bias for fate, bias in self.buffer.length_bias().items()})
        return ray.put(make_batch(self.args, step, groups)), metrics

    def show_mismatch(self, groups):
        """The run's first conversation whose text is not what the chat template makes of it; the metrics count them all."""
        found = [s for group in groups for s in group.samples if s.mismatch.startswith("text")]
        if found and not self.mismatch_shown:
            self.mismatch_shown = True
            print(f"warning: rollout/template_mismatch: {found[0].name}: {found[0].mismatch}", flush=True)

    async def next_groups(self, step):
        """(groups, counts), or (None, counts) when the data have ended. After a resume the batch that waited at the save is
        handed out as it was."""
        if self.args.load_debug_rollout_data:
            return load_groups(self.args.load_debug_rollout_data.format(step=step)), {}
        groups = self.buffer.waiting(step)
        if groups is not None:
            return groups, {}
        if self.stream:
            return await self.wait_for_batch(step)
        wanted = self.args.rollout_batch_size
        counts = await self.collect(wanted)
        return (self.buffer.take(step, wanted) if self.buffer.finished_count >= wanted else None), counts

    # ---- the stream of train_fully_async.py ---------------------------------------------------------------
    def fill(self):
        """Starts every group that may start now. Called at each event that can open the gate, also from callbacks, where an
        exception (a row of the data that cannot be read) would be lost: the next wait raises it."""
        groups = []
        try:
            groups = self.stream.draw() if self.fleet.up and not self.held else []
        except Exception as error:
            self.failure = self.failure or error
        for group in groups:
            self.counts["drawn"] += 1
            task = asyncio.create_task(self.run_group(group, self.counts))
            self.tasks.add(task)
            task.add_done_callback(self.landed)

    def landed(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and task.exception():
            self.failure = self.failure or task.exception()
        self.fill()
        self.news.set()

    async def wait_for_batch(self, step):
        """(groups, counts) of the batch of `step` as soon as enough groups are finished, while generation goes on; (None, ...)
        when the data have ended. An error in generation or reward since the last call is raised here."""
        groups = None
        while groups is None:
            if self.failure:
                raise self.failure
            if self.stream.ready(step):
                groups = self.stream.take(step)
                continue
            self.fill()                            # a drop by lag has opened the gate
            if self.failure:
                raise self.failure
            if not self.tasks:
                if not self.fleet.up:
                    raise self.fleet.none_left()
                if not self.buffer.exhausted:      # cannot be: a dropped group opens the gate
                    raise RuntimeError(f"step {step}: nothing runs, {self.buffer.finished_count} of {self.args.groups_per_step} "
                                       f"groups are finished and the gate is closed")
                break
            self.give_up_when_hopeless(self.counts, self.args.groups_per_step)
            self.news.clear()
            await self.news.wait()
        counts = {f"rollout/{name}": n for name, n in self.counts.items()}
        counts["rollout/dropped_by_lag"], self.stream.dropped_by_lag = self.stream.dropped_by_lag, 0
        self.counts.clear()                        # in place: groups on their way count into it
        return groups, counts

    async def hold(self):
        """Before a sync: nothing new starts; what runs is waited for, or with --partial-rollout aborted."""
        self.held = True
        if self.args.partial_rollout:
            await self.abort(set(self.tasks))
        while self.tasks:
            await asyncio.wait(set(self.tasks))

    # ---- a batch at a time: train_sync.py and train_async.py ----------------------------------------------
    async def collect(self, wanted):
        """Keeps groups submitted until `wanted` are finished and accepted, then aborts the rest. Surplus stays in the buffer."""
        tasks, counts = set(), Counter()
        target = self.args.over_sampling_batch_size
        try:
            while self.buffer.finished_count < wanted and self.fleet.up:
                room = target - self.buffer.finished_count - len(tasks)
                for group in self.buffer.draw(room):
                    tasks.add(asyncio.create_task(self.run_group(group, counts)))
                    counts["drawn"] += 1
                if not tasks:
                    break                          # the data have ended
                self.give_up_when_hopeless(counts, wanted)
                await self.settle(tasks, asyncio.FIRST_COMPLETED, None)
            await self.abort(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.buffer.finished_count < wanted and not self.fleet.up:
            raise self.fleet.none_left()
        return {f"rollout/{name}": n for name, n in counts.items()}

    async def settle(self, tasks, when, timeout):
        """Waits, and takes the ended ones out of `tasks`. An error in generation or reward ends the run here, with its cause."""
        done, _ = await asyncio.wait(tasks, return_when=when, timeout=timeout)
        for task in done:
            tasks.discard(task)
            task.result()

    def give_up_when_hopeless(self, counts, wanted):
        limit = self.args.max_filter_rounds * max(wanted, self.args.over_sampling_batch_size)
        if sum(n for name, n in counts.items() if name.startswith("drop")) > limit and self.buffer.finished_count < wanted:
            rest = {name: n for name, n in counts.items() if name.startswith("drop")}
            raise RuntimeError(
                f"{counts['drawn']} groups drawn (--max-filter-rounds {self.args.max_filter_rounds:g} batches) and only "
                f"{self.buffer.finished_count} of {wanted} accepted: {counts['all_right']} were all right, "
                f"{counts['all_wrong']} all wrong, {rest}; the last one: {self.last_drop}. "
                + ("Take easier or harder prompts, or more samples per prompt."
                   if counts["all_right"] + counts["all_wrong"] else ""))

    async def run_group(self, group, counts):
        """Generates and rewards one group, then puts it where it belongs: finished, dropped, or back into the buffer."""
        work = self.works[group.group_id] = self.assign(group)
        try:
            length, longest = len(group.samples[0].prompt_tokens), self.args.rollout_max_prompt_len
            if not 0 < length <= longest:
                raise Dropped("prompt_empty" if length == 0 else
                              f"prompt_too_long: {length} tokens, --rollout-max-prompt-len {longest}")
            self.buffer.ledger.write("submit", group=group.group_id, engine=work.lane.rank)
            await gather(self.run_sample(work, sample) for sample in group.attempts)
            if any(sample.status == "pending" for sample in group.attempts):
                return self.buffer.put_back(group)                           # aborted
            if self.args.group_rm:
                await self.reward_group(group)
            self.accept(group, counts)
        except Dropped as reason:
            counts[f"dropped_{str(reason).split(':')[0]}"] += 1
            self.last_drop = str(reason)
            self.buffer.drop(group, str(reason))
        finally:
            self.watchdog.alive()
            work.move(None)
            del self.works[group.group_id]
            if self.stream:                        # at once: nobody may see a group running and finished
                self.stream.landed(group)

    def assign(self, group):
        """The least loaded engine, for all samples of the group: they share the prompt's cache. The load counts from here,
        not from the request: all groups of a batch choose before the first request is out."""
        work = Work(group, tokens=sum(self.cost(sample) for sample in group.attempts if sample.status == "pending"))
        work.move(self.fleet.least_loaded())
        work.aborting = not self.fleet.up
        return work

    def cost(self, sample):
        return len(sample.prompt_tokens) + self.args.rollout_max_response_len

    def accept(self, group, counts):
        """The filter looks at the task's rewards; what passes waits in the buffer for a batch."""
        rewards = [sample.reward for sample in group.attempts]
        for sample in group.samples:
            sample.reward = next(attempt.reward for attempt in group.attempts if attempt.index == sample.index)
            sample.columns = {name: plain_column(sample, name) for name in sample.columns}
        verdict = True if self.keep_group is None else no_exit(self.keep_group, self.args, group.attempts)
        if not isinstance(verdict, str) and verdict:        # numpy's and torch's truths, too
            return self.buffer.finish(group)
        if min(rewards) == max(rewards):
            counts["all_right" if rewards[0] > 0 else "all_wrong"] += 1
        raise Dropped(f"filter: {verdict if isinstance(verdict, str) else 'rejected'}")

    async def abort(self, tasks):
        """Aborts the groups in flight by their request ids and waits until each is back in the buffer.

        By id, not all at once: an evaluation may be running beside, and a group that was started again after an abort must
        be allowed to finish, or long answers never do. The engine misses an id that arrives before its request: say it again.
        """
        fresh = [work for work in self.works.values() if not (work.aborting or work.group.keep)]
        if fresh:
            self.buffer.ledger.write("abort", groups=[work.group.group_id for work in fresh])
        for work in fresh:
            work.aborting = True
        while tasks:                               # bounded: each request and each reward has its own limit and tries
            works = [work for work in self.works.values() if work.aborting]
            await gather(self.say_abort(work.lane, rid) for work in works for rid in list(work.rids))
            await self.settle(tasks, asyncio.ALL_COMPLETED, 1.0)

    async def say_abort(self, lane, rid):
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, Dropped, Busy):   # it is said again in a second
            await self.post(lane, "/abort_request", {"rid": rid}, 30)

    # ---- one sample ---------------------------------------------------------------------------------------
    async def run_sample(self, work, sample):
        """Generates until the sample is finished or its group is aborted, then rewards it."""
        if sample.status != "pending":
            return                                 # a finished member of a continued group stays as it is
        await self.serve(work, sample, self.sampling)
        work.group.generated = time.time()
        work.load(-self.cost(sample))
        if sample.status != "pending" and not self.args.group_rm:
            sample.reward = self.checked(await self.call_reward(sample), sample)

    async def serve(self, work, sample, sampling):
        """The sample's turns within a slot of its engine; when that is lost, within one of the next, from the sample's tokens."""
        lane = None
        while work.lane is not lane and sample.status == "pending":
            lane = work.lane
            async with lane.slots:
                if work.lane is lane:              # else it was lost as this waited
                    await self.run_turns(work, sample, sampling)

    async def run_turns(self, work, sample, sampling):
        """One call of the generate function, which may ask the engine several times. An abort leaves the sample pending, with
        what it has."""
        status, lane, requests = None, work.lane, []

        async def ask(sample):
            nonlocal status
            if work.lane is not lane:
                raise Aborted                      # its engine was lost during a tool call
            requests.append(asyncio.ensure_future(self.continue_sample(work, sample, sampling)))
            status = await requests[-1]
            return status

        agent = Agent(self.args, self.tokenizer, work.group.samples, sampling["max_len"], self.stops, self.threads, ask)
        try:
            said = await asyncio.wait_for(no_exit_async(self.generate_sample(self.args, sample, agent)), self.sample_limit)
        except Aborted:
            return await asyncio.gather(*requests, return_exceptions=True)   # several, beside each other: all end now
        except asyncio.TimeoutError:
            raise Dropped(f"error: {sample.name}: --custom-generate-function-path took longer than --generate-timeout "
                          f"{self.args.generate_timeout:g} s") from None
        finally:
            agent.over = True
            for request in requests:
                request.cancel()
        agent.finish(sample, said or status)

    async def continue_sample(self, work, sample, sampling):
        """Generates from all of the sample's tokens within what is left of its budget, and appends what the engine says.
        Returns "completed" or "truncated"; raises Aborted, with the sample extended by what came, when its group is."""
        budget = sampling["max_len"] - len(sample.response_tokens)
        if budget <= 0:
            return "truncated"
        if work.aborting:
            raise Aborted
        params = {"max_new_tokens": budget, "temperature": sampling["temperature"], "top_p": sampling["top_p"],
                  "top_k": sampling["top_k"], "skip_special_tokens": False, "stop_token_ids": self.stops,
                  "sampling_seed": sampling_seed(self.args.seed, sample)}
        payload = {"input_ids": sample.prompt_tokens + sample.response_tokens, "sampling_params": params,
                   "return_logprob": True}
        routed = self.args.routed_experts and sample.index == 0 and sampling is self.sampling  # one of a group: kilobytes each
        if routed:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": len(payload["input_ids"]) - 1}
        answer = await self.ask(work, sample, payload)
        reason = answer["meta_info"]["finish_reason"]["type"]
        if routed and reason != "abort" and not answer["meta_info"].get("routed_experts") and not self.unrouted_shown:
            self.unrouted_shown = True
            print(f"warning: engine {work.lane.url} does not say which experts it chose, so parity/routing_mismatch leaves its "
                  f"answers out: start it with --enable-return-routed-experts", flush=True)
        if reason == "stop" or answer["output_ids"] and answer["output_ids"][-1] in self.stops:
            return "completed"     # also when the abort met the stop token: SGLang then says abort
        if reason == "abort":
            raise Aborted
        return "truncated"

    async def ask(self, work, sample, payload):
        """One /generate with finite tries. A 4xx is final, but for 429; Aborted when the engine is lost."""
        lane, limit, tries, deadline = work.lane, self.args.generate_timeout, 0, time.time() + self.args.generate_timeout
        while tries < self.args.max_sample_retries:
            if lane.state != "up":                 # since the last try
                raise Aborted
            rid, pause = uuid.uuid4().hex, min(2.0 ** tries * 0.1, 5)
            try:
                with busy(work, rid, sample):
                    call = self.post(lane, "/generate", {**payload, "rid": rid}, limit)
                    answer = await self.fleet.until_lost(lane, call)
                await self.fleet.trust(lane)
                self.take_answer(lane, sample, answer, payload["sampling_params"]["max_new_tokens"])
                lane.wrong = 0
                return answer
            except Busy as busy_for:               # no failure, but not for ever
                problem, pause = f"engine {lane.url} is busy (429 or 503) for --generate-timeout {limit:g} s", busy_for.seconds
                tries += time.time() + pause > deadline and self.args.max_sample_retries
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                problem, tries = f"{type(error).__name__}: {error}", tries + 1
                await self.fleet.check(lane, problem)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem, tries = f"{type(error).__name__}: {error}", tries + 1
                self.fleet.wrong_answer(lane, problem)
            if lane.state != "up":
                raise Aborted
            await asyncio.sleep(pause if tries < self.args.max_sample_retries else 0)
        raise Dropped(f"error: {sample.name}: {problem}")

    def take_answer(self, lane, sample, answer, limit):
        """Checks the answer, of at most `limit` tokens, and appends it. ValueError and the like for what an engine must not say;
        the sample is unchanged then. An engine that answers with another version than the published one is lost."""
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason {meta['finish_reason']}")
        triples = meta.get("output_token_logprobs") or []
        tokens, logprobs = [t[1] for t in triples], [t[0] for t in triples]
        if tokens != answer["output_ids"]:
            raise ValueError(f"{sample.name}: {len(answer['output_ids'])} tokens with {len(tokens)} log-probs")
        if len(tokens) > limit:
            raise ValueError(f"{sample.name}: {len(tokens)} tokens where {limit} were asked for")
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in tokens):   # an index of the trainer's
            raise ValueError(f"{sample.name}: token ids beyond the vocabulary of {self.vocab_size}")
        if str(meta["weight_version"]) != str(self.version) and self.version is not None:
            self.fleet.lose(lane, f"engine {lane.url} generated with version {meta['weight_version']}, but {self.version} was "
                                  f"published")
            raise Aborted
        if tokens:
            sample.append(tokens, logprobs, self.version or 0)
            if meta.get("routed_experts") and meta["finish_reason"]["type"] != "abort":
                sample.experts.append([len(sample.response_tokens) - len(tokens), len(tokens), meta["routed_experts"]])
        self.watchdog.alive()

    # ---- rewards ------------------------------------------------------------------------------------------
    async def call_reward(self, target):
        """The reward of a sample (or, with --group-rm, the list of a group's). A time-out or a failing connection is tried
        again and then drops the group; any other exception is a fault of the function and ends the run."""
        args, problem = self.args, None
        for attempt in range(args.max_sample_retries):
            await asyncio.sleep(attempt and min(2.0 ** attempt * 0.1, 5))
            try:
                if inspect.iscoroutinefunction(self.reward):
                    return await asyncio.wait_for(no_exit_async(self.reward(args, target)), args.reward_timeout)
                async with self.reward_slots:
                    call = asyncio.get_running_loop().run_in_executor(self.threads, no_exit, self.reward, args, target)
                    return await asyncio.wait_for(call, args.reward_timeout)
            except asyncio.TimeoutError:
                problem = f"took longer than --reward-timeout {args.reward_timeout:g} s"
            except (OSError, aiohttp.ClientError) as error:     # of a service that it asks
                problem = f"failed: {type(error).__name__}: {error}"
        raise Dropped(f"error: the reward {problem}, {args.max_sample_retries} times")

    async def reward_group(self, group):
        rewards = await self.call_reward(group.attempts)
        if not hasattr(rewards, "__len__") or len(rewards) != len(group.attempts):
            raise ValueError(f"--group-rm: {self.args.custom_rm_path} returned {rewards!r} for {len(group.attempts)} "
                             f"samples: it must be a list with a number for each")
        for sample, reward in zip(group.attempts, rewards):
            sample.reward = self.checked(reward, sample)

    def checked(self, reward, sample):
        """The reward as a finite float, or a ValueError that says whose it was."""
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{self.args.custom_rm_path or self.args.rm_type} returned {reward!r} for {sample.name}: a reward "
                             f"must be a finite number")
        return value

    # ---- evaluation ---------------------------------------------------------------------------------------
    async def evaluate(self):
        """Every evaluation set with the published version: evaluation.evaluate. The next sync waits for its end."""
        self.evaluating = asyncio.ensure_future(evaluate(self))
        try:
            with self.watchdog.at("an evaluation"):
                return await self.evaluating
        finally:
            self.evaluated = None

    # ---- weight sync: the engines' side of it -------------------------------------------------------------
    async def rest(self, version):
        """Nothing runs on any engine from here to `publish`: a loop syncs between two batches, a stream is held, and an evaluation
        is waited for, so that all of it is of one version. The engines are asked for `version` at once; or their urls are
        returned, when the trainers have to join them anew, for `update`."""
        urls = await self.come_to_rest()
        if not urls:
            self.fleet.update(version)
        return urls

    async def come_to_rest(self):
        with self.watchdog.at("the sync: waiting for what runs"):
            await self.proved()
            started = time.time()
            if self.evaluating:
                evaluation, self.evaluating = self.evaluating, None
                await evaluation
            self.eval_wait = time.time() - started
            if self.stream:
                await self.hold()
            return await self.fleet.rest()

    async def update(self, version, stages):
        """The trainers have joined the engines and will send these stages."""
        self.fleet.update(version, stages)

    async def updated(self):
        """Returns when every engine has all weights; EngineError when one fails."""
        with self.watchdog.at("the sync: engines receiving weights"):
            await self.fleet.updated()

    async def blame(self, url, why):
        """The sync has failed, by this engine if it has a name: goes on without those at fault, or raises NoEngineLeft."""
        await self.fleet.blame(url, why)

    async def release_memory(self):
        """--colocate: the engines, where nothing runs between two batches, give their memory to the training. The next sync
        takes it back, for what it writes first: the weights before they are sent, the cache behind them."""
        await self.come_to_rest()
        await self.fleet.release_memory()

    async def publish(self, version, sent, expected):
        """When all is sent, the engines go on with the new version. What they hold is compared with the trainers' fingerprints
        (sent, expected: calls of their ranks, WeightSender.send and fingerprints) while the first requests run, and before
        anything that they say is taken. Returns what the driver does not see: the bytes, the wait for an evaluation."""
        with self.watchdog.at("the sync: publishing the version"):
            size = await self.fleet.publish(version, sent, expected)
        self.version = version
        if self.buffer:
            self.buffer.ledger.write("sync", version=version)
        if self.stream:
            self.stream.publish(version)
            self.held = False
            self.fill()
        return {"sync/bytes": size, "sync/eval_wait_time": self.eval_wait}

    async def proved(self):
        """Waits until every engine has proved the last sync or is lost. Returns the seconds that it took."""
        self.check_time = await self.fleet.proved()
        return self.check_time

    def retire(self):
        """The run ends: from now on an engine that does not answer was stopped."""
        self.fleet.quiet = True

    def print_tasks(self, file):
        """Where coroutines wait: threads' stacks show the loop alone."""
        for task in list(asyncio.all_tasks(self.loop))[:50]:
            at = task.get_coro()
            print("\nCoroutine:", file=file)
            while inspect.iscoroutine(at) and at.cr_frame:
                print(f"  {at.cr_code.co_filename}, line {at.cr_frame.f_lineno} in {at.cr_code.co_name}", file=file)
                at = at.cr_await

    # ---- bookkeeping --------------------------------------------------------------------------------------
    async def revive(self):
        """Waits until an engine comes back. NoEngineLeft when none will."""
        self.evaluating = None                     # it ended with the engines
        with self.watchdog.at("waiting for an engine"):
            waiting = asyncio.create_task(self.fleet.revive())
            while not (await asyncio.wait({waiting}, timeout=1))[0]:
                self.watchdog.alive()              # a restart has limits of its own
        await waiting
        self.fleet.ledger.write("revive", step=self.steps)

    def trained_steps(self):
        return self.steps

    def trained(self, step):
        """The step is in the trainers' weights."""
        self.steps = step + 1
        if self.args.load_debug_rollout_data:
            return
        if self.stream:
            self.stream.trained(step)
            self.fill()
        else:
            self.buffer.trained(step)

    def save(self, folder, step):
        return save_buffer(self.buffer, folder, step)

    def load(self, folder, step):
        self.steps = step
        with open(os.path.join(folder, "buffer.json")) as f:
            state = json.load(f)
        if self.buffer:
            self.buffer.load_state(state)
            self.buffer.ledger.resume(step, state["ledger_seq"])
        if self.stream:
            self.stream.trained_steps = step

    def progress(self):
        """What generation does now, for the terminal."""
        running = sum(lane.requests for lane in self.fleet.lanes)
        groups = f"{self.buffer.finished_count} of {self.args.groups_per_step} groups finished, " if self.buffer else ""
        evaluated = "evaluation: {} of {} answers, ".format(*self.evaluated) if self.evaluated else ""
        return f"{evaluated}{groups}{running} answers are being generated"

    def lane_metrics(self, seconds):
        """Time that the engines had something to do since the last call, as a mean over them."""
        lanes = self.fleet.lanes
        for lane in lanes:
            if lane.requests:                      # a stream's engine may never be without a request
                now = time.time()
                lane.seconds, lane.since = lane.seconds + now - lane.since, now
        mean = sum(lane.seconds for lane in lanes) / max(len(lanes), 1)
        for lane in lanes:
            lane.seconds = 0.0
        return {"perf/engine_busy_time": mean, "perf/engine_busy_share": mean / max(seconds, 1e-9),
                "perf/engines": len(self.fleet.up)}

    # ---- HTTP ---------------------------------------------------------------------------------------------
    async def post(self, lane, verb, payload, timeout):
        """One exchange. A 4xx raises Dropped (the request itself is wrong: trying again cannot help), 429 and 503 Busy, other
        failures aiohttp.ClientError or asyncio.TimeoutError."""
        if self.session is None:   # needs the running loop. The slots limit connections; a server closes idle ones after 5 s
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            self.session = aiohttp.ClientSession(connector=connector, headers=self.headers)
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self.session.post(lane.url + verb, timeout=limit, json=payload) as r:
            if r.status in (429, 503):
                raise Busy(retry_after(r.headers.get("Retry-After", "")))
            if 400 <= r.status < 500:
                raise Dropped(f"error: engine {lane.url} answered {verb} with {r.status}: {(await r.text())[:300]}")
            r.raise_for_status()
            return await r.json() if "json" in r.content_type else None


# ---- helpers ----------------------------------------------------------------------------------------------
def retry_after(text):
    """Seconds of that header, at least 0.1 and at most 60; 1 where it is missing or a date."""
    return min(max(float(text), 0.1), 60.0) if re.fullmatch(r"\d+(\.\d+)?", text) else 1.0


@contextlib.contextmanager
def busy(work, rid, sample):
    """Names a request for an abort, and counts the sample's time with its engine and the engine's with anything to do."""
    lane, started = work.lane, time.time()
    work.rids.add(rid)
    lane.requests += 1
    if lane.requests == 1:
        lane.since = started
    try:
        yield
    finally:
        sample.seconds += time.time() - started
        work.rids.discard(rid)
        lane.requests -= 1
        if lane.requests == 0:
            lane.seconds += time.time() - lane.since


def keep_spread(args, samples):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal have no gradient."""
    rewards = [sample.reward for sample in samples]
    return True if min(rewards) < max(rewards) else "zero_spread"


def stop_ids(args, tokenizer):
    """The tokens that end an answer: SGLang's own, from the checkpoint's configs, and --rollout-stop-token-ids."""
    found = {tokenizer.eos_token_id, *args.rollout_stop_token_ids}
    for name in ("config.json", "generation_config.json"):
        path = os.path.join(args.hf_checkpoint, name)
        if os.path.exists(path):
            with open(path) as f:
                ids = json.load(f).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return sorted(found - {None})


def load_tokenizer(args):
    from transformers import AutoTokenizer    # takes seconds, which the driver, that knows this file too, need not wait
    return AutoTokenizer.from_pretrained(args.hf_checkpoint)


def make_buffer(args, tokenizer):
    """The buffer over --prompt-data, or None: nothing is drawn to evaluate, or to train on saved batches."""
    if not args.prompt_data or args.eval_only:
        return None
    recorded = not (args.debug_rollout_only or args.load_debug_rollout_data)
    ledger = Ledger(os.path.join(args.run_dir, "ledger.jsonl") if recorded else None)
    return Buffer(PromptRows(args.prompt_data, args, tokenizer), args.n_samples_per_prompt, args.seed, ledger,
                  digest=file_digest(args.prompt_data), shuffle=args.rollout_shuffle, num_epoch=args.num_epoch,
                  partial_rollout=args.partial_rollout)


def make_stream(args, buffer, trained_steps=0):
    """For train_fully_async.py, whose generation never stops; else None."""
    if not args.fully_async or args.load_debug_rollout_data or buffer is None:
        return None
    sampler = None
    if args.custom_sampler_path:
        function = load_function(args.custom_sampler_path, "--custom-sampler-path", 3)
        sampler = lambda groups, k: function(args, groups, k)
    gate = Gate(args.groups_per_step, args.staleness_threshold, args.update_weights_interval, args.max_lag, args.num_rollout)
    return Stream(buffer, gate, args.max_lag_policy, trained_steps, sampler)


def save_buffer(buffer, folder, step):
    """Writes the buffer's whole state, the batch that waits for training included; null where there is none. Returns the file's
    size and checksum."""
    if buffer:
        buffer.ledger.write("save", step=step)
    text = json.dumps(buffer and buffer.state()).encode()      # json.dump writes piece by piece, a third slower
    written = checkpoint.write(os.path.join(folder, "buffer.json"), lambda file: file.write(text))
    if buffer:
        buffer.ledger.sync()
    return written


def sampling_seed(seed, sample):
    """A seed of its own for each sample, the same in every repetition of a run; engines that sample deterministically use it."""
    text = f"{seed}/{sample.group_id}/{sample.row}/{sample.index}" + (f"/{sample.part}" if sample.part else "")
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "big") >> 1
