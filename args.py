"""Every flag, in groups; `--help` is the table. Names are those of slime, Megatron, SGLang or verl wherever they have one.

`parse_args` checks what can be checked without starting anything and adds the derived values (listed in `derive`).
Nothing changes args afterwards.
"""

import argparse
import difflib
import glob
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import time

from buffer import Ledger
from data import GYM, load_rows
from plan import SHAPES, known_config, read_rates
from rewards import REWARDS


def parse_args(argv=None, script="train_async.py"):
    """argv: list of strings (None: the command line). Returns the checked namespace; exits with one line on bad input."""
    parser = argparse.ArgumentParser(
        prog=script, usage=f"{script} [flags]    (--help lists them)", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
        epilog="Any --sglang-FLAG is handed to the SGLang server as --FLAG.")
    for add in (add_run, add_cluster, add_model, add_data, add_rollout, add_eval, add_algorithm, add_correction, add_async,
                add_optimizer, add_batching, add_sync, add_checkpoint, add_replay, add_debug):
        add(parser)
    show_defaults(parser)
    try:
        recorded = take_recorded_flags(parser, argv, script)
        args, rest = parser.parse_known_args(argv)
        args.flags = dict(vars(args))           # as they were given, for a replay
        args.recorded = recorded                # {} without --replay
        args.sglang_args = split_sglang(rest, parser)       # derived
        check_sizes(args)
        check_ranges(args)
        check_script(args, script)
        check_needs(args)
        derive(args, script)
        check(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def show_defaults(parser):
    """Names after each flag its default, where it has one that says something."""
    for action in parser._actions:
        if action.default not in (None, False, [], {}, argparse.SUPPRESS):
            action.help += f" [{'yes' if action.default is True else action.default}]"
        if action.type in (int, float) and not action.choices:
            action.metavar = action.metavar or "N"
        elif action.nargs is None and not action.choices:
            action.metavar = action.metavar or "NAME"


SWITCH = {"action": argparse.BooleanOptionalAction, "default": False}    # --no-FLAG: a replay may take it back


# ---- flags ------------------------------------------------------------------------------------------------
def add_run(parser):
    g = parser.add_argument_group("run")
    g.add_argument("--run-name", help="name of the run's folder (default: the time)")
    g.add_argument("--output-dir", metavar="DIR", default="runs", help="folder that holds the runs' folders")
    g.add_argument("--num-rollout", type=int, help="number of steps (or --num-epoch)")
    g.add_argument("--num-epoch", type=int, help="end when the data were drawn this often")
    g.add_argument("--seed", type=int, default=1234, help="seed of data order, sampling and dropout")
    g.add_argument("--dry-run", action="store_true", help="print layout, batch, memory and the time of a step, and start "
                   "nothing; neither data nor weights need be here: --hf-checkpoint Qwen3-8B is known by its name")
    g.add_argument("--hf-checkpoint-shape", choices=sorted(SHAPES), metavar="NAME", help="--dry-run of this model, whatever "
                   f"--hf-checkpoint says: {', '.join(SHAPES)}")
    g.add_argument("--dry-run-rates", type=json_dict, default={}, metavar="JSON", help="other speeds than an H200's in the "
                   "times of --dry-run, like {\"network_gb_s\": 20, \"lengths\": \"lognormal:2048:1:16384\"}")
    g.add_argument("--gpu-memory-gb", type=float, default=141, help="memory of a GPU in --dry-run: an H200's")
    g.add_argument("--use-tensorboard", action="store_true", help="also write TensorBoard files to RUN/tensorboard")
    g.add_argument("--use-wandb", action="store_true", help="also write to Weights & Biases (pip install wandb)")
    g.add_argument("--wandb-mode", choices=("online", "offline", "disabled"), default="online",
                   help="offline: files in RUN/wandb, for `wandb sync`")
    g.add_argument("--wandb-project", default="offbeat", help="project of the run there")
    g.add_argument("--wandb-group", help="group of the run there")


def add_cluster(parser):
    g = parser.add_argument_group("cluster (a 'GPU' is one process on a machine without any)")
    g.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    g.add_argument("--ray-address", metavar="ADDRESS", help="an existing Ray cluster (default: a local one for this run)")
    g.add_argument("--actor-num-nodes", type=int, default=1, help="training nodes")
    g.add_argument("--actor-num-gpus-per-node", type=int, default=1, help="training ranks on each node")
    g.add_argument("--rollout-num-gpus", type=int, help="GPUs of all engines together (default: 1)")
    g.add_argument("--colocate", action="store_true", help="train_sync.py: engines and training ranks share the "
                   "GPUs; the engines give their memory back while training")
    g.add_argument("--rollout-num-gpus-per-engine", type=int, default=1, help="tensor parallel size of an engine")
    g.add_argument("--num-gpus-per-node", type=int, default=8, help="GPUs that a node has")
    g.add_argument("--rollout-external-engine-addrs", nargs="+", default=[], metavar="URL",
                   help="use these running SGLang servers and start none")
    g.add_argument("--sglang-port", type=int, help="port of engine 0; engine i takes port + i (default: free ports)")
    g.add_argument("--engine-start-timeout", type=float, default=600, help="seconds that an engine may take to start")
    g.add_argument("--max-engine-restarts", type=int, default=3, help="how often an engine that died, hangs or answers wrongly "
                   "is started again (or, if external, waited for), before it is left out")
    g.add_argument("--rollout-health-check-interval", type=float, default=30, help="seconds between two checks of the engines")
    g.add_argument("--rollout-health-check-timeout", type=float, default=30, help="seconds that an engine may take to answer one")
    g.add_argument("--watchdog-timeout", type=float, default=3600, help="seconds without any progress after which the run ends, "
                   "with the stacks of all processes in RUN/logs")
    g.add_argument("--distributed-timeout", type=float, default=600, help="seconds that a collective may take")


def add_model(parser):
    g = parser.add_argument_group("model")
    g.add_argument("--hf-checkpoint", metavar="DIR", help="Hugging Face directory: llama, qwen2, qwen3 or "
                   "qwen3_moe")
    g.add_argument("--ref-load", metavar="DIR", help="reference policy of the KL term (default: --hf-checkpoint)")
    g.add_argument("--tensor-model-parallel-size", type=int, default=1, help="tensor parallel ranks")
    g.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages")
    g.add_argument("--expert-model-parallel-size", type=int, default=1,
                   help="data-parallel ranks that share out a layer's experts")
    g.add_argument("--sequence-parallel", action="store_true", help="split activations along the sequence under TP")
    g.add_argument("--recompute-granularity", choices=("full",), help="recompute activations in the backward pass")
    g.add_argument("--bf16", action="store_true", help="bf16 weights, fp32 master weights and gradients")


def add_data(parser):
    g = parser.add_argument_group("data")
    g.add_argument("--prompt-data", metavar="FILE", help="prompts: JSONL, JSON or Parquet; a data set of the Hugging Face hub, "
                   "like openai/gsm8k?name=main&split=test; or reasoning-gym:TASK?size=500&seed=1")
    g.add_argument("--input-key", default="prompt", help="column of the prompt: a text or a list of chat messages")
    g.add_argument("--label-key", default="label", help="column of the reference answer")
    g.add_argument("--metadata-key", help="column of a dict that rewards and tools may read")
    g.add_argument("--apply-chat-template", action="store_true", help="render prompts with the tokenizer's template")
    g.add_argument("--apply-chat-template-kwargs", type=json_dict, default={}, metavar="JSON",
                   help="what the template takes beside messages, like {\"enable_thinking\": false}")
    g.add_argument("--rollout-shuffle", action=argparse.BooleanOptionalAction, default=True,
                   help="new order in each epoch, from --seed + epoch")
    g.add_argument("--rollout-max-prompt-len", type=int, default=1024, help="longer prompts are dropped, and counted")


def add_rollout(parser):
    g = parser.add_argument_group("rollout")
    g.add_argument("--rollout-batch-size", type=int, default=32, help="prompts (groups) of a step")
    g.add_argument("--n-samples-per-prompt", type=int, default=8, help="samples of a group")
    g.add_argument("--over-sampling-batch-size", type=int, help="groups kept submitted (default: the batch size)")
    g.add_argument("--partial-rollout", action="store_true", help="aborted samples are continued, not started again")
    g.add_argument("--mask-offpolicy-in-partial-rollout", action="store_true",
                   help="no loss on older versions' tokens in continued samples")
    g.add_argument("--rollout-max-response-len", type=int, default=1024, help="token budget of a response")
    g.add_argument("--rollout-temperature", type=float, default=1.0, help="sampling temperature, on both sides")
    g.add_argument("--rollout-top-p", type=float, default=1.0, help="needs --allow-processed-logprobs unless 1")
    g.add_argument("--rollout-top-k", type=int, default=-1, help="needs --allow-processed-logprobs unless -1")
    g.add_argument("--allow-processed-logprobs", action="store_true",
                   help="accept sampling whose log-probs the trainer cannot reproduce")
    g.add_argument("--rollout-stop-token-ids", type=int, nargs="+", default=[], help="further stop tokens")
    g.add_argument("--sglang-server-concurrency", type=int, default=512, help="requests in flight per engine")
    g.add_argument("--dynamic-sampling-filter", action="store_true", help="drop groups whose rewards are all equal")
    g.add_argument("--dynamic-sampling-filter-path", metavar="MODULE.FUNCTION",
                   help="own filter: f(args, samples) -> True to keep, or a reason to drop")
    g.add_argument("--max-filter-rounds", type=float, default=10, help="give up after dropping this many batches to fill one")
    g.add_argument("--rm-type", choices=sorted(REWARDS), default="exact", help="a reward of rewards.py")
    g.add_argument("--rm-url", help="--rm-type remote_rm: a service that is POSTed prompt, response, label and metadata, and "
                   "answers with a number")
    g.add_argument("--rm-regex", metavar="PATTERN", help="--rm-type regex: its last match in the answer, or the group in it, "
                   "must be the label")
    g.add_argument("--custom-rm-path", metavar="MODULE.FUNCTION", help="own reward: f(args, sample) -> float; may be async")
    g.add_argument("--group-rm", action="store_true",
                   help="--custom-rm-path takes a group's samples and returns a list")
    g.add_argument("--custom-generate-function-path", metavar="MODULE.FUNCTION",
                   help="own generation, of several turns with tools: async f(args, sample, agent), see agent.py")
    g.add_argument("--max-sample-retries", type=int, default=3, help="tries of a request before its group is dropped")
    g.add_argument("--generate-timeout", type=float, default=1800, help="seconds that one request may take")
    g.add_argument("--reward-timeout", type=float, default=60, help="seconds that one reward may take")


def add_eval(parser):
    g = parser.add_argument_group("evaluation")
    g.add_argument("--eval-interval", type=int, help="evaluate every so many versions, and at the start and the end")
    g.add_argument("--eval-prompt-data", nargs="+", default=[], metavar="NAME FILE", help="pairs: NAME FILE ...")
    g.add_argument("--n-samples-per-eval-prompt", type=int, default=1, help="samples of an evaluation prompt; above 1 with "
                   "pass@k, where a reward of at least 1 is a pass")
    g.add_argument("--eval-temperature", type=float, help="default: --rollout-temperature; 0 is greedy")
    g.add_argument("--eval-top-p", type=float, help="default: --rollout-top-p")
    g.add_argument("--eval-top-k", type=int, help="default: --rollout-top-k")
    g.add_argument("--eval-max-response-len", type=int, help="default: --rollout-max-response-len")
    g.add_argument("--skip-eval-before-train", action="store_true", help="no evaluation of version 0")
    g.add_argument("--eval-only", action="store_true", help="evaluate the loaded weights and stop")


def add_algorithm(parser):
    g = parser.add_argument_group("algorithm")
    g.add_argument("--advantage-estimator", default="grpo",
                   choices=("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
                   help="see loss.py; ppo has a critic")
    g.add_argument("--disable-grpo-std-normalization", **SWITCH, help="do not divide by the group's std (Dr. GRPO)")
    g.add_argument("--custom-advantage-path", metavar="MODULE.FUNCTION",
                   help="own estimator: f(args, batch) -> a number, or one for each token, for each sample")
    g.add_argument("--critic-load", metavar="DIR", help="Hugging Face directory, of the policy's shape, that the critic "
                   "starts from (default: --hf-checkpoint)")
    g.add_argument("--critic-lr", type=float, help="the critic's learning rate (default: --lr)")
    g.add_argument("--value-clip", type=float, default=0.2, help="the critic's values move by at most this in an update's loss")
    g.add_argument("--gamma", type=float, default=1.0, help="discount of each token (ppo)")
    g.add_argument("--lambd", type=float, default=1.0, help="lambda of generalised advantage estimation (ppo)")
    g.add_argument("--overlong-buffer-len", type=int, help="DAPO: the last so many tokens of the budget cost reward")
    g.add_argument("--overlong-penalty-factor", type=float, help="what a response of the whole budget loses (default: 1)")
    g.add_argument("--loss-type", choices=("ppo_clip", "gspo", "cispo", "reinforce"), default="ppo_clip", help="policy loss")
    g.add_argument("--custom-loss-path", metavar="MODULE.FUNCTION",
                   help="own policy loss: f(args, logp, columns) -> (loss of each token, {name: values to log})")
    g.add_argument("--eps-clip", type=float, default=0.2, help="lower clip of the ratio: 1 - eps")
    g.add_argument("--eps-clip-high", type=float, help="upper clip: 1 + eps (default: --eps-clip)")
    g.add_argument("--eps-clip-c", type=float, help="dual clip: bound c > 1 of the loss where the advantage is negative")
    g.add_argument("--loss-agg-mode", choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
                   default="token-mean", help="aggregation over the global batch")
    g.add_argument("--loss-scale-factor", type=float,
                   help="divisor of seq-mean-token-sum-norm (default: --rollout-max-response-len)")
    g.add_argument("--kl-coef", type=float, default=0.0, help="KL to the reference, taken from the reward")
    g.add_argument("--use-kl-loss", **SWITCH, help="KL to the reference in the loss")
    g.add_argument("--kl-loss-coef", type=float, default=0.0, help="its coefficient")
    g.add_argument("--kl-loss-type", choices=("k1", "k2", "k3", "low_var_kl"), default="low_var_kl",
                   help="estimator, for both KL terms")
    g.add_argument("--use-unbiased-kl", **SWITCH, help="weigh the KL loss by the ratio to the old policy (k1, k3)")
    g.add_argument("--entropy-coef", type=float, default=0.0, help="entropy bonus")


def add_correction(parser):
    g = parser.add_argument_group("off-policy correction")
    g.add_argument("--policy-old", choices=("rollout", "recompute"), default="rollout",
                   help="old log-probs: the engine's (bypass), or recomputed with the last published weights (decoupled)")
    g.add_argument("--rollout-is", choices=("none", "token", "sequence"), default="none",
                   help="weigh the loss by the ratio to the rollout policy, of each token or of the sample")
    g.add_argument("--rollout-is-threshold", metavar="BOUND",
                   help="2.0 truncates weights (TIS); 0.5_2.0 zeroes those outside (IcePop) (default: 2.0)")
    g.add_argument("--rollout-is-batch-normalize", **SWITCH, help="divide the weights by their mean (decoupled only)")
    g.add_argument("--rollout-rs", metavar="LIST",
                   help="mask what is too far off: comma list of {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}")
    g.add_argument("--rollout-rs-threshold", metavar="LIST",
                   help="a bound for each: k1 takes lo_hi of the ratio (hi alone: 1/hi_hi), k2 and k3 an upper bound")
    g.add_argument("--rs-denominator", choices=("kept", "original"), help="tokens that means divide by (default: kept)")
    g.add_argument("--parity-interval", type=int, help="steps between two measurements of |engine - trainer| log-probs, on "
                   "the same weights (mismatch) and by age of weights (staleness) (default: none)")
    g.add_argument("--parity-warn", type=float, default=0.05, help="mean mismatch per token that is warned of")
    g.add_argument("--parity-max", type=float, help="mean mismatch per token that ends the run (default: none)")


def add_async(parser):
    g = parser.add_argument_group("asynchronous")
    g.add_argument("--max-lag", type=int, help="train_async.py: 1 (default) launches generation before the training, 0 behind "
                                               "it; train_fully_async.py: bound of every sample's lag (default: none)")
    g.add_argument("--staleness-threshold", type=float, default=0.0,
                   help="train_fully_async.py: share of groups started beyond those trained between two syncs")
    g.add_argument("--require-batches", type=int, default=1, help="train_fully_async.py: batches that make a step")
    g.add_argument("--max-lag-policy", choices=("wait", "drop", "mask"), default="wait",
                   help="what keeps --max-lag: waiting for the oldest, dropping them, or no loss on old tokens")
    g.add_argument("--custom-sampler-path", metavar="MODULE.FUNCTION", help="train_fully_async.py: own choice of a batch "
                   "among the finished groups, oldest first: f(args, groups, k) -> k of them")


def add_optimizer(parser):
    g = parser.add_argument_group("optimizer (Megatron)")
    g.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    g.add_argument("--min-lr", type=float, default=0.0, help="end of the decay")
    g.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine"), default="constant", help="schedule")
    g.add_argument("--lr-warmup-iters", type=int, default=0, help="optimizer steps of linear warm-up")
    g.add_argument("--lr-decay-iters", type=int, help="optimizer steps of the decay (default: the whole run)")
    g.add_argument("--weight-decay", type=float, default=0.0, help="on matrices; norms and biases have none")
    g.add_argument("--adam-beta1", type=float, default=0.9, help="Adam")
    g.add_argument("--adam-beta2", type=float, default=0.98, help="Adam")
    g.add_argument("--adam-eps", type=float, default=1e-8, help="Adam")
    g.add_argument("--clip-grad", type=float, default=1.0, help="bound of the gradient's norm; 0: none")
    g.add_argument("--use-distributed-optimizer", action="store_true", help="optimizer states split over DP ranks")


def add_batching(parser):
    g = parser.add_argument_group("batching")
    g.add_argument("--global-batch-size", type=int, help="samples of an optimizer step (default: the whole batch)")
    g.add_argument("--micro-batch-size", type=int, default=1, help="samples of a micro-batch")
    g.add_argument("--use-dynamic-batch-size", action="store_true", help="pack micro-batches by --max-tokens-per-gpu")
    g.add_argument("--max-tokens-per-gpu", type=int, default=16384, help="tokens of a packed micro-batch")
    g.add_argument("--log-probs-chunk-size", type=int, default=1024,
                   help="positions whose logits exist at one time in fp32")


def add_sync(parser):
    g = parser.add_argument_group("weight sync")
    g.add_argument("--update-weights-interval", type=int, default=1, help="steps between two published versions")
    g.add_argument("--update-weight-buffer-size", type=int, default=512 * 1024 * 1024, help="bytes of a bucket")
    g.add_argument("--update-weight-timeout", type=float, default=300, help="seconds for joining and for each bucket")


def add_checkpoint(parser):
    g = parser.add_argument_group("checkpoints")
    g.add_argument("--save", metavar="DIR", help="folder of the checkpoints (default: RUN/checkpoints)")
    g.add_argument("--save-interval", type=int, help="steps between two checkpoints (default: none at all)")
    g.add_argument("--keep-checkpoints", type=int, default=2, help="how many of the last checkpoints stay")
    g.add_argument("--load", metavar="DIR", help="a run's folder: goes on from its last checkpoint, in the same folder")
    g.add_argument("--save-hf", metavar="DIR", help="export the final weights as a Hugging Face directory")


def add_replay(parser):
    g = parser.add_argument_group("record and replay")
    g.add_argument("--record", action=argparse.BooleanOptionalAction, default=True, help="keep each batch in RUN/samples")
    g.add_argument("--replay", metavar="RUN", help="repeat a recorded run without engines: same batches, same weights; all other "
                                                   "flags default to the recorded ones")
    g.add_argument("--replay-data-only", action="store_true", help="train on the recorded batches, under any flags of the loss")


NOT_REPLAYED = ("run_name", "output_dir", "save", "load", "save_hf", "ray_address", "replay", "replay_data_only", "eval_interval",
                "eval_prompt_data", "rollout_external_engine_addrs", "save_debug_rollout_data", "load_debug_rollout_data")


def take_recorded_flags(parser, argv, script):
    """With --replay RUN the recorded run's flags become the defaults, so that only what differs has to be said."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--replay")
    run = first.parse_known_args(argv)[0].replay
    if run is None:
        return {}
    path = os.path.join(run, "args.json")
    if not os.path.exists(path):
        raise ValueError(f"--replay {run}: there is no {path}: give the folder of a recorded run")
    with open(path) as f:
        recorded = json.load(f)
    if recorded["script"] != script:
        raise ValueError(f"--replay {run} was recorded by {recorded['script']}: replay it by that script")
    parser.set_defaults(**{name: value for name, value in recorded["flags"].items() if name not in NOT_REPLAYED})
    return recorded


def add_debug(parser):
    g = parser.add_argument_group("the two halves alone")
    g.add_argument("--debug-rollout-only", action="store_true", help="generate, do not train")
    g.add_argument("--debug-train-only", action="store_true", help="train on --load-debug-rollout-data, start no engine")
    g.add_argument("--save-debug-rollout-data", metavar="PATH", help="write each batch; {step} is its number")
    g.add_argument("--load-debug-rollout-data", metavar="PATH", help="read each batch instead of generating it")


def json_dict(text):
    """argparse's type of a flag that takes a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def parse_bounds(text, flag):
    """'2.0' -> (None, 2.0); '0.5_2.0' -> (0.5, 2.0). ValueError for anything else."""
    try:
        *low, high = map(float, text.split("_"))
        if len(low) <= 1 and 0 < high < math.inf and all(0 <= value <= high for value in low):
            return (low[0] if low else None), high
    except ValueError:
        pass
    raise ValueError(f"{flag} {text}: wants a number above 0, like 2.0, or a range, like 0.5_2.0")


def parse_rejections(names, bounds):
    """The two comma lists -> [(statistic, low or None, high)]. ValueError, naming the flag, for what does not fit together."""
    names, bounds = (text.split(",") if text else [] for text in (names, bounds))
    if len(names) != len(bounds):
        raise ValueError(f"--rollout-rs has {len(names)} statistics, --rollout-rs-threshold {len(bounds)} bounds: one for each")
    rules = [(name.strip(), *parse_bounds(bound, "--rollout-rs-threshold")) for name, bound in zip(names, bounds)]
    for name, low, high in rules:
        if name not in RS_STATISTICS:
            raise ValueError(f"--rollout-rs {name}: there are {', '.join(RS_STATISTICS)}")
        if not name.endswith("k1") and low is not None:
            raise ValueError(f"--rollout-rs-threshold {low:g}_{high:g}: {name} is at least 0 and takes an upper bound alone")
        if name.endswith("k1") and low is None and high < 1:
            raise ValueError(f"--rollout-rs-threshold {high:g} for {name}: alone it means 1/{high:g} .. {high:g}: at least 1")
    return rules


RS_STATISTICS = [f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k1", "k2", "k3")
                 if (level, kind) != ("seq_max", "k1")]


# ---- derived values ---------------------------------------------------------------------------------------
def split_sglang(rest, parser):
    """['--sglang-mem-fraction-static', '.7'] -> ['--mem-fraction-static', '.7']. ValueError for any other flag."""
    for i, word in enumerate(rest):
        if (i == 0 or word.startswith("--")) and not word.startswith("--sglang-"):
            near = difflib.get_close_matches(word.split("=")[0], parser._option_string_actions, n=1, cutoff=0.8)
            raise ValueError(f"unknown flag {word}: " + (f"is {near[0]} meant?" if near else "see --help"))
    return [word.replace("--sglang-", "--", 1) for word in rest]


def derive(args, script):
    """The values that follow from flags: args.x below is either derived here or a flag's default that depends on others.
    Those that need the data are set by `check_data`."""
    args.script = script
    args.hf_checkpoint = args.hf_checkpoint_shape or args.hf_checkpoint
    if args.replay_data_only and args.replay:
        args.debug_train_only, args.load_debug_rollout_data = True, samples_path(args.replay)
        steps = sum(record["event"] == "trained" for record in Ledger.surviving(os.path.join(args.replay, "ledger.jsonl")))
        args.num_rollout = min(args.num_rollout or steps, steps)
        if steps == 0 or not os.path.exists(samples_path(args.replay).format(step=0)):
            raise ValueError(f"--replay {args.replay} --replay-data-only: no batch was recorded and trained there")
    if args.replay and not os.path.exists(samples_path(args.replay).format(step=0)):
        raise ValueError(f"--replay {args.replay}: no batch was recorded there (a run of --no-record, or itself a replay)")
    args.without_engines = bool(args.debug_train_only or args.replay)
    if args.device == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        args.device = "cuda" if glob.glob("/dev/nvidia[0-9]*") and not hidden or args.dry_run and args.bf16 else "cpu"
    derive_layout(args)
    args.groups_per_step = args.rollout_batch_size * args.require_batches
    args.samples_per_step = args.groups_per_step * args.n_samples_per_prompt
    args.global_batch_size = args.global_batch_size or args.samples_per_step
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    args.fully_async = script == "train_fully_async.py"
    if args.max_lag is None and not args.fully_async:
        args.max_lag = 1 if script == "train_async.py" else 0
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    args.eval_temperature = args.rollout_temperature if args.eval_temperature is None else args.eval_temperature
    args.eval_top_p = args.rollout_top_p if args.eval_top_p is None else args.eval_top_p
    args.eval_top_k = args.rollout_top_k if args.eval_top_k is None else args.eval_top_k
    args.eval_max_response_len = args.eval_max_response_len or args.rollout_max_response_len
    args.critic_load = args.critic_load or args.hf_checkpoint
    args.critic_lr = args.lr if args.critic_lr is None else args.critic_lr
    args.overlong_penalty_factor = 1.0 if args.overlong_penalty_factor is None else args.overlong_penalty_factor
    args.loss_scale_factor = args.loss_scale_factor or args.rollout_max_response_len
    args.rollout_is_bounds = (None, math.inf)           # without weights in the loss those that are logged are the bare ones
    if args.rollout_is != "none":
        args.rollout_is_bounds = parse_bounds(args.rollout_is_threshold or "2.0", "--rollout-is-threshold")
    args.rejections = parse_rejections(args.rollout_rs, args.rollout_rs_threshold)
    args.rs_denominator = args.rs_denominator or "kept"
    args.use_reference = args.kl_coef != 0 or args.use_kl_loss
    args.ref_load = args.ref_load or args.hf_checkpoint
    if args.load:
        args.output_dir, args.run_name = os.path.split(os.path.abspath(args.load))
    args.run_name = args.run_name or time.strftime("%Y%m%d-%H%M%S")
    args.run_dir = os.path.abspath(os.path.join(args.output_dir, args.run_name))
    args.save = os.path.abspath(args.save or os.path.join(args.run_dir, "checkpoints"))
    args.record_path = samples_path(args.run_dir) if args.record and not args.without_engines else None


def derive_layout(args):
    """How many ranks and engines there are."""
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % model_parallel:
        raise ValueError(f"--actor-num-nodes x --actor-num-gpus-per-node = {args.world_size} training ranks do not divide "
                         f"by tensor x pipeline = {model_parallel}: change --actor-num-gpus-per-node")
    args.data_parallel_size = args.world_size // model_parallel
    if args.data_parallel_size % args.expert_model_parallel_size:
        raise ValueError(f"--expert-model-parallel-size {args.expert_model_parallel_size} does not divide the data-parallel "
                         f"size: {args.world_size} training ranks / (tensor x pipeline = {model_parallel}) = "
                         f"{args.data_parallel_size}")
    if args.colocate and args.rollout_num_gpus not in (None, args.world_size):
        raise ValueError(f"--colocate: the engines use the GPUs of the {args.world_size} training ranks; leave "
                         f"--rollout-num-gpus {args.rollout_num_gpus} out")
    args.rollout_num_gpus = args.world_size if args.colocate else args.rollout_num_gpus or args.rollout_num_gpus_per_engine
    if args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        raise ValueError(f"--rollout-num-gpus {args.rollout_num_gpus} does not divide by "
                         f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}")
    args.num_engines = (len(args.rollout_external_engine_addrs)
                        or args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def samples_path(run_dir):
    """Where a run keeps the batch of a step: format with step=N."""
    return os.path.join(run_dir, "samples", "step_{step:07d}.npz")


# ---- checks -----------------------------------------------------------------------------------------------
def check(args):
    """Everything that can be refused before a process starts. ValueError: one line with the flag and the arithmetic."""
    check_batches(args)
    check_model(args)
    check_data(args)
    check_combinations(args)
    check_algorithm(args)
    check_hooks(args)
    check_folders(args)


def check_sizes(args):
    positive = ("rollout_batch_size", "n_samples_per_prompt", "max_tokens_per_gpu", "keep_checkpoints",
                "micro_batch_size", "update_weights_interval", "rollout_max_response_len",
                "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_gpus_per_node",
                "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "max_sample_retries",
                "require_batches",
                "sglang_server_concurrency", "update_weight_buffer_size", "log_probs_chunk_size", "n_samples_per_eval_prompt")
    optional = ("rollout_num_gpus", "num_rollout", "num_epoch", "eval_interval", "save_interval", "global_batch_size",
                "over_sampling_batch_size", "overlong_buffer_len", "parity_interval")
    for name in positive + optional:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, is {getattr(args, name)}")


def check_ranges(args):
    """Bounds of the numbers that are not counts; nan fails them all."""
    ranges = {"lr": (0, 10), "min_lr": (0, 10), "weight_decay": (0, 10), "adam_beta1": (0, 1), "adam_beta2": (0, 1),
              "adam_eps": (0, 1), "clip_grad": (0, math.inf), "eps_clip": (0, 1), "eps_clip_high": (0, 100),
              "rollout_temperature": (0, 100), "eval_temperature": (0, 100), "rollout_top_p": (0, 1), "eval_top_p": (0, 1),
              "kl_coef": (0, 100), "kl_loss_coef": (0, 100), "entropy_coef": (-10, 10), "lr_warmup_iters": (0, math.inf),
              "max_lag": (0, math.inf), "staleness_threshold": (0, 1000), "sglang_port": (1, 65535),
              "rollout_max_prompt_len": (1, math.inf), "seed": (0, 2 ** 31 - 1), "max_filter_rounds": (0.1, math.inf),
              "parity_warn": (0, math.inf), "parity_max": (0, math.inf), "overlong_penalty_factor": (0, 100),
              "loss_scale_factor": (1e-6, math.inf), "gpu_memory_gb": (1, 10000), "critic_lr": (0, 10),
              "value_clip": (0, math.inf), "gamma": (0, 1),
              "lambd": (0, 1), "max_engine_restarts": (0, math.inf)}
    limits = ("engine_start_timeout", "distributed_timeout", "generate_timeout", "reward_timeout", "update_weight_timeout",
              "watchdog_timeout", "rollout_health_check_interval", "rollout_health_check_timeout")
    for name, (low, high) in (ranges | dict.fromkeys(limits, (0.001, 10 ** 9))).items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be between {low} and {high}")


def check_script(args, script):
    """Flags that belong to one of the scripts, and how far they go together."""
    k = args.update_weights_interval
    if script == "train_sync.py":
        if args.max_lag:
            raise ValueError(f"--max-lag {args.max_lag} needs train_async.py: train_sync.py is on-policy")
        if k > 1:
            raise ValueError("--update-weights-interval above 1 needs train_async.py: train_sync.py is on-policy")
    if args.colocate and args.debug_rollout_only:
        raise ValueError("--colocate lends the engines' memory to a training that --debug-rollout-only leaves out")
    if args.partial_rollout and script != "train_fully_async.py" and (
            (args.over_sampling_batch_size or 0) <= args.rollout_batch_size):
        raise ValueError("--partial-rollout needs --over-sampling-batch-size above --rollout-batch-size: else nothing is aborted")
    if args.max_lag_policy != "wait" and args.max_lag is None:
        raise ValueError(f"--max-lag-policy {args.max_lag_policy} needs --max-lag")
    if args.colocate and script != "train_sync.py":
        raise ValueError(f"--colocate needs train_sync.py: in {script} generation and training overlap, on GPUs of their own")
    if script == "train_async.py" and args.max_lag not in (None, 0, 1):
        raise ValueError(f"--max-lag {args.max_lag}: train_async.py knows 0 and 1; deeper belongs to train_fully_async.py")
    if script != "train_fully_async.py":
        if args.staleness_threshold or args.require_batches > 1 or args.max_lag_policy != "wait" or args.custom_sampler_path:
            raise ValueError("--staleness-threshold, --require-batches, --max-lag-policy and --custom-sampler-path need "
                             "train_fully_async.py")
        if args.max_lag == 0 and k > 1:
            raise ValueError(f"--max-lag 0 is below --update-weights-interval - 1 = {k - 1}")
        return
    if args.debug_rollout_only:
        raise ValueError("--debug-rollout-only needs train_sync.py or train_async.py: a stream goes on only as fast as it is "
                         "trained on")
    if args.over_sampling_batch_size:
        raise ValueError("--over-sampling-batch-size: train_fully_async.py runs ahead by --staleness-threshold instead")
    if args.partial_rollout and not args.staleness_threshold:
        raise ValueError("--partial-rollout needs --staleness-threshold above 0: at 0 nothing is in flight at a sync")
    if args.max_lag is not None and args.max_lag < k - 1:
        raise ValueError(f"--max-lag {args.max_lag} is below --update-weights-interval - 1 = {k - 1}: weights that are published "
                         f"every {k} steps are up to {k - 1} steps old")


def check_needs(args):
    """Flags that say nothing without another one. Before `derive`, which fills in defaults."""
    given = lambda name: getattr(args, name) not in (None, False, 0.0, "none", {})
    for name, other in (("kl_loss_coef", "use_kl_loss"), ("use_kl_loss", "kl_loss_coef"), ("use_unbiased_kl", "use_kl_loss"),
                        ("overlong_penalty_factor", "overlong_buffer_len"), ("rollout_is_threshold", "rollout_is"),
                        ("rollout_is_batch_normalize", "rollout_is"), ("rollout_rs", "rollout_rs_threshold"),
                        ("rollout_rs_threshold", "rollout_rs"), ("rs_denominator", "rollout_rs"),
                        ("mask_offpolicy_in_partial_rollout", "partial_rollout"), ("parity_max", "parity_interval"),
                        ("wandb_group", "use_wandb"), ("hf_checkpoint_shape", "dry_run"), ("dry_run_rates", "dry_run")):
        if given(name) and not given(other) and getattr(args, name) != args.recorded.get("flags", {}).get(name):
            raise ValueError(f"--{name.replace('_', '-')} needs --{other.replace('_', '-')}")
    if not (args.hf_checkpoint or args.hf_checkpoint_shape):
        raise ValueError("--hf-checkpoint is missing")
    critic = args.critic_load or args.critic_lr is not None or args.gamma != 1 or args.lambd != 1
    if critic and args.advantage_estimator != "ppo":
        raise ValueError("--critic-load, --critic-lr, --gamma and --lambd need --advantage-estimator ppo")
    if args.loss_scale_factor and args.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ValueError("--loss-scale-factor needs --loss-agg-mode seq-mean-token-sum-norm")


def check_batches(args):
    if args.samples_per_step % args.global_batch_size:
        batches = f" x --require-batches {args.require_batches}" if args.require_batches > 1 else ""
        raise ValueError(f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
                         f"{batches} = {args.samples_per_step} samples do not divide by --global-batch-size "
                         f"{args.global_batch_size}")
    if args.global_batch_size % args.data_parallel_size:
        raise ValueError(f"--global-batch-size {args.global_batch_size} does not divide by the {args.data_parallel_size} "
                         f"data-parallel ranks")
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(f"--over-sampling-batch-size {args.over_sampling_batch_size} is smaller than "
                         f"--rollout-batch-size {args.rollout_batch_size}")
    if args.save_interval and args.save_interval % args.update_weights_interval:
        raise ValueError(f"--save-interval {args.save_interval} must be a multiple of --update-weights-interval "
                         f"{args.update_weights_interval}: a resume publishes the saved weights")
    if args.eval_interval and args.eval_interval % args.update_weights_interval:
        raise ValueError(f"--eval-interval {args.eval_interval} must be a multiple of --update-weights-interval "
                         f"{args.update_weights_interval}: only published versions can be evaluated")
    if args.num_rollout is None and args.num_epoch is None and not (args.eval_only or args.dry_run):
        raise ValueError("say when the run ends: --num-rollout or --num-epoch")


def check_model(args):
    read_rates(args.dry_run_rates)
    config = read_config(args.hf_checkpoint, "--hf-checkpoint", args.dry_run)
    if args.use_reference and not args.dry_run:
        read_config(args.ref_load, "--ref-load")
    if args.advantage_estimator == "ppo" and not args.dry_run:
        read_config(args.critic_load, "--critic-load")
    longest = max(args.rollout_max_response_len, args.eval_max_response_len)
    positions = config.get("max_position_embeddings", math.inf)
    if args.rollout_max_prompt_len + longest > positions:
        raise ValueError(f"--rollout-max-prompt-len {args.rollout_max_prompt_len} + response length {longest} = "
                         f"{args.rollout_max_prompt_len + longest} tokens exceed the model's {positions} positions")
    longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu < longest:
        raise ValueError(f"--max-tokens-per-gpu {args.max_tokens_per_gpu} is smaller than one sample: "
                         f"--rollout-max-prompt-len {args.rollout_max_prompt_len} + --rollout-max-response-len "
                         f"{args.rollout_max_response_len} = {longest}")
    moe = config.get("model_type") == "qwen3_moe"
    args.routed_experts = moe and args.parity_interval is not None     # derived: engines say which they chose
    args.sglang_args += ["--enable-return-routed-experts"] * args.routed_experts
    for name, size in (("num_attention_heads", args.tensor_model_parallel_size),
                       ("num_key_value_heads", args.tensor_model_parallel_size),
                       ("moe_intermediate_size" if moe else "intermediate_size", args.tensor_model_parallel_size),
                       ("num_experts", args.expert_model_parallel_size),
                       ("num_hidden_layers", args.pipeline_model_parallel_size)):
        if config.get(name, 0) % size:
            raise ValueError(f"the model's {name} = {config[name]} does not divide by the parallel size {size}")
    if args.expert_model_parallel_size > 1 and not moe:
        raise ValueError(f"--expert-model-parallel-size {args.expert_model_parallel_size}: {config.get('model_type')} has no "
                         "experts")
    if moe and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with experts needs --sequence-parallel")


def read_config(path, flag, by_name=False):
    """config.json of a Hugging Face directory as a dict; of a known model by its name, where that may be. ValueError when it is
    not there or of an unknown architecture."""
    file = os.path.join(path, "config.json")
    if by_name and not os.path.exists(file) and (config := known_config(path)):
        return config
    if not os.path.exists(file):
        raise ValueError(f"{flag} {path}: there is no config.json; give a Hugging Face model directory")
    with open(file) as f:
        config = json.load(f)
    if config.get("model_type") not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        raise ValueError(f"{flag} {path}: architecture {config.get('model_type')!r} is not supported; llama, qwen2, "
                         f"qwen3, qwen3_moe are")
    if config["model_type"] == "qwen3_moe":
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            raise ValueError(f"{flag} {path}: decoder_sparse_step and mlp_only_layers are not supported: every layer must have "
                             "experts")
        if config.get("tie_word_embeddings"):     # it would answer with noise
            raise ValueError(f"{flag} {path}: tie_word_embeddings with experts is not supported: SGLang would leave the head "
                             "empty")
    return config


def check_data(args):
    if not args.prompt_data and not (args.eval_only or args.debug_train_only or args.dry_run):
        raise ValueError("--prompt-data is missing")
    if len(args.eval_prompt_data) % 2:
        raise ValueError("--eval-prompt-data takes pairs: NAME FILE [NAME FILE ...]")
    if (args.eval_interval or args.eval_only) and not args.eval_prompt_data:
        raise ValueError("--eval-interval and --eval-only need --eval-prompt-data NAME FILE")
    args.eval_sets = list(zip(args.eval_prompt_data[::2], args.eval_prompt_data[1::2]))   # derived
    if len(dict(args.eval_sets)) < len(args.eval_sets):
        raise ValueError("--eval-prompt-data: two sets have the same name")
    paths = [args.prompt_data or "", *(path for _, path in args.eval_sets)]
    check_reward(args)
    if args.rm_type == "reasoning_gym" and not args.custom_rm_path and not all(path.startswith(GYM) for path in paths if path):
        raise ValueError("--rm-type reasoning_gym scores the tasks of reasoning-gym only: --prompt-data reasoning-gym:TASK, and "
                         "--eval-prompt-data alike")
    for name, path in args.eval_sets if not args.dry_run else ():
        load_rows(path, args, f"--eval-prompt-data {name}")
    if args.prompt_data and not args.dry_run:
        data = load_rows(args.prompt_data, args, "--prompt-data")
        rows = len(data)
        if args.label_key not in data.column_names:     # an own reward may do without; `label in response` is always true then
            print(f"warning: --prompt-data {args.prompt_data} has no column {args.label_key!r} (see --label-key): "
                  f"--custom-rm-path gets an empty label", file=sys.stderr)
        if args.num_epoch:   # derived: the step at which the data end, unless --num-rollout comes first
            steps = rows * args.num_epoch // args.groups_per_step
            if steps == 0:
                raise ValueError(f"--num-epoch {args.num_epoch} x {rows} rows of --prompt-data do not fill one "
                                 f"--rollout-batch-size {args.rollout_batch_size} x --require-batches {args.require_batches}")
            args.num_rollout = min(args.num_rollout or steps, steps)
    args.num_updates = (args.num_rollout or 0) * args.samples_per_step // args.global_batch_size   # derived
    args.lr_decay_iters = args.lr_decay_iters or args.num_updates


def check_reward(args):
    for flag, rm_type in (("rm_url", "remote_rm"), ("rm_regex", "regex")):
        used = args.rm_type == rm_type and not args.custom_rm_path
        if used != bool(getattr(args, flag)):
            raise ValueError(f"--{flag.replace('_', '-')} and --rm-type {rm_type} belong together")
    if args.rm_type == "math" and not args.custom_rm_path and importlib.util.find_spec("math_verify") is None:
        raise ValueError("--rm-type math needs the package math-verify: pip install math-verify")
    if args.rm_url and not args.rm_url.startswith(("http://", "https://")):
        raise ValueError(f"--rm-url {args.rm_url}: wants http://HOST:PORT/PATH")
    if args.rm_regex:
        try:
            groups = re.compile(args.rm_regex).groups
        except re.error as error:
            raise ValueError(f"--rm-regex {args.rm_regex}: {error}") from None
        if groups > 1:
            raise ValueError(f"--rm-regex {args.rm_regex} has {groups} groups: at most one, which is the answer")
    if args.group_rm and not args.custom_rm_path:
        raise ValueError("--group-rm needs --custom-rm-path: the rewards of --rm-type look at one sample")


def check_combinations(args):
    processed = args.rollout_top_p < 1 or args.rollout_top_k > 0
    if processed and not args.allow_processed_logprobs:
        raise ValueError("--rollout-top-p < 1 and --rollout-top-k change the engine's log-probs so that the trainer's cannot "
                         "match them; leave them out or accept that by --allow-processed-logprobs")
    if args.rollout_temperature == 0:
        raise ValueError("--rollout-temperature 0.0: training needs a temperature above 0")
    if args.replay_data_only and not args.replay:
        raise ValueError("--replay-data-only needs --replay RUN")
    if args.replay and args.load:
        raise ValueError("--replay repeats a run from its start: leave --load out")
    if args.replay and not args.replay_data_only and (args.eval_interval or args.eval_only or args.eval_prompt_data):
        raise ValueError("--replay starts no engine: leave --eval-interval, --eval-only and --eval-prompt-data out")
    if args.colocate and args.rollout_external_engine_addrs and args.device == "cuda":
        raise ValueError("--colocate starts the engines on the trainers' GPUs: leave --rollout-external-engine-addrs out")
    if args.colocate and args.device == "cuda" and args.pipeline_model_parallel_size > 1:
        raise ValueError(f"--colocate: --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: an engine on the GPU of "
                         f"one stage cannot read the others' weights; use tensor or data parallel ranks")
    if args.debug_train_only and not args.load_debug_rollout_data:
        raise ValueError("--debug-train-only needs --load-debug-rollout-data")
    if args.debug_train_only and (args.eval_interval or args.eval_only):
        raise ValueError("--debug-train-only starts no engine: leave --eval-interval and --eval-only out")
    if args.debug_train_only and args.debug_rollout_only:
        raise ValueError("--debug-train-only and --debug-rollout-only exclude each other")
    if args.bf16 and args.device == "cpu":
        raise ValueError("--bf16 needs a GPU: on the CPU weights are fp32")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1")
    if args.device == "cuda" or args.dry_run:
        check_gpus(args)


def check_algorithm(args):
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        raise ValueError(f"--eps-clip-c {args.eps_clip_c} must be above 1")
    if args.eps_clip_c is not None and args.loss_type != "ppo_clip":
        raise ValueError(f"--eps-clip-c belongs to --loss-type ppo_clip, not to {args.loss_type}")
    if args.custom_loss_path and args.loss_type != "ppo_clip":
        raise ValueError("--custom-loss-path and --loss-type exclude each other")
    if args.custom_advantage_path and args.advantage_estimator != "grpo":
        raise ValueError("--custom-advantage-path and --advantage-estimator exclude each other")
    if args.disable_grpo_std_normalization and (args.advantage_estimator != "grpo" or args.custom_advantage_path):
        raise ValueError("--disable-grpo-std-normalization needs --advantage-estimator grpo")
    if args.use_unbiased_kl and args.kl_loss_type == "k2":
        raise ValueError("--use-unbiased-kl needs --kl-loss-type k1 or k3: the ratio makes the gradient of k2 a wrong one")
    for name in ("lr", "critic_lr") if args.advantage_estimator == "ppo" else ("lr",):
        if args.min_lr > getattr(args, name):
            raise ValueError(f"--min-lr {args.min_lr:g} is above --{name.replace('_', '-')} {getattr(args, name):g}")
    if args.overlong_buffer_len and args.overlong_buffer_len > args.rollout_max_response_len:
        raise ValueError(f"--overlong-buffer-len {args.overlong_buffer_len} is more than --rollout-max-response-len "
                         f"{args.rollout_max_response_len}")
    grouped = args.advantage_estimator not in ("reinforce_plus_plus", "ppo") and not args.custom_advantage_path
    if args.n_samples_per_prompt == 1 and grouped and not args.debug_rollout_only:
        print("warning: --n-samples-per-prompt 1 gives every group the advantage 0: nothing is learned", file=sys.stderr)
    if args.policy_old == "recompute":
        return
    if args.rollout_is != "none" and args.loss_type != "reinforce" and not args.custom_loss_path:
        raise ValueError(f"--rollout-is {args.rollout_is} with --policy-old rollout: the ratio of --loss-type {args.loss_type} "
                         f"is the correction already, and both would count it twice; leave it out, or take --policy-old "
                         f"recompute or --loss-type reinforce")
    if args.rollout_is_batch_normalize:
        raise ValueError("--rollout-is-batch-normalize needs --policy-old recompute: with rollout the mean depends on the "
                         "weights that are being trained")


def policies(args):
    """One line on the policies in the loss, for a run to print."""
    old = {"rollout": "the engine's log-probs (bypass)", "recompute": "the last published weights' log-probs (decoupled)"}
    weights = "none" if args.rollout_is == "none" else f"{args.rollout_is} {args.rollout_is_threshold or '2.0'}"
    rejected = f"{args.rollout_rs} {args.rollout_rs_threshold}, means over {args.rs_denominator} tokens"
    return (f"loss {args.custom_loss_path or args.loss_type}; --policy-old {args.policy_old}: {old[args.policy_old]}; "
            f"--rollout-is {weights}; --rollout-rs {rejected if args.rollout_rs else 'none'}")


def check_gpus(args):
    t, p = args.actor_num_gpus_per_node, args.num_gpus_per_node
    if max(t, args.rollout_num_gpus_per_engine) > p:
        raise ValueError(f"--actor-num-gpus-per-node {t} and --rollout-num-gpus-per-engine "
                         f"{args.rollout_num_gpus_per_engine} must fit a node: --num-gpus-per-node {p}")
    if args.colocate and t % args.rollout_num_gpus_per_engine:
        raise ValueError(f"--colocate: --actor-num-gpus-per-node {t} does not divide by --rollout-num-gpus-per-engine "
                         f"{args.rollout_num_gpus_per_engine}: an engine's GPUs are those of one node")


def nodes_needed(args):
    """Nodes for disjoint training and rollout GPUs. With t training and r rollout GPUs on a node of p, on tn and rn nodes:
    max(tn, rn) if t + r <= p, else tn + rn; engines are spread over as many nodes as makes that least."""
    t, p, tn, size = args.actor_num_gpus_per_node, args.num_gpus_per_node, args.actor_num_nodes, args.rollout_num_gpus_per_engine
    if args.colocate:
        return tn
    engines = args.rollout_num_gpus // size
    fewest = math.ceil(engines / (p // size))
    spread = {rn: math.ceil(engines / rn) * size for rn in range(fewest, max(fewest, min(engines, tn)) + 1)}
    return min(max(tn, rn) if t + r <= p else tn + rn for rn, r in spread.items())


HOOKS = (("custom_rm_path", 2), ("dynamic_sampling_filter_path", 2), ("custom_generate_function_path", 3),
         ("custom_advantage_path", 2), ("custom_loss_path", 3), ("custom_sampler_path", 3))     # flags, arguments of the function


def check_hooks(args):
    if args.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("--use-wandb: the package is not installed here: pip install wandb")
    for flag, count in HOOKS:
        if getattr(args, flag):
            load_function(getattr(args, flag), "--" + flag.replace("_", "-"), count)


def load_function(path, flag, count):
    """'module.function' -> the function. ValueError if it cannot be imported or does not take `count` arguments."""
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())     # a script's own folder is there already, the user's is not
    try:
        if not module or module.startswith("."):
            raise ValueError("wants MODULE.FUNCTION")
        function = getattr(importlib.import_module(module), name)
        signature = inspect.signature(function)
    except Exception as error:           # whatever stands in the user's file
        kind = "" if isinstance(error, (ImportError, AttributeError, ValueError)) else f"{type(error).__name__}: "
        raise ValueError(f"{flag} {path}: {kind}{error}") from None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ValueError(f"{flag} {path}: must take {count} arguments, is {name}{signature}") from None
    return function


def check_folders(args):
    if args.load and not os.path.isdir(args.load):
        raise ValueError(f"--load {args.load}: no such folder")
    if args.load and not os.path.isdir(args.save):
        raise ValueError(f"--load {args.load}: there is no checkpoint in {args.save}")
    if not args.load and os.path.exists(os.path.join(args.run_dir, "ledger.jsonl")):
        saved = glob.glob(os.path.join(args.save, "step_*", "meta.json"))
        raise ValueError(f"{args.run_dir} holds a run already: choose another --run-name"
                         + (f", or go on with --load {args.run_dir}" if saved else ""))
    if args.save_hf and os.path.exists(args.save_hf):
        raise ValueError(f"--save-hf {args.save_hf} is there already")
    if not args.dry_run:
        os.makedirs(args.run_dir, exist_ok=True)
