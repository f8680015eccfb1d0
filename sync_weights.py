"""Megatron's weights into the engines: gather, flatten into buckets, broadcast, and prove that they arrived.

`sync_weights` is the driver's side and the order of things; `WeightSender` lives in every training rank. One rank of each
pipeline stage is a source: it forms one group (NCCL; gloo on the CPU) with every rank of every engine and sends its stage.
On shared GPUs (--colocate), where NCCL has no second rank for a device, each rank shows its own GPU's engine the buckets in
place, by CUDA IPC.
"""

import concurrent.futures
import contextlib
import datetime
import threading
import time
import uuid

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

import weight_map
from engine import EngineClient, EngineError, NoEngineLeft, api_key, free_address
from fingerprint import fingerprint_tensor, to_int


def sync_weights(trainers, rollout, version):
    """Publishes the trainers' weights as `version` on every engine. Returns the sync's metrics.

    Order: pause -> flush the KV cache -> buckets -> version published -> continue, while the fingerprints are compared: nothing
    of a version is taken from an engine before it proved to hold it, and no engine is left paused. Engines that came back join
    again first. One that fails is left out, and all begins again; NoEngineLeft when there is none.
    """
    started = time.time()
    version = version if trainers else 0      # --debug-rollout-only: the engines keep what they loaded
    while True:
        try:
            if urls := ray.get(rollout.pause.remote()):
                ray.get([trainer.join_engines.remote(urls, uuid.uuid4().hex[:8]) for trainer in trainers])
            paused = time.time()
            sent = [part for part in ray.get([trainer.send_weights.remote() for trainer in trainers]) if part]
            broadcast = time.time()
            expected = {name: value for part in sent for name, value in part["expected"].items()}
            ray.get(rollout.publish.remote(version, expected if sent else None))
            break
        except BaseException as error:
            leave_out(error, trainers, rollout)
    ray.get(rollout.resume.remote())
    size, seconds = sum(part["bytes"] for part in sent), broadcast - paused
    return {"sync/version": version, "sync/time": time.time() - started, "sync/pause_time": paused - started,
            "sync/broadcast_time": seconds, "sync/publish_time": time.time() - broadcast, "sync/bytes": size,
            "sync/engine_time": max((part["waited"] for part in sent), default=0.0),      # of the broadcast: waiting for engines
            "sync/gb_per_s": size / max(seconds, 1e-9) / 1e9}


def leave_out(error, trainers, rollout):
    """After a failed attempt: drops the group, and the engine at fault. Raises what cannot be helped, with no engine paused."""
    try:
        if isinstance(error, NoEngineLeft) or not isinstance(error, EngineError):
            raise error
        ray.get([trainer.leave_engines.remote() for trainer in trainers])
        ray.get(rollout.blame.remote(getattr(error, "cause", error).url, str(getattr(error, "cause", error))))
    except BaseException:
        with contextlib.suppress(Exception):  # an engine that does not answer now must not hide what went wrong before
            ray.get(rollout.resume.remote())
        raise


class WeightSender:
    """The training rank's side. Every rank of the first data-parallel replica gathers; the sources also send."""

    def __init__(self, args, ddp, hf):
        self.args, self.ddp, self.hf = args, ddp, hf
        self.gathers = mpu.get_data_parallel_rank() == 0
        self.source = self.gathers and mpu.get_tensor_model_parallel_rank() == 0
        self.clients, self.group, self.buffers = [], None, [None, None]
        self.views = ()                   # of the stage that is being sent
        self.timeout, self.in_place = args.update_weight_timeout, args.colocate and args.device == "cuda"

    def join(self, urls, name):
        """Forms a group for each stage with the engines at `urls`, in place of the one before; colocated engines need none."""
        self.leave()
        self.in_place = self.in_place and bool(urls)
        if self.in_place:
            tp, rank = self.args.rollout_num_gpus_per_engine, dist.get_rank()
            self.beside = range(rank // tp * tp, rank // tp * tp + tp)       # the ranks on the GPUs of this rank's engine
            self.gathers, self.source = True, rank == self.beside[0]
            self.clients = [EngineClient(urls[rank // tp], api_key(self.args), self.timeout)] if self.source else []
            self.pool = concurrent.futures.ThreadPoolExecutor(1)
        else:
            self.in_turn(lambda: self.join_stage(urls, name))

    def in_turn(self, action):
        """Runs action() on this rank when its stage's turn has come, and returns its result. One stage after the other: two
        sources at once could meet the engines in different orders and wait for each other for ever. An error is raised behind
        the last turn, so that the ranks stay in step."""
        result, failed = None, None
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            if stage == mpu.get_pipeline_model_parallel_rank():
                try:
                    result = action()
                except EngineError as error:
                    failed = error
                    if self.in_place:          # they exchange handles with this one
                        raise
                    for _ in self.views:       # the ranks beside gather on
                        pass
            dist.barrier()
        if failed:
            raise failed
        return result

    def join_stage(self, urls, name):
        """This rank is rank 0 of the group, engine i has tp ranks from 1 + i x tp. EngineError names the engine that refused
        or was not there in time."""
        if not (self.source and urls):
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
        """Ends the group on both sides. It may have a dead member, or one that hangs in a broadcast: nothing here waits for it."""
        if self.group is None:
            return
        told = [self.pool.submit(EngineClient.destroy_group, client, self.name) for client in self.clients]
        concurrent.futures.wait(told, 5)      # an engine that is gone refuses, one that hangs is not waited for
        threading.Thread(target=end_group, args=(self.group,), daemon=True).start()
        self.pool.shutdown(wait=False)
        self.group, self.meeting, self.clients = None, None, []

    def send(self):
        """Sends this rank's stage in its turn. Sources return {"expected": {name: (shape, fingerprint)}, "bytes": n}."""
        return self.in_turn(self.send_stage)

    def send_stage(self):
        """Gathering and flattening bucket i + 1 overlaps the broadcast of bucket i: there are two buffers."""
        if not self.gathers:
            return None
        views = self.views = weight_map.hf_views(self.ddp, self.hf)
        if not (self.source and self.clients or self.in_place):
            for _ in views:        # takes part in gathering
                pass
            return None
        shapes, prints, size, flying, waited = {}, [], 0, None, 0.0
        for i, views_of_bucket in enumerate(buckets(views, self.args.update_weight_buffer_size)):
            bucket, flat = self.flatten(views_of_bucket, i % 2)
            waited += self.land(*flying) if flying else 0.0
            flying = self.show(bucket, flat) if self.in_place else self.launch(bucket, flat)
            shapes.update({name: tuple(t.shape) for name, t in bucket})
            prints += [fingerprint_tensor(t) for _, t in bucket]           # beside the broadcast, where they lie in the bucket
            size += flat.numel()
        waited += self.land(*flying)
        prints = map(to_int, torch.stack(prints).tolist())         # one wait for all of them
        return {"expected": {name: (shapes[name], value) for name, value in zip(shapes, prints)}, "bytes": 0 if self.in_place and dist.get_rank() else size, "waited": waited}

    def flatten(self, views, which):
        """Copies tensors, end to end as bytes, into one of the two buffers (kept from sync to sync): the only copy. Returns the
        tensors where they lie now, [(name, tensor)], and the bytes."""
        size = sum(view.nbytes for _, view in views)
        if self.buffers[which] is None or self.buffers[which].numel() < size:
            self.buffers[which] = torch.empty(max(size, 1), dtype=torch.uint8, device=views[0][1].device)
        bucket, start = [], 0
        for name, view in views:
            place = self.buffers[which][start:start + view.nbytes].view(view.dtype)
            bucket.append((name, place.view(weight_map.hf_shape(view))))
            start += view.nbytes
        torch._foreach_copy_([t.view(view.shape) for (_, t), (_, view) in zip(bucket, views)], [view for _, view in views])
        return bucket, self.buffers[which][:size]

    def launch(self, bucket, flat):
        """Tells every engine what comes and starts the broadcast. flush_cache=true would kill a server with requests."""
        names, shapes = [name for name, _ in bucket], [list(t.shape) for _, t in bucket]
        dtypes = [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        asked = [self.pool.submit(client.update_from_distributed, names, dtypes, shapes, self.name)
                 for client in self.clients]
        return asked, dist.broadcast(flat, group=self.group, group_src=0, async_op=True)

    def show(self, bucket, flat):
        """Hands the handles of the ranks beside each other to their engine. The exchange also keeps the ranks in step: no buffer
        is written again before its engine has read it."""
        torch.cuda.synchronize()
        handles = [None] * dist.get_world_size()
        dist.all_gather_object(handles, ipc_handle(bucket, flat))
        return [self.pool.submit(client.update_from_tensor, [handles[i] for i in self.beside]) for client in self.clients], None

    def land(self, asked, work):
        """Waits for one bucket; returns how long. An engine's refusal surfaces at once, with its name, though the broadcast may
        hang."""
        started = time.time()
        first_error(asked, self.timeout, "a bucket of weights")
        if work is not None:
            work.wait(datetime.timedelta(seconds=self.timeout))
        return time.time() - started


def ipc_handle(bucket, flat):
    """The flattened bucket as SGLang reads it in place: a handle of this GPU's memory, and where each tensor lies in it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    monkey_patch_torch_reductions()       # names the device by its UUID: the engine counts its GPUs differently
    places, start = [], 0
    for name, t in bucket:
        places.append(FlattenedTensorMetadata(name, t.shape, t.dtype, start, start + t.nbytes, t.nbytes))
        start += t.nbytes
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": places}, output_str=True)


def buckets(tensors, limit):
    """Cuts a stream of (name, tensor) into lists of at most `limit` bytes (a larger tensor has a bucket of its own)."""
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def first_error(futures, timeout, what):
    """Waits for all futures; the first error is raised without waiting for the others. A client's own time limit names its
    engine, so it gets the chance to come first."""
    done, waiting = concurrent.futures.wait(futures, timeout + 5, return_when=concurrent.futures.FIRST_EXCEPTION)
    errors = [error for error in (future.exception() for future in done) if error]
    if errors:      # torch's own says less
        raise next((error for error in errors if isinstance(error, EngineError)), None) or EngineError(f"{what}: {str(errors[0]).splitlines()[0]}")
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
