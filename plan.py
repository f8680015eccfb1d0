"""--dry-run: what a run would need and how long it would take, without starting anything: layout, batch, memory of each GPU,
weight sync, and a step's time in each kind of loop.

Weights, gradients and optimizer states are counted. Activations are estimated, and times come from RATES: measured on H200s where
docs/gpu/results.md has a figure, else assumed. --dry-run-rates replaces any of them.
"""

import os
import sys
import textwrap
from types import SimpleNamespace

# family, hidden size, layers, heads, key-value heads, head dim, intermediate size, vocabulary, tied head, and of a mixture of
# experts: experts, those that a token takes, their intermediate size. From the models' config.json
SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, False, 128, 8, 768),
    "qwen3-235b-a22b": ("qwen3_moe", 4096, 94, 64, 4, 128, 12288, 151936, False, 128, 8, 1536),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False),
    "smollm2-135m": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
}
FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size", "tie_word_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
ACTIVATIONS = 1.68               # what a layer keeps, in units of 4 hidden + 2 (queries + keys and values) + 3 inner numbers
FULL = 0.95                      # of a GPU's memory: the rest is the driver's, NCCL's and fragments
RATES = {                        # with what each stands on; "measured": docs/gpu/results.md
    "train_tflops": (400, "measured"),          # of a GPU, as 6 x parameters of a token: 4B 322, 8B 418
    "train_tflops_moe": (200, "assumed"),       # with experts
    "read_tb_s": (2.9, "assumed"),              # of a GPU's memory in decoding: 0.6 of an H200's 4.8
    "decode_ms": (1.5, "from one run"),         # of a decoding step besides reading: 2.5-3B's 8,192 tokens in 30.7 s
    "sync_ms": (6.1, "measured"),               # of a sync besides bytes: the line through 0.6B and 8B
    "nvlink_gb_s": (351, "measured"),           # of a sync inside a node: the same line
    "network_gb_s": (40, "assumed"),            # between nodes, one source at a time: a card of 400 Gbit/s
    "lengths": ("lognormal", "assumed"),        # as --lengths of scripts/simulate.py; without numbers: median 1/16 of the longest
}
MODES = {"train_sync.py": {"mode": "sync"}, "train_async.py": {"mode": "one_step_off"},
         "train_fully_async.py, stale": {"mode": "fully_async", "staleness_threshold": 0.5},
         "train_fully_async.py, partial": {"mode": "fully_async", "staleness_threshold": 0.5, "partial_rollout": True}}
STEPS = 6                        # of a simulation


def read_rates(given):
    """--dry-run-rates -> RATES with the given ones replaced. ValueError for what is none of them."""
    for name, value in given.items():
        if name not in RATES:
            raise ValueError(f"--dry-run-rates: there is no {name}, but {', '.join(RATES)}")
        if name != "lengths" and not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(f"--dry-run-rates: {name} {value} must be above 0")
    return {name: value for name, (value, _) in RATES.items()} | given


def known_config(path):
    """config.json's fields of a model by its name, where its folder is not there: Qwen3-8B, Qwen/Qwen2.5-7B-Instruct; or None."""
    name = os.path.basename(os.path.normpath(path)).lower()
    for word in ("-instruct", "-base", "-math", "meta-"):
        name = name.replace(word, "")
    shape = SHAPES.get(name)
    return dict(zip(FIELDS, shape)) if shape else None


# ---- sizes ------------------------------------------------------------------------------------------------
def sizes(config):
    """Numbers of a layer (split: those that tensor parallelism splits, whole: those it does not, experts: all of them, which it
    splits as well, used: of these by one token), of the embedding, and the widths of queries, keys and the inner part."""
    h, heads, moe = config["hidden_size"], config["num_attention_heads"], config["model_type"] == "qwen3_moe"
    dim = config.get("head_dim") or h // heads
    q, kv, inner = heads * dim, config.get("num_key_value_heads", heads) * dim, config["intermediate_size"]
    count, used = (config["num_experts"], config["num_experts_per_tok"]) if moe else (0, 0)
    split = h * (q + 2 * kv) + q * h + 3 * h * inner * (not moe) + (q + 2 * kv) * (config["model_type"] == "qwen2")
    whole = 2 * h + 2 * dim * (config["model_type"] in ("qwen3", "qwen3_moe")) + h * count
    expert = 3 * h * config["moe_intermediate_size"] if moe else 0
    inner = used * config["moe_intermediate_size"] if moe else inner
    return SimpleNamespace(split=split, whole=whole, experts=count * expert, used=used * expert, q=q, kv=kv, inner=inner,
                           taken=used * h, embedding=h * config["vocab_size"])


def parameters(config, of_a_token=False):
    """All of them, or those that compute with one token."""
    n, heads = sizes(config), 1 if config.get("tie_word_embeddings") else 2
    layer = n.split + n.whole + (n.used if of_a_token else n.experts)
    return config["num_hidden_layers"] * layer + heads * n.embedding + config["hidden_size"]


def trainer_memory(args, config):
    """{part: GB} of the training rank that needs most. Tokens are taken to go to the experts evenly."""
    n, h = sizes(config), config["hidden_size"]
    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    layers = config["num_hidden_layers"] // pp
    tables = 1 if pp > 1 or config.get("tie_word_embeddings") else 2      # the first or last stage holds one of two
    dense, experts = layers * (n.split / tp + n.whole) + tables * n.embedding / tp, layers * n.experts / (tp * ep)
    width, models = 2 if args.bf16 else 4, 2 if args.advantage_estimator == "ppo" else 1
    states, dp = 12 if args.bf16 else 8, args.data_parallel_size if args.use_distributed_optimizer else 1
    held = dense / dp + experts / max(dp / ep, 1)          # an expert's states are split over those ranks that have the expert
    tokens = args.max_tokens_per_gpu if args.use_dynamic_batch_size else (
        args.micro_batch_size * (args.rollout_max_prompt_len + args.rollout_max_response_len))
    along = tp if args.sequence_parallel else 1
    layer = ACTIVATIONS * width * (4 * h / along + (2 * n.q + 2 * n.kv + 3 * n.inner) / tp + 2 * n.taken)
    flight = min(pp, args.samples_per_step) if pp > 1 else 1              # micro-batches whose activations the first stage keeps
    kept = layers * layer * flight if args.recompute_granularity is None else layers * width * h / along * flight + layer
    found = {"weights": models * width * (dense + experts), "gradients": models * 4 * (dense + experts),
             "optimizer": models * states * held, "activations": tokens * kept,
             "buckets of the sync": 2 * max(args.update_weight_buffer_size, n.embedding * width)}
    if args.use_reference:
        found["reference"] = width * (dense + experts)
    return {part: size / 1e9 for part, size in found.items()}


def engine_memory(args, config):
    """(GB of weights, GB of KV cache, tokens in it) of an engine's GPU."""
    words = dict(zip(args.sglang_args, args.sglang_args[1:]))
    share = float(words.get("--mem-fraction-static", 0.85))
    weights = (2 if args.bf16 else 4) * parameters(config) / args.rollout_num_gpus_per_engine / 1e9
    memory = trainer_memory(args, config)
    beside = sum(memory.values()) - memory["activations"] if args.colocate else 0.0       # what the trainer has there first
    cache = share * (args.gpu_memory_gb - beside) - weights
    return weights, cache, max(0, int(cache * 1e9 / cached_bytes(args, config)))


def cached_bytes(args, config):
    """Of one token on one GPU of an engine. With more ranks than key-value heads each head is there more than once."""
    kv = max(sizes(config).kv / args.rollout_num_gpus_per_engine, config.get("head_dim") or 64)
    return 2 * config["num_hidden_layers"] * kv * (2 if args.bf16 else 4)


# ---- what fits --------------------------------------------------------------------------------------------
def training_fits(args, config):
    return sum(trainer_memory(args, config).values()) < FULL * args.gpu_memory_gb


def fits(args, config):
    return training_fits(args, config) and engine_memory(args, config)[1] > 0


def layouts(args, config, world):
    """Changes of args to each layout of `world` ranks that the model divides by, the cheapest first: experts within a node,
    few ranks to a copy of the model, few to share out its experts, no recomputation."""
    def divides(size, *names):
        return all(config.get(name, size) % size == 0 for name in names)

    inner, node, found = "moe_intermediate_size" if "num_experts" in config else "intermediate_size", args.num_gpus_per_node, []
    for tp in (t for t in (1, 2, 4, 8) if t <= node and divides(t, "num_attention_heads", "num_key_value_heads", inner)):
        for pp in (p for p in range(1, 65) if divides(p, "num_hidden_layers") and world % (tp * p) == 0):
            dp = world // (tp * pp)
            shares = range(1, config.get("num_experts", 1) + 1) if args.global_batch_size % dp == 0 else ()
            found += [(ep * tp > node, tp * pp, ep, -tp, recompute) for ep in shares if dp % ep == 0 and divides(ep, "num_experts")
                      for recompute in ("", "full")]
    for _, size, ep, tp, recompute in sorted(found):
        yield {"tensor_model_parallel_size": -tp, "pipeline_model_parallel_size": size // -tp, "expert_model_parallel_size": ep,
               "sequence_parallel": tp < -1, "use_distributed_optimizer": True, "world_size": world,
               "data_parallel_size": world // size, "recompute_granularity": recompute or None}


def cheapest(args, config, world=None):
    """The first of the layouts with which the training would fit so many GPUs, as flags; None: none does."""
    for change in layouts(args, config, world or args.world_size):
        if training_fits(SimpleNamespace(**{**vars(args), **change}), config):
            flags = {name: value for name, value in change.items() if name not in ("world_size", "data_parallel_size")
                     and (value is True or value not in (1, None, False))}
            return " ".join("--" + name.replace("_", "-") + f" {value}" * (value is not True) for name, value in flags.items())
    return None


def what_would_fit(args, config):
    """Advice for a plan that does not fit, in words."""
    said = []
    if not training_fits(args, config):
        nodes = [args.actor_num_nodes, *(2 ** i for i in range(8) if 2 ** i > args.actor_num_nodes)]
        found = ((n, cheapest(args, config, n * args.actor_num_gpus_per_node)) for n in nodes)
        count, flags = next((pair for pair in found if pair[1]), (0, None))
        said.append("the training does not fit, " + (
            f"the cheapest layout that does: {flags}" if count == nodes[0] else
            f"and no layout on so many ranks does; one that does: --actor-num-nodes {count} {flags}" if flags else
            "and no layout on so many ranks does, or on more: a lower --max-tokens-per-gpu"))
    if engine_memory(args, config)[1] <= 0:
        sizes = [tp for tp in (1, 2, 4, 8) if tp <= args.num_gpus_per_node and config["num_attention_heads"] % tp == 0
                 and engine_memory(SimpleNamespace(**{**vars(args), "rollout_num_gpus_per_engine": tp}), config)[1] > 0]
        said.append("the engine does not fit: " + (f"--rollout-num-gpus-per-engine {sizes[0]} does" if sizes else
                                                   "a larger --sglang-mem-fraction-static, or GPUs with more memory"))
    return "\n".join(textwrap.fill(text, 100, subsequent_indent=" " * 10, break_on_hyphens=False) for text in said)


# ---- times ------------------------------------------------------------------------------------------------
def sync_seconds(size, rates, nodes=1):
    """A sync of so many bytes. Between nodes it is a stage's source that sends at a time."""
    return rates["sync_ms"] / 1e3 + size / 1e9 / rates["nvlink_gb_s" if nodes == 1 else "network_gb_s"]


def train_seconds(args, config, rates):
    """(seconds of a response token on all ranks, fixed seconds): 6 operations for each parameter, 8 with recomputation. Fixed are
    the prompts, taken for half as long as they may be, and a pipeline's empty slots: PP - 1 micro-batches for each update."""
    operations = (8 if args.recompute_granularity else 6) * parameters(config, of_a_token=True)
    token = operations / (speed(config, rates) * args.world_size)
    updates = args.samples_per_step // args.global_batch_size
    budget = args.max_tokens_per_gpu if args.use_dynamic_batch_size else args.rollout_max_response_len
    empty = updates * (args.pipeline_model_parallel_size - 1) * budget * args.data_parallel_size
    return token, (args.samples_per_step * args.rollout_max_prompt_len / 2 + empty) * token


def speed(config, rates):
    """Operations per second of a GPU."""
    return 1e12 * rates["train_tflops_moe" if "num_experts" in config else "train_tflops"]


def decoding(args, config, mean, rates):
    """(requests that an engine runs at a time, tokens per second of each). A step reads the weights once, which for many
    requests are all experts, and of each the cache, half of what it will have; or takes as long as its 2 operations for each
    parameter of a token, where that is more."""
    weights, _, room = engine_memory(args, config)
    slots = min(args.sglang_server_concurrency, int(room // (args.rollout_max_prompt_len / 2 + mean)),
                -(-args.samples_per_step // args.num_engines))
    read = weights * 1e9 + slots * (args.rollout_max_prompt_len + mean) / 2 * cached_bytes(args, config)
    compute = slots * 2 * parameters(config, of_a_token=True) / args.rollout_num_gpus_per_engine / speed(config, rates)
    return slots, 1 / (max(read / (1e12 * rates["read_tb_s"]), compute) + rates["decode_ms"] / 1e3)


def step_times(args, config, rates, sync):
    """[(loop, seconds of a step, of it waiting for generation, mean lag)] under scripts/virtual_clock.py, at these GPUs; and
    (requests of an engine, tokens per second of each, mean length)."""
    scripts = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")
    sys.path.append(scripts)
    from simulate import mean_length, parse_lengths
    from virtual_clock import simulate
    longest = args.rollout_max_response_len
    default = f"lognormal:{max(1, longest // 16)}:1.2:{longest}"
    lengths = parse_lengths(default if rates["lengths"] == "lognormal" else rates["lengths"])
    mean = mean_length(lengths)
    slots, rate = decoding(args, config, mean, rates)
    token, fixed = train_seconds(args, config, rates)
    common = dict(slots=slots * args.num_engines, steps=STEPS, lengths=lengths, rate=rate, train_time=fixed,
                  train_token_time=token, sync_time=sync, rollout_batch_size=args.groups_per_step,
                  n_samples_per_prompt=args.n_samples_per_prompt, unit=max(1.0, mean / 8))
    modes = list(MODES.items())[:1] if args.colocate else MODES.items()
    results = {name: simulate(**common, **flags).means for name, flags in modes}
    return [(name, means["step"], means["wait"] + means["sync"] - sync, means["mean lag"]) for name, means in results.items()], (
        slots, rate, mean)


# ---- what is shown ----------------------------------------------------------------------------------------
def describe(args):
    """The plan as text, and whether it fits."""
    from args import nodes_needed, policies, read_config      # which imports this file
    config, rates = read_config(args.hf_checkpoint, "--hf-checkpoint", by_name=True), read_rates(args.dry_run_rates)
    memory, count = trainer_memory(args, config), parameters(config)
    weights, cache, tokens = engine_memory(args, config)
    longest, size = args.rollout_max_prompt_len + args.rollout_max_response_len, count * (2 if args.bf16 else 4)
    gpus, nodes = args.world_size + (0 if args.colocate else args.rollout_num_gpus), nodes_needed(args)
    parts = ", ".join(f"{part} {gb:.1f}" for part, gb in memory.items())
    on_gpus, moe, sync = args.device == "cuda", "num_experts" in config, sync_seconds(size, rates, nodes)
    lines = [
        ("model", f"{config['model_type']}, {count:,} parameters"
                  + (f" ({parameters(config, of_a_token=True):,} for a token)" if moe else "")
                  + f", {config['num_hidden_layers']} layers, {'bf16' if args.bf16 else 'fp32'}"),
        ("layout", f"{gpus} {'GPUs' if on_gpus else 'processes'} on {nodes} node(s): {args.world_size} training ranks = "
                   f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size} x DP {args.data_parallel_size}"
                   + (f", experts shared out over {args.expert_model_parallel_size}" if moe else "")
                   + f"; {args.num_engines} engine(s) of TP {args.rollout_num_gpus_per_engine}"
                   + (", on the same GPUs" if args.colocate else "")),
        ("batch", f"{args.groups_per_step} groups x {args.n_samples_per_prompt} samples = {args.samples_per_step} a step, in "
                  f"{args.samples_per_step // args.global_batch_size} update(s) of {args.global_batch_size}, "
                  f"{args.global_batch_size // args.data_parallel_size} for each data-parallel rank; a sample has at most "
                  f"{args.rollout_max_prompt_len:,} + {args.rollout_max_response_len:,} = {longest:,} tokens"),
        ("loss", policies(args).removeprefix("loss ")),
        ("training", f"{sum(memory.values()):.1f} GB{f' of {args.gpu_memory_gb:g}' * on_gpus} on the fullest rank: {parts}"),
        ("engine", f"{weights:.1f} GB of weights" + on_gpus * (
            f" and {max(cache, 0):.1f} of KV cache = {tokens:,} tokens on each GPU: {tokens // longest:,} samples of full length "
            f"at once")),
        ("sync", f"{size / 1e9:.2f} GB" + on_gpus * f", about {1e3 * sync:,.0f} ms by {'NVLink' if nodes == 1 else 'the network'}"),
    ]
    possible = not on_gpus or fits(args, config)              # of another machine's memory nothing is known
    if on_gpus and possible:
        steps, (slots, rate, mean) = step_times(args, config, rates, sync)
        lines += [("step" * (i == 0), f"{seconds:8.1f} s  {name}: waits {wait:.1f} s for generation, mean lag {lag:.2f}")
                  for i, (name, seconds, wait, lag) in enumerate(steps)]
        lines += [("", f"simulated: {slots} requests an engine at {rate:.0f} tokens/s each, mean length {mean:.0f}, threshold 0.5"),
                  ("rates", "; ".join(f"{name} {rates[name]} ({'given' if rates[name] != value else source})"
                                      for name, (value, source) in RATES.items()))]
    text = "\n".join(textwrap.fill(said, 100, initial_indent=f"{name:<10}", subsequent_indent=" " * 10, break_long_words=False,
                                   break_on_hyphens=False) for name, said in lines)
    return (text if possible else text + "\n" + what_would_fit(args, config)), possible
