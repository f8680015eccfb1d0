"""How long a weight sync takes, from the driver's call to its return, beside one raw broadcast of the
same bytes over the same GPUs.

    python scripts/bench_sync.py 0.6B 4B 8B                   two GPUs: one trains, one generates
    python scripts/bench_sync.py 8B --layouts tp2pp2 dp4 --engines 2 4 [--rollout-num-gpus-per-engine 2]
        eight GPUs: each layout of the trainer into so many engines at once
    python scripts/bench_sync.py tiny --device cpu            a rehearsal

Last lines, one for each case: `sync 8B 52.8 1.20` = milliseconds (median of the syncs behind the
first two) and their ratio to the raw broadcast from one GPU to all of the engines'. With --layouts or
--engines the case stands behind the shape: `sync 8B:tp2pp2-4xtp1 60.1 1.30`. Each sync is proved on
every engine rank by fingerprints; that goes on while the first requests run, and its time is printed, too.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts", "gpu")]

import ray

import resident

import placement
from args import parse_args
from engine import free_address
from shapes import layout_flags, make_shape, ranks, read_layout
from sync_weights import sync_weights
from trainer import TrainWorker


class Sender:
    """A training rank that holds random weights and no optimizer, so that every shape fits."""

    def __init__(self, args, rank, master):
        import model
        from sync_weights import WeightSender
        from watchdog import Watchdog
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        model.init_parallel(rank, args.world_size, f"tcp://{master}", args.tensor_model_parallel_size,
                            args.pipeline_model_parallel_size, args.seed, args.distributed_timeout)
        self.hf = model.load_hf_config(args.hf_checkpoint)
        self.sender = WeightSender(args, model.build_model(self.hf, args), self.hf)
        self.watchdog = Watchdog(f"training rank {rank}", args)

    def ready(self):
        pass

    join_engines, leave_engines = TrainWorker.join_engines, TrainWorker.leave_engines
    prepare_weights, send_weights, fingerprints = TrainWorker.prepare_weights, TrainWorker.send_weights, TrainWorker.fingerprints


class Raw:
    """A GPU's end of a broadcast of a flat buffer."""

    def time(self, rank, world, address, size):
        import torch
        import torch.distributed as dist
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
        flat, seconds = torch.zeros(size, dtype=torch.uint8, device="cuda" if cuda else "cpu"), []
        for _ in range(8):
            dist.barrier()
            started = time.perf_counter()
            dist.broadcast(flat, 0)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])


def main():
    options, flags = parse()
    placement.TrainWorker = Sender
    with tempfile.TemporaryDirectory() as folder:
        lines = [line for shape in options.shapes for line in measure(make_shape(shape, folder), folder, options, flags)]
    print("\n".join(lines), flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="0.6B, 1.7B, 4B, 8B or tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--syncs", type=int, default=12)
    parser.add_argument("--layouts", nargs="+", default=["dp1"], help="of the trainer: tp2, tp2pp2, dp4, ...")
    parser.add_argument("--engines", nargs="+", type=int, default=[1], help="how many take each sync")
    parser.add_argument("--rollout-num-gpus-per-engine", type=int, default=1)
    parser.add_argument("--update-weight-buffer-size", type=int, default=2 << 30)
    options, flags = parser.parse_known_args()            # --sglang-...
    options.named = options.layouts != ["dp1"] or options.engines != [1]
    options.layouts = {name: read_layout(name, "--layouts", parser) for name in options.layouts}
    return options, flags


def measure(model, folder, options, flags):
    """All cases of a shape, with the same engines. Returns their lines."""
    servers, lines, tp = [], [], options.rollout_num_gpus_per_engine
    training, most = max(map(ranks, options.layouts.values())), max(options.engines)
    largest = max(options.layouts, key=lambda name: ranks(options.layouts[name]))
    args = case_args(model, folder, options, flags, largest, most)
    placement.start_ray(args)
    try:
        size, gpus = weight_bytes(model), resident.hold_gpus(training + most * tp, args)
        raw = {count: 1e3 * raw_broadcast(args, training, count * tp, size) for count in options.engines}
        resident.start_servers(args, [",".join(gpus[i:i + tp]) if gpus[0] else None
                                      for i in range(training, training + most * tp, tp)], servers)
        for name in options.layouts:
            for count in options.engines:
                args = case_args(model, folder, options, flags, name, count)
                ms = time_syncs(args, servers[:count], size, options.syncs)
                case = os.path.basename(model) + f":{name}-{count}xtp{tp}" * options.named
                print(f"{case}: {size / 1e9:.2f} GB, " + ", ".join(f"{what} {value:.1f}" for what, value in ms.items())
                      + f" ms; raw broadcast {raw[count]:.1f} ms; {size / ms['time'] / 1e6:.0f} GB/s", flush=True)
                lines.append(f"sync {case} {ms['time']:.1f} {ms['time'] / raw[count]:.2f}")
    finally:
        resident.stop(servers)
    return lines


def case_args(model, folder, options, flags, name, engines):
    sizes = options.layouts[name]
    words = ["--hf-checkpoint", model, "--prompt-data", f"{model}/prompts.jsonl", "--num-rollout", "1", "--device", options.device,
             "--output-dir", folder, "--run-name", f"run-{os.path.basename(model)}-{name}-{engines}",
             "--rollout-max-prompt-len", "64", "--rollout-max-response-len", "64", "--rollout-batch-size", str(4 * sizes["dp"]),
             "--update-weight-buffer-size", str(options.update_weight_buffer_size), *layout_flags(sizes),
             "--rollout-num-gpus", str(engines * options.rollout_num_gpus_per_engine),
             "--rollout-num-gpus-per-engine", str(options.rollout_num_gpus_per_engine), "--sglang-load-format", "dummy"]
    if options.device == "cuda":
        words += ["--bf16", "--sglang-mem-fraction-static", ".6"]
    return parse_args([*words, *flags], "train_async.py")


def time_syncs(args, servers, size, syncs):
    """{part: ms} of a sync into `servers`: of the first, and medians from the third on."""
    args.rollout_external_engine_addrs = [server.client.url for server in servers]
    trainers, rollout = placement.launch(args, [])
    rows = []
    for version in range(syncs):
        row = sync_weights(trainers, rollout, version)
        rows.append({**row, "sync/check_time": ray.get(rollout.proved.remote())})
    assert rows[0]["sync/bytes"] == size or args.device == "cpu"             # there weights are fp32
    ray.get([trainer.leave_engines.remote() for trainer in trainers])
    ray.get(rollout.retire.remote())
    for actor in [*trainers, rollout]:
        ray.kill(actor)
    parts = ("time", "pause_time", "broadcast_time", "check_time")
    return {"first": 1e3 * rows[0]["sync/time"]} | {part: 1e3 * statistics.median(row[f"sync/{part}"] for row in rows[2:])
                                                    for part in parts}


def weight_bytes(model):
    """Of all tensors in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return 2 * sum(p.numel() for p in network.parameters())


def raw_broadcast(args, training, receivers, size):
    """Seconds from the first training GPU to so many of the engines'."""
    options = placement.reserve(args, "GPU(s)", training + receivers, 1, 1)
    actors = [ray.remote(Raw).options(**option).remote() for option in [options[0], *options[training:]]]
    host, port = free_address()
    seconds = ray.get([actor.time.remote(rank, len(actors), f"{host}:{port}", size) for rank, actor in enumerate(actors)],
                      timeout=120)
    for actor in actors:
        ray.kill(actor)
    return max(seconds)


if __name__ == "__main__":
    main()
