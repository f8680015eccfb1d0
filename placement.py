"""Puts processes on machines: starts Ray, the engines, the training ranks and the rollout manager, and takes them down.

Training and rollout GPUs are disjoint because each actor reserves its own in Ray; that is checked here, not hoped for. With
--colocate they are the same on purpose: only the training ranks reserve, and each engine is told their GPUs.
"""

import _thread
import contextlib
import fcntl
import gc
import json
import os
import re
import signal
import sys
import time
import traceback

import ray
from ray._private import ray_constants
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from tqdm import tqdm

import checkpoint
import plan
from args import HOOKS, load_function, nodes_needed, policies
from engine import EngineError, NoEngineLeft, SGLangEngine, look_around
from replay import ReplayManager
from rollout import RolloutManager
from trainer import TrainWorker
from sync_weights import sync_weights
from tracking import Tracker
from watchdog import Watchdog, said


HELD = []       # the placement groups of this process's run


def run(train, args):
    """Starts everything, runs an entry script's loop `train(args, trainers, rollout, tracker, start_step)`, and takes
    everything down whatever happens. Exits non-zero on an error; its cause is the last line on standard error."""
    if args.dry_run:
        text, fits = plan.describe(args)
        print(text)
        sys.exit(0 if fits else 1)
    end = lambda *_: sys.exit(143)
    signal.signal(signal.SIGTERM, end)                         # so that `finally` below is reached
    trainers, engines, rollout, tracker, status, began, watchdog = [], [], None, None, 0, time.time(), None
    lock = take_folder(args)
    try:
        step = checkpoint.latest(args)[0] if args.load else 0
        if args.load and step >= (args.num_rollout or 0) and not (args.eval_only or args.save_hf):
            raise ValueError(f"--load {args.load}: the checkpoint has {step} steps already, so --num-rollout {args.num_rollout} "
                             f"leaves nothing to do")
        start_ray(args)
        signal.signal(signal.SIGTERM, end)                     # Ray has put its own handler there
        trainers, rollout = launch(args, engines)
        if args.load:                     # from the one before, if its bytes are not what was written
            step = checkpoint.load(args, trainers, rollout)
        if not (args.eval_only or args.debug_rollout_only):
            print(policies(args), flush=True)
        if not args.eval_only and step < args.num_rollout:
            write_flags(args)
        tracker = Tracker(args, step)
        watchdog = Watchdog("driver", args, finish=lambda why: _thread.interrupt_main(signal.SIGTERM))
        watchdog.start()
        if sys.stderr.isatty():
            tracker.watch(rollout)
        trained = step if args.eval_only else keep_training(train, args, trainers, rollout, tracker, step)
        finish(args, trained, trainers, rollout, tracker, save=trained > step)
    except (KeyboardInterrupt, SystemExit) as error:
        status = 130 if isinstance(error, KeyboardInterrupt) else error.code
        close(tracker)
        if said(os.path.join(args.run_dir, "logs"), began):
            status = 1
        saved = checkpoint.complete(args.save)
        print("interrupted: stopping; " + (f"--load {args.run_dir} goes on after {max(saved)} steps" if saved else
                                           "no checkpoint was saved (see --save-interval)"), file=sys.stderr)
    except Exception as error:
        status = 1
        close(tracker)
        report(error, args, engines, trainers, rollout, began)
    finally:
        if watchdog:
            watchdog.ended = True
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)                # a second Ctrl-C must not cut the cleaning short
        stop(engines)
    lock.close()
    sys.exit(status)


def keep_training(train, args, trainers, rollout, tracker, step):
    """The loop; begun anew at the step where it stands when the last engine is lost and one comes back. As behind a resume
    nothing is in flight then: what the engines were at has gone back into the buffer. If none comes back, the run is saved."""
    first = step
    while True:
        try:
            return train(args, trainers, rollout, tracker, step)
        except NoEngineLeft as error:
            tracker.lose_evaluation()
            print(f"warning: {getattr(error, 'cause', error)}: waiting for one to come back", file=sys.stderr, flush=True)
            step = ray.get(rollout.trained_steps.remote())
            of_ranks = set(ray.get([trainer.trained_steps.remote() for trainer in trainers])) - {None, step}
            if of_ranks:                  # never: then the last checkpoint is what counts
                raise
            try:
                ray.get(rollout.revive.remote())
            except NoEngineLeft:
                if step > first:          # else it is a fault of the set-up, and nothing is lost
                    checkpoint.save(args, step, trainers, rollout)
                    print(f"saved after {step} steps: --load {args.run_dir} goes on from there", file=sys.stderr, flush=True)
                raise


def take_folder(args):
    """A lock on the run's folder, held while this process lives and freed even by kill -9: two runs would mix their files."""
    try:
        lock = open(os.path.join(args.run_dir, ".lock"), "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another process is writing to {args.run_dir}: choose another --run-name")
    except OSError as error:
        sys.exit(f"error: --output-dir, --run-name: {error}")
    return lock


def write_flags(args):
    """RUN/args.json: what the run is made with, for a replay and for the reader; without the engines' key."""
    path, words = os.path.join(args.run_dir, "args.json"), args.sglang_args
    hidden = ["***" if i and words[i - 1] == "--api-key" else word for i, word in enumerate(words) if "--api-key=" not in word]
    with open(path + ".tmp", "w") as f:
        json.dump({**vars(args), "sglang_args": hidden, "recorded": None}, f, indent=1)
    os.replace(path + ".tmp", path)


def close(tracker):
    if tracker:
        tracker.bar.close()               # else the bar would write over what is said now


def finish(args, step, trainers, rollout, tracker, save):
    """After the last step: the last checkpoint, the export, one more sync and the evaluation of what it published."""
    if save and args.save_interval:
        checkpoint.save(args, step, trainers, rollout)
    if args.save_hf:                      # before the evaluation: its failure must not cost the weights
        ray.get([trainer.export.remote(args.save_hf) for trainer in trainers])
    tracker.collect_evaluation()          # of the version before
    if args.eval_sets and not args.without_engines:
        tracker.note(sync_weights(trainers, rollout, version=step))
        tracker.evaluate(rollout)
    ray.get(rollout.proved.remote())      # of the last sync, too
    ray.get(rollout.retire.remote())
    ray.get([trainer.leave_engines.remote() for trainer in trainers])
    tracker.summary()


def report(error, args, engines, trainers, rollout, began):
    """The whole trace goes to a file, the cause in one line to the terminal, behind what is known of servers that died."""
    for rank, engine in enumerate(engines):
        with contextlib.suppress(Exception):                   # an actor that is gone as well has nothing to say
            if reason := ray.get(engine.died.remote(), timeout=5):
                print(f"engine {rank}: {reason.splitlines()[0]} (log: {args.run_dir}/logs)", file=sys.stderr)
    remote = isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None
    cause = error.cause if remote else error
    path = os.path.join(args.run_dir, "logs", "error.txt")
    trace = "".join(traceback.format_exception(error))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(f"{error}\n{trace}")
    except OSError as problem:            # a full disk may be what this is about
        path = f"not written: {problem}"
    if isinstance(cause, ray.exceptions.RayActorError):        # Ray's paragraphs; the reason is their last line
        names = {trainer._actor_id.hex(): f"training rank {rank}" for rank, trainer in enumerate(trainers)}
        names |= {rollout._actor_id.hex(): "rollout manager"} if rollout else {}
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = said(os.path.join(args.run_dir, "logs"), began) or lines[-1]
        cause = RuntimeError(f"{names.get(cause.actor_id, 'a process of the run')} has died: {reason}")
    named = isinstance(cause, EngineError) or isinstance(cause, ValueError) and not remote   # says all by itself
    kind = "" if named else f"{type(cause).__name__}: "
    place = "" if isinstance(cause, EngineError) else users_place(args, str(error) if remote else trace)
    print(f"error: {place}{kind}{cause}   (trace: {path})", file=sys.stderr, flush=True)


def users_place(args, trace):
    """'/home/me/my_rewards.py:3, in brief: ' where an error came from a function that a flag names: the innermost line of the
    trace that lies in the function's file; else "". The trace is a text, since that of another process is."""
    files = set()
    for flag, count in HOOKS:
        if path := getattr(args, flag):
            module = sys.modules.get(load_function(path, flag, count).__module__)
            files.add(getattr(module, "__file__", None))
    frames = re.findall(r'^ *File "(.+)", line (\d+), in (.+)$', trace, re.MULTILINE)
    return next((f"{file}:{line}, in {name}: " for file, line, name in reversed(frames) if file in files), "")


# ---- Ray --------------------------------------------------------------------------------------------------
def start_ray(args):
    """A local cluster for this run alone, or the one at --ray-address. ValueError when it has too few GPUs (cores)."""
    HELD.clear()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")          # Ray's 15 lets any other program stretch a step
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")        # threads that spin take the cores from the engines
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""        # for every actor: none may take a GPU that is there all the same
    quiet = {"address": "local", "include_dashboard": False, "logging_level": "ERROR"}       # not one that happens to run here
    print(f"starting Ray; the run's folder is {args.run_dir}", flush=True)
    # a cluster of its own listens on loopback, as Ray's does elsewhere than on Linux: who reaches its ports can run code
    ray_constants.ENABLE_RAY_CLUSTER = bool(args.ray_address)
    if args.ray_address:
        ray.init(address=args.ray_address, logging_level="ERROR")
    elif args.device == "cuda":
        ray.init(**quiet)
    else:
        ray.init(num_cpus=args.world_size + args.num_engines * args.rollout_num_gpus_per_engine + 1, num_gpus=0, **quiet)
    have, training = int(ray.cluster_resources().get(unit(args), 0)), 0 if args.debug_rollout_only else args.world_size
    rollout = 0 if args.without_engines or args.rollout_external_engine_addrs or args.colocate else args.rollout_num_gpus
    if training + rollout > have:
        raise ValueError(f"{training} {unit(args)}s for training (--actor-num-nodes {args.actor_num_nodes} x "
                         f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}) + {rollout} for --rollout-num-gpus = "
                         f"{training + rollout} on {nodes_needed(args)} nodes of --num-gpus-per-node "
                         f"{args.num_gpus_per_node}, but the cluster has {have}")


def unit(args):
    """What a rank or an engine's rank reserves of a node: on the CPU, where a 'GPU' is a process, a core."""
    return "GPU" if args.device == "cuda" else "CPU"


def launch(args, engines):
    """Starts engines, training ranks and the rollout manager side by side and joins them. -> (trainers, rollout).
    `engines` is filled as they start, so that the caller can stop them when a later part fails."""
    started = time.time()
    while HELD:                           # by a run before this one in the same cluster
        remove_placement_group(HELD.pop())
    urls = args.rollout_external_engine_addrs
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)   # beside the run's folder
    manager = ray.remote(ReplayManager if args.replay and not args.replay_data_only else RolloutManager)
    rollout = manager.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote(args)
    size = args.actor_num_gpus_per_node
    options = reserve(args, "training node(s)", 0 if args.debug_rollout_only else args.actor_num_nodes, size, size)
    trainers = start_trainers(args, options)
    if not (args.without_engines or urls):
        engines += start_engines(args, trainers, options)
    starting = [engine.start.remote() for engine in engines]
    wait_for([*starting, *(trainer.ready.remote() for trainer in trainers), rollout.ready.remote()],
             max(args.engine_start_timeout, args.distributed_timeout),
             f"{len(engines)} engines, {len(trainers)} training ranks, rollout manager")
    urls = urls or ray.get(starting)
    ray.get(rollout.connect.remote(urls, engines))
    gc.freeze()                           # what the imports left, half a million objects: each look for garbage there costs 0.3 s
    print(f"everything is up after {time.time() - started:.0f} s", flush=True)
    return trainers, rollout


def start_engines(args, trainers, options):
    """One actor for each server. Colocated ones start when the training ranks have taken their memory, beside the first rank
    of those whose GPUs they use."""
    count, tp = args.num_engines, args.rollout_num_gpus_per_engine
    if not (args.colocate and trainers):
        return [SGLangEngine.options(max_restarts=args.max_engine_restarts, **option).remote(i, args)
                for i, option in enumerate(reserve(args, "engine(s)", count, tp, 1))]
    gpus = ray.get([trainer.gpu.remote() for trainer in trainers if args.device == "cuda"], timeout=args.distributed_timeout)
    return [SGLangEngine.options(num_gpus=0, scheduling_strategy=options[i * tp]["scheduling_strategy"])
            .remote(i, args, gpus[i * tp:(i + 1) * tp]) for i in range(count)]


def start_trainers(args, options):
    """The first rank of each node says what its node sees; rank 0 also where all ranks meet."""
    if args.debug_rollout_only:
        return []
    firsts = options[::args.actor_num_gpus_per_node]
    nodes = ray.get([ray.remote(look_around).options(**first).remote(args) for first in firsts], timeout=args.distributed_timeout)
    for host, _, missing in nodes:
        if missing:
            raise ValueError(f"the node {host} does not see {', '.join(missing)}: --hf-checkpoint and --output-dir must be on a "
                             f"file system of all nodes, under the same path")
    worker, (host, port, _) = ray.remote(TrainWorker), nodes[0]
    return [worker.options(**options[rank]).remote(args, rank, f"{host}:{port}") for rank in range(args.world_size)]


def reserve(args, what, bundles, size, actors, limit=120):
    """Actor options for bundles x actors actors. A bundle is `size` GPUs (on the CPU cores) of one node, shared evenly by its
    `actors`; bundles are packed on as few nodes as possible, and moved to another one when their node is lost. What is reserved
    here is nobody else's, so training and rollout cannot end up on the same GPU."""
    if bundles == 0:
        return []
    group = placement_group([{"CPU": actors, unit(args): size}] * bundles, strategy="PACK")
    HELD.append(group)
    if not group.wait(limit):
        raise RuntimeError(f"Ray found no place within {limit:g} s for {bundles} {what}, each with {size} free {unit(args)}(s) on "
                           f"one node")
    own = {"num_gpus": size // actors, "num_cpus": 1} if unit(args) == "GPU" else {"num_cpus": size // actors}
    return [{**own, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i // actors)} for i in range(bundles * actors)]


def wait_for(refs, limit, what):
    """Waits with a progress bar; the first error is raised at once."""
    deadline, waiting = time.time() + limit, list(refs)
    with tqdm(total=len(refs), desc=f"starting {what}", bar_format="{desc}: {n}/{total} up after {elapsed}") as bar:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=1 if sys.stderr.isatty() else 10)
            ray.get(done)
            bar.update(len(done))
            bar.refresh()      # the clock goes on
            if time.time() > deadline:
                raise RuntimeError(f"{len(waiting)} of {what} were not ready within {limit:g} s")


def stop(engines):
    """Ends the servers, then Ray and with it every actor. Nothing else is touched."""
    if not ray.is_initialized():
        return
    try:
        ray.get([engine.stop.remote() for engine in engines], timeout=60)
    except Exception as error:      # a server that does not end is killed with its actor
        print(f"warning: stopping the engines: {type(error).__name__}: {error}", file=sys.stderr)
    ray.shutdown()
