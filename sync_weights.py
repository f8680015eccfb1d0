"""Megatron's weights into the engines: gather, flatten into buckets, broadcast, and prove that they arrived.

`sync_weights` is the driver's side and the order of things; `WeightSender` lives in every training rank. One rank of each
pipeline stage is a source: it forms one group (NCCL; gloo on the CPU) with every rank of every engine and sends its stage.
On shared GPUs (--colocate), where NCCL has no second rank for a device, each rank shows its own GPU's engine the buckets in
place, by CUDA IPC.
"""

import concurrent.futures
import contextlib
import datetime
import itertools
import threading
import time
import uuid

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

import weight_map
from buckets import bucket_bytes, cut, lay_out
from engine import EngineClient, EngineError, NoEngineLeft, api_key, free_address
from fingerprint import fingerprinter, to_int


def sync_weights(trainers, rollout, version):
    """Publishes the trainers' weights as `version` on every engine. Returns the sync's metrics.

    Order: generation rests -> buckets, KV cache flushed -> version published -> generation goes on, while the fingerprints are
    compared: nothing of a version is taken from an engine before it proved to hold it. Engines that came back join first. One
    that fails is left out, and all begins again; NoEngineLeft when there is none.

    The rollout manager asks the engines for it as soon as nothing runs there, while this calls the trainers into the broadcast;
    they look at `updated` when a bucket is not taken.
    """
    started = time.time()
    version = version if trainers else 0      # --debug-rollout-only: the engines keep what they loaded
    while True:
        resting = rollout.rest.remote(version)
        for trainer in trainers:
            trainer.prepare_weights.remote()  # meanwhile
        try:
            if urls := ray.get(resting):
                name = uuid.uuid4().hex[:8]   # a new group each time
                stages = ray.get([trainer.join_engines.remote(urls, name) for trainer in trainers])
                ray.get(rollout.update.remote(version, [stage for stage in stages if stage]))
            rested = time.time()
            updated = rollout.updated.remote()
            sent = [trainer.send_weights.remote([updated]) for trainer in trainers]
            published = ray.get(rollout.publish.remote(version, sent, [trainer.fingerprints.remote() for trainer in trainers]))
            break
        except EngineError as error:
            if isinstance(error, NoEngineLeft):
                raise
            cause = getattr(error, "cause", error)
            ray.get([trainer.leave_engines.remote() for trainer in trainers])
            ray.get(rollout.blame.remote(cause.url, str(cause)))
    seconds = time.time() - rested
    return {"sync/version": version, "sync/time": time.time() - started, "sync/pause_time": rested - started,
            "sync/broadcast_time": seconds, **published, "sync/gb_per_s": published["sync/bytes"] / max(seconds, 1e-9) / 1e9}


class WeightSender:
    """The training rank's side. Every rank of the first data-parallel replica gathers; the sources also send."""

    def __init__(self, args, ddp, hf):
        self.args, self.ddp, self.hf = args, ddp, hf
        self.timeout = args.update_weight_timeout
        self.gathers = self.sends = self.in_place = False
        self.clients, self.group, self.buffers, self.plan, self.filled = [], None, [None, None], None, None

    def join(self, urls, name):
        """Forms a group for each stage with the engines at `urls`, in place of the one before; colocated engines need none.
        Sources return what the engines have to know of their stage, see Fleet.update."""
        self.leave()
        self.in_place = self.args.colocate and self.args.device == "cuda"
        self.gathers = self.in_place or weight_map.gathers()
        self.sends = self.in_place or weight_map.sends()
        if self.gathers and not self.plan:
            self.plan_buckets()
        if self.in_place:
            tp, rank = self.args.rollout_num_gpus_per_engine, dist.get_rank()
            self.beside = range(rank // tp * tp, rank // tp * tp + tp)       # the ranks on the GPUs of this rank's engine
            if rank == self.beside[0]:
                self.clients = [EngineClient(urls[rank // tp], api_key(self.args), self.timeout)]
            self.pool, self.name = concurrent.futures.ThreadPoolExecutor(1), None
        else:
            self.in_turn(lambda: self.join_stage(urls, name))
        if not self.sends:
            return None
        size = 0 if self.in_place and dist.get_rank() else sum(map(bucket_bytes, self.plan))
        return {"stage": mpu.get_pipeline_model_parallel_rank(), "group": self.name, "tensors": self.tensors, "bytes": size,
                "limit": self.args.update_weight_buffer_size, "timeout": self.timeout * len(self.plan)}

    def plan_buckets(self):
        """What is the same in each sync. A rank that has all of a stage to itself also keeps the views: they are the parameters'
        own memory. What is gathered is let go of at once."""
        views, self.views = weight_map.hf_views(self.ddp, self.hf), None
        if mpu.get_expert_tensor_and_model_parallel_world_size() == 1:
            views = self.views = list(views)
        self.tensors = [(name, view.dtype, weight_map.hf_shape(view)) for name, view in views]
        self.plan = cut(self.tensors, self.args.update_weight_buffer_size)
        if self.sends:
            self.buckets = lay_out(self.plan, self.buffers, next(self.ddp.parameters()).device)
            self.prints = [fingerprinter([(t, 0, 0) for t in tensors.values()]) for _, tensors in self.buckets]

    def in_turn(self, action):
        """Runs action() on this rank when its stage's turn has come. One stage after the other: two sources at once could meet
        the engines in different orders and wait for each other for ever. An error is raised behind the last turn, so that the
        ranks stay in step."""
        failed = None
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            if stage == mpu.get_pipeline_model_parallel_rank():
                try:
                    action()
                except EngineError as error:
                    failed = error
            dist.barrier()
        if failed:
            raise failed

    def join_stage(self, urls, name):
        """This rank is rank 0 of the group, engine i has tp ranks from 1 + i x tp. EngineError names the engine that refused
        or was not there in time."""
        if not self.sends:
            return
        tp = self.args.rollout_num_gpus_per_engine
        self.clients = [EngineClient(url, api_key(self.args), self.timeout) for url in urls]
        self.name = f"{name}-stage{mpu.get_pipeline_model_parallel_rank()}"
        self.pool = concurrent.futures.ThreadPoolExecutor(len(urls) + 1)
        address, port = free_address()
        backend, world = "nccl" if torch.cuda.is_available() else "gloo", 1 + len(urls) * tp
        limit = datetime.timedelta(seconds=self.timeout)
        meeting = dist.TCPStore(address, port, None, True, limit, wait_for_workers=False)     # without it nobody waits on
        asked = [self.pool.submit(client.init_group, address, port, 1 + i * tp, world, self.name, backend)
                 for i, client in enumerate(self.clients)]
        joined = self.pool.submit(join_group, address, port, world, self.name, backend, limit)
        try:
            first_error([*asked, joined], self.timeout, "joining the weight update group")
        except EngineError:
            del meeting                       # those who wait for the one that does not come are told so at once
            raise
        self.group, self.meeting = joined.result(), meeting

    def leave(self):
        """Ends the group on both sides. Nothing here waits for a member that is dead or hangs in a broadcast."""
        if self.group is None:
            return
        told = [self.pool.submit(EngineClient.destroy_group, client, self.name) for client in self.clients]
        concurrent.futures.wait(told, 5)      # an engine that is gone refuses, one that hangs is not waited for
        threading.Thread(target=end_group, args=(self.group,), daemon=True).start()
        self.pool.shutdown(wait=False)
        self.group, self.meeting, self.clients = None, None, []

    def prepare(self):
        """Fills the first bucket. The engines need not have come to rest for that."""
        if self.gathers:
            filled = self.fill()
            self.filled = itertools.chain([next(filled)], filled)

    def send(self, updated):
        """Sends this rank's stage. The engines take the stages in order; `updated` (a reference to what says that they have all)
        is looked at when a bucket is not taken: it holds the reason."""
        if self.gathers and self.filled is None:       # this rank has joined only now, or the preparation failed
            self.prepare()
        filled, self.filled = self.filled or (), None
        try:
            if self.sends:
                self.found = self.show(filled) if self.in_place else self.broadcast(filled, updated)
        finally:
            for _ in filled:       # takes part in gathering; also where the engines fail, for the ranks beside gather on
                pass

    def fingerprints(self):
        """{name: (shape, fingerprint)} of what this rank sent last; empty where it sends nothing."""
        if not self.sends:
            return {}
        values = map(to_int, torch.cat(self.found).tolist())
        return {name: (tuple(shape), value) for (name, _, shape), value in zip(self.tensors, values)}

    def fill(self):
        """Copies one bucket after the other into its buffer and yields its number: that copy is the only one. Ranks that only
        take part in gathering copy nothing."""
        views = iter(self.views or weight_map.hf_views(self.ddp, self.hf))
        for i, bucket in enumerate(self.plan):
            whole = [view for _, view in itertools.islice(views, len(bucket))]
            if self.sends:
                places = self.buckets[i][1].values()
                torch._foreach_copy_([t.view(view.shape) for t, view in zip(places, whole)], whole)
            yield i

    def broadcast(self, filled, updated):
        """A bucket is filled while the one before is under way, and a buffer again when its broadcast has ended."""
        prints, flying, patience = [], None, self.timeout * (1 + mpu.get_pipeline_model_parallel_rank())    # for its turn
        for i in filled:
            work = dist.broadcast(self.buckets[i][0], group=self.group, group_src=0, async_op=True)
            prints.append(self.prints[i]())
            land(flying, updated, patience)
            flying = work
        land(flying, updated, patience)
        return prints

    def show(self, filled):
        """Hands the handles of the ranks beside each other to their engine, bucket by bucket. The exchange also keeps the ranks
        in step: no buffer is written again before its engine has read it, and what one engine fails with every rank raises."""
        prints, asked = [], []
        for i in filled:
            torch.cuda.synchronize()
            self.wait(asked)
            handles = [None] * dist.get_world_size()
            dist.all_gather_object(handles, ipc_handle(self.plan[i], self.buckets[i][0]))
            asked = [self.pool.submit(client.update_from_tensor, [handles[j] for j in self.beside]) for client in self.clients]
            prints.append(self.prints[i]())
        self.wait(asked)
        return prints

    def wait(self, asked):
        """Waits for the engines' answers together with all other ranks, which fail alike."""
        error = None
        try:
            first_error(asked, self.timeout, "a bucket of weights")
        except EngineError as problem:
            error = problem
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        for error in filter(None, errors):
            raise error


def land(work, updated, limit):
    """Waits for the broadcast of one bucket (None: there is none). What an engine fails with surfaces at once, with its name,
    though the broadcast may hang; EngineError without a name after `limit` seconds, or 5 behind an answer that all is there."""
    started, said = time.time(), False
    while work is not None and not work.is_completed():
        seconds = time.time() - started
        if seconds > limit:
            raise EngineError("the engines say that they have all weights, but took none of a bucket" if said else
                              f"a bucket of weights did not arrive within {limit:g} s (--update-weight-timeout)")
        if seconds > 0.01 and not said and over(updated, 0):       # looking costs more than most buckets take
            said, limit = True, min(limit, seconds + 5)
        time.sleep(min(1e-4 + seconds / 10, 0.01))
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:          # of the group's other end; who it is the request to it says
            over(updated, 5)
            raise EngineError(f"a bucket of weights: {str(error).splitlines()[0]}") from None


def over(updated, patience):
    """Whether the engines have received all within so many seconds; raises what one failed with."""
    if not ray.wait([updated], num_returns=1, timeout=patience)[0]:
        return False
    try:
        ray.get(updated)
    except EngineError as error:
        raise getattr(error, "cause", error) from None
    return True


def ipc_handle(bucket, flat):
    """The flattened bucket as SGLang reads it in place: a handle of this GPU's memory, and where each tensor lies in it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    monkey_patch_torch_reductions()       # names the device by its UUID: the engine counts its GPUs differently
    places = [FlattenedTensorMetadata(name, shape, dtype, start, start + size, size)
              for name, dtype, shape, start, size in bucket]
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": places}, output_str=True)


def first_error(futures, timeout, what):
    """Waits for all futures; the first error is raised without waiting for the others. A client's own time limit names its
    engine, so it gets the chance to come first."""
    done, waiting = concurrent.futures.wait(futures, timeout + 5, return_when=concurrent.futures.FIRST_EXCEPTION)
    errors = [error for error in (future.exception() for future in done) if error]
    if errors:      # torch's own says less
        raise (next((error for error in errors if isinstance(error, EngineError)), None)
               or EngineError(f"{what}: {str(errors[0]).splitlines()[0]}"))
    if waiting:
        raise EngineError(f"{what}: {len(waiting)} of {len(futures)} engines did not answer within "
                          f"--update-weight-timeout {timeout:g} s")


def join_group(address, port, world_size, name, backend, limit):
    """Rank 0 of a process group beside the default one, built as SGLang builds its side: the same store and prefix."""
    store = dist.TCPStore(address, port, world_size, False, limit)
    group, _ = _new_process_group_helper(world_size, 0, [], Backend(backend), PrefixStore(name, store),
                                         group_name=name, backend_options=None, timeout=limit)
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def end_group(group):
    """In a thread of its own: what is in flight with a dead member ends when its time limit does."""
    with contextlib.suppress(Exception):
        group.abort()
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)
