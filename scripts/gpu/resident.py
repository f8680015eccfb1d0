"""Engines that stay while one run follows the other: a start takes a minute, and GPU time is short.

`hold_gpus` reserves the GPUs for as long as Ray runs, `start_servers` puts an engine on each, and `run` lets an entry script's loop
work with those that it is given. Training rank i of every run is on the GPU of server i, as with --colocate; runs on disjoint GPUs
take the last server and leave the first GPU to the trainer: stop the first server before.
"""

import copy
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATHS = [ROOT, os.path.join(ROOT, "scripts"), os.path.join(ROOT, "scripts", "gpu"), os.path.join(ROOT, "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])      # for the actors

import ray

import placement
from engine import EngineError, Server
from sync_weights import sync_weights
from tracking import Tracker
from trainer import TrainWorker


RESERVE = placement.reserve


class RandomWorker(TrainWorker):
    """A training rank that starts from random weights: a shape's folder has none."""

    def __init__(self, *arguments):
        from shapes import random_weights
        random_weights()
        super().__init__(*arguments)


def hold_gpus(count, args):
    """Reserves GPUs for as long as Ray runs; training rank i of every run takes the i-th. Returns their ids."""
    options = RESERVE(args, "GPU(s)", count, 1, 1)
    placement.HELD.clear()                 # no launch frees them
    placement.reserve = lambda args, what, bundles, size, actors: options[:bundles * actors]
    if args.device == "cpu":
        return [None] * count
    gpu = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    return ray.get([gpu.options(**option).remote() for option in options], timeout=120)


def start_servers(args, gpus, servers):
    """A server on each GPU, side by side. `servers` is filled at once, so that the caller can stop them when one fails."""
    started = time.time()
    servers += [Server(i, args, gpu and [gpu]) for i, gpu in enumerate(gpus)]
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(Server.start, servers))
    print(f"{len(servers)} engines are up after {time.time() - started:.0f} s", flush=True)


def run(script, args, servers, ahead=0):
    """One run of an entry script, with a trainer and a rollout manager of its own. With `ahead` the stream does not thin out
    towards the end: its gate is that of a run which is so many steps longer. Returns the rows of metrics.jsonl."""
    args.rollout_external_engine_addrs = [server.client.url for server in servers]     # --colocate refuses a user's, not these
    part = copy.copy(args)
    args.num_rollout += ahead
    placement.write_flags(part)
    trainers, rollout = placement.launch(args, [])
    tracker = Tracker(part, 0)
    steps = script.train(part, trainers, rollout, tracker, 0)
    if args.colocate and not args.eval_sets:
        tracker.note(sync_weights(trainers, rollout, steps))       # the engines take their memory back for the next run
    placement.finish(part, steps, trainers, rollout, tracker, save=False)
    for actor in [*trainers, rollout]:
        ray.kill(actor)
    for server in servers:
        quiet(server.client)
    return tracker.rows.read()


def quiet(client, limit=60):
    """Ends what a run has left on its engine. EngineError when the engine does not come to rest."""
    deadline = time.time() + limit
    while True:
        client.abort_all()
        try:
            return client.flush_cache()            # refused while anything runs
        except EngineError:
            if time.time() > deadline:
                raise
            time.sleep(0.5)


def stop(servers):
    for server in servers:
        server.stop()
    placement.stop([])


class Memory:
    """Watches the memory of the processes on a GPU, as its driver counts it: both sides' peaks, and the least that the engine
    kept after its peak, which is what it had while training. gpu: an id of hold_gpus."""

    def __init__(self, gpu):
        self.gpu = int(gpu or 0)
        self.seen, self.problem = {}, None                     # "engine", "trainer" or "in use" -> bytes at each look
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()

    def watch(self):
        try:
            import pynvml
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(self.gpu)
            while not self.end.wait(0.1):
                self.look(pynvml, gpu)
        except Exception as error:                             # a measurement must not end the run; the summary says why
            self.problem = f"{type(error).__name__}: {error}"

    def look(self, pynvml, gpu):
        import psutil
        sums = {"in use": pynvml.nvmlDeviceGetMemoryInfo(gpu).used}
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
            try:
                name = " ".join(psutil.Process(process.pid).cmdline()[:2])
            except psutil.Error:
                continue
            side = "trainer" if "Worker" in name else "engine" if "sglang" in name or "serve.py" in name else "other"
            sums[side] = sums.get(side, 0) + (process.usedGpuMemory or 0)
        for side, size in sums.items():
            self.seen.setdefault(side, []).append(size)

    def summary(self):
        """Such as "trainer 12.3 engine 57.0 released to 1.2 GB"."""
        if "engine" not in self.seen:
            sizes = ", ".join(f"{side} {min(sizes) / 1e9:.1f} to {max(sizes) / 1e9:.1f} GB" for side, sizes in self.seen.items())
            return f"{sizes or 'not measured'} ({self.problem or 'no engine was seen'})"
        engine = self.seen["engine"]
        least = min(engine[engine.index(max(engine)):])
        peak = {side: max(sizes) / 1e9 for side, sizes in self.seen.items()}
        return (f"trainer {peak.get('trainer', 0):.1f} engine {peak['engine']:.1f} released to {least / 1e9:.1f}, together at most "
                f"{peak['in use']:.1f} GB")
