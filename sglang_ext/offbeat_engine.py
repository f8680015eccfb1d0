"""The plugin that SGLang loads in each of its processes, by the entry point in offbeat_engine.dist-info.

It makes POST /weights_checker {"action": "checksum"} answer with fingerprints (fingerprint.py) of the tensors of the
Hugging Face checkpoint instead of hashes of SGLang's own, fused and padded ones, and on a machine without CUDA.

And POST /update_weights_from_distributed takes all buckets of a sync in one request (load_format: buckets.FORMAT=LIMIT). SGLang's
own way is a request for each bucket, 3 to 4 ms apart, in which nothing flies while a bucket is loaded. With flush_cache it forgets
every cached prefix, too, and says so (buckets.FLUSHED); where a request is still on its way out SGLang itself would die of that.
"""

import dataclasses
import multiprocessing
import os
import sys


def register():
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))   # last, so that it shadows nothing
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    srt = "sglang.srt."
    HookRegistry.register(srt + "utils.weight_checker.WeightChecker._compute_checksum", checksums, HookType.REPLACE)
    HookRegistry.register(srt + "model_executor.model_runner_components.weight_updater.WeightUpdater."
                          "update_weights_from_distributed", update_weights, HookType.AROUND)
    HookRegistry.register(srt + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
                          "update_weights_from_distributed", flush_when_idle, HookType.AROUND)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        HookRegistry.register(srt + "entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER)
        HookRegistry.register(srt + "state_capturer.base.BaseHostCache.__init__", host_cache, HookType.REPLACE)


def fork_children(result, *args, **kwargs):
    """Scheduler and detokenizer share the parent's imports (6 s of two cores each). CUDA does not survive a fork."""
    multiprocessing.set_start_method("fork", force=True)


def host_cache(cache, num_tokens, num_layers, topk_size, name):
    """Replaces BaseHostCache.__init__: where --enable-return-routed-experts keeps the experts of each token. Its own memory is
    pinned, which there is only with CUDA."""
    import torch
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def checksums(checker):
    """Replaces WeightChecker._compute_checksum: {'<hf name>|r0:r1|c0:c1': '<16 hex digits>'} of this rank's slices. What
    `receive` has read, from the same memory and behind the copies into it, is not read once more."""
    from fingerprint import fingerprints, to_int
    slices, read = slices_of(checker._get_model()), {}
    for of_slices, stage in COPIES.values():
        if of_slices is slices:
            for copy in stage:
                read.update(zip(copy.keys, copy.read.tolist() if copy.read is not None else ()))
                copy.read = None
    rest = [piece for piece in slices if piece[0] not in read]
    if rest:
        read.update(zip((key for key, *_ in rest), fingerprints([piece[2:] for piece in rest]).tolist()))
    found = {key: f"{to_int(read[key]):016x}" for key, _, t, _, _ in slices if t.numel()}   # a rank may hold padding only
    total = sum(map(to_int, read.values())) % (1 << 64)
    return {"checksums": found, "per_gpu_checksum": f"{total:016x}",
            "parallelism_info": checker._parallelism_info().model_dump()}


# ---- receiving weights ------------------------------------------------------------------------------------
def update_weights(original, updater, names, dtypes, shapes, group_name, load_format=None):
    """Around WeightUpdater.update_weights_from_distributed -> (success, message), as it answers."""
    from buckets import FORMAT
    if not (load_format or "").startswith(FORMAT + "="):
        return original(updater, names, dtypes, shapes, group_name, load_format)
    try:
        if names:
            TOLD[group_name] = tuple(names), tuple(dtypes), tuple(map(tuple, shapes)), int(load_format.partition("=")[2])
        receive(updater, TOLD[group_name], group_name)
    except Exception as error:
        return False, f"receiving weights: {type(error).__name__}: {error}; those of this engine are partly new"
    return True, "weights received"


def flush_when_idle(original, manager, request):
    """Around SchedulerWeightUpdaterManager.update_weights_from_distributed: flushes behind the update if nothing runs."""
    from buckets import FLUSHED
    request.flush_cache = request.flush_cache and manager.is_fully_idle()
    answer = original(manager, request)
    if request.flush_cache:
        answer.message += f", {FLUSHED}"
    return answer


@dataclasses.dataclass
class Copy:
    """Of one bucket's tensors into this rank's memory."""
    into: list
    out_of: list
    keys: list               # of the slices that are written
    fingerprints: object     # a function: of what they hold
    read: object = None      # what it found behind the last copy


TOLD = {}                                      # group -> what its first request says: hundreds of names, which cost 2 ms
LAID, COPIES, BUFFERS = {}, {}, [None, None]   # of a stage, by what was said of it: the same from sync to sync


def receive(updater, key, group_name):
    """Copies each bucket into the model's own tensors, and reads their fingerprints there, while the next bucket flies."""
    import torch
    import torch.distributed as dist
    group = updater._model_update_group[group_name]
    if key not in LAID:
        LAID[key] = laid_out(*key, updater.device)
    buckets = LAID[key]
    start = lambda i: dist.broadcast(buckets[i][0], group=group, group_src=0, async_op=True) if i < len(buckets) else None
    flying = start(0)
    slices = slices_of(updater.get_model())
    if key not in COPIES or COPIES[key][0] is not slices:
        COPIES[key] = slices, copies(slices, [tensors for _, tensors in buckets])
    for i, copy in enumerate(COPIES[key][1]):
        follows = start(i + 1)
        flying.wait()
        torch._foreach_copy_(copy.into, copy.out_of)
        copy.read = copy.fingerprints()
        flying = follows
    if buckets[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()       # the forward passes run on another stream


def laid_out(names, dtypes, shapes, limit, device):
    import torch
    from buckets import cut, lay_out
    return lay_out(cut(list(zip(names, (getattr(torch, dtype) for dtype in dtypes), shapes)), limit), BUFFERS, device)


def copies(slices, buckets):
    """[Copy] of each bucket {hf name: whole tensor}: of a tensor the rows and columns that this rank holds."""
    from fingerprint import fingerprinter
    places, found = {}, []
    for piece in slices:
        places.setdefault(piece[1], []).append(piece)
    for tensors in buckets:
        if unknown := tensors.keys() - places.keys():
            raise KeyError(f"this engine's model has no {sorted(unknown)[0]}")
        into = [piece for name in tensors for piece in places[name]]
        out_of = [tensors[name][c0:c0 + t.shape[0]] if t.dim() == 1 else tensors[name][r0:r0 + t.shape[0], c0:c0 + t.shape[1]]
                  for _, name, t, r0, c0 in into]
        found.append(Copy([t for _, _, t, _, _ in into], out_of, [key for key, *_ in into],
                          fingerprinter([piece[2:] for piece in into])))
    return found


# ---- where the checkpoint's tensors lie -------------------------------------------------------------------
SLICES = {}


def slices_of(model):
    """[(key of checksums, *slice of hf_slices)]. The list is made anew only where the model's memory has moved."""
    where = [p.data_ptr() for p in model.parameters()]
    if SLICES.get("where") != where:
        found = []
        for name, t, r0, c0 in hf_slices(model):
            rows, columns = t.shape if t.dim() == 2 else (1, t.shape[0])
            found.append((f"{name}|{r0}:{r0 + rows}|{c0}:{c0 + columns}", name, t, r0, c0))
        SLICES.update(where=where, found=found)
    return SLICES["found"]


def hf_slices(model):
    """Yields (hf name, tensor [columns] or [rows, columns], first row, first column in the whole tensor) for every
    parameter of the model. A 1-D tensor is one row. A tied head is the embedding's module, and yielded once."""
    limits = real_sizes(model.config)
    for path, module in model.named_modules():
        for leaf, t in module.named_parameters(recurse=False):
            if t.dim() > 2 and leaf not in ("w13_weight", "w2_weight"):
                raise NotImplementedError(f"no fingerprint for {path}.{leaf} of shape {tuple(t.shape)}")
            for name, piece, row, column in pieces(path, module, leaf, t.data):
                rows, columns = limits.get(name.split(".")[-2], (None, None))
                piece = piece[:rows and max(0, rows - row)]
                if t.dim() == 1:
                    yield name, piece, 0, row
                else:
                    yield name, piece[:, :columns and max(0, columns - column)], row, column


def real_sizes(config):
    """{layer: (rows, columns) of the checkpoint's tensor, None where all are real}. On a CPU SGLang appends zero heads
    and zero intermediate columns where tensor parallelism does not divide them; the true numbers are original_*."""
    if not hasattr(config, "original_num_attention_heads"):
        return {}
    heads, kv_heads = config.original_num_attention_heads, config.original_total_num_kv_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"   # all layers or none
    inner = getattr(config, f"original_{width}", getattr(config, width))
    return {"q_proj": (heads * size, None), "k_proj": (kv_heads * size, None), "v_proj": (kv_heads * size, None),
            "o_proj": (None, heads * size), "gate_proj": (inner, None), "up_proj": (inner, None),
            "down_proj": (None, inner)}


def pieces(path, module, leaf, t):
    """Yields (hf name, piece, first row, first column) of one parameter. What its layer's class does to a checkpoint's
    tensors at loading decides: see layers/linear.py, layers/vocab_parallel_embedding.py and layers/moe of SGLang."""
    kind, (parent, _, own) = type(module).__name__, path.rpartition(".")
    if leaf in ("w13_weight", "w2_weight"):
        yield from expert_pieces(path, module, leaf, t)
        return
    if kind == "QKVParallelLinear":
        kv_rank = getattr(module, "kv_tp_rank", module.tp_rank)   # SGLang before 0.5.18 has the one rank only
        kv = kv_rank // module.num_kv_head_replicas   # neighbouring ranks may hold the same heads
        shards = [("q_proj", module.tp_rank, module.q_proj_shard_size), ("k_proj", kv, module.kv_proj_shard_size),
                  ("v_proj", kv, module.v_proj_shard_size)]
    elif kind == "MergedColumnParallelLinear" and own == "gate_up_proj":
        shards = [(half, module.tp_rank, module.output_sizes[0] // module.tp_size) for half in ("gate_proj", "up_proj")]
    elif kind in ("VocabParallelEmbedding", "ParallelLMHead"):
        first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield f"{path}.{leaf}", t[:last - first], first, 0   # the rest is padding
        return
    elif kind == "RowParallelLinear":
        yield f"{path}.{leaf}", t, 0, module.tp_rank * t.shape[1] if t.dim() == 2 else 0
        return
    elif kind.endswith("Linear") and kind != "ReplicatedLinear":
        raise NotImplementedError(f"no fingerprint for {path}, a {kind}")
    else:   # norms: every rank has the whole
        yield f"{path}.{leaf}", t, 0, 0
        return
    start = 0
    for name, index, size in shards:
        yield f"{parent}.{name}.{leaf}", t[start:start + size], index * size, 0
        start += size


def expert_pieces(path, module, leaf, t):
    """The same of a layer's experts [expert, rows, columns]: w13_weight has each one's gate above its up."""
    method = module.quant_method
    reordered = ("use_triton_kernels", "use_flashinfer_trtllm_moe", "use_flashinfer_cutlass", "w13_swiglu_interleaved")
    if type(method).__name__ != "UnquantizedFusedMoEMethod" or any(getattr(method, flag, False) for flag in reordered):
        raise NotImplementedError(f"no fingerprint for {path}.{leaf}: this backend reorders the experts; use "
                                  "--sglang-moe-runner-backend triton")
    first, rank = module._expert_storage_rank * module._num_local_routed, module.moe_tp_rank
    for expert, matrix in enumerate(t[:module._num_local_routed], first):
        if leaf == "w2_weight":
            yield f"{path}.{expert}.down_proj.weight", matrix, 0, rank * matrix.shape[1]
            continue
        for name, half in zip(("gate_proj", "up_proj"), matrix.chunk(2)):
            yield f"{path}.{expert}.{name}.weight", half, rank * len(half), 0
