"""Checkpoints: a folder step_N holds one file for each training rank, the buffer's state, and meta.json, written last.

N is the number of steps in the weights. A folder takes its name only when everything in it is on the disk, so what has the
name is whole; meta.json lists the sizes, so what was cut off later is noticed.
"""

import json
import os
import shutil

import ray

LAYOUT = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
          "use_distributed_optimizer", "bf16")


def save(args, step, trainers, rollout):
    """Call where nothing is in flight: weights, optimizer, random states, buffer and the batch in hand are the whole state."""
    final = os.path.join(args.save, f"step_{step:07d}")
    folder = final + ".tmp"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    ray.get([trainer.save.remote(folder) for trainer in trainers] + [rollout.save.remote(folder, step)])
    wanted = {f"rank_{rank:05d}.pt" for rank in range(len(trainers))} | {"buffer.json"}
    if missing := wanted - set(os.listdir(folder)):
        raise RuntimeError(f"{folder}: {', '.join(sorted(missing)[:3])} is not here: --save must be a folder of all nodes")
    meta = {"step": step, "layout": {name: getattr(args, name) for name in LAYOUT},
            "files": {name: os.path.getsize(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}}
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.rename(folder, final)
    sync_folder(args.save)
    for old in sorted(complete(args.save))[:-args.keep_checkpoints]:
        shutil.rmtree(os.path.join(args.save, f"step_{old:07d}"))


def latest(args):
    """(step, folder) of the last whole checkpoint in args.save. ValueError if there is none or its layout is another."""
    found = complete(args.save)
    if not found:
        raise ValueError(f"--load {args.load}: there is no whole checkpoint in {args.save}; start anew under another --run-name")
    step = max(found)
    layout = {name: getattr(args, name) for name in LAYOUT}
    differing = [f"--{name.replace('_', '-')} was {value}, is {layout[name]}"
                 for name, value in found[step]["layout"].items() if layout[name] != value]
    if differing:
        raise ValueError(f"--load {args.load}: the checkpoint was saved with another layout: {'; '.join(differing)}")
    return step, os.path.join(args.save, f"step_{step:07d}")


def load(args, folder, step, trainers, rollout):
    """An evaluation needs the weights only, and must not touch the run's ledger."""
    buffer = [] if args.eval_only else [rollout.load.remote(folder, step)]
    ray.get([trainer.load.remote(folder) for trainer in trainers] + buffer)


def complete(path):
    """{step: meta} of the checkpoints whose files all have the size that meta.json says."""
    found = {}
    for name in os.listdir(path) if os.path.isdir(path) else ():
        folder = os.path.join(path, name)
        if not name.startswith("step_") or name.endswith(".tmp"):
            continue
        try:
            with open(os.path.join(folder, "meta.json")) as f:
                meta = json.load(f)
            if all(os.path.getsize(os.path.join(folder, file)) == size for file, size in meta["files"].items()):
                found[meta["step"]] = meta
                continue
        except (OSError, ValueError):
            pass
        print(f"warning: checkpoint {folder} is not whole and is left aside", flush=True)
    return found


def sync_folder(path):
    """Makes a rename durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
