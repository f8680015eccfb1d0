"""Synchronous training: generate batch i with the weights of version i, train on it, publish version i + 1.

`ray.get` stands around the generation, so nothing overlaps and every token has lag 0. With --colocate the engines and the
trainers share the GPUs, and take turns with their memory.
`diff train_sync.py train_async.py` is the explanation of one-step-off training.
"""

import ray

import checkpoint
from args import parse_args
from placement import run
from sync_weights import sync_weights


def train(args, trainers, rollout, tracker, start_step):
    """Runs the steps from start_step on. Returns the number of steps that the weights carry at the end."""
    for step in range(start_step, args.num_rollout):
        if step > start_step and args.save_interval and step % args.save_interval == 0:
            with tracker.timer("perf/save_time"):                   # nothing is in flight: the weights of `step` and the
                checkpoint.save(args, step, trainers, rollout)      # buffer are the whole state

        tracker.note(sync_weights(trainers, rollout, version=step))
        tracker.evaluate_if_due(rollout, step)

        with tracker.timer("perf/wait_prev_gen"):
            batch, metrics = ray.get(rollout.generate.remote(step))
        if batch is None:
            return step                                             # the data have ended
        if args.colocate:
            tracker.collect_evaluation()                            # it needs the engines
            ray.get(rollout.release_memory.remote())                # until the next sync

        trained = ray.get([trainer.train.remote(step, batch) for trainer in trainers])
        ray.get(rollout.trained.remote(step))
        tracker.log_step(step, metrics, trained)
    return max(start_step, args.num_rollout)


if __name__ == "__main__":
    run(train, parse_args(script="train_sync.py"))
