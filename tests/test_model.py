"""The Megatron model against transformers and plain torch, in real gloo processes, on tiny random models.

Cases are grouped by world size: one set of processes runs all cases of its size and reports numbers, which the tests
below compare with their bounds.
"""
import base64
import contextlib
import copy
import functools
import itertools
import json
import os
import random
import time
import traceback
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from torch.utils._python_dispatch import TorchDispatchMode

import light
from engine import pick_port
from fingerprint import check_fingerprints, fingerprint

STEPS, TEMPERATURE, ENTROPY = 2, 0.7, 0.05
ARGS = Namespace(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1, sequence_parallel=False, bf16=False,
    recompute_granularity=None, lr=1e-3, min_lr=0.0, lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=None,
    weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, clip_grad=1.0, use_distributed_optimizer=False)
SCALED_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
DISTRIBUTED = {"use_distributed_optimizer": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MODELS = {  # name: (architecture, config)
    "llama": ("Llama", {}), "llama3": ("Llama", {"rope_parameters": SCALED_ROPE}),
    "qwen2": ("Qwen2", {}), "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    "qwen2-deep": ("Qwen2", {"num_hidden_layers": 4}),
    "qwen3_moe-deep": ("Qwen3Moe", {"num_hidden_layers": 4, "head_dim": 16, **EXPERTS}),
    "qwen3_moe-raw": ("Qwen3Moe", {"head_dim": 16, **EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 3}),
}


# ---- the reference: transformers and torch AdamW --------------------------------------------------------------------
def make_hf(name):
    import transformers
    arch, config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, arch + "ForCausalLM")(getattr(transformers, arch + "Config")(**{
        "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False, **config}))
    with torch.no_grad():  # biases and norms start at 0 and 1: make every tensor matter
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(4)
    return model.float().eval()


def samples(count=8):
    """[(tokens, response_length, advantages of the response)]"""
    g = torch.Generator().manual_seed(7)
    draw = lambda low, high: torch.randint(low, high, (), generator=g).item()
    lengths = [(draw(2, 8), draw(1, 20)) for _ in range(count)]
    return [(torch.randint(0, 131, (p + r,), generator=g).tolist(), r, torch.randn(r, generator=g)) for p, r in lengths]


def per_expert(tensors):
    """transformers keeps the experts of a layer in two tensors; names and tensors as in its files."""
    out = {}
    for name, t in tensors:
        if name.endswith("experts.gate_up_proj"):
            halves = t.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            halves = [t]
        else:
            out[name] = t
            continue
        stem, _, projections = name.removesuffix("_proj").rpartition(".")
        for projection, half in zip(projections.split("_"), halves):
            out |= {f"{stem}.{e}.{projection}_proj.weight": one for e, one in enumerate(half)}
    return out


def hf_scores(model, data, temperature):
    """Each sample alone, unpadded: [(logits, log-probs, entropies) of its response]."""
    out = []
    for tokens, n, _ in data:
        logits = model(torch.tensor([tokens])).logits[0, -n - 1:-1]
        logp = (logits / temperature).log_softmax(-1)
        picked = logp.gather(-1, torch.tensor(tokens[-n:])[:, None])[:, 0]
        out.append((logits, picked, -(logp.exp() * logp).sum(-1)))
    return out


def router_logits(model, data):
    """Of each sample, each layer's scores [tokens, experts]; [] without experts."""
    out = []
    note = lambda gate, args: out[-1].append(F.linear(args[0].flatten(0, -2), gate.weight))
    hooks = [layer.mlp.gate.register_forward_pre_hook(note) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for tokens, _, _ in data if hooks else ():
        out.append([])
        with torch.no_grad():
            model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return out


def objective(logp, entropy, advantages):
    """Its sum over all samples, over the tokens of all of them, is the loss."""
    return -(advantages * logp).sum() - ENTROPY * entropy.sum()


@functools.cache
def reference(name):
    model, data = make_hf(name), samples()
    with torch.no_grad():
        scores = {t: hf_scores(model, data, t) for t in (1.0, TEMPERATURE)}
    initial = copy.deepcopy(model)
    weights = per_expert((n, p.detach()) for n, p in initial.named_parameters())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": ARGS.weight_decay},
                              {"params": vectors, "weight_decay": 0.0}], lr=ARGS.lr, betas=(0.9, 0.95),
                             eps=ARGS.adam_eps)
    curve, norms, grads = [], [], None
    for _ in range(STEPS):
        adam.zero_grad()
        loss = sum(objective(l, e, a) for (_, l, e), (_, _, a) in zip(hf_scores(model, data, TEMPERATURE), data))
        loss = loss / sum(n for _, n, _ in data)
        loss.backward()
        grads = grads or per_expert((n, p.grad.clone()) for n, p in model.named_parameters())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ARGS.clip_grad).item())
        adam.step()
        curve.append(loss.item())
    return {"initial": initial, "weights": weights, "scores": scores, "router": router_logits(initial, data), "grads": grads,
            "curve": curve, "norms": norms, "final": per_expert((n, p.detach()) for n, p in model.named_parameters())}


# ---- what runs in the processes -------------------------------------------------------------------------------------
def join(rank, world, port, args):
    """This process's groups, in the layout that all of its cases have."""
    import model as M
    torch.set_num_threads(1)
    M.init_parallel(rank, world, f"tcp://127.0.0.1:{port}", args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
                    seed=1, timeout_s=60, ep=args.expert_model_parallel_size)


def build(folder, args, load=True):
    import model as M
    hf = M.load_hf_config(folder)
    model = M.build_model(hf, args)
    if load:
        M.load_weights(model, hf, folder)
    return hf, model


def micro_batches(data, sizes, args):
    """Cuts data into micro-batches of sizes (the last size repeats) -> (packs, their data)."""
    import model as M
    align = args.tensor_model_parallel_size if args.sequence_parallel else 1
    parts, data, sizes = [], list(data), list(sizes)
    while data:
        n = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(data[:n])
        data = data[n:]
    return [M.pack([s[:2] for s in part], "cpu", align) for part in parts], parts


def loss_function(network, packs, parts, tokens, chunk=16):
    import model as M

    def loss(hidden, i):
        logp, entropy = M.token_logprobs(network, hidden, packs[i].labels, TEMPERATURE, chunk=chunk, entropy=True)
        total = objective(logp, entropy, torch.cat([a for _, _, a in parts[i]])) / tokens
        return total, total.item()
    return loss


def gathered(model, hf, **kw):
    """All Hugging Face tensors, of all pipeline stages, on every rank."""
    import weight_map
    from megatron.core import parallel_state as mpu
    stages = [None] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, dict(weight_map.hf_tensors(model, hf, **kw)),
                           group=mpu.get_pipeline_model_parallel_group())
    assert sum(map(len, stages)) == len({n for s in stages for n in s}), "two stages export the same tensor"
    return {n: t for s in stages for n, t in s.items()}


def equal(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def worst(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max((got[n] - want[n]).abs().max().item() for n in got)


def real_logits(model, hidden):
    """[N, vocabulary]: the head's own weight, gathered."""
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model
    gpt = unwrap_model(model)
    tied = gpt.share_embeddings_and_output_weights
    logits = F.linear(hidden, gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight)
    parts = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, logits, group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[:, :gpt.true_vocab_size]


def equivalence(folder, ref, args):
    """Distances from transformers: weights there and back, logits, log-probs, entropy, gradients, updates."""
    import model as M
    from megatron.core import parallel_state as mpu
    hf, model = build(folder, args)
    back = gathered(model, hf)
    result = {"roundtrip": 0 if equal(back, ref["weights"]) else 1}

    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    data, tokens = samples(), sum(n for _, n, _ in samples())
    mine = range(rank, len(data), size)
    packs, parts = micro_batches([data[i] for i in mine], [2, 1, 3, 2], args)

    def collect(hidden, i):
        logits = real_logits(model, hidden)
        return [(logits, *M.token_logprobs(model, hidden, packs[i].labels, temperature, chunk=16, entropy=True))
                for temperature in (1.0, TEMPERATURE)]
    for temperature, found in zip((1.0, TEMPERATURE), zip(*M.run([model], packs, collect, forward_only=True))):
        wanted = [torch.cat(column) for column in zip(*(ref["scores"][temperature][i] for i in mine))]
        for name, f, w in zip(("logits", "logp", "entropy"), (torch.cat(c) for c in zip(*found)), wanted):
            assert not f.requires_grad
            result[f"{name}@{temperature}"] = (f - w).abs().max().item()

    ddp, optimizer, scheduler = M.wrap(model, args)
    curve, norms = [], []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = M.run([ddp], packs, loss_function(ddp, packs, parts, tokens))
        if step == 0 and not args.use_distributed_optimizer:  # which leaves each rank a slice of the sum
            result["grads"] = worst(gathered(ddp, hf, read=lambda p: p.main_grad), ref["grads"])
        _, norm, _ = optimizer.step()
        scheduler.step(1)
        loss = torch.tensor(float(sum(losses)))
        dist.all_reduce(loss, group=mpu.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, group=mpu.get_data_parallel_group())
        curve.append(loss.item())
        norms.append(norm)
    result["curve"] = max(abs(a - b) for a, b in zip(curve, ref["curve"]))
    result["norms"] = max(abs(a - b) for a, b in zip(norms, ref["norms"]))
    result["weights"] = worst(gathered(ddp, hf), ref["final"])
    return result


def train(ddp, optimizer, scheduler, steps, args):
    import model as M
    from megatron.core import parallel_state as mpu
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    packs, parts = micro_batches(samples()[rank::size], [4], args)
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        M.run([ddp], packs, loss_function(ddp, packs, parts, 100))
        optimizer.step()
        scheduler.step(1)


def routing(folder, ref, args):
    """TrainWorker.routing against the experts that transformers chose, as an engine would say it: none differs. Then each piece's
    first token has others, in both layers."""
    import numpy as np
    import model as M
    import trainer
    from megatron.core import parallel_state as mpu
    hf, model = build(folder, args)
    data, batch = samples(), {"tokens": [], "response_lengths": [], "versions": [], "experts": []}
    for i, (tokens, n, _) in enumerate(data):
        logits = [layer[-n - 1:-1] for layer in ref["router"][i]]
        chosen = torch.stack([layer.topk(hf.num_experts_per_tok).indices for layer in logits], dim=1).int().numpy()
        first = n // 2                        # of version 0; none is said of an odd sample's rest, of version 1
        pieces = [[0, first, chosen[:first]], [first, n - first, chosen[first:]]][:1 if i % 2 else 2]
        batch["tokens"].append(np.array(tokens))
        batch["response_lengths"].append(n)
        batch["versions"].append([[0, first], [1, n - first]] if first else [[1, n]])
        batch["experts"].append([[at, count, base64.b64encode(rows.tobytes()).decode()] for at, count, rows in pieces if count])
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    micros = [[i] for i in range(rank, len(data), size)][:-1] + [[]]
    micros[0] = [*micros[0], range(rank, len(data), size)[-1]]
    align = args.tensor_model_parallel_size if args.sequence_parallel else 1
    packs = [M.pack([data[i][:2] for i in micro], "cpu", align) for micro in micros]
    worker = Namespace(args=args, hf=hf, model=model)
    worker.engine_routing = functools.partial(trainer.TrainWorker.engine_routing, worker)

    def counted(version):
        counts = torch.zeros(2, dtype=torch.float64)
        with trainer.TrainWorker.routing(worker, batch, micros, version, counts):
            M.run([model], packs, lambda hidden, i: None, forward_only=True)
        dist.all_reduce(counts)
        return counts.tolist()

    result = dict(zip(("differ0", "pairs0", "differ1", "pairs1"), counted(0) + counted(1)))
    for piece in (piece for pieces in batch["experts"] for piece in pieces):
        rows = np.frombuffer(base64.b64decode(piece[2]), np.int32).reshape(piece[1], 2, -1).copy()
        rows[0] = (rows[0] + 1) % hf.num_experts
        piece[2] = base64.b64encode(rows).decode()
    return {**result, "wrong0": counted(0)[0]}


def resume(folder, ref, args):
    """Three updates, save, two more; a fresh model loads and makes the same two: equal to the bit."""
    import model as M
    import rank_state
    hf, model = build(folder, args)
    state = M.wrap(model, args)
    train(*state, 3, args)
    path = os.path.join(folder, f"resume-{dist.get_world_size()}-{args.pipeline_model_parallel_size}", f"rank_{dist.get_rank():05d}.pt")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rank_state.save(path, *state)
    dist.barrier()
    noise = torch.rand(3)
    train(*state, 2, args)
    want, lr = gathered(model, hf), state[1].param_groups[0]["lr"]

    fresh = build(folder, args, load=False)[1]
    state = M.wrap(fresh, args)
    torch.manual_seed(99)
    rank_state.load(path, *state, hf)
    assert torch.equal(torch.rand(3), noise), "the random state was not restored"
    train(*state, 2, args)
    got = gathered(fresh, hf)
    assert state[1].param_groups[0]["lr"] == lr > 0
    return {"resume": 0 if equal(got, want) else 1}


def export(folder, ref, args):
    """Two updates, then save_hf, twice into the same folder; the test loads it with transformers."""
    import model as M
    import weight_map
    hf, model = build(folder, args)
    out = f"{folder}-export-{args.tensor_model_parallel_size}-{args.pipeline_model_parallel_size}"
    weight_map.save_hf(model, hf, folder, out)
    state = M.wrap(model, args)
    train(*state, 2, args)
    weight_map.SHARD_BYTES = 100_000  # several files on each stage
    weight_map.save_hf(model, hf, folder, out)
    want = gathered(model, hf)
    if dist.get_rank() == 0:
        torch.save(want, os.path.join(out, "want.pt"))
    return {}


def packing(folder, ref, args):
    """The same samples, packed in four ways, shuffled and with an empty micro-batch: log-probs and gradients."""
    import model as M
    hf, model = build(folder, args)
    ddp, optimizer, _ = M.wrap(model, args)
    data, found = samples(), []
    for sizes, order in (([1], 0), ([8], 0), ([2], 0), ([3, 1, 4], 5)):
        shuffled = list(range(len(data)))
        random.Random(order).shuffle(shuffled)
        packs, parts = micro_batches([data[i] for i in shuffled], sizes, args)
        packs, parts = packs + [M.pack([], "cpu")], parts + [[(None, None, torch.zeros(0))]]
        ddp.zero_grad_buffer()
        logps = {}

        def loss(hidden, i):
            logp, entropy = M.token_logprobs(ddp, hidden, packs[i].labels, TEMPERATURE, chunk=5, entropy=True)
            for (tokens, *_), part in zip(parts[i], logp.split(packs[i].response_lengths)):
                logps[tuple(tokens)] = part.detach()
            return objective(logp, entropy, torch.cat([a for _, _, a in parts[i]])) / 100, None
        M.run([ddp], packs, loss)
        found.append((logps, {n: t.clone() for n, t in gathered(ddp, hf, read=lambda p: p.main_grad).items()}))
    alone = found[0]
    return {"logps": max(worst(f[0], alone[0]) for f in found), "grads": max(worst(f[1], alone[1]) for f in found)}


class WidestLogits(TorchDispatchMode):
    """Notes the largest number of rows of any tensor with a column for each word."""
    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        transposed_weight = (64, 131)
        if torch.is_tensor(out) and out.dim() > 1 and out.size(-1) == 131 and out.shape != transposed_weight:
            self.rows = max(self.rows, out.numel() // 131)
        return out


def chunks(folder, ref, args):
    """The logits of no more than `chunk` rows exist at a time, forward and backward."""
    import model as M
    hf, model = build(folder, args)
    packs, parts = micro_batches(samples(), [8], args)
    assert len(packs[0].labels) > 64
    with WidestLogits() as mode:
        M.run([model], packs, loss_function(model, packs, parts, 1, chunk=6))
    assert model.output_layer.weight.grad is not None
    return {"rows": mode.rows}


def still(folder, ref, args):
    """A learning rate of 0 leaves every bit as it is."""
    import model as M
    hf, model = build(folder, args)
    before = {n: fingerprint(t) for n, t in gathered(model, hf).items()}
    state = M.wrap(model, args)
    train(*state, 2, args)
    after = {n: fingerprint(t) for n, t in gathered(model, hf).items()}
    return {"still": 0 if before == after else 1}


def half(folder, ref, args):
    """bf16 with fp32 gradients and masters: near the fp32 scores, and the loss falls as it does in fp32."""
    import model as M
    hf, model = build(folder, args)
    packs, parts = micro_batches(samples(), [3], args)
    state = M.wrap(model, args)
    collect = lambda hidden, i: M.token_logprobs(model, hidden, packs[i].labels, 1.0)[0]
    start = M.run([model], packs, collect, forward_only=True)
    result = {}
    if start:
        want = torch.cat([logp for _, logp, _ in ref["scores"][1.0]])
        result["logp"] = (torch.cat(start) - want).abs().mean().item()
    gradient_types = {p.main_grad.dtype for p in model.parameters()}
    assert gradient_types == {torch.float32} and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    train(*state, 1, args)
    exported = gathered(model, hf)
    assert {t.dtype for t in exported.values()} == {torch.bfloat16}
    return result


def case(kind, name, world, tp=1, pp=1, ep=1, sp=False, **over):
    args = Namespace(**{**vars(ARGS), "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
                        "expert_model_parallel_size": ep, "sequence_parallel": sp, **over})
    dp = world // tp // pp
    label = "-".join([kind.__name__, name] + [f"{k}{v}" for k, v in (("tp", tp), ("pp", pp), ("dp", dp), ("ep", ep)) if v > 1]
                     + ["sp"] * sp + sorted(k for k, v in over.items() if v and k != "lr_decay_iters"))
    return label, kind, name, world, args



COSINE = {"lr_decay_style": "cosine", "lr_decay_iters": 6, "lr_warmup_iters": 1}


def layouts(world):
    """Every layout of so many ranks: tensor x pipeline x data, the experts over each divisor of the data-parallel ranks; sequence
    parallel wherever there are tensor parallel ranks, which experts need."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    return [dict(tp=tp, pp=pp, ep=ep, sp=tp > 1) for tp in sizes for pp in sizes if world % (tp * pp) == 0
            for ep in sizes if world // (tp * pp) % ep == 0]


# Four stages take a model of four layers. On four ranks two families have the tensors of all: qwen2 those of llama and biases,
# qwen3_moe the norms of qwen3 and experts.
FAMILIES = {2: ("llama", "qwen2", "qwen3", "qwen3_moe"), 4: ("qwen2", "qwen3_moe")}
TABLE = [case(equivalence, name + "-deep" * (layout["pp"] > 2), world, **layout) for world, names in FAMILIES.items()
         for layout in layouts(world) for name in names if layout["ep"] == 1 or name == "qwen3_moe"]
CASES = [
    *(case(equivalence, name, 1) for name in MODELS if not name.endswith("-deep")),
    case(equivalence, "qwen3", 1, recompute_granularity="full"),
    case(packing, "qwen3", 1), case(chunks, "qwen3", 1), case(still, "qwen2", 1, lr=0.0), case(packing, "qwen3_moe", 1),
    case(half, "qwen2-tied", 1, bf16=True), case(half, "qwen3_moe", 1, bf16=True),
    case(export, "qwen2", 1), case(export, "qwen3_moe", 1),
    *TABLE,
    *(case(equivalence, name, 2, tp=2) for name in ("llama", "qwen2", "qwen2-tied", "qwen3")),
    case(equivalence, "qwen2-tied", 2, pp=2), case(equivalence, "qwen2-tied", 2, tp=2, sp=True),
    case(equivalence, "qwen2-tied", 2, **DISTRIBUTED), case(equivalence, "qwen3_moe", 2, ep=2, **DISTRIBUTED),
    case(equivalence, "qwen3", 2, tp=2, sp=True, recompute_granularity="full"),
    case(equivalence, "qwen2-tied", 2, pp=2, recompute_granularity="full"),
    case(equivalence, "qwen3_moe", 2, ep=2, recompute_granularity="full"),
    case(routing, "qwen3_moe", 2, tp=2, sp=True), case(routing, "qwen3_moe-raw", 2, ep=2), case(routing, "qwen3_moe", 2, pp=2),
    case(resume, "qwen2-tied", 2, pp=2, bf16=True, **COSINE), case(resume, "qwen3", 2, tp=2, **COSINE),
    case(resume, "qwen2", 2, bf16=True, **COSINE, **DISTRIBUTED),
    case(half, "qwen3", 2, tp=2, sp=True, bf16=True), case(half, "qwen3_moe", 2, ep=2, bf16=True),
    case(equivalence, "qwen2-tied", 4, tp=2, pp=2), case(equivalence, "qwen2-tied", 4, tp=2, pp=2, sp=True),
    case(equivalence, "qwen3", 4, tp=2, sp=True, **DISTRIBUTED), case(equivalence, "qwen2-tied", 4, pp=2, **DISTRIBUTED),
    case(equivalence, "qwen3_moe-raw", 4, tp=2, ep=2, sp=True, **DISTRIBUTED),
    case(equivalence, "qwen3_moe", 4, ep=2, **DISTRIBUTED),
    case(export, "qwen3_moe", 4, pp=2, ep=2), case(export, "qwen2-tied", 4, tp=2, pp=2),
    case(resume, "qwen2-tied", 4, tp=2, sp=True, **COSINE, **DISTRIBUTED),
]


def worker(rank, world, port, cases, folder):
    join(rank, world, port, cases[0][4])
    references = torch.load(os.path.join(folder, f"references{world}.pt"), weights_only=True)
    for label, kind, name, _, args in cases:
        started = time.time()
        try:
            torch.manual_seed(1)
            result = kind(os.path.join(folder, name), references[name], args)
        except Exception:
            with open(os.path.join(folder, f"{label}.error"), "a") as f:
                f.write(f"rank {rank}: {traceback.format_exc()}")
            os._exit(1)  # the others must not wait for this rank
        everyone = [None] * world
        dist.all_gather_object(everyone, result)
        if rank == 0:
            worst_of = {key: max(r[key] for r in everyone if key in r) for r in everyone for key in r}
            with open(os.path.join(folder, f"{label}.json"), "w") as f:
                json.dump({**worst_of, "seconds": round(time.time() - started, 1)}, f)
    dist.destroy_process_group()


def run_ranks(worker, world, jobs, folder, seconds):
    """worker(rank, world, port, jobs, folder) in a process for each rank. mp.ProcessExitedException when one fails."""
    light.server()                              # has imported everything, once for all processes
    port = pick_port(None, "127.0.0.1", "rendezvous")
    context = mp.start_processes(worker, (world, port, jobs, folder), world, join=False, start_method="forkserver")
    deadline = time.time() + seconds
    try:
        while not context.join(timeout=0.1):
            assert time.time() < deadline, f"the {world} processes did not finish in {seconds} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def outcome(folder):
    """outcome(label) -> the numbers of a case; runs all cases of its world size when the first is asked for."""
    done = set()

    def run(world):
        layout = lambda c: (c[4].tensor_model_parallel_size, c[4].pipeline_model_parallel_size, c[4].expert_model_parallel_size)
        mine = sorted((c for c in CASES if c[3] == world), key=layout)
        for name in {c[2] for c in mine}:
            if not os.path.exists(os.path.join(folder, name)):
                reference(name)["initial"].save_pretrained(os.path.join(folder, name))
        told = {name: {key: value for key, value in reference(name).items() if key != "initial"} for name in {c[2] for c in mine}}
        torch.save(told, os.path.join(folder, f"references{world}.pt"))
        for _, cases in itertools.groupby(mine, layout):     # the threads of groups that are gone would slow down those that come
            with contextlib.suppress(mp.ProcessExitedException):  # the case's own error is in its file
                run_ranks(worker, world, list(cases), folder, 240)

    def get(label):
        world = next(c[3] for c in CASES if c[0] == label)
        if world not in done:
            done.add(world)
            run(world)
        file = os.path.join(folder, label)
        if os.path.exists(file + ".error"):
            pytest.fail(open(file + ".error").read())
        assert os.path.exists(file + ".json"), "the processes ended before this case; see the first failing one"
        with open(file + ".json") as f:
            result = json.load(f)
        print(label, result)
        return result
    return get


def labels(kind):
    """Its cases; those of several ranks have the mark."""
    return [pytest.param(c[0], marks=[pytest.mark.parallel] * (c[3] > 1)) for c in CASES if c[1] is kind]


@pytest.mark.contract
@pytest.mark.parametrize("label", labels(equivalence))
def test_equals_transformers(outcome, label):
    bounds = dict.fromkeys(("logits@1.0", "logits@0.7", "logp@1.0", "logp@0.7", "entropy@1.0", "entropy@0.7", "grads", "curve",
                            "norms", "weights"), 1e-5) | {"roundtrip": 0}
    if "distributed" in label:
        del bounds["grads"]
    got = outcome(label)
    assert {n: v for n, v in got.items() if n in bounds and v <= bounds[n]}.keys() == bounds.keys(), got


@pytest.mark.contract
@pytest.mark.parametrize("label", labels(packing))
def test_any_packing_is_no_packing(outcome, label):
    got = outcome(label)
    assert got["logps"] < 1e-5 and got["grads"] < 1e-6, got


@pytest.mark.contract
@pytest.mark.parametrize("label", labels(resume))
def test_resume_is_exact(outcome, label):
    assert outcome(label)["resume"] == 0


@pytest.mark.contract
@pytest.mark.parametrize("label", labels(routing))
def test_routing_is_compared_token_by_token(outcome, label):
    halves = [(n // 2, (n - n // 2) * (i % 2 == 0)) for i, (_, n, _) in enumerate(samples())]
    pairs0, pairs1 = (2 * sum(column) for column in zip(*halves))
    got = outcome(label)
    assert (got["differ0"], got["differ1"], got["pairs0"], got["pairs1"]) == (0, 0, pairs0, pairs1), got
    assert got["wrong0"] == 2 * sum(n > 0 for n, _ in halves), got


@pytest.mark.parametrize("label", labels(chunks))
def test_logits_exist_in_chunks(outcome, label):
    assert outcome(label)["rows"] == 6


@pytest.mark.parametrize("label", labels(still))
def test_learning_rate_zero_moves_nothing(outcome, label):
    assert outcome(label)["still"] == 0


@pytest.mark.parametrize("label", labels(half))
def test_bf16_is_near_fp32(outcome, label):
    assert outcome(label)["logp"] < 0.1


def test_logits_of_bf16_are_not_rounded_to_bf16():
    """A logit of 20 would be off by up to 1/16. Products and gradients as torch has them in fp64."""
    import model as M
    torch.manual_seed(0)
    hidden, weight = 2 * torch.randn(5, 64).bfloat16(), torch.randn(11, 64).bfloat16()
    grad, results = torch.randn(5, 11), []
    for function, dtype in ((M._Logits.apply, torch.bfloat16), (F.linear, torch.float64)):
        operands = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        logits = function(*operands)
        logits.backward(grad.to(logits.dtype))
        results.append((logits, *(t.grad for t in operands)))
    (logits, *grads), (want, *want_grads) = results
    assert logits.dtype == torch.float32 and want.abs().max() > 16
    assert (logits - want).abs().max() < 2e-5
    for got, wanted in zip(grads, want_grads):
        assert got.dtype == torch.bfloat16 and (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("label", labels(export))
def test_export_loads_in_transformers(outcome, folder, label):
    import transformers
    outcome(label)
    _, _, name, _, args = next(c for c in CASES if c[0] == label)
    out = os.path.join(folder, f"{name}-export-{args.tensor_model_parallel_size}-{args.pipeline_model_parallel_size}")
    want = torch.load(os.path.join(out, "want.pt"))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    got = per_expert(model.named_parameters())
    assert equal(got, want)
    assert not torch.equal(got["model.norm.weight"], reference(name)["initial"].model.norm.weight), "no update in it"
    assert len([f for f in os.listdir(out) if f.endswith(".safetensors")]) > 1
    assert not os.path.exists(out + ".tmp") and not os.path.exists(out + ".old")


# ---- configuration --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config, message", [
    (None, "no config.json"),
    ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3, qwen3_moe"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2 .* every layer must have experts"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers \[3\]"),
    ({"model_type": "qwen3_moe", "num_experts_per_tok": 1}, "num_experts_per_tok 1 of num_experts 128"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
    ({"model_type": "qwen2", "hidden_act": "gelu"}, "gelu"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
])
def test_what_is_not_supported_is_refused(tmp_path, config, message):
    import model as M
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        M.load_hf_config(str(tmp_path))
    assert "\n" not in str(error.value) and "--hf-checkpoint" in str(error.value)


@pytest.mark.parametrize("name, rope", [
    ("Llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ("Llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Qwen2", {"rope_theta": 1e6, "rope_scaling": None}),
    ("Qwen3", {"rope_theta": 1e6, "head_dim": 128}),
])
def test_rotary_frequencies_of_published_configs(tmp_path, name, rope):
    import importlib
    import model as M
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": name.lower(), "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, **rope}))
    hf = M.load_hf_config(str(tmp_path))
    modeling = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    want = getattr(modeling, name + "RotaryEmbedding")(hf)
    assert torch.equal(M.inverse_frequencies(hf), want.inv_freq) and want.attention_scaling == 1.0


@pytest.mark.parametrize("tp, pp, message", [(8, 1, "num_key_value_heads 4"), (1, 3, "2 layers"), (5, 1, "heads 8")])
def test_sizes_that_do_not_divide_are_refused(tp, pp, message):
    import model as M
    args = Namespace(**{**vars(ARGS), "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp})
    with pytest.raises(ValueError, match=message):
        M.megatron_config(make_hf("qwen3").config, args)


def test_pack():
    import model as M
    packed = M.pack([([5, 6, 7, 8], 2), ([1, 2, 3], 1), ([9, 4], 0)], "cpu", align=4)
    assert packed.ids.tolist() == [[5, 6, 7, 8, 1, 2, 3, 9, 4, 0, 0, 0]]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.layout.cu_seqlens_q.tolist() == [0, 4, 7, 9, 12] and packed.layout.max_seqlen_q == 4
    assert packed.response_index.tolist() == [1, 2, 5] and packed.labels.tolist() == [7, 8, 3]
    assert packed.response_lengths == [2, 1, 0]
    assert M.pack([], "cpu", align=2).ids.shape == (1, 2)
    with pytest.raises(ValueError, match="sample 1 .* 2 response tokens of 2"):
        M.pack([([5, 6], 1), ([1, 2], 2)], "cpu")


# ---- fingerprints ---------------------------------------------------------------------------------------------------
def oracle(t):
    """The definition in Python's integers."""
    t = t[None] if t.dim() == 1 else t
    bits = t.view({2: torch.int16, 4: torch.int32}[t.element_size()]).tolist()
    a = lambda i: (i * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64 | 1
    b = lambda j: (j * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) % 2**64 | 1
    return sum(x * a(i) * b(j) for i, row in enumerate(bits) for j, x in enumerate(row)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (1, 1), (64, 3)])
def test_fingerprint_is_the_definition(monkeypatch, dtype, shape):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(t) == oracle(t)
    monkeypatch.setattr("fingerprint.CHUNK", 8)  # several chunks, in both directions
    assert fingerprint(t) == oracle(t)


def test_fingerprints_of_slices_add_up():
    t = torch.randn(10, 12)
    cuts = [(0, 4, 0, 12), (4, 10, 0, 5), (4, 10, 5, 12)]
    assert sum(fingerprint(t[a:b, c:d], a, c) for a, b, c, d in cuts) % 2**64 == fingerprint(t)
    v = torch.randn(9)
    assert (fingerprint(v[:4]) + fingerprint(v[4:], c0=4)) % 2**64 == fingerprint(v)
    assert fingerprint(t.t()) == fingerprint(t.t().contiguous()) != fingerprint(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_catches(dtype):
    t = torch.randn(8, 6).to(dtype)
    flipped = t.clone()
    flipped.view({torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype])[3, 2] ^= 1  # the lowest bit
    rows, columns = t.clone(), t.clone()
    rows[[1, 5]], columns[:, [0, 4]] = t[[5, 1]], t[:, [4, 0]]
    minus_zero = torch.zeros(8, 6, dtype=dtype)
    minus_zero[0, 0] = -0.0
    assert len({fingerprint(x) for x in (t, flipped, rows, columns)}) == 4
    assert fingerprint(minus_zero) != fingerprint(torch.zeros(8, 6, dtype=dtype)) == 0
    q, k = torch.randn(2, 8, 6).to(dtype)  # a pair of equal shape, exchanged: caught by name
    assert fingerprint(q) != fingerprint(k)


def test_check_fingerprints():
    q, k, norm = torch.randn(8, 6), torch.randn(8, 6), torch.randn(6)
    expected = {"q": ((8, 6), fingerprint(q)), "k": ((8, 6), fingerprint(k)), "norm": ((6,), fingerprint(norm))}

    def engine(q, k, norm):
        """Two ranks: q split along rows, k along columns, norm on both."""
        return [{f"q|{r}:{r + 4}|0:6": f"{fingerprint(q[r:r + 4], r):016x}",
                 f"k|0:8|{c}:{c + 3}": f"{fingerprint(k[:, c:c + 3], 0, c):016x}",
                 "norm|0:1|0:6": f"{fingerprint(norm):016x}"} for r, c in ((0, 0), (4, 3))]
    check_fingerprints(expected, engine(q, k, norm), "E")
    changed = q.clone()
    changed[7, 5] += 1
    lost, other, extra = (engine(q, k, norm) for _ in range(3))
    del lost[1]["q|4:8|0:6"]
    other[1]["norm|0:1|0:6"] = "0" * 16
    extra[0]["bias|0:1|0:6"] = "0" * 16
    for found, message in ((engine(changed, k, norm), "E: 1 of 3 .* q: values differ"),
                           (engine(k, q, norm), "E: 2 of 3 .* k: values differ; q: values differ"),
                           (engine(q, k, norm)[:1], "covers 24 of 48"), (lost, "q: the engine covers 24 of 48"),
                           (other, "E: its ranks hold different values of norm"), (extra, "bias: only the engine"),
                           ([{}], "E: 3 of 3 .* only the trainer has it")):
        with pytest.raises(RuntimeError, match=message) as error:
            check_fingerprints(expected, found, "E")
        assert "\n" not in str(error.value)
