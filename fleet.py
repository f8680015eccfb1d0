"""The engines as the rollout manager sees them: which serve, which are lost and why, and how those come back.

    up -- dead, hanging, wrong, failed in a sync --> lost -- restarted and healthy --> ready -- the next sync --> up
                                                      `-- no restart left --> gone

Only an engine that is up gets requests, and what it answers is taken only when it has proved to hold the published version.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ray

from engine import EngineClient, EngineError, NoEngineLeft, api_key
from fingerprint import check_fingerprints

WRONG_IN_A_ROW = 16      # answers that no engine gives, before it is taken for broken
FLUSH_PATIENCE = 5.0     # seconds


class Aborted(BaseException):
    """Unwinds a sample's generation when its group is aborted or its engine is lost: the sample stays pending, and is continued
    later or elsewhere. Like a cancellation it is no Exception, so that no `except Exception` of a user's function swallows it."""


@dataclass(eq=False)
class Lane:
    """What is known about one engine."""
    rank: int
    url: str
    client: EngineClient
    slots: asyncio.Semaphore          # bounds the requests in flight; the next one starts at every completion
    actor: object = None              # owns the server's process; None for an external engine
    state: str = "up"
    lent: set = field(default_factory=set)        # the parts of its memory that the training has
    why: str = ""                     # it was lost the last time
    restarts: int = 0
    worked: bool = False              # it has proved a version: what never has is a fault of the set-up, and not restarted
    proof: asyncio.Task | None = None # the comparison of fingerprints since the last sync
    health: asyncio.Future | None = None
    wrong: int = 0                    # wrong answers in a row
    calls: set = field(default_factory=set)       # open requests
    works: set = field(default_factory=set)
    tokens: int = 0                   # tokens of the requests in flight: the least loaded engine gets the next group
    seconds: float = 0.0              # time with at least one request in flight
    requests: int = 0
    since: float = 0.0


class Fleet:
    def __init__(self, args, ledger):
        self.args, self.ledger, self.lanes = args, ledger, []
        self.party = []                # the engines of the sync that is under way, or was last
        self.joined = None             # the members of the broadcast group
        self.quiet = True              # no request is open: they get weights, or are lent to the training
        self.updating = None           # the engines, to the weights of a sync
        self.stages = []               # what the trainers send, see WeightSender.join
        self.asking = asyncio.Lock()   # for the engines' health
        self.returning, self.watcher = set(), None

    def connect(self, urls, actors):
        """The engines that are up; the trainers join these."""
        key, slots = api_key(self.args), self.args.sglang_server_concurrency
        self.threads = ThreadPoolExecutor(4 * len(urls) + 1, "control")     # one that hangs must not keep the others waiting
        self.lanes = [Lane(rank, url, EngineClient(url, key), asyncio.Semaphore(slots), actor)
                      for rank, (url, actor) in enumerate(zip(urls, actors or [None] * len(urls)))]
        self.party, self.joined = list(self.lanes), None

    # ---- who serves ---------------------------------------------------------------------------------------
    @property
    def up(self):
        """Colocated engines are tied to their ranks: there is no doing without one."""
        lanes = [lane for lane in self.lanes if lane.state == "up"]
        return lanes if len(lanes) == len(self.lanes) or not self.args.colocate else []

    @property
    def enough(self):
        """For a sync: those that are ready will be up."""
        able = [lane.state in ("up", "ready") for lane in self.lanes]
        return all(able) if self.args.colocate else any(able)

    def least_loaded(self):
        return min(self.up or self.lanes, key=lambda lane: lane.tokens)

    def none_left(self):
        return NoEngineLeft("no engine left: " + "; ".join(
            f"{lane.why} ({lane.restarts} of --max-engine-restarts {self.args.max_engine_restarts})"
            for lane in self.lanes if lane.why))

    def need(self, lanes):
        """NoEngineLeft when none of these can take part in a sync. (A run that trains on saved batches has no engine to lose.)"""
        if self.lanes and not (self.enough and any(lane.state in ("up", "ready") for lane in lanes)):
            raise self.none_left()

    def lose(self, lane, why):
        """Takes an engine out of service. Its samples go on elsewhere from the tokens that they have, or back into the buffer
        where there is no elsewhere; and it is brought back."""
        if lane.state not in ("up", "ready"):
            return
        lane.state, lane.why = "lost", why
        self.note(lane, why)
        for call in lane.calls:
            call.cancel()
        for work in list(lane.works):
            if self.up:
                work.move(self.least_loaded())
                if work.group.group_id >= 0:       # not of an evaluation
                    self.ledger.write("submit", group=work.group.group_id, engine=work.lane.rank)
        if not self.up:
            for work in [work for each in self.lanes for work in each.works]:
                work.aborting = True
        task = asyncio.create_task(self.bring_back(lane))
        self.returning.add(task)
        task.add_done_callback(self.returning.discard)

    def note(self, lane, why=""):
        self.ledger.write("engine", engine=lane.rank, state=lane.state, **({"why": why} if why else {}))
        print(f"{'warning: ' if why else ''}engine {lane.rank} is {lane.state}{why and ': '}{why}", flush=True)

    async def bring_back(self, lane):
        while lane.worked and lane.restarts < self.args.max_engine_restarts:
            lane.restarts += 1
            try:
                lane.url = await self.restart(lane)
            except Exception as error:
                lane.why = f"engine {lane.url}: {error}"
                continue
            lane.client = EngineClient(lane.url, api_key(self.args))
            lane.slots, lane.wrong, lane.lent = asyncio.Semaphore(self.args.sglang_server_concurrency), 0, set()
            lane.state = "ready"
            return self.note(lane)
        lane.state = "gone"
        self.note(lane, lane.why)

    async def restart(self, lane):
        """The url of the new process. An external engine is somebody else's to start: it is waited for."""
        limit = self.args.engine_start_timeout
        if lane.actor:
            asked = lane.actor.restart.options(max_task_retries=-1).remote()      # waits while Ray moves it to another node
            try:
                return await asyncio.to_thread(ray.get, asked, timeout=limit + 60)
            except ray.exceptions.GetTimeoutError:
                ray.cancel(asked)
                raise EngineError(f"not started again within --engine-start-timeout {limit:g} s") from None
        deadline = time.monotonic() + limit
        while True:
            try:
                await self.call(lane, "health")
                return lane.url
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(f"not back within --engine-start-timeout {limit:g} s: {error}") from None
                await asyncio.sleep(0.2)

    async def revive(self):
        """Waits until an engine can take part in a sync. NoEngineLeft when none will."""
        while not self.enough:
            if not self.returning:
                raise self.none_left()
            await asyncio.wait(set(self.returning), return_when=asyncio.FIRST_COMPLETED)

    # ---- requests -----------------------------------------------------------------------------------------
    async def until_lost(self, lane, coroutine):
        """The coroutine's result; Aborted as soon as the engine is lost."""
        call = asyncio.ensure_future(coroutine)
        lane.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if lane.state == "up" or asyncio.current_task().cancelling():
                raise
            raise Aborted from None
        finally:
            lane.calls.discard(call)
            call.cancel()

    async def trust(self, lane):
        """Returns when the engine has proved what it holds. Aborted when it did not."""
        if lane.proof:
            await asyncio.shield(lane.proof)
        if lane.state != "up":
            raise Aborted

    async def check(self, lane, problem):
        """After a request that failed: an engine that does not answer is lost."""
        if lane.health is None or lane.health.done():       # one question for a thousand requests that fail together
            lane.health = self.call(lane, "health")
        try:
            await asyncio.shield(lane.health)
        except EngineError as error:
            self.lose(lane, f"{error}; the request before: {problem}")

    def wrong_answer(self, lane, problem):
        lane.wrong += 1
        if lane.wrong >= WRONG_IN_A_ROW:
            self.lose(lane, f"engine {lane.url} answered wrongly {lane.wrong} times in a row: {problem}")

    async def watch(self):
        """Asks every engine for a token, again and again: one that hangs is noticed before its requests time out."""
        interval, limit = self.args.rollout_health_check_interval, self.args.rollout_health_check_timeout
        while True:
            await asyncio.sleep(interval)
            async with self.asking:
                lanes = [] if self.quiet else self.up
                calls = (self.call(lane, "health_generate", limit + 2) for lane in lanes)  # the server's own limit comes first
                answers = await asyncio.gather(*calls, return_exceptions=True)
            for lane, answer in zip(lanes, answers):
                if isinstance(answer, EngineError) and not self.quiet:
                    self.lose(lane, f"{answer} (--rollout-health-check-timeout)")

    # ---- all of them: the engines' side of a sync ---------------------------------------------------------
    def call(self, lane, verb, *arguments):
        return asyncio.get_running_loop().run_in_executor(self.threads, getattr(lane.client, verb), *arguments)

    async def everyone(self, verb, *arguments, among=None):
        """Says it to all engines of the sync (or those `among` them) at once; one that fails is lost. NoEngineLeft when none is
        left."""
        lanes = [lane for lane in (self.party if among is None else among) if lane.state in ("up", "ready")]
        answers = await asyncio.gather(*(self.call(lane, verb, *arguments) for lane in lanes), return_exceptions=True)
        for lane, answer in zip(lanes, answers):
            if isinstance(answer, EngineError):
                self.lose(lane, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        self.need(self.party)

    async def rest(self):
        """No request is open. Chooses the engines that shall get the next version: those that serve and those that are ready
        again. Returns their urls when the trainers have to join them anew."""
        self.quiet = True
        async with self.asking:        # that is a request, too
            pass
        self.party = [lane for lane in self.lanes if lane.state in ("up", "ready")]
        self.need(self.party)
        await self.give_back("weights")
        self.party = [lane for lane in self.party if lane.state in ("up", "ready")]
        return None if self.members() == self.joined else [lane.url for lane in self.party]

    def members(self):
        """Of a broadcast group that the trainers would form with the engines of this sync."""
        return {(lane.rank, lane.restarts) for lane in self.party}

    def update(self, version, stages=None):
        """Asks every engine of the sync to receive the stages, one after the other, and to call itself `version` behind the last.
        stages: those of the trainers' new groups (of each pipeline stage its group, tensors, bucket limit, bytes and time limit;
        no group where a colocated rank shows its engine the weights itself), or as before."""
        if stages is not None:
            self.stages = sorted(stages, key=lambda stage: stage["stage"])
            self.joined = self.members()
        self.updating = asyncio.create_task(self.receive(version))

    async def receive(self, version):
        sent = [stage for stage in self.stages if stage["group"]]
        for stage in sent:
            named = version if stage is sent[-1] else None
            tensors = stage.pop("tensors", ())                     # a group is told once
            flushed = await asyncio.gather(*(
                self.call(lane, "update_from_distributed", tensors, stage["group"], stage["limit"], named, stage["timeout"])
                for lane in self.party))
        if not (sent and all(flushed)):                            # a cache that was lent is empty
            await self.everyone("flush_cache", FLUSH_PATIENCE, among=[lane for lane in self.party if not lane.lent])

    async def updated(self):
        """Waits until every engine has received what it was asked to. EngineError for the first that did not."""
        if self.updating:
            await asyncio.shield(self.updating)

    async def blame(self, url, why):
        """A sync has failed: engines whose scheduler does not answer are lost; if all do, the one at `url`, which the error
        names; else all. (One that hangs in a broadcast makes others wait, which are named as likely.)"""
        self.joined, limit = None, self.args.rollout_health_check_timeout
        if self.updating:
            self.updating.cancel()
        lanes = [lane for lane in self.party if lane.state in ("up", "ready")]
        calls = (self.call(lane, "flush_cache", FLUSH_PATIENCE, limit) for lane in lanes)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        dead = [lane for lane, answer in zip(lanes, answers) if isinstance(answer, EngineError)]
        for lane in dead or [lane for lane in lanes if lane.url == url] or lanes:
            self.lose(lane, why)
        self.need(self.lanes)

    async def publish(self, version, sent, expected):
        """When all is sent and received: an engine that received named itself `version` with the last bucket, others are told to.
        What it holds is compared while the first requests run. Returns the bytes."""
        await asyncio.gather(self.updated(), results(sent))
        if not any(stage["group"] for stage in self.stages):
            await self.everyone("set_version", version)
        await self.give_back("kv_cache", "cuda_graph")
        expected = asyncio.create_task(results(expected)) if self.stages else None
        for lane in [lane for lane in self.party if lane.state in ("up", "ready")]:
            if lane.state == "ready":
                lane.state = "up"
                self.note(lane)
            lane.worked |= expected is None
            lane.proof = None if expected is None else asyncio.create_task(self.prove(lane, expected))
        self.quiet = False
        self.watcher = self.watcher or asyncio.create_task(self.watch())
        return sum(stage["bytes"] for stage in self.stages)

    async def prove(self, lane, expected):
        """An engine whose tensors are not the trainer's is lost, before anything that it said is taken. Returns the seconds."""
        started, parts = time.time(), await asyncio.shield(expected)
        try:
            checksums = await self.call(lane, "checksums")
            check_fingerprints({name: value for part in parts for name, value in part.items()}, checksums, lane.url)
            lane.worked = True
        except Exception as error:         # what it says may be of any form
            self.lose(lane, str(error) if isinstance(error, RuntimeError) else f"engine {lane.url}: weights_checker: {error!r}")
        return time.time() - started

    async def proved(self):
        """Waits until the last sync is proved or its engine lost. Returns the seconds that the slowest took."""
        return max([await lane.proof for lane in self.lanes if lane.proof], default=0.0)

    async def release_memory(self):
        await self.everyone("flush_cache", FLUSH_PATIENCE)     # it must be idle
        for lane in self.party:        # before: where one is lost in this, the others have lent theirs
            lane.lent = {"weights", "kv_cache", "cuda_graph"}
        await self.everyone("release_memory")

    async def give_back(self, *parts):
        """Of their memory, to those engines that lent it."""
        lanes = [lane for lane in self.party if lane.lent.issuperset(parts)]
        for lane in lanes:
            lane.lent -= set(parts)
        if lanes:
            await self.everyone("resume_memory", list(parts), among=lanes)


async def results(calls):
    """Of calls of the trainers, what they return; what one fails with as it was raised there."""
    try:
        return [await call for call in calls]
    except EngineError as error:
        raise getattr(error, "cause", error) from None
