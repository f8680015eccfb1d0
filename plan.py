"""--dry-run: what a run would need, without starting anything: layout, batch, memory of each GPU, weight sync.

Weights, gradients and optimizer states are counted. Activations are estimated, and the sync's time is interpolated, from what was
measured on H200s (docs/gpu/results.md).
"""

import os
from types import SimpleNamespace

# family, hidden size, layers, heads, key-value heads, head dim, intermediate size, vocabulary, tied head
SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False),
    "smollm2-135m": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
}
FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "tie_word_embeddings")
ACTIVATIONS = 1.68               # what a layer keeps, in units of 4 hidden + 2 (queries + keys and values) + 3 inner numbers
FULL = 0.95                      # of a GPU's memory: the rest is the driver's, NCCL's and fragments
SYNC_SECONDS = 0.0171, 3.0       # fixed, and per TB: fitted to 0.6B, 4B and 8B


def known_config(path):
    """config.json's fields of a model by its name, where its folder is not there: Qwen3-8B, Qwen/Qwen2.5-7B-Instruct; or None."""
    name = os.path.basename(os.path.normpath(path)).lower()
    for word in ("-instruct", "-base", "-math", "meta-"):
        name = name.replace(word, "")
    shape = SHAPES.get(name)
    return dict(zip(FIELDS, shape)) if shape else None


def sizes(config):
    """(parameters of a layer that tensor parallelism splits, of a layer that it does not, of the embedding), and the widths of
    queries and of keys and values."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or h // heads
    q, kv, inner = heads * dim, config.get("num_key_value_heads", heads) * dim, config["intermediate_size"]
    split = h * (q + 2 * kv) + q * h + 3 * h * inner + (q + 2 * kv) * (config["model_type"] == "qwen2")
    whole = 2 * h + 2 * dim * (config["model_type"] == "qwen3")
    return split, whole, h * config["vocab_size"], q, kv


def parameters(config):
    split, whole, embedding, _, _ = sizes(config)
    heads = 1 if config.get("tie_word_embeddings") else 2
    return config["num_hidden_layers"] * (split + whole) + heads * embedding + config["hidden_size"]


def trainer_memory(args, config):
    """{part: GB} of the training rank that needs most."""
    split, whole, embedding, q, kv = sizes(config)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    h, inner = config["hidden_size"], config["intermediate_size"]
    layers = config["num_hidden_layers"] // pp
    tables = 1 if pp > 1 or config.get("tie_word_embeddings") else 2      # the first or last stage holds one of two
    count = layers * (split / tp + whole) + tables * embedding / tp
    width = 2 if args.bf16 else 4
    states = (12 if args.bf16 else 8) / (args.data_parallel_size if args.use_distributed_optimizer else 1)
    tokens = args.max_tokens_per_gpu if args.use_dynamic_batch_size else (
        args.micro_batch_size * (args.rollout_max_prompt_len + args.rollout_max_response_len))
    along = tp if args.sequence_parallel else 1
    layer = ACTIVATIONS * width * (4 * h / along + (2 * q + 2 * kv + 3 * inner) / tp)
    flight = min(pp, args.samples_per_step) if pp > 1 else 1              # micro-batches whose activations the first stage keeps
    kept = layers * layer * flight if args.recompute_granularity is None else layers * width * h / along * flight + layer
    models = 2 if args.advantage_estimator == "ppo" else 1
    found = {"weights": models * width * count, "gradients": models * 4 * count, "optimizer": models * states * count,
             "activations": tokens * kept, "buckets of the sync": 2 * max(args.update_weight_buffer_size, embedding * width)}
    if args.use_reference:
        found["reference"] = width * count
    return {part: size / 1e9 for part, size in found.items()}


def engine_memory(args, config):
    """(GB of weights, GB of KV cache, tokens in it) of an engine's GPU."""
    words = dict(zip(args.sglang_args, args.sglang_args[1:]))
    share = float(words.get("--mem-fraction-static", 0.85))
    split, whole, embedding, _, kv = sizes(config)
    width, tp = 2 if args.bf16 else 4, args.rollout_num_gpus_per_engine
    weights = width * parameters(config) / tp / 1e9
    memory = trainer_memory(args, config)
    beside = sum(memory.values()) - memory["activations"] if args.colocate else 0.0       # what the trainer has there first
    cache = share * (args.gpu_memory_gb - beside) - weights
    token = 2 * config["num_hidden_layers"] * max(kv / tp, config.get("head_dim") or 64) * width
    return weights, cache, max(0, int(cache * 1e9 / token))


def sync_seconds(size):
    fixed, per_terabyte = SYNC_SECONDS
    return fixed + per_terabyte * size / 1e12


def training_fits(args, config):
    return sum(trainer_memory(args, config).values()) < FULL * args.gpu_memory_gb


def fits(args, config):
    return training_fits(args, config) and engine_memory(args, config)[1] > 0


def cheapest(args, config):
    """The least tensor and pipeline parallel sizes with which training would fit these GPUs, as flags; None: none does."""
    for size in (1, 2, 4, 8, 16, 32, 64):
        for tp in [t for t in (8, 4, 2, 1) if size % t == 0 and t <= args.num_gpus_per_node]:
            pp = size // tp
            if (args.world_size % size or config.get("num_key_value_heads", tp) % tp or config["num_hidden_layers"] % pp
                    or args.global_batch_size % (args.world_size // size)):
                continue
            for change in ({}, {"recompute_granularity": "full"}):
                other = SimpleNamespace(**{**vars(args), "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
                                           "sequence_parallel": tp > 1, "use_distributed_optimizer": True,
                                           "data_parallel_size": args.world_size // size, **change})
                if training_fits(other, config):
                    flags = [f"--tensor-model-parallel-size {tp}"] * (tp > 1) + ["--sequence-parallel"] * (tp > 1)
                    flags += [f"--pipeline-model-parallel-size {pp}"] * (pp > 1) + ["--use-distributed-optimizer"]
                    return " ".join(flags + ["--recompute-granularity full"] * bool(change))
    return None


def describe(args):
    """The plan as text, and whether it fits."""
    from args import nodes_needed, policies, read_config      # which imports this file
    config = read_config(args.hf_checkpoint, "--hf-checkpoint", by_name=True)
    memory, count = trainer_memory(args, config), parameters(config)
    weights, cache, tokens = engine_memory(args, config)
    longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    size = count * (2 if args.bf16 else 4)
    gpus = args.world_size + (0 if args.colocate else args.rollout_num_gpus)
    parts = ", ".join(f"{part} {gb:.1f}" for part, gb in memory.items())
    on_gpus, kind = args.device == "cuda", "bf16" if args.bf16 else "fp32"
    lines = [
        ("model", f"{config['model_type']}, {count:,} parameters, {config['num_hidden_layers']} layers, {kind}"),
        ("layout", f"{gpus} {'GPUs' if on_gpus else 'processes'} on {nodes_needed(args)} node(s): "
                   f"{args.world_size} training ranks = TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}"
                   f" x DP {args.data_parallel_size}; {args.num_engines} engine(s) of TP {args.rollout_num_gpus_per_engine}"
                   + (", on the same GPUs" if args.colocate else "")),
        ("batch", f"{args.groups_per_step} groups x {args.n_samples_per_prompt} samples = {args.samples_per_step} a step, in "
                  f"{args.samples_per_step // args.global_batch_size} update(s) of {args.global_batch_size}, "
                  f"{args.global_batch_size // args.data_parallel_size} for each data-parallel rank; a sample has at most "
                  f"{args.rollout_max_prompt_len:,} + {args.rollout_max_response_len:,} = {longest:,} tokens"),
        ("loss", policies(args)),
        ("training", f"{sum(memory.values()):.1f} GB{f' of {args.gpu_memory_gb:g}' * on_gpus} on the fullest rank: {parts}"),
        ("engine", f"{weights:.1f} GB of weights" + on_gpus * (
            f" and {max(cache, 0):.1f} of KV cache = {tokens:,} tokens on each GPU: {tokens // longest:,} samples of full length "
            f"at once")),
        ("sync", f"{size / 1e9:.2f} GB" + on_gpus * f", about {1e3 * sync_seconds(size):.0f} ms by NVLink"),
    ]
    text = "\n".join(f"{name:<10}{said}" for name, said in lines)
    if not on_gpus:          # nothing is known of this machine's memory
        return text, True
    if cache <= 0:
        text += "\nthe engine does not fit: a larger --rollout-num-gpus-per-engine, or --sglang-mem-fraction-static"
    if not training_fits(args, config):
        flags = cheapest(args, config)
        text += "\nthe training does not fit" + (f": the cheapest layout that does: {flags}" if flags else
                                                 ", and no layout on so many ranks does: more of them, or a lower "
                                                 "--max-tokens-per-gpu")
    return text, fits(args, config)
