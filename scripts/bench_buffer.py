"""How many operations a second the buffer does, with 10,000, 100,000 and a million rows of data.

    python scripts/bench_buffer.py [--samples 8]

An operation is one arrow of one group's life, with its part of the ledger on a real file, flushed
as in a run: drawn, put back, drawn again, finished, taken, trained are six. The groups have 8
samples; extending and rewarding these is the engines' and the rewards' work and is not timed. Nor
is the shuffle of an epoch, one pass over the row numbers: it is printed by itself. Seconds are the
process's own, the system's work for it included, so that other programs do not count; the sizes
take turns and each shows its median round. Last line: `ops_per_second 1e4 180000 1e5 170000 1e6
160000`.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from buffer import Buffer, Ledger

SIZES = {"1e4": 10_000, "1e5": 100_000, "1e6": 1_000_000}
GROUPS, STEPS, ROUNDS = 128, 20, 9         # groups of a step, steps of a round


class Rows:
    """A data set whose rows come into being when they are read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"prompt": f"What is {i} + {i}?", "prompt_tokens": [i % 1000] * 64, "label": str(2 * i), "metadata": {"row": i}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="samples of a group")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        buffers, rates = {}, {name: [] for name in SIZES}
        for name, size in SIZES.items():
            ledger = Ledger(os.path.join(folder, f"{name}.jsonl"))
            buffers[name] = Buffer(Rows(size), options.samples, 0, ledger, partial_rollout=True)
            started = time.process_time()
            buffers[name].drop(buffers[name].draw(1)[0], "warm-up")
            print(f"{size} rows: the first draw, with the epoch's shuffle, took {time.process_time() - started:.3f} s")
        for number in range(ROUNDS):
            for name, buffer in buffers.items():
                seconds = sum(one_step(buffer, number * STEPS + i) for i in range(STEPS))
                rates[name].append(6 * GROUPS * STEPS / seconds)
    print("ops_per_second " + " ".join(f"{name} {round(statistics.median(found))}" for name, found in rates.items()))


def one_step(buffer, step):
    """The life of GROUPS groups. Returns the seconds of the buffer's and the ledger's work."""
    started = time.process_time()
    for group in buffer.draw(GROUPS):
        buffer.put_back(group)
    groups = buffer.draw(GROUPS)
    seconds = time.process_time() - started
    for sample in [sample for group in groups for sample in group.samples]:
        sample.append([1] * 16, [-0.5] * 16, step)
        sample.status, sample.reward, sample.seconds = "completed", 1.0, 0.32
    started = time.process_time()
    for group in groups:
        buffer.finish(group)
    buffer.take(step, GROUPS)
    buffer.trained(step)
    return seconds + time.process_time() - started


if __name__ == "__main__":
    main()
