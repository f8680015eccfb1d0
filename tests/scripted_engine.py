"""An engine that says what the test wants, at the speed the test wants, and misbehaves on order.

It speaks SGLang's verbs with SGLang's answers, and really takes part in the weight broadcast. Each token, with its
log-prob, is a pure function of (fingerprint of the weights, all tokens before it, sampling_seed), so a continued
request gives what an uninterrupted one gives. Where SGLang dies, it dies: an unknown group, a token beyond the vocabulary.
A cached prefix that was not flushed spoils what is generated after an update.

    python tests/scripted_engine.py --port 0 --lengths 90:1,10:10 --unit-seconds 0.05     first line: PORT <n>
    POST /script {...}   orders, see `Engine.script`          GET /script   counters
"""

import argparse
import asyncio
import collections
import datetime
import hashlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
import uuid

from aiohttp import web

MASK = (1 << 64) - 1
PREFIX = 16   # tokens that make a prefix for the cache
ANSWERS = ("wrong_logprobs", "missing_logprobs", "null_logprobs", "nan_logprobs", "short_logprobs", "too_long",
           "foreign_ids", "old_version")


# ---- what is generated ------------------------------------------------------------------------------------
def mix(x):
    """splitmix64: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def fold(key, tokens):
    for token in tokens:
        key = mix(key ^ token)
    return key


def text_key(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def parse_lengths(spec):
    """'7': always 7 units; '90:1,10:10': nine in ten answers have 1 unit, the others 10; 'eos:50': each token ends the
    answer with chance 1/50. Returns (parts, None) or (None, mean)."""
    spec = str(spec)
    if spec.startswith("eos:"):
        return None, float(spec[4:])
    parts = [part.split(":") if ":" in part else ["1", part] for part in spec.split(",")]
    return [(float(share), int(units)) for share, units in parts], None


def draw_units(parts, key):
    point = key / 2**64 * sum(share for share, _ in parts)
    for share, units in parts:
        point -= share
        if point < 0:
            return units
    return parts[-1][1]


class Request:
    """One /generate: `tokens` and `logprobs` are what it has produced, `advance` produces more."""

    def __init__(self, body, engine):
        params = body["sampling_params"]
        self.rid = body.get("rid") or uuid.uuid4().hex
        self.input, self.budget = body["input_ids"], params["max_new_tokens"]
        self.seed = 0 if params.get("temperature") == 0 else params.get("sampling_seed") or 0
        self.stops = [] if params.get("ignore_eos") else [engine.o.eos_id, *(params.get("stop_token_ids") or [])]
        self.tokens, self.logprobs, self.weights, self.key = [], [], None, 0
        self.finish, self.wake, self.began, self.started = None, asyncio.Event(), time.time(), None
        # the answer's length hangs on the prompt, which a continued request holds together with a part of the response
        used = max(0, (engine.o.budget or self.budget) - self.budget)
        parts, self.mean = parse_lengths(engine.o.lengths)
        self.length = None   # in tokens, the stop token included
        if parts:
            prompt = fold(mix(self.seed), self.input[:len(self.input) - used])
            self.length = draw_units(parts, prompt) * engine.o.unit_tokens - used
        prefix = tuple(self.input[:PREFIX])
        self.cached = min(PREFIX, len(self.input) - 1) if prefix in engine.cache else 0
        cached_by = engine.cache.setdefault(prefix, engine.weights)
        self.stale = 0 if cached_by == engine.weights else mix(cached_by)

    def advance(self, count, weights, vocab):
        """Produces up to `count` more tokens under these weights; sets `finish` at the end of the answer."""
        if weights != self.weights:   # the key of the next token: weights, seed and every token so far
            if self.weights is not None:
                self.stale = mix(self.weights)   # the cache of what it has generated is of the old weights
            self.weights, self.key = weights, fold(mix(weights ^ self.stale) ^ mix(self.seed), self.input + self.tokens)
        while count > 0 and self.finish is None:
            count -= 1
            if self.length is None:
                last = self.key % max(1, round(self.mean)) == 0
            else:
                last = len(self.tokens) + 1 >= self.length
            token = 3 + (self.key >> 20) % (vocab - 3)
            while token in self.stops:
                token = 3 + (token - 2) % (vocab - 3)
            if last and self.stops:
                token = self.stops[-1]
                self.finish = {"type": "stop", "matched": token}
            self.tokens.append(token)
            self.logprobs.append(-0.01 - 4 * (self.key >> 40) / 2**24)
            self.key = mix(self.key ^ token)
            if self.finish is None and len(self.tokens) >= self.budget:
                self.finish = {"type": "length", "length": self.budget}


# ---- the server -------------------------------------------------------------------------------------------
class Engine:
    def __init__(self, options):
        self.o = options
        self.weights = text_key(f"weights {options.weights}")   # fingerprint of all weights
        self.tensors, self.prints, self.groups, self.told = {}, {}, {}, {}
        self.version, self.released = "default", False
        self.running, self.queue = set(), collections.deque()
        self.cache = {}         # prefix -> weights that its keys and values were computed with
        self.counters = collections.Counter()
        self.verbs = collections.deque(maxlen=1000)
        self.stuck = 0          # updates that hang
        self.orders = []        # refusals, hangs and deaths still to come
        self.answers, self.answers_left, self.stale = None, 0, False

    def advance(self, request):
        """Lets a running request catch up with the clock."""
        if self.token_seconds == 0:
            count = request.budget
        else:
            count = int((time.monotonic() - request.started) / self.token_seconds + 1e-6) - len(request.tokens)
        before = len(request.tokens)
        request.advance(count, self.weights, self.o.vocab_size)
        self.counters["tokens"] += len(request.tokens) - before

    @property
    def token_seconds(self):
        return self.o.unit_seconds / self.o.unit_tokens

    async def generate(self, http):
        body = await http.json()
        await self.obey("generate")
        self.counters["requests"] += 1
        refusal = self.refusal(body)
        if refusal:
            return web.json_response({"error": {"message": refusal}}, status=400)
        request = Request(body, self)
        self.queue.append(request)
        try:
            await self.run(request)
        finally:   # also when the client went away
            self.forget(request)
        return self.answer(body, request)

    def refusal(self, body):
        """Why SGLang would answer 400, or None."""
        ids, budget = body.get("input_ids"), (body.get("sampling_params") or {}).get("max_new_tokens")
        if not ids or not all(isinstance(i, int) for i in ids):
            return "input_ids must be a non-empty list of token ids"
        if not all(0 <= i < self.o.vocab_size for i in ids):
            die(f"a token id beyond the vocabulary of {self.o.vocab_size}")
        if not isinstance(budget, int) or budget < 0:
            return f"max_new_tokens must be at least 0, got {budget}."
        if len(ids) + budget > self.o.context_length:
            return (f"Requested token count exceeds the model's maximum context length of {self.o.context_length} "
                    f"tokens: {len(ids)} + {budget}.")
        if any(r.rid == body.get("rid") for r in [*self.running, *self.queue]):
            return f"Duplicate request ID detected: {body['rid']}"
        return "memory is released" if self.released else None

    async def run(self, request):
        """Waits for a slot, then for the clock, until the request is finished or aborted."""
        self.admit()
        while request.finish is None:
            request.wake.clear()
            left = None   # queued: until woken
            if request in self.running:
                if request.budget == 0:
                    request.finish = {"type": "length", "length": 0}
                    break
                self.advance(request)
                if request.finish:
                    break
                left = max(0.0, request.started + self.token_seconds * self.next_stop(request) - time.monotonic())
            try:
                await asyncio.wait_for(request.wake.wait(), left)
            except asyncio.TimeoutError:
                pass

    def next_stop(self, request):
        """How many tokens the request will have when it is worth looking at again: one timer for a whole answer."""
        if request.length is None:
            return len(request.tokens) + 8
        return max(len(request.tokens) + 1, min(request.length if request.stops else request.budget, request.budget))

    def admit(self):
        while self.queue and len(self.running) < self.o.slots:
            request = self.queue.popleft()
            request.started = time.monotonic()
            self.running.add(request)
            self.counters["peak_in_flight"] = max(self.counters["peak_in_flight"], len(self.running))
            request.wake.set()

    def forget(self, request):
        self.running.discard(request)
        if request in self.queue:
            self.queue.remove(request)
        self.admit()

    def answer(self, body, request):
        tokens, logprobs, version = list(request.tokens), [x - self.o.logprob_shift for x in request.logprobs], self.version
        kind = self.answers if self.answers_left > 0 else None
        self.answers_left -= kind is not None
        if kind == "wrong_logprobs":
            logprobs = [x - 1.0 for x in logprobs]
        elif kind in ("nan_logprobs", "null_logprobs"):
            logprobs = [float("nan") if kind == "nan_logprobs" else None] * len(logprobs)
        elif kind == "short_logprobs":
            logprobs = logprobs[:-1]
        elif kind == "too_long":
            tokens, logprobs = tokens + [3] * 5, logprobs + [-1.0] * 5
        elif kind == "foreign_ids":
            tokens = [token + 10 ** 6 for token in tokens]
        elif kind == "old_version":
            version = str(int(version) - 1) if version.isdigit() else "older"
        meta = {"id": request.rid, "finish_reason": request.finish, "prompt_tokens": len(request.input),
                "weight_version": version, "num_retractions": 0, "reasoning_tokens": 0,
                "completion_tokens": len(tokens), "cached_tokens": request.cached, "cached_tokens_details": None,
                "dp_rank": None,
                "e2e_latency": time.time() - request.began, "response_sent_to_client_ts": time.time()}
        if body.get("return_logprob") and kind != "missing_logprobs":
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[x, token, None] for x, token in zip(logprobs, tokens)]
            meta["output_token_logprobs_length"] = len(logprobs)
        if request.started is None:   # aborted in the queue: SGLang says less
            for key in ("prompt_tokens", "num_retractions", "reasoning_tokens", "cached_tokens",
                        "cached_tokens_details", "dp_rank"):
                del meta[key]
            return web.json_response({"text": "", "output_ids": [], "meta_info": meta})
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    # ---- control verbs ----
    async def abort(self, http):
        body = await http.json()
        self.abort_requests(lambda r: body.get("abort_all") or r.rid == body.get("rid"))
        return web.Response()

    def abort_requests(self, chosen):
        for request in [r for r in [*self.running, *self.queue] if chosen(r)]:
            if request in self.running:
                self.advance(request)
            if request.finish is None:
                self.counters["aborts"] += 1
                request.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                if request.started is None:
                    request.finish = {"type": "abort", "message": "Abort in waiting queue"}
            request.wake.set()

    async def flush(self, http):
        while self.stuck:
            await asyncio.sleep(0.05)
        if self.running or self.queue:
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting.\n")
        self.cache.clear()
        return web.Response(text="Cache flushed.\n")

    async def init_group(self, http):
        b = await http.json()
        try:
            self.groups[b["group_name"]] = await asyncio.to_thread(
                join_group, b["backend"], b["master_address"], b["master_port"], b["rank_offset"], b["world_size"],
                b["group_name"], self.o.group_timeout)
        except Exception as error:
            return failure(f"Failed to initialize group: {error}")
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def destroy_group(self, http):
        import torch.distributed as dist
        name = (await http.json())["group_name"]
        if name not in self.groups:
            return failure(f"no group {name}")
        dist.destroy_process_group(self.groups.pop(name))
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def update(self, http):
        b = await http.json()
        if b["group_name"] not in self.groups:
            die(f"Group {b['group_name']} not in {list(self.groups)}")
        form, _, limit = b["load_format"].partition("=")
        if form != "offbeat_buckets":
            return failure("offbeat_buckets only")
        for request in self.running:
            self.advance(request)
        try:
            if b["names"]:                        # only a group's first request says them
                self.told[b["group_name"]] = b["names"], b["dtypes"], b["shapes"]
            received = await asyncio.to_thread(receive, self.groups[b["group_name"]], *self.told[b["group_name"]], int(limit))
        except Exception as error:
            return failure(f"Failed to update parameter online: {error}.")
        if not self.stale:
            self.tensors.update(received)
            self.prints.update(await asyncio.to_thread(fingerprints, received))
            self.weights = fold(0, [text_key(f"{key} {value}") for key, value in sorted(self.prints.items())])
        if b.get("weight_version") is not None and self.stale is not True:
            self.version = b["weight_version"]
        self.counters["updates"] += 1
        if flushed := b.get("flush_cache", True) and not (self.running or self.queue):
            self.cache.clear()
        return web.json_response({"success": True, "message": "weights received" + ", cache flushed" * flushed})

    async def set_version(self, http):
        version = (await http.json())["new_version"]
        if self.stale is not True:
            self.version = version
        return web.json_response({"success": True, "message": f"Weight version updated to {version}",
                                  "new_version": version})

    async def checksums(self, http):
        rank = {"checksums": self.prints, "per_gpu_checksum": f"{self.weights:016x}",
                "parallelism_info": {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1,
                                     "rank": 0, "size": 1}}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank],
                                  "per_engine_checksum": f"{self.weights:016x}"})

    async def release(self, http):
        if self.running or self.queue:
            die("AssertionError: release_memory_occupation should be called only when server is idle.")
        self.released = True
        if not (await http.json()).get("tags") or "weights" in (await http.json())["tags"]:
            self.tensors, self.prints, self.weights = {}, {}, text_key("released")   # what comes back is undefined
        return web.json_response(None)

    async def take_back(self, http):
        self.released = False
        return web.json_response(None)

    async def info(self, http):
        return web.json_response({"model_path": "scripted", "tokenizer_path": "scripted", "is_generation": True,
                                  "weight_version": self.version})

    async def health(self, http):
        return web.Response()

    # ---- orders ----
    async def obey(self, verb):
        """Carries out the first order for this verb, if there is one."""
        order = next((order for order in self.orders if order["verb"] == verb), None)
        if order is None:
            return
        order["count"] -= 1
        if order["count"] == 0:
            self.orders.remove(order)
        if order["do"] == "refuse":
            self.counters["refused"] += 1
            raise Refused(order)
        if order["do"] == "hang":
            self.stuck += verb == "update_weights_from_distributed"      # as SGLang's scheduler is
            await asyncio.sleep(order["seconds"])
            self.stuck -= verb == "update_weights_from_distributed"
        elif order["count"] == 0:   # die
            asyncio.get_running_loop().call_later(order["seconds"], die, "ordered")

    async def script(self, http):
        """Orders, all in one POST; `verb` is generate unless given.
        {"refuse": N, "status": 500, "verb": V}   the next N calls of V get that status, and Retry-After with "retry_after": S
        {"hang": N, "seconds": 1e9, "verb": V}    the next N calls of V wait so long
        {"die": N, "seconds": 0.05, "verb": V}    the process dies that long after the N-th call of V from now came in
        {"answers": KIND, "count": N}             one of ANSWERS for the next N answers (default: all)
        {"stale": true}        acknowledges updates and versions, and keeps the old ones
        {"stale": "tensors"}   acknowledges updates, and keeps the old tensors
        {"flip": NAME or true} changes one bit of a weight (of the first one)
        {"swap": true}         the first two weights of equal shape change places
        {"weights": X}         other weights, without a broadcast
        {"lengths": SPEC, "unit_seconds": S, "slots": N, ...}   any option of the command line
        {"reset": true}        ends all misbehaviour"""
        b = await http.json()
        if b.get("reset"):
            self.orders, self.answers, self.answers_left, self.stale, self.stuck = [], None, 0, False, 0
        for do, seconds in (("refuse", 0), ("hang", 1e9), ("die", 0.05)):
            if do in b:
                self.orders.append({**b, "do": do, "verb": b.get("verb", "generate"), "count": b[do],
                                    "status": b.get("status", 500), "seconds": b.get("seconds", seconds)})
        if "answers" in b:
            if b["answers"] not in ANSWERS:
                return web.json_response({"error": f"answers: one of {ANSWERS}"}, status=400)
            self.answers, self.answers_left = b["answers"], b.get("count", 1 << 60)
        self.stale = b.get("stale", self.stale)
        if "weights" in b:
            self.weights = text_key(f"weights {b['weights']}")
        if "flip" in b:
            self.flip(b["flip"])
        if "swap" in b:
            self.swap()
        for name in vars(self.o).keys() & b.keys() - {"weights"}:
            setattr(self.o, name, b[name])
        return web.json_response({})

    def flip(self, name):
        import torch
        name = min(self.tensors) if name is True else name
        bits = self.tensors[name].view(torch.uint8).view(-1)
        bits[0] ^= 1
        self.changed(name)

    def swap(self):
        import torch
        a, b = next((a, b) for a, b in itertools.combinations(sorted(self.tensors), 2)
                    if self.tensors[a].shape == self.tensors[b].shape and not torch.equal(self.tensors[a], self.tensors[b]))
        self.tensors[a], self.tensors[b] = self.tensors[b], self.tensors[a]
        self.changed(a, b)

    def changed(self, *names):
        self.prints.update(fingerprints({name: self.tensors[name] for name in names}))
        self.weights = fold(0, [text_key(f"{key} {value}") for key, value in sorted(self.prints.items())])

    async def report(self, http):
        counters = {"requests": 0, "aborts": 0, "refused": 0, "tokens": 0, "updates": 0, "peak_in_flight": 0}
        state = {"in_flight": len(self.running), "queued": len(self.queue),
                 "version": self.version, "weights": f"{self.weights:016x}", "pid": os.getpid(),
                 "verbs": list(self.verbs)}
        return web.json_response({**counters, **self.counters, **state})


def failure(message):
    return web.json_response({"success": False, "message": message}, status=400)


class Refused(Exception):
    def __init__(self, order):
        self.status = order["status"]
        self.headers = {"Retry-After": str(order["retry_after"])} if "retry_after" in order else {}


def die(why):
    print(f"scripted engine dies: {why}", flush=True)
    os._exit(1)


# ---- weights ----------------------------------------------------------------------------------------------
def join_group(backend, address, port, rank, world_size, name, timeout):
    """A process group beside the default one, as SGLang's init_custom_process_group builds it."""
    from torch.distributed import distributed_c10d as c10d
    limit = datetime.timedelta(seconds=timeout)
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=limit))
    store.set_timeout(limit)
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(world_size, rank, [], c10d.Backend(backend), store, group_name=name,
                                              backend_options=None, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def receive(group, names, dtypes, shapes, limit):
    """Buckets of bytes, each of at most `limit` unless it is one tensor; every tensor begins at a multiple of 16. {name: tensor}."""
    import torch
    found, waiting = {}, list(zip(names, [getattr(torch, dtype) for dtype in dtypes], shapes))
    while waiting:
        places, end = [], 0
        while waiting:
            name, dtype, shape = waiting[0]
            start, size = (end + 15) // 16 * 16, math.prod(shape) * dtype.itemsize
            if places and start + size > limit:
                break
            places.append((name, dtype, shape, start, size))
            end = start + size
            waiting.pop(0)
        bucket = torch.empty(end, dtype=torch.uint8)
        torch.distributed.broadcast(bucket, src=0, group=group)
        found.update({name: bucket[start:start + size].clone().view(dtype).view(*shape)
                      for name, dtype, shape, start, size in places})
    return found


def fingerprints(tensors):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fingerprint import fingerprint
    found = {}
    for name, t in tensors.items():
        rows, columns = t.shape if t.dim() == 2 else (1, len(t))
        found[f"{name}|0:{rows}|0:{columns}"] = f"{fingerprint(t):016x}"
    return found


# ---- process ----------------------------------------------------------------------------------------------
@web.middleware
async def errors(http, handler):
    """Notes the verb and carries out an order for it; generate looks for its own once it has read the body."""
    engine, verb = http.app["engine"], http.path.strip("/")
    try:
        if engine.o.api_key and verb != "script" and http.headers.get("Authorization") != f"Bearer {engine.o.api_key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        if verb not in ("generate", "script"):
            engine.verbs.append(verb)
            await engine.obey(verb)
        return await handler(http)
    except Refused as refused:
        return web.json_response({"error": {"message": "refused on order"}}, status=refused.status, headers=refused.headers)


def make_app(options):
    app = web.Application(middlewares=[errors], client_max_size=1 << 30)
    e = app["engine"] = Engine(options)
    posts = {"generate": e.generate, "abort_request": e.abort, "flush_cache": e.flush, "script": e.script,
             "init_weights_update_group": e.init_group, "destroy_weights_update_group": e.destroy_group,
             "update_weights_from_distributed": e.update, "update_weight_version": e.set_version,
             "weights_checker": e.checksums,
             "release_memory_occupation": e.release, "resume_memory_occupation": e.take_back}
    gets = {"health": e.health, "health_generate": e.health, "model_info": e.info, "script": e.report}
    app.add_routes([web.post(f"/{verb}", handler) for verb, handler in posts.items()])
    app.add_routes([web.get(f"/{verb}", handler) for verb, handler in gets.items()])
    return app


async def serve(options):
    runner = web.AppRunner(make_app(options), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=2048)
    await site.start()
    print("PORT", site._server.sockets[0].getsockname()[1], flush=True)
    while options.die_with_parent in (None, os.getppid()):       # by its number: the parent may be gone already
        await asyncio.sleep(0.3)


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--port", type=int, default=0, help="0: any free one")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--lengths", default="16", help="N | share:units,share:units | eos:MEAN; the stop token is counted")
    p.add_argument("--unit-tokens", type=int, default=1, help="tokens of a unit")
    p.add_argument("--unit-seconds", type=float, default=0.0, help="seconds that a unit takes")
    p.add_argument("--slots", type=int, default=1 << 30, help="requests that run at a time; others queue")
    p.add_argument("--budget", type=int, help="max_new_tokens of all new requests: a continued one then keeps its length")
    p.add_argument("--logprob-shift", type=float, default=0.0, help="log-probs are lower by this: a mark on answers from now on")
    p.add_argument("--weights", default="0", help="names the weights before the first update")
    p.add_argument("--vocab-size", type=int, default=500, help="ids are below it; generated ones are 3 and above")
    p.add_argument("--eos-id", type=int, default=2, help="stop token, besides the request's own")
    p.add_argument("--context-length", type=int, default=4096, help="prompt + budget beyond it: 400")
    p.add_argument("--group-timeout", type=float, default=60, help="seconds for joining a group and for a broadcast")
    p.add_argument("--api-key", help="what clients must send")
    p.add_argument("--die-with-parent", type=int, metavar="PID", help="end when the parent process, PID, ends")
    return p.parse_args(argv)


def start(n=1, **options):
    """Starts n engines with these options of the command line: [(process, url), ...]. End them with `stop`."""
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    argv = [sys.executable, os.path.abspath(__file__), "--die-with-parent", str(os.getpid()), *flags]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(n)]
    engines = []
    for process in processes:
        line = process.stdout.readline().split()
        if line[:1] != ["PORT"]:
            stop([(p, None) for p in processes])
            raise RuntimeError(f"a scripted engine did not start: {argv}")
        engines.append((process, f"http://127.0.0.1:{line[1]}"))
    return engines


def stop(engines):
    for process, _ in engines:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


if __name__ == "__main__":
    asyncio.run(serve(parse()))
