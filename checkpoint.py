"""Checkpoints: a folder step_N holds one file for each training rank, the buffer's state, and meta.json, written last.

N is the number of steps in the weights. A folder takes its name only when everything in it is on the disk, so what has the
name is whole; meta.json lists sizes and checksums, so what was cut off or changed later is noticed, and the one before is used.
Another run may have another parallel layout than the one that saved (see rank_state.py); the precision must be the same.
"""

import json
import os
import shutil

import ray
import xxhash

FORMAT = 2      # of the ranks' files


class Checked:
    """A file that takes the checksum of what is written to it on the way: xxh3, far faster than any disk."""

    def __init__(self, file):
        self.file, self.sum = file, xxhash.xxh3_64()

    def write(self, data):
        self.sum.update(data)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


def write(path, fill):
    """Calls fill(file) for a new file, down to the disk. Returns {its name: [size, checksum]}, for meta.json."""
    with open(path, "wb") as f:
        checked = Checked(f)
        fill(checked)
        f.flush()
        os.fsync(f.fileno())
        return {os.path.basename(path): [f.tell(), checked.sum.hexdigest()]}


def damaged(folder, files):
    """Names of the files {name: [size, checksum]} that are not what was written."""
    found = []
    for name, (size, wanted) in files.items():
        checksum, block = xxhash.xxh3_64(), memoryview(bytearray(1 << 22))
        try:
            with open(os.path.join(folder, name), "rb", buffering=0) as f:
                while count := f.readinto(block):
                    checksum.update(block[:count])
        except OSError:
            pass
        found += [name] if checksum.hexdigest() != wanted else []
    return found


def save(args, step, trainers, rollout):
    """Call where nothing is in flight: weights, optimizer, random states, buffer and the batch in hand are the whole state."""
    final = os.path.join(args.save, f"step_{step:07d}")
    folder = final + ".tmp"
    clear(args.save)
    os.makedirs(folder)
    written = ray.get([trainer.save.remote(folder) for trainer in trainers] + [rollout.save.remote(folder, step)])
    files = {name: entry for part in written for name, entry in part.items()}
    if missing := set(files) - set(os.listdir(folder)):
        raise RuntimeError(f"{folder}: {', '.join(sorted(missing)[:3])} is not here: --save must be a folder of all nodes")
    meta = {"format": FORMAT, "step": step, "bf16": args.bf16, "files": files}
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    if os.path.exists(final):
        os.rename(final, final + ".old.tmp")
    os.rename(folder, final)
    sync_folder(args.save)
    for old in sorted(complete(args.save))[:-args.keep_checkpoints]:
        path = os.path.join(args.save, f"step_{old:07d}")
        os.rename(path, path + ".tmp")
    clear(args.save)


def clear(path):
    """Removes what a save has not finished, or what it has put aside: a kill in the middle of it leaves no part under the name."""
    for name in os.listdir(path) if os.path.isdir(path) else ():
        if name.endswith(".tmp"):
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)


def latest(args, without=()):
    """(step, folder, its files {name: [size, checksum]}) of the last whole checkpoint in args.save. ValueError if there is none or
    its precision is another."""
    found = {step: meta for step, meta in complete(args.save).items() if step not in without}
    if not found:
        raise ValueError(f"--load {args.load}: there is no whole checkpoint in {args.save}; start anew under another --run-name")
    step = max(found)
    if found[step]["bf16"] != args.bf16:
        raise ValueError(f"--load {args.load}: the checkpoint was saved with --bf16 {found[step]['bf16']}, this run has "
                         f"{args.bf16}")
    return step, os.path.join(args.save, f"step_{step:07d}"), found[step]["files"]


def load(args, trainers, rollout):
    """The last checkpoint whose files are what was written. Returns its step. An evaluation needs the weights only, and must not
    touch the run's ledger."""
    without = []
    while True:
        step, folder, files = latest(args, without)
        shares = [dict(sorted(files.items())[i::len(trainers)]) for i in range(len(trainers))]
        found = ray.get([trainer.damaged.remote(folder, share) for trainer, share in zip(trainers, shares)])
        bad = sorted(sum(found, [])) if trainers else damaged(folder, files)
        if not bad:
            break
        print(f"warning: checkpoint {folder} is damaged and is left aside: {', '.join(bad[:3])}: the bytes are not those that "
              f"were written", flush=True)
        without.append(step)
        if not args.eval_only:        # else it would count as one of --keep-checkpoints
            shutil.rmtree(folder + ".damaged", ignore_errors=True)
            os.rename(folder, folder + ".damaged")
    buffer = [] if args.eval_only else [rollout.load.remote(folder, step)]
    ray.get([trainer.load.remote(folder) for trainer in trainers] + buffer)
    return step


def complete(path):
    """{step: meta} of the checkpoints whose files all have the size that meta.json says."""
    found = {}
    for name in os.listdir(path) if os.path.isdir(path) else ():
        folder = os.path.join(path, name)
        if not name.startswith("step_") or name.endswith((".tmp", ".damaged")):
            continue
        try:
            with open(os.path.join(folder, "meta.json")) as f:
                meta = json.load(f)
            sizes = {file: os.path.getsize(os.path.join(folder, file)) for file in meta["files"]}
            if meta["format"] == FORMAT and sizes == {file: size for file, (size, _) in meta["files"].items()}:
                found[int(name[5:])] = meta
                continue
        except (OSError, ValueError, KeyError, TypeError):      # meta.json itself may be the damaged one
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
