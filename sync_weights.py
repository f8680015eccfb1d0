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
import time

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

import weight_map
from buckets import bucket_bytes, cut, lay_out
from engine import EngineClient, EngineError, api_key, free_address
from fingerprint import fingerprinter, to_int


def sync_weights(trainers, rollout, version):
    """Publishes the trainers' weights as `version` on every engine. Returns the sync's metrics.

    Order: pause -> flush the KV cache -> buckets -> version published -> continue, while the fingerprints are compared: nothing
    of a version is handed out before every engine proved to hold it, and no engine is left paused. Each call waits for the
    results that it is given, and none for this process; the first bucket is filled while the engines come to rest.
    """
    started = time.time()
    version = version if trainers else 0      # --debug-rollout-only: the engines keep what they loaded
    prepared = [trainer.prepare_weights.remote() for trainer in trainers]
    paused = rollout.pause.remote()
    sent = [trainer.send_weights.remote(version, paused, ready) for trainer, ready in zip(trainers, prepared)]
    published = rollout.publish.remote(version, *sent)
    try:
        pause_time, publish_time, *parts = ray.get([paused, published, *sent])
    except BaseException:
        with contextlib.suppress(Exception):  # an engine that does not answer now must not hide what went wrong before
            ray.get(rollout.resume.remote())
        raise
    parts = [part for part in parts if part]
    size, seconds = sum(part["bytes"] for part in parts), sum(part["seconds"] for part in parts)
    return {"sync/version": version, "sync/time": time.time() - started, "sync/pause_time": pause_time,
            "sync/broadcast_time": seconds, "sync/publish_time": publish_time, "sync/bytes": size,
            "sync/engine_time": max((part["waited"] for part in parts), default=0.0),      # of the broadcast: waiting for engines
            "sync/gb_per_s": size / max(seconds, 1e-9) / 1e9}


class WeightSender:
    """The training rank's side. Every rank of the first data-parallel replica gathers; the sources also send."""

    def __init__(self, args, ddp, hf):
        self.args, self.ddp, self.hf = args, ddp, hf
        self.timeout = args.update_weight_timeout
        self.gathers = self.sends = self.in_place = False
        self.clients, self.group, self.buffers = [], None, [None, None]

    def join(self, urls, name):
        """Forms a group for each stage with the engines at `urls`; colocated engines need none."""
        if not urls:
            return
        self.in_place = self.args.colocate and self.args.device == "cuda"
        self.gathers = self.in_place or mpu.get_data_parallel_rank() == 0
        self.sends = self.in_place or self.gathers and mpu.get_tensor_model_parallel_rank() == 0
        if self.in_place:
            tp, rank = self.args.rollout_num_gpus_per_engine, dist.get_rank()
            self.beside = range(rank // tp * tp, rank // tp * tp + tp)       # the ranks on the GPUs of this rank's engine
            if rank == self.beside[0]:
                self.clients = [EngineClient(urls[rank // tp], api_key(self.args), self.timeout)]
            self.pool = concurrent.futures.ThreadPoolExecutor(1)
        else:
            self.in_turn(lambda: self.join_stage(urls, name))
        if self.gathers:
            self.plan_buckets()

    def plan_buckets(self):
        """What is the same in each sync. Views of a single shard are among it: they are the parameters' own memory."""
        views = list(weight_map.hf_views(self.ddp, self.hf))
        self.tensors = [(name, view.dtype, weight_map.hf_shape(view)) for name, view in views]
        self.plan = cut(self.tensors, self.args.update_weight_buffer_size)
        self.views = views if mpu.get_tensor_model_parallel_world_size() == 1 else None
        if self.sends:
            self.buckets = lay_out(self.plan, self.buffers, views[0][1].device)
            self.prints = [fingerprinter([(t, 0, 0) for t in tensors.values()]) for _, tensors in self.buckets]

    def in_turn(self, action):
        """Runs action() on this rank when its stage's turn has come, and returns its result. One stage after the other: two
        sources at once could meet the engines in different orders and wait for each other for ever."""
        result = None
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            if stage == mpu.get_pipeline_model_parallel_rank():
                result = action()
            dist.barrier()
        return result

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
        asked = [self.pool.submit(client.init_group, address, port, 1 + i * tp, world, self.name, backend)
                 for i, client in enumerate(self.clients)]
        joined = self.pool.submit(join_group, f"tcp://{address}:{port}", world, self.name, backend, self.timeout)
        first_error([*asked, joined], self.timeout, "joining the weight update group")
        self.group = joined.result()

    def leave(self):
        """Ends the group on the engines' side, for engines that live on after the run."""
        for client in self.clients if self.group else ():
            client.destroy_group(self.name)

    def prepare(self):
        """Fills the first bucket. The engines need not have come to rest for that."""
        if self.gathers:
            self.filled = self.fill()
            next(self.filled)

    def send(self, version):
        """Sends this rank's stage in its turn; the last stage publishes the version. Sources return {"expected": {name: (shape,
        fingerprint)}, "bytes": n, "seconds": s, "waited": s}."""
        last = mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
        return self.in_turn(lambda: self.send_stage(version if last else None))

    def send_stage(self, version):
        if not self.gathers:
            return None
        started, filled = time.time(), itertools.chain([0], self.filled)
        if not self.sends:
            for _ in filled:       # takes part in gathering
                pass
            return None
        prints, waited = (self.show if self.in_place else self.broadcast)(filled, version)
        prints = map(to_int, torch.cat(prints).tolist())           # one wait for all of them
        sizes = map(bucket_bytes, () if self.in_place and dist.get_rank() else self.plan)
        return {"expected": {name: (tuple(shape), value) for (name, _, shape), value in zip(self.tensors, prints)},
                "bytes": sum(sizes), "seconds": time.time() - started, "waited": waited}

    def fill(self):
        """Copies one bucket after the other into its buffer and yields its number: that copy is the only one. Ranks that only take
        part in gathering copy nothing."""
        views = iter(self.views or weight_map.hf_views(self.ddp, self.hf))
        for i, bucket in enumerate(self.plan):
            whole = [view for _, view in itertools.islice(views, len(bucket))]
            if self.sends:
                places = self.buckets[i][1].values()
                torch._foreach_copy_([t.view(view.shape) for t, view in zip(places, whole)], whole)
            yield i

    def broadcast(self, filled, version):
        """One request tells every engine what comes. A bucket is filled while the one before is under way, and a buffer again when
        its broadcast has ended."""
        asked = [self.pool.submit(client.update_from_distributed, self.tensors, self.name, self.args.update_weight_buffer_size,
                                  version) for client in self.clients]
        prints, waited, flying = [], 0.0, None
        for i in filled:
            work = dist.broadcast(self.buckets[i][0], group=self.group, group_src=0, async_op=True)
            prints.append(self.prints[i]())
            waited += self.land(asked, flying)
            flying = work
        waited += self.land(asked, flying)
        return prints, waited + self.wait(asked)

    def land(self, asked, work):
        """Waits for the broadcast of one bucket; returns how long. An engine's refusal surfaces at once, with its name, though the
        broadcast may hang."""
        started = time.time()
        while work is not None and not work.is_completed():
            for future in asked:
                if future.done():
                    future.result()
            seconds = time.time() - started
            if seconds > self.timeout:
                raise EngineError(f"a bucket of weights did not arrive within --update-weight-timeout {self.timeout:g} s")
            time.sleep(min(1e-4 + seconds / 10, 0.01))
        if work is not None:
            work.wait()
        return time.time() - started

    def show(self, filled, version):
        """Hands the handles of the ranks beside each other to their engine, bucket by bucket. The exchange also keeps the ranks in
        step: no buffer is written again before its engine has read it."""
        prints, waited, asked = [], 0.0, []
        for i in filled:
            torch.cuda.synchronize()
            waited += self.wait(asked)
            handles = [None] * dist.get_world_size()
            dist.all_gather_object(handles, ipc_handle(self.plan[i], self.buckets[i][0]))
            asked = [self.pool.submit(client.update_from_tensor, [handles[j] for j in self.beside],
                                      version if i == len(self.plan) - 1 else None) for client in self.clients]
            prints.append(self.prints[i]())
        return prints, waited + self.wait(asked)

    def wait(self, asked):
        started = time.time()
        first_error(asked, self.timeout, "a bucket of weights")
        return time.time() - started


def ipc_handle(bucket, flat):
    """The flattened bucket as SGLang reads it in place: a handle of this GPU's memory, and where each tensor lies in it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    monkey_patch_torch_reductions()       # names the device by its UUID: the engine counts its GPUs differently
    places = [FlattenedTensorMetadata(name, shape, dtype, start, start + size, size) for name, dtype, shape, start, size in bucket]
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": places}, output_str=True)


def first_error(futures, timeout, what):
    """Waits for all futures; the first error is raised without waiting for the others. A client's own time limit names its
    engine, so it gets the chance to come first."""
    done, waiting = concurrent.futures.wait(futures, timeout + 5, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future in done:
        future.result()
    if waiting:
        raise EngineError(f"{what}: {len(waiting)} of {len(futures)} engines did not answer within "
                          f"--update-weight-timeout {timeout:g} s")


def join_group(init_method, world_size, name, backend, timeout):
    """Rank 0 of a process group beside the default one, built as SGLang builds its side: the same store and prefix."""
    limit = datetime.timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous(init_method, 0, world_size, timeout=limit))
    store.set_timeout(limit)
    group, _ = _new_process_group_helper(world_size, rank, [], Backend(backend), PrefixStore(name, store),
                                         group_name=name, backend_options=None, timeout=limit)
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
