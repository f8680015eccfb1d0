"""Training at its limit: tokens per second, and the share of the GPU's own bf16 matrix speed, on
packed 4k-token samples.

    python scripts/bench_train.py 4B                                      one GPU
    python scripts/bench_train.py 8B --gpus 2 --max-tokens-per-gpu 4096
        data parallel, optimizer states split
    python scripts/bench_train.py 8B --layout tp2pp2                      four GPUs
    python scripts/bench_train.py tiny --device cpu --length 256          a rehearsal
    python scripts/bench_train.py 4B --profile  the kernels that take the time

Counted are the model's operations, 6 for each weight and token (the head at response positions
only) and those of causal attention; recomputation does not count. Last line: `train 4B 0.46 13228`
= that share of the matrix peak measured in this run, tokens per second on all GPUs. With
--layout it stands behind the shape: `train 8B:tp2pp2 0.40 30000`. With --dry-run the memory is
estimated, and nothing is started.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts", "gpu")]

import numpy as np
import torch
import torch.multiprocessing as mp

import plan
from args import parse_args, read_config
from engine import free_address
from shapes import layout_flags, make_shape, random_weights, ranks, read_layout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="0.6B, 1.7B, 4B, 8B or tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=1, help="data parallel")
    parser.add_argument("--layout", help="instead of --gpus: tp2, tp2pp2, dp4, ...")
    parser.add_argument("--samples", type=int, default=16, help="of a step, on each GPU")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample, an eighth of them the prompt")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4, help="the first warms up")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options, flags = parser.parse_known_args()             # any flag of the trainer
    options.sizes = read_layout(options.layout or f"dp{options.gpus}", "--layout", parser)
    options.gpus, options.case = ranks(options.sizes), options.shape + f":{options.layout}" * bool(options.layout)
    with tempfile.TemporaryDirectory() as folder:
        if options.dry_run:
            return estimate(options, flags, folder)
        options.port = free_address()[1]
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_main, (options, flags, folder, queue), nprocs=options.gpus)
        print(queue.get(), flush=True)


def rank_main(rank, options, flags, folder, queue):
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[rank] if options.device == "cuda" else ""
    random_weights()
    from trainer import TrainWorker

    args = rank_args(rank, options, flags, folder)
    worker = TrainWorker(args, rank, f"127.0.0.1:{options.port}")
    seconds = []
    for step in range(options.steps):
        started = time.perf_counter()
        with profiler(options, rank, step):
            worker.train(step, make_batch(options, worker.hf, step))
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        queue.put(result(options, worker.hf, seconds))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def rank_args(rank, options, flags, folder):
    path = make_shape(options.shape, os.path.join(folder, str(rank)))
    prompt = options.length // 8
    words = ["--hf-checkpoint", path, "--prompt-data", f"{path}/prompts.jsonl", "--output-dir", folder, "--run-name", f"rank{rank}",
             "--num-rollout", "1", "--rollout-batch-size", str(options.samples * options.gpus // 4), "--n-samples-per-prompt", "4",
             "--rollout-max-prompt-len", str(prompt), "--rollout-max-response-len", str(options.length - prompt),
             *layout_flags(options.sizes), "--use-dynamic-batch-size", "--use-distributed-optimizer",
             "--max-tokens-per-gpu", str(options.max_tokens_per_gpu), "--device", options.device, *flags]
    return parse_args(words + ["--bf16"] * (options.device == "cuda"), "train_sync.py")


def result(options, hf, seconds):
    tokens = options.samples * options.gpus * options.length
    step_time, peak = statistics.median(seconds[1:]), matrix_peak(options.device) * options.gpus
    share = flops(hf, options) * options.samples * options.gpus / step_time / peak
    memory = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else 0.0
    print(f"{options.shape}: {step_time:.2f} s for {tokens} tokens on {options.gpus} GPUs; peak {peak / options.gpus / 1e12:.0f} "
          f"TFLOP/s each; {memory:.0f} GB used; steps {[round(s, 2) for s in seconds]}", flush=True)
    return f"train {options.case} {share:.2f} {tokens / step_time:.0f}"


def estimate(options, flags, folder):
    options.device = "cuda"                                # for its memory; it need not be there
    args = rank_args(0, options, [*flags, "--dry-run"], folder)
    parts = plan.trainer_memory(args, read_config(args.hf_checkpoint, "--hf-checkpoint"))
    parts.pop("buckets of the sync")                       # there is none
    print(f"{options.case} on {options.gpus} GPUs: {sum(parts.values()):.1f} of {args.gpu_memory_gb:.0f} GB = "
          + " + ".join(f"{part} {size:.1f}" for part, size in parts.items() if size), flush=True)


def make_batch(options, hf, step):
    g, count = np.random.default_rng(step), options.samples * options.gpus
    response = options.length - options.length // 8
    return {"step": step, "update_sizes": [count], "shares": [1.0] * count, "group_ids": [i // 4 for i in range(count)],
            "tokens": [g.integers(4, min(hf.vocab_size, 250), size=options.length) for _ in range(count)],
            "response_lengths": [response] * count, "loss_mask": [np.ones(response, np.float32)] * count,
            "rollout_logprobs": [np.full(response, -5.0, np.float32)] * count, "rewards": list(g.random(count)),
            "versions": [[[step, response]]] * count, "columns": {}, "file_order": range(count)}


def flops(hf, options):
    """Floating-point operations of forward and backward over one sample."""
    width, kv = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    layer = hf.hidden_size * (2 * width + 2 * kv + 3 * hf.intermediate_size)
    head = hf.hidden_size * hf.vocab_size * (1 - 1 / 8)     # no logits of the prompt
    attention = hf.num_hidden_layers * 12 * width * options.length / 2
    return (6 * (hf.num_hidden_layers * layer + head) + attention) * options.length


def matrix_peak(device, size=8192):
    """Operations per second of a large bf16 product: the best of ten."""
    if device == "cpu":
        size = 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 10 * 2 * size ** 3 / best


def profiler(options, rank, step):
    """The kernels of the last step, on rank 0."""
    import contextlib
    if not (options.profile and rank == 0 and step == options.steps - 1):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def profiled():
        with torch.profiler.profile() as found:
            yield
        print(found.key_averages().table(sort_by="self_cuda_time_total" if options.device == "cuda" else "self_cpu_time_total",
                                         row_limit=25, max_name_column_width=60), flush=True)

    return profiled()


if __name__ == "__main__":
    main()
