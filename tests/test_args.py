"""Flags: bad input is refused in one line with the flag's name and the arithmetic, and every flag has a reader."""

import glob
import json
import os
import re

import pytest

import harness
from args import nodes_needed, parse_args, policies


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


def refuse(capsys, words, script="train_async.py"):
    """The message with which a command line is refused; one line behind the usage."""
    with pytest.raises(SystemExit) as stop:
        parse_args(words, script)
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 2 and error[1].startswith(f"{script}: error: "), error
    return error[1]


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("changes, text", [
    (dict(hf_checkpoint="/nowhere"), "--hf-checkpoint /nowhere: there is no config.json"),
    (dict(prompt_data="/nowhere.jsonl"), "--prompt-data /nowhere.jsonl: no such file"),
    (dict(no_such_flag=3), "unknown flag --no-such-flag: see --help"),
    (dict(eval_intervall=3), "unknown flag --eval-intervall: is --eval-interval meant?"),
    (dict(label_key="answer", custom_rm_path=None), "there is no column 'answer'; there are prompt, label"),
    (dict(input_key="question"), "there is no column 'question'"),
    (dict(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=3), "4 x --n-samples-per-prompt 2 = 8 samples do not divide by --global-batch-size 3"),
    (dict(actor_num_gpus_per_node=3, global_batch_size=8), "--global-batch-size 8 does not divide by the 3 data-parallel ranks"),
    (dict(actor_num_gpus_per_node=3, tensor_model_parallel_size=2), "= 3 training ranks do not divide by tensor x pipeline = 2"),
    (dict(rollout_num_gpus=3, rollout_num_gpus_per_engine=2), "--rollout-num-gpus 3 does not divide by --rollout-num-gpus-per-engine 2"),
    (dict(over_sampling_batch_size=2), "--over-sampling-batch-size 2 is smaller than --rollout-batch-size 4"),
    (dict(rollout_max_prompt_len=500, rollout_max_response_len=100, max_tokens_per_gpu=1000), "500 + response length 100 = 600 tokens exceed the model's 512 positions"),
    (dict(max_tokens_per_gpu=20), "--max-tokens-per-gpu 20 is smaller than one sample"),
    (dict(save_interval=3, update_weights_interval=2), "--save-interval 3 must be a multiple of --update-weights-interval 2"),
    (dict(num_rollout=None), "--num-rollout or --num-epoch"),
    (dict(num_rollout=0), "--num-rollout must be at least 1, is 0"),
    (dict(num_rollout=None, num_epoch=1, rollout_batch_size=1000), "--num-epoch 1 x 200 rows of --prompt-data do not fill one --rollout-batch-size 1000 x --require-batches 1"),
    (dict(rollout_top_p=0.9), "--rollout-top-p < 1 and --rollout-top-k change the engine's log-probs"),
    (dict(rollout_temperature=0), "--rollout-temperature 0.0: training needs a temperature above 0"),
    (dict(custom_rm_path="no.such"), "--custom-rm-path no.such: No module named 'no'"),
    (dict(custom_rm_path="test_args.one_argument"), "--custom-rm-path test_args.one_argument: must take 2 arguments, is one_argument(sample)"),
    (dict(tensor_model_parallel_size=4, actor_num_gpus_per_node=4), "num_key_value_heads = 2 does not divide by the parallel size 4"),
    (dict(load="/nowhere"), "--load /nowhere: no such folder"),
    (dict(eval_interval=2), "need --eval-prompt-data NAME FILE"),
    (dict(bf16=True), "--bf16 needs a GPU"),
    (dict(max_lag=0, update_weights_interval=2), "--max-lag 0 is below --update-weights-interval - 1 = 1"),
    (dict(eps_clip_c=0.5), "--eps-clip-c 0.5 must be above 1"),
    (dict(lr="nan"), "--lr nan must be between 0 and 10"),
    (dict(reward_timeout=-1), "--reward-timeout -1.0 must be between 0.001 and"),
    (dict(kl_loss_coef=0.5), "--kl-loss-coef needs --use-kl-loss"),
    (dict(rm_type="remote_rm", custom_rm_path=None), "--rm-url and --rm-type remote_rm belong together"),
    (dict(rm_url="http://x/"), "--rm-url and --rm-type remote_rm belong together"),
    (dict(rm_url="x:1", rm_type="remote_rm", custom_rm_path=None), "--rm-url x:1: wants http://HOST:PORT/PATH"),
    (dict(rm_type="regex", custom_rm_path=None), "--rm-regex and --rm-type regex belong together"),
    (dict(rm_type="regex", rm_regex="(", custom_rm_path=None), "--rm-regex (: missing ), unterminated subpattern"),
    (dict(rm_type="regex", rm_regex="(a)(b)", custom_rm_path=None), "--rm-regex (a)(b) has 2 groups: at most one"),
    (dict(group_rm=True, custom_rm_path=None), "--group-rm needs --custom-rm-path"),
    (dict(eval_top_p=1.5), "--eval-top-p 1.5 must be between 0 and 1"),
    (dict(apply_chat_template_kwargs="[1]"), "argument --apply-chat-template-kwargs: invalid json_dict value: '[1]'"),
    (dict(tensor_model_parallel_size=0), "--tensor-model-parallel-size must be at least 1, is 0"),
    (dict(eval_interval=3, update_weights_interval=2, eval_prompt_data=["a", "b"]), "--eval-interval 3 must be a multiple of"),
    (dict(use_kl_loss=True), "--use-kl-loss needs --kl-loss-coef"),
    (dict(rollout_is="token"), "the ratio of --loss-type ppo_clip is the correction already, and both would count it twice"),
    (dict(rollout_is="sequence", loss_type="gspo"), "the ratio of --loss-type gspo is the correction already"),
    (dict(rollout_is="token", loss_type="reinforce", rollout_is_batch_normalize=True), "--rollout-is-batch-normalize needs --policy-old recompute"),
    (dict(rollout_is_batch_normalize=True), "--rollout-is-batch-normalize needs --rollout-is"),
    (dict(rollout_is_threshold="2"), "--rollout-is-threshold needs --rollout-is"),
    (dict(policy_old="recompute", rollout_is="token", rollout_is_threshold="2_1"), "--rollout-is-threshold 2_1: wants a number above 0"),
    (dict(policy_old="recompute", rollout_is="token", rollout_is_threshold="nan"), "--rollout-is-threshold nan: wants a number above 0"),
    (dict(rollout_rs="token_k1"), "--rollout-rs needs --rollout-rs-threshold"),
    (dict(rollout_rs="token_k1,seq_max_k1", rollout_rs_threshold="2,2"), "--rollout-rs seq_max_k1: there are token_k1, token_k2"),
    (dict(rollout_rs="token_k1,token_k3", rollout_rs_threshold="2"), "--rollout-rs has 2 statistics, --rollout-rs-threshold 1 bounds"),
    (dict(rollout_rs="token_k3", rollout_rs_threshold="0.1_0.2"), "token_k3 is at least 0 and takes an upper bound alone"),
    (dict(rollout_rs="token_k1", rollout_rs_threshold="0.5"), "alone it means 1/0.5 .. 0.5: at least 1"),
    (dict(rs_denominator="kept"), "--rs-denominator needs --rollout-rs"),
    (dict(overlong_buffer_len=7), "--overlong-buffer-len 7 is more than --rollout-max-response-len 6"),
    (dict(overlong_penalty_factor=0.5), "--overlong-penalty-factor needs --overlong-buffer-len"),
    (dict(loss_scale_factor=8), "--loss-scale-factor needs --loss-agg-mode seq-mean-token-sum-norm"),
    (dict(eps_clip_c=3, loss_type="cispo"), "--eps-clip-c belongs to --loss-type ppo_clip, not to cispo"),
    (dict(disable_grpo_std_normalization=True, advantage_estimator="rloo"), "--disable-grpo-std-normalization needs --advantage-estimator grpo"),
    (dict(critic_lr=1e-5), "--critic-load, --critic-lr, --gamma and --lambd need --advantage-estimator ppo"),
    (dict(critic_load="/nowhere", advantage_estimator="ppo"), "--critic-load /nowhere: there is no config.json"),
    (dict(use_unbiased_kl=True), "--use-unbiased-kl needs --use-kl-loss"),
    (dict(use_unbiased_kl=True, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"), "--use-unbiased-kl needs --kl-loss-type k1 or k3"),
    (dict(custom_loss_path="test_args.one_argument"), "--custom-loss-path test_args.one_argument: must take 3 arguments"),
    (dict(custom_advantage_path="test_args.one_argument"), "--custom-advantage-path test_args.one_argument: must take 2 arguments"),
    (dict(custom_advantage_path="test_args.one_argument", advantage_estimator="rloo"), "--custom-advantage-path and --advantage-estimator exclude"),
    (dict(custom_loss_path="test_args.one_argument", loss_type="gspo"), "--custom-loss-path and --loss-type exclude"),
])
def test_bad_input_is_refused_in_one_line(changes, text, model, tmp_path, capsys):
    assert text in refuse(capsys, harness.flags(model, tmp_path, "run", **changes))
    assert not os.path.exists(tmp_path / "run"), "nothing is left of a run that never began"


def one_argument(sample):
    return 0.0


def two_arguments(args, sample):
    return 0.0


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("text, said", [("", "the file is empty"), ("{\"prompt\": \"a\"\n", ""), ("not json at all\n", "")])
def test_bad_data_files(text, said, model, tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", text)
    assert f"--prompt-data {path}: {said}" in refuse(capsys, harness.flags(model, tmp_path, "run", prompt_data=path))


@pytest.mark.contract
@pytest.mark.parametrize("column, text", [("label", '{"prompt": "1+1="}'), ("prompt", '{"label": "2"}')])
def test_a_row_without_its_label_or_prompt_is_named_before_the_start(column, text, model, tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", ('{"prompt": "1+2=", "label": "3"}\n' * 3) + (text + "\n") * 2)
    message = refuse(capsys, harness.flags(model, tmp_path, "run", prompt_data=path, custom_rm_path=None))
    assert f"--prompt-data {path}: 2 of 5 rows have nothing in column '{column}', the first is row 3" in message


def test_an_own_reward_is_told_that_the_data_have_no_labels(model, tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", '{"prompt": "1+2=", "answer": "3"}\n' * 8)
    flags = dict(prompt_data=path, custom_rm_path="test_args.two_arguments")
    parse_args(harness.flags(model, tmp_path, "run", **flags))
    assert f"warning: --prompt-data {path} has no column 'label' (see --label-key)" in capsys.readouterr().err
    parse_args(harness.flags(model, tmp_path, "run", **flags, label_key="answer"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name, text, said", [
    ("faulty_syntax", "def reward(args, sample)\n    return 1\n", "SyntaxError: expected ':' (faulty_syntax.py, line 1)"),
    ("faulty_constant", "LIMIT = 1 + 'a'\n", "TypeError: unsupported operand"),
    ("faulty_import", "import no_such_package\n", "No module named 'no_such_package'"),
    ("faulty_kind", "reward = 1.0\n", "TypeError: 1.0 is not a callable object")])
def test_a_faulty_file_of_the_users_is_one_line(name, text, said, model, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / f"{name}.py", text)
    message = refuse(capsys, harness.flags(model, tmp_path, "run", custom_rm_path=f"{name}.reward"))
    assert f"--custom-rm-path {name}.reward: {said}" in message


@pytest.mark.contract
def test_unknown_architecture(model, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "config.json", json.dumps({"model_type": "gpt_bigcode"}))
    message = refuse(capsys, harness.flags(model, tmp_path, "run", hf_checkpoint=str(tmp_path / "other")))
    assert "architecture 'gpt_bigcode' is not supported; llama, qwen2, qwen3, qwen3_moe are" in message


def test_a_run_is_not_overwritten(model, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text("")
    assert "holds a run already" in refuse(capsys, harness.flags(model, tmp_path, "run"))


def test_sync_is_on_policy_by_construction(model, tmp_path, capsys):
    words = harness.flags(model, tmp_path, "run", update_weights_interval=2)
    assert "needs train_async.py" in refuse(capsys, words, "train_sync.py")
    words = harness.flags(model, tmp_path, "run", max_lag=1)
    assert "--max-lag 1 needs train_async.py" in refuse(capsys, words, "train_sync.py")


@pytest.mark.parametrize("changes, text", [
    (dict(max_lag=1, update_weights_interval=3), "--max-lag 1 is below --update-weights-interval - 1 = 2"),
    (dict(staleness_threshold=-0.5), "--staleness-threshold -0.5 must be between 0 and 1000"),
    (dict(partial_rollout=True), "--partial-rollout needs --staleness-threshold above 0"),
    (dict(over_sampling_batch_size=8), "--over-sampling-batch-size: train_fully_async.py runs ahead by --staleness-threshold"),
    (dict(require_batches=3, global_batch_size=16), "2 x --require-batches 3 = 24 samples do not divide by --global-batch-size 16"),
])
def test_flags_of_the_fully_async_script(changes, text, model, tmp_path, capsys):
    assert text in refuse(capsys, harness.flags(model, tmp_path, "run", **changes), "train_fully_async.py")
    if changes.get("require_batches"):
        assert "need train_fully_async.py" in refuse(capsys, harness.flags(model, tmp_path, "run", **changes))


def test_derived_values_and_pass_through(model, tmp_path):
    args = parse_args(harness.flags(model, tmp_path, "run", num_rollout=None, num_epoch=2, global_batch_size=4)
                      + ["--sglang-mem-fraction-static", "0.7", "--sglang-disable-radix-cache"])
    assert args.num_rollout == 100 and args.samples_per_step == 8 and args.num_updates == 200     # 2 x 200 rows / 4 groups
    assert args.sglang_args == ["--mem-fraction-static", "0.7", "--disable-radix-cache"]
    assert args.eps_clip_high == args.eps_clip == 0.2


def test_correction_flags_become_rules_and_a_line_to_print(model, tmp_path):
    args = parse_args(harness.flags(model, tmp_path, "run", policy_old="recompute", rollout_is="token", rollout_is_threshold="0.5_5",
                                    rollout_rs="token_k1, seq_mean_k3,seq_sum_k1", rollout_rs_threshold="0_2,0.1,1.5"))
    assert args.rollout_is_bounds == (0.5, 5.0) and args.rs_denominator == "kept"
    assert args.rejections == [("token_k1", 0.0, 2.0), ("seq_mean_k3", None, 0.1), ("seq_sum_k1", None, 1.5)]
    assert "--policy-old recompute: the last published weights' log-probs (decoupled); --rollout-is token 0.5_5" in policies(args)
    args = parse_args(harness.flags(model, tmp_path, "other", loss_type="reinforce", rollout_is="sequence"))
    assert args.rollout_is_bounds == (None, 2.0) and args.rejections == []
    assert policies(args).startswith("loss reinforce; --policy-old rollout: the engine's log-probs (bypass)")


@pytest.mark.parametrize("t, tn, rollout, p, nodes", [(4, 1, 4, 8, 1), (8, 1, 8, 8, 2), (4, 2, 4, 8, 2), (6, 1, 2, 8, 1),
                                                      (8, 2, 24, 8, 5), (4, 1, 8, 4, 3)])
def test_nodes_needed(t, tn, rollout, p, nodes, model, tmp_path):
    args = parse_args(harness.flags(model, tmp_path, "run"))
    args.actor_num_gpus_per_node, args.actor_num_nodes, args.rollout_num_gpus, args.num_gpus_per_node = t, tn, rollout, p
    assert nodes_needed(args) == nodes


def test_every_flag_has_a_reader():
    """A flag that nobody reads is a promise that is not kept."""
    with open(os.path.join(harness.ROOT, "args.py")) as f:
        text = f.read()
    flags = re.findall(r'g\.add_argument\("--([a-z0-9-]+)"', text)
    assert len(flags) > 80
    code = "".join(open(path).read() for path in glob.glob(os.path.join(harness.ROOT, "*.py")) if not path.endswith("args.py"))
    derived = text[text.index("# ---- derived values"):]
    unread = [flag for flag in flags if not re.search(rf"\bargs\.{flag.replace('-', '_')}\b", code + derived)]
    assert unread == []


def test_help_fits_the_screen(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 150
