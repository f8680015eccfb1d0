"""Fully asynchronous training: generation never stops; a step takes the next finished groups as soon as there are enough.

How far generation runs ahead is one gate (buffer.Gate), set by --staleness-threshold, --update-weights-interval and
--max-lag. At a sync, what is in flight is waited for, or with --partial-rollout aborted and continued under the new weights.

    threshold 0                      on-policy stream: nothing is in flight at a sync; lag 0 .. k - 1
    threshold > 0                    stale samples: generation runs ahead, and is drained before a sync
    threshold > 0, --partial-rollout partial rollout: generation runs ahead, and never waits for the longest sample

`diff train_async.py train_fully_async.py`: the launches are gone, since the rollout manager starts groups by itself.
"""

import ray

import checkpoint
from args import parse_args
from placement import run
from sync_weights import sync_weights


def train(args, trainers, rollout, tracker, start_step):
    """Runs the steps from start_step on. Returns the number of steps that the weights carry at the end."""
    for step in range(start_step, args.num_rollout):
        if step == start_step or step % args.update_weights_interval == 0:
            tracker.note(sync_weights(trainers, rollout, version=step))     # holds the stream, and opens the gate again
            tracker.evaluate_if_due(rollout, step)

        with tracker.timer("perf/wait_prev_gen"):
            batch, metrics = ray.get(rollout.generate.remote(step))         # waits for enough finished groups
        if batch is None:
            return step                                                     # the data have ended
        if step > start_step and args.save_interval and step % args.save_interval == 0:
            with tracker.timer("perf/save_time"):                           # what is in flight is saved as to be drawn again
                checkpoint.save(args, step, trainers, rollout)

        trained = ray.get([trainer.train.remote(step, batch) for trainer in trainers])
        ray.get(rollout.trained.remote(step))
        tracker.log_step(step, metrics, trained)
    return max(start_step, args.num_rollout)


if __name__ == "__main__":
    run(train, parse_args(script="train_fully_async.py"))
