"""A run in one process: an entry script's own loop under placement.run, with the real rollout manager, buffer, ledger, weight
sync and checkpoints, on engines that run already. Ray alone is replaced, by the few calls of it that these modules make.

Each run is forked from a server that has imported everything, so it takes a second or two where a cluster takes twelve. It is
a process like any other: it can be killed at any instant and resumed from what it left.
"""

import asyncio
import copy
import functools
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import tempfile
import threading
import time
from concurrent import futures
from multiprocessing import forkserver
from types import SimpleNamespace
from unittest import mock

import datasets       # noqa: F401  (slow to import: once, in the server; so are two more below)
import ray
import requests
import torch._dynamo  # noqa: F401  (by an optimizer)
from tqdm import tqdm
from transformers import AutoTokenizer      # noqa: F401

import checkpoint
import engine
import fleet
import harness
import placement
import replay
import rollout
import sync_weights
import tracking
import train_async
import train_fully_async
import train_sync
from args import parse_args
from trainer import TrainWorker

MODULES = (checkpoint, engine, fleet, placement, replay, rollout, sync_weights, tracking, train_async, train_fully_async,
           train_sync)


# ---- in Ray's place ---------------------------------------------------------------------------------------
class Ref(futures.Future):
    def __await__(self):
        return asyncio.wrap_future(self).__await__()


class Actor:
    """An object with a thread of its own. `actor.method.remote(...)` -> a future; as in Ray, calls begin one after the other, and
    while a coroutine waits the next one runs."""
    everyone = []          # none ends before the run does

    def __init__(self, make, *arguments):
        self.everyone.append(self)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.object = self.call(make, *arguments).result()

    def call(self, function, *arguments):
        async def run():
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result

        def settle(done):
            error = done.exception()
            ref.set_result(done.result()) if error is None else ref.set_exception(error)

        ref = Ref()
        asyncio.run_coroutine_threadsafe(run(), self.loop).add_done_callback(settle)
        return ref

    def __getattr__(self, name):
        return SimpleNamespace(remote=functools.partial(self.call, getattr(self.object, name)))


class Remote:
    """ray.remote(make) of a class or a function."""

    def __init__(self, make):
        self.make = make

    def options(self, **_):
        return self

    def remote(self, *arguments):
        return Actor(self.make, *arguments) if inspect.isclass(self.make) else self.make(*arguments)


def get(ref, timeout=None):
    if isinstance(ref, list):
        return [get(one, timeout) for one in ref]
    return ref.result(timeout) if isinstance(ref, futures.Future) else ref


def wait(refs, num_returns, timeout):
    done, waiting = futures.wait(refs, timeout, futures.FIRST_COMPLETED)
    return list(done), list(waiting)


RAY = SimpleNamespace(get=get, put=copy.deepcopy, wait=wait, remote=Remote, exceptions=ray.exceptions, init=lambda **_: None,
                      cluster_resources=lambda: {"CPU": 1000}, is_initialized=lambda: False,
                      get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))


# ---- a trainer in a few lines -----------------------------------------------------------------------------
class TinyWorker:
    """A trainer whose weights are the batches that it was trained on, so that nothing in them can be lost or repeated unseen.
    The engines get their digest in place of a broadcast, so what is generated hangs on every batch before."""

    def __init__(self, args, rank, master):
        self.urls, self.batches = [], []

    def ready(self):
        pass

    def join_engines(self, urls, group):
        self.urls = urls

    def leave_engines(self):
        pass

    def trained_steps(self):
        return len(self.batches)

    def train(self, step, batch):
        started = time.time()
        time.sleep(0.02)       # so that something can happen meanwhile
        self.batches.append({"step": step, "group_ids": batch["group_ids"], "tokens": [ids.tolist() for ids in batch["tokens"]],
                             "rollout_logprobs": [logprobs.tolist() for logprobs in batch["rollout_logprobs"]]})
        return {"started": started, "perf/train_time": time.time() - started}

    def prepare_weights(self):
        pass

    def digest(self):
        return hashlib.sha256(json.dumps(self.batches).encode()).hexdigest()

    def fingerprints(self):
        pass

    def send_weights(self, updated):
        digest = self.digest()
        for url in self.urls:
            try:
                requests.post(f"{url}/script", json={"weights": digest}, timeout=10).raise_for_status()
            except requests.RequestException as error:
                raise engine.EngineError(f"engine {url}: weights: {error}", url) from None

    def save(self, folder):
        text = json.dumps(self.batches).encode()
        return checkpoint.write(os.path.join(folder, "rank_00000.pt"), lambda file: file.write(text))

    def damaged(self, folder, files):
        return checkpoint.damaged(folder, files)

    def load(self, folder):
        self.batches = trained_batches(folder)


def trained_batches(folder):
    """The weights of a TinyWorker in a checkpoint's folder."""
    with open(os.path.join(folder, "rank_00000.pt")) as f:
        return json.load(f)


# ---- runs -------------------------------------------------------------------------------------------------
def life(script, words, worker, prepare, path):
    """The forked process: the script with these words, in the end sys.exit as the script does it."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tqdm.set_lock(threading.RLock())       # its own belongs to all processes and would outlive a kill
    for module in MODULES:
        module.ray = RAY
    placement.TrainWorker = worker
    placement.reserve = lambda args, what, bundles, size, actors: [{}] * (bundles * actors)
    if prepare:
        prepare()
    placement.run(importlib.import_module(script.removesuffix(".py")).train, parse_args(words, script=script))


def server():
    """The context of the server, once for all runs, that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["light"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([harness.ROOT, harness.TESTS]), CUDA_VISIBLE_DEVICES="",
                         TORCH_CPP_LOG_LEVEL="ERROR"):
        forkserver.ensure_running()
    return context


def start(script, words, worker=TrainWorker, prepare=None):
    """Forks a run; prepare() is called in it first. Returns (process, path of its output)."""
    context = server()
    handle, path = tempfile.mkstemp(prefix="light-", suffix=".log")
    os.close(handle)
    process = context.Process(target=life, args=(script, words, worker, prepare, path))
    process.start()
    return process, path


def end(process, path, timeout=120):
    """Waits for the end of a run. Returns (exit status, output)."""
    process.join(timeout)
    late = process.exitcode is None
    process.kill()
    process.join()
    with open(path, errors="replace") as f:
        output = f.read()
    os.remove(path)
    assert not late, f"the run did not end within {timeout} s:\n{output[-3000:]}"
    return process.exitcode, output


def interrupt(started, condition, how, timeout=120):
    """As harness.interrupt."""
    process, path = started
    deadline = time.time() + timeout
    while not condition():
        assert process.is_alive() and time.time() < deadline, f"the moment did not come:\n{end(process, path, 0)[1][-3000:]}"
        time.sleep(0.002)
    os.kill(process.pid, how)
    return end(process, path)


def run(script, words, timeout=120, **options):
    """As harness.run; options: see start."""
    return end(*start(script, words, **options), timeout)


def succeed(script, words, timeout=120, **options):
    status, output = run(script, words, timeout, **options)
    assert status == 0, output[-3000:]
    return output
