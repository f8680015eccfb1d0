"""One-step-off training: while the trainer works on batch i, the engines generate batch i + 1 with the weights of version i.

`ray.get(next_batch)` is the only place where training waits for generation. Batch 0 has lag 0, every later one lag 1 (with
--update-weights-interval k: 1..k). Removed from the textbook: no pass for old log-probs, they are the engine's own (see
--policy-old). `diff train_sync.py train_async.py` is the explanation of one-step-off training.
"""

import ray

import checkpoint
from args import parse_args
from placement import run
from sync_weights import sync_weights


def train(args, trainers, rollout, tracker, start_step):
    """Runs the steps from start_step on. Returns the number of steps that the weights carry at the end."""
    for step in range(start_step, args.num_rollout):
        if step == start_step or args.max_lag == 0:
            tracker.note(sync_weights(trainers, rollout, version=step))
            tracker.evaluate_if_due(rollout, step)
            next_batch = rollout.generate.remote(step)              # after a resume: the batch that was saved with it

        with tracker.timer("perf/wait_prev_gen"):
            batch, metrics = ray.get(next_batch)                    # the only place where training waits for generation
        if batch is None:
            return step                                             # the data have ended
        if step > start_step and args.save_interval and step % args.save_interval == 0:
            with tracker.timer("perf/save_time"):                   # nothing is in flight: the weights of `step` and this
                checkpoint.save(args, step, trainers, rollout)      # batch, made by the version before, are the whole state

        if args.max_lag == 1:
            if step > start_step and step % args.update_weights_interval == 0:
                tracker.note(sync_weights(trainers, rollout, version=step))
                tracker.evaluate_if_due(rollout, step)
            if step + 1 < args.num_rollout:                         # nothing is generated past the last step
                next_batch = rollout.generate.remote(step + 1)      # overlaps with the training below

        trained = ray.get([trainer.train.remote(step, batch) for trainer in trainers])
        ray.get(rollout.trained.remote(step))
        tracker.log_step(step, metrics, trained)
    return max(start_step, args.num_rollout)


if __name__ == "__main__":
    run(train, parse_args(script="train_async.py"))
