"""One table between Hugging Face tensors and this rank's Megatron parameters. Loading, export and the weight sync all
walk it, so that the directions cannot drift apart.

A Megatron parameter has a kind, which says how full Hugging Face tensors become a tensor-parallel shard and back:

    copy      the same tensor on every rank
    row       split along dim 1
    vocab     rows padded with zeros to a multiple of the tensor parallel size, split along dim 0
    qkv       per query group [its q heads, k, v], split along dim 0 (weights and biases alike)
    gate_up   each rank holds [its gate rows; its up rows]
    experts_row, experts_gate_up
              dim 0 is the expert; an expert parallel rank holds its consecutive ones, each split as the kind's other half says
"""
import json
import os
import re
import shutil

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WHOLE = {
    "embedding.word_embeddings.weight": ("vocab", [EMBEDDING]),
    "output_layer.weight": ("vocab", [HEAD]),
    "decoder.final_layernorm.weight": ("copy", ["model.norm.weight"]),
    "value_head.weight": ("copy", ["value_head.weight"]),      # of a critic
    "value_head.bias": ("copy", ["value_head.bias"]),
}
LAYER = {
    "input_layernorm.weight": ("copy", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": ("qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_qkv.bias": ("qkv", [f"self_attn.{x}_proj.bias" for x in "qkv"]),
    "self_attention.q_layernorm.weight": ("copy", ["self_attn.q_norm.weight"]),
    "self_attention.k_layernorm.weight": ("copy", ["self_attn.k_norm.weight"]),
    "self_attention.linear_proj.weight": ("row", ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": ("copy", ["post_attention_layernorm.weight"]),
    "mlp.linear_fc1.weight": ("gate_up", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": ("row", ["mlp.down_proj.weight"]),
    "mlp.router.weight": ("copy", ["mlp.gate.weight"]),
    "mlp.experts.linear_fc1": ("experts_gate_up", ["mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"]),
    "mlp.experts.linear_fc2": ("experts_row", ["mlp.experts.{}.down_proj.weight"]),
}
SHARD_BYTES = 4 << 30  # of one file of an export
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # files of a checkpoint that are not weights


def table(model):
    """[(parameter, kind, [Hugging Face names])] of this pipeline stage, in a fixed order: the experts last, and first what is as
    large as the vocabulary, for the last bucket of a sync to be a small one. Experts are named all, also those of other ranks."""
    gpt = unwrap_model(model)
    offset = get_transformer_layer_offset(gpt.config)
    rows = []
    for name, param in gpt.named_parameters():
        if name in WHOLE:
            kind, names = WHOLE[name]
        else:
            layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
            kind, names = LAYER[rest]
            experts = range(gpt.config.num_moe_experts) if kind.startswith("experts") else [None]
            names = [f"model.layers.{int(layer) + offset}.{n}".format(expert) for expert in experts for n in names]
        rows.append((param, kind, names))
    return sorted(rows, key=lambda row: (row[1] != "vocab", row[1].startswith("experts")))


# ---- Hugging Face -> Megatron ---------------------------------------------------------------------------------------
def to_shard(kind, full, param, hf, tp, rank):
    """full: the Hugging Face tensors of one parameter -> rank's shard of it, in the shape of param. Of experts: of param's own."""
    if kind.startswith("experts"):
        each = len(full) // len(param)
        return torch.stack([to_shard(kind.removeprefix("experts_"), full[i:i + each], None, hf, tp, rank)
                            for i in range(0, len(full), each)])
    if kind == "qkv":
        per_group = [t.unflatten(0, (hf.num_key_value_heads, -1)) for t in full]
        return torch.cat(per_group, dim=1).flatten(0, 1).chunk(tp)[rank]
    if kind == "gate_up":
        return torch.cat([t.chunk(tp)[rank] for t in full])
    if kind == "row":
        return full[0].chunk(tp, dim=1)[rank]
    if kind == "vocab":
        first = rank * param.size(0)
        rows = full[0][first:first + param.size(0)]
        return torch.cat([rows, rows.new_zeros(param.size(0) - rows.size(0), *rows.shape[1:])])
    return full[0]


@torch.no_grad()
def load(model, hf, get_tensor):
    """Fills this rank's shards. get_tensor(name) -> the full Hugging Face tensor, on any device, in any dtype.
    Raises ValueError when a tensor has another shape than the config says."""
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for param, kind, names in table(model):
        if names == [HEAD] and hf.tie_word_embeddings:
            names = [EMBEDDING]  # the last pipeline stage holds its own copy of a tied embedding
        if kind.startswith("experts"):
            mine = len(names) // mpu.get_expert_model_parallel_world_size()
            names = names[mpu.get_expert_model_parallel_rank() * mine:][:mine]
        full = [get_tensor(n) for n in names]
        if kind == "vocab" and full[0].size(0) != hf.vocab_size:
            raise ValueError(f"--hf-checkpoint: {names[0]} has {full[0].size(0)} rows, vocab_size is {hf.vocab_size}")
        shard = to_shard(kind, full, param, hf, tp, rank)
        if shard.shape != param.shape:
            raise ValueError(f"--hf-checkpoint: {', '.join(names)}: {[tuple(t.shape) for t in full]} do not fit "
                             "config.json")
        param.copy_(shard)


# ---- Megatron -> Hugging Face ---------------------------------------------------------------------------------------
def to_views(kind, shards, hf):
    """The tensor-parallel shards of one parameter, in rank order -> its full Hugging Face tensors. Of a single shard they are
    views, and the caller's copy is the only one. One of more than two dimensions stands for its first three merged. Of
    experts: the shards of one expert parallel rank after the other."""
    def joined(dim=0):
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)

    if kind.startswith("experts"):
        tp = mpu.get_expert_tensor_parallel_world_size()
        return [view for first in range(0, len(shards), tp) for expert in zip(*shards[first:first + tp])
                for view in to_views(kind.removeprefix("experts_"), expert, hf)]
    if kind == "qkv":
        heads, groups = hf.num_attention_heads, hf.num_key_value_heads
        per_group = joined().unflatten(0, (groups, heads // groups + 2, -1))           # [group, q heads + k + v, dim]
        return per_group.split([heads // groups, 1, 1], dim=1)
    if kind == "gate_up":
        halves = [s.chunk(2) for s in shards]
        return halves[0] if len(halves) == 1 else [torch.cat(parts) for parts in zip(*halves)]
    if kind == "row":
        return [joined(1)]
    if kind == "vocab":
        return [joined()[:hf.vocab_size]]
    return [shards[0]]


def hf_shape(view):
    """Of the Hugging Face tensor that a view of `to_views` stands for."""
    return torch.Size((view.shape[:3].numel(), *view.shape[3:])) if view.dim() > 2 else view.shape


def hf_tensors(model, hf, read=lambda param: param.data):
    """Yields (Hugging Face name, full tensor) of this pipeline stage: `hf_views`, contiguous. Of a single shard it may be
    the parameter's own memory."""
    for name, view in hf_views(model, hf, read):
        yield name, view.reshape(hf_shape(view)).contiguous()


@torch.no_grad()
def hf_views(model, hf, read=lambda param: param.data):
    """Yields (Hugging Face name, view) of this pipeline stage, in a fixed order, the experts in a second pass. Every rank of its
    tensor and expert parallel groups must iterate (see `gathers`). One Megatron parameter is gathered at a time. `read` says
    what to export: the weights, or for example `lambda p: p.main_grad`. A tied head is not repeated."""
    for param, kind, names in table(model):
        if names == [HEAD] and hf.tie_word_embeddings:
            continue  # the first stage exports it, as the embedding
        group = None if kind == "copy" else mpu.get_tensor_model_parallel_group()
        if kind.startswith("experts"):
            group = mpu.get_expert_tensor_and_model_parallel_group()  # the tensor parallel ranks are neighbours in it
        shards = [read(param)]
        if group and group.size() > 1:
            mine = shards[0].contiguous()
            shards = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(shards, mine, group=group)
        yield from zip(names, to_views(kind, shards, hf))


def gathers():
    """Whether this rank is of the first replica: the ranks that together hold one copy of everything."""
    return mpu.get_expert_data_parallel_rank() == 0


def sends():
    """Whether this rank, of those that gather, is the one of its pipeline stage that does something with it."""
    return mpu.get_data_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0


def save_hf(model, hf, source_dir, out_dir):
    """Writes a Hugging Face directory that transformers and SGLang load: safetensors files of at most 4 GiB (larger
    only for a single larger tensor), their index, and source_dir's config and tokenizer files. Every rank must call
    it. Atomic: out_dir appears, or is replaced, when all of it is written. Weights keep the model's dtype."""
    out_dir = os.path.abspath(out_dir)
    temporary = out_dir + ".tmp"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
    dist.barrier()
    files = {}
    if gathers():
        files = write_shards(model, hf, temporary)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, files)  # also the barrier behind which all files are whole
    if dist.get_rank() == 0:
        names = {name: file for part in everyone for name, (file, _) in part.items()}
        size = sum(bytes_ for part in everyone for _, bytes_ in part.values())
        with open(os.path.join(temporary, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {"total_size": size}, "weight_map": names}, f, indent=1)
        for name in os.listdir(source_dir):
            if name.endswith(COPIED) and not name.endswith(".index.json"):
                shutil.copy(os.path.join(source_dir, name), temporary)
        replace_dir(temporary, out_dir)
    dist.barrier()


def write_shards(model, hf, folder):
    """This pipeline stage's safetensors files, written by one of its ranks -> {name: (file, bytes)}."""
    from safetensors.torch import save_file
    stage, files, pending, pending_bytes, count = mpu.get_pipeline_model_parallel_rank(), {}, {}, 0, 0

    def flush():
        nonlocal pending, pending_bytes, count
        file = f"model-stage{stage:03d}-{count:05d}.safetensors"
        save_file(pending, os.path.join(folder, file), metadata={"format": "pt"})
        files.update({name: (file, t.nbytes) for name, t in pending.items()})
        pending, pending_bytes, count = {}, 0, count + 1

    for name, tensor in hf_tensors(model, hf):
        if not sends():
            continue
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.cpu()
        pending_bytes += tensor.nbytes
    if pending:
        flush()
    return files


def replace_dir(new, old):
    """Renames folder `new` to `old`; what was at `old` is moved aside first, and removed last."""
    if os.path.exists(old):
        aside = old + ".old"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(old, aside)
        os.rename(new, old)
        shutil.rmtree(aside)
    else:
        os.rename(new, old)
