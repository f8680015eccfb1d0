"""The plugin that SGLang loads in each of its processes, by the entry point in offbeat_engine.dist-info.

It makes POST /weights_checker {"action": "checksum"} answer with fingerprints (fingerprint.py) of the tensors of the
Hugging Face checkpoint instead of hashes of SGLang's own, fused and padded ones, and on a machine without CUDA.
"""

import multiprocessing
import os
import sys


def register():
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))   # last, so that it shadows nothing
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    srt = "sglang.srt."
    HookRegistry.register(srt + "utils.weight_checker.WeightChecker._compute_checksum", checksums, HookType.REPLACE)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        HookRegistry.register(srt + "entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER)


def fork_children(result, *args, **kwargs):
    """Scheduler and detokenizer share the parent's imports (6 s of two cores each). CUDA does not survive a fork."""
    multiprocessing.set_start_method("fork", force=True)


def checksums(checker):
    """Replaces WeightChecker._compute_checksum: {'<hf name>|r0:r1|c0:c1': '<16 hex digits>'} of this rank's slices."""
    import torch
    from fingerprint import fingerprint_tensor, to_int
    names, values = [], []
    for name, t, r0, c0 in hf_slices(checker._get_model()):
        rows, columns = t.shape if t.dim() == 2 else (1, t.shape[0])
        if t.numel():   # a rank may hold padding only
            names.append(f"{name}|{r0}:{r0 + rows}|{c0}:{c0 + columns}")
            values.append(fingerprint_tensor(t, r0, c0))
    found = {name: f"{to_int(value):016x}" for name, value in zip(names, torch.stack(values).tolist())}
    total = sum(int(value, 16) for value in found.values()) % (1 << 64)
    return {"checksums": found, "per_gpu_checksum": f"{total:016x}",
            "parallelism_info": checker._parallelism_info().model_dump()}


def hf_slices(model):
    """Yields (hf name, tensor [columns] or [rows, columns], first row, first column in the whole tensor) for every
    parameter of a dense model. A 1-D tensor is one row. A tied head is the embedding's module, and yielded once."""
    limits = real_sizes(model.config)
    for path, module in model.named_modules():
        for leaf, t in module.named_parameters(recurse=False):
            if t.dim() > 2:
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
    inner = getattr(config, "original_intermediate_size", config.intermediate_size)
    return {"q_proj": (heads * size, None), "k_proj": (kv_heads * size, None), "v_proj": (kv_heads * size, None),
            "o_proj": (None, heads * size), "gate_proj": (inner, None), "up_proj": (inner, None),
            "down_proj": (None, inner)}


def pieces(path, module, leaf, t):
    """Yields (hf name, piece, first row, first column) of one parameter. What its layer's class does to a checkpoint's
    tensors at loading decides: see layers/linear.py and layers/vocab_parallel_embedding.py of SGLang."""
    kind, (parent, _, own) = type(module).__name__, path.rpartition(".")
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
