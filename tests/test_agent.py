"""The agent loop: tokens against the chat templates of three families, masks, interruptions at every place, limits, several
samples of one attempt."""

import asyncio
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import chat_templates
import engine as engine_module
import harness
import light
import scripted_engine
from agent import Aborted, Agent
from args import parse_args
from batch import load_groups, make_batch, save_groups
from buffer import Dropped, Group, Ledger, Sample
from data import render
from examples import calculator
from rollout import RolloutManager
from test_model import run_ranks
from trainer import TrainWorker

FAMILIES = sorted(chat_templates.SPECIAL)
TOKENIZERS = {name: chat_templates.make_tokenizer(name) for name in FAMILIES}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is (12+30)*2?"}]


def make_agent(family, turns, messages=QUESTION, max_len=10 ** 6, stop_at=None, **kwargs):
    """(agent, sample) whose model says the texts (or ids) `turns` one after the other, each with the stop token behind it.
    Aborted before the token number stop_at[0] of all that it says; the other places are each counted from the last."""
    tokenizer, args = TOKENIZERS[family], SimpleNamespace(apply_chat_template_kwargs=kwargs, rollout_max_prompt_len=200)
    prompt = render(args, tokenizer, messages, add_generation_prompt=True)
    sample = Sample(0, 0, 0, prompt, "84", tokenizer.encode(prompt, add_special_tokens=False), {"prompt_messages": messages})
    left, stop_at = [encode(family, text) if isinstance(text, str) else text for text in turns], stop_at or []

    async def ask(sample):
        tokens = left[0]
        room = max_len - len(sample.response_tokens)
        count = min(len(tokens), room, stop_at[0] if stop_at else len(tokens))
        if room <= 0:
            return "truncated"
        aborted = bool(stop_at) and stop_at[0] < min(len(tokens), room)
        if stop_at:
            stop_at[0] -= count
        sample.append(tokens[:count], [-1.0 - i for i in range(count)], 3)
        left[0] = tokens[count:]
        if aborted:
            stop_at.pop(0)
            raise Aborted
        if not left[0]:
            left.pop(0)
            return "completed"
        return "truncated"

    stops = [tokenizer.eos_token_id]
    return Agent(args, tokenizer, [sample], max_len, stops, ThreadPoolExecutor(2), ask), sample


def encode(family, text):
    tokenizer = TOKENIZERS[family]
    return tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]


def play(agent, sample, function=calculator.generate):
    """Calls the function as often as it is interrupted. Returns its last answer and the number of calls."""
    for calls in range(1, 100):
        try:
            status = asyncio.run(function(agent.args, sample, agent))
        except Aborted:
            continue
        agent.finish(sample, status)
        return status, calls
    raise AssertionError("never ended")


# ---- the templates ----------------------------------------------------------------------------------------
WHOLE = {
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
              "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\nWhat is (12+30)*2?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n<calc>12+30</calc><|eot_id|>"
              "<|start_header_id|>ipython<|end_header_id|>\n\n\"42\"<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 84.<|eot_id|>",
    "qwen2.5": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is (12+30)*2?<|im_end|>\n"
               "<|im_start|>assistant\n<calc>12+30</calc><|im_end|>\n"
               "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 84.<|im_end|>",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is (12+30)*2?<|im_end|>\n"
             "<|im_start|>assistant\n<think>\nfirst\n</think>\n\n<calc>12+30</calc><|im_end|>\n"
             "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
             "<|im_start|>assistant\n<think>\ntwice 42\n</think>\n\nIt is 84.<|im_end|>"}
SAID = {"llama3": ["<calc>12+30</calc>", "It is 84."], "qwen2.5": ["<calc>12+30</calc>", "It is 84."],
        "qwen3": ["<think>\nfirst\n</think>\n\n<calc>12+30</calc>", "<think>\ntwice 42\n</think>\n\nIt is 84."]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_what_the_template_makes_of_it(family):
    """Text by hand; ids by the tokenizer of the whole text at once; mask 1 and the engine's log-probs on what was sampled, 0 and
    0.0 on all else."""
    agent, sample = make_agent(family, SAID[family])
    assert play(agent, sample) == ("completed", 1) and sample.mismatch == ""
    tokenizer = TOKENIZERS[family]
    assert sample.prompt_tokens + sample.response_tokens == tokenizer.encode(WHOLE[family], add_special_tokens=False)
    first, second = (encode(family, text) for text in SAID[family])
    tool = len(sample.response_tokens) - len(first) - len(second)
    assert sample.loss_mask == [1] * len(first) + [0] * tool + [1] * len(second) and tool > 5
    counted = lambda turn: [-1.0 - i for i in range(len(turn))]
    assert sample.rollout_logprobs == counted(first) + [0.0] * tool + counted(second)
    assert sample.version_runs == [[3, len(sample.response_tokens)]]
    assert sample.response == SAID[family][1], "what the reward sees is what was said last"
    roles = [message["role"] for message in sample.messages]
    assert roles == ["assistant", "tool"] and sample.messages[1]["content"] == "42"


@pytest.mark.parametrize("family", FAMILIES)
def test_long_conversations_of_any_text(family):
    """200 random conversations with tools and users, white space and other scripts: equal to the template's tokens, or, where the
    template changes the text (found by rendering it), reported so."""
    draw, kinds = random.Random(1), {"": 0, "text": 0}
    words = ["twelve", " 12", "+30", "\n", "<calc>", " é", "日本", ".", "{\"a\": 1}", "'", "the answer", "  "]
    for _ in range(200):
        turns = ["".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(draw.randint(2, 5))]
        if family == "qwen3":
            turns = [f"<think>\n{draw.choice(['hm', 'so 12', 'é'])}\n</think>\n\n{turn}" for turn in turns]
        role = draw.choice(["tool", "tool", "user"])

        async def talk(args, sample, agent):
            for i, _ in enumerate(turns):
                status = await agent.generate(sample)
                if i + 1 < len(turns):
                    assert agent.reply(sample, "".join(draw.choices(words, k=3)).strip(), role)
            return status

        agent, sample = make_agent(family, turns)
        play(agent, sample, talk)
        last = {"role": "assistant", "content": turns[-1]}
        text = render(agent.args, agent.tokenizer, [*QUESTION, *sample.messages, last])
        said = agent.tokenizer.decode(sample.prompt_tokens + sample.response_tokens)
        assert sample.mismatch.split(":")[0] == ("" if text.startswith(said) else "text")
        kinds[sample.mismatch.split(":")[0]] += 1
        sampled = [token for token, mask in zip(sample.response_tokens, sample.loss_mask) if mask]
        assert sampled == [token for turn in turns for token in encode(family, turn)], "sampled tokens are never touched"
    assert kinds[""] >= 30 and (family == "qwen2.5") == (kinds["text"] == 0)


@pytest.mark.parametrize("family, turns, kwargs, said, template", [
    ("llama3", [" <calc>1+1</calc>", "2"], {}, "header_id|>\\n\\n <calc>", "header_id|>\\n\\n<calc>"),   # trims
    ("qwen3", ["<think>\na\n</think>\n\n<calc>1+1</calc>", "2"], {},
     "assistant\\n2<|im_end|>'", "assistant\\n<think>"),    # empty thinking
    ("qwen3", ["<calc>1+1</calc>", "2"], {"enable_thinking": False},
     "assistant\\n<think>", "assistant\\n<calc>"),         # only in the prompt
])
def test_what_the_template_changes_is_reported_with_its_place(family, turns, kwargs, said, template):
    agent, sample = make_agent(family, turns, **kwargs)
    play(agent, sample)
    kind, here, there = re.match(r"(text): (.*) is in the sample where the chat template has (.*)", sample.mismatch).groups()
    assert said in here and template in there and said not in there


@pytest.mark.parametrize("family", FAMILIES)
def test_another_cut_into_tokens_is_kept_and_reported(family):
    """The model spells its call letter by letter, where the tokenizer has longer tokens: the trainer gets what was sampled."""
    call, answer = SAID[family]
    said = TOKENIZERS[family].convert_tokens_to_ids(["Ċ" if letter == "\n" else letter for letter in call])
    said += [TOKENIZERS[family].eos_token_id]
    assert len(said) == len(call) + 1 > len(encode(family, call))
    agent, sample = make_agent(family, [said, answer])
    play(agent, sample)
    assert sample.mismatch == "tokens" and sample.messages[1]["content"] == "42"
    assert sample.response_tokens[:len(said)] == said


@pytest.mark.parametrize("family", FAMILIES)
def test_several_results_stand_in_one_reply(family):
    async def two_tools(args, sample, agent):
        await agent.generate(sample)
        assert agent.reply(sample, ["5", "7"])
        return await agent.generate(sample)

    turns = ["<think>\na\n</think>\n\nboth", "<think>\nb\n</think>\n\n12"] if family == "qwen3" else ["both", "12"]
    agent, sample = make_agent(family, turns)
    play(agent, sample, two_tools)
    assert sample.mismatch == "" and [m["content"] for m in sample.messages[1:]] == ["5", "7"] and agent.turns(sample) == 1


# ---- interruptions ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_interrupted_at_any_token_it_ends_the_same(family, monkeypatch):
    """Once at each token of three turns, and at pairs of tokens: the sample is the uninterrupted one, and each tool ran once."""
    turns = SAID[family][:1] + [SAID[family][0].replace("12+30", "42*2")] + SAID[family][1:]
    ran = []
    monkeypatch.setattr(calculator, "calculate", lambda text: ran.append(text) or {"12+30": 42, "42*2": 84}[text])
    agent, whole = make_agent(family, turns)
    play(agent, whole)
    assert whole.mismatch == "" and ran == ["12+30", "42*2"]
    said = sum(whole.loss_mask)
    places = [[i] for i in range(said)] + [[i, j] for i in range(0, said, 3) for j in range(0, said - i, 4)]
    for stop_at in places:
        ran.clear()
        agent, sample = make_agent(family, turns, stop_at=list(stop_at))
        _, calls = play(agent, sample)
        assert calls == 1 + len(stop_at) and ran == ["12+30", "42*2"], stop_at
        for name in ("response_tokens", "loss_mask", "version_runs", "messages", "status", "response", "mismatch"):
            assert getattr(sample, name) == getattr(whole, name), (name, stop_at)


def test_what_runs_on_behind_an_interruption_changes_nothing():
    """asyncio.gather leaves the others running when one is interrupted: they may not touch their samples any more. agent.gather
    waits for them."""
    agent, sample = make_agent("qwen2.5", ["a"] * 4)
    part = agent.branch(sample, QUESTION)
    part.append([5], [-1.0], 3)

    async def interrupted():
        raise Aborted

    async def slow():
        await asyncio.sleep(0.05)
        return agent.reply(part, "late")

    async def with_asyncio():
        try:
            await asyncio.gather(interrupted(), task := asyncio.ensure_future(slow()))
        except Aborted:
            agent.over = True
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(with_asyncio())[0], Aborted) and part.response_tokens == [5]
    agent.over = False

    async def with_agent():
        await agent.gather(interrupted(), slow())

    with pytest.raises(Aborted):
        asyncio.run(with_agent())
    assert part.messages[-1]["content"] == "late"


# ---- limits -----------------------------------------------------------------------------------------------
def test_the_calculator_by_hand():
    for text, want in (("2+3*4", 14), ("7/2", 3.5), ("8/2", 4), (" (1+2)*-3", -9), ("17//5", 3), ("-7%3", 2),
                       ("0.1+0.2", 0.1 + 0.2)):
        assert calculator.calculate(text) == want
    for text, error in (("2**3", ValueError), ("a+1", ValueError), ("__import__('os')", ValueError), ("1/0", ZeroDivisionError),
                        ("1+", SyntaxError), ("'a'*3", ValueError), ("1" * 201, ValueError), ("", SyntaxError),
                        ("1e308*10", ArithmeticError)):
        with pytest.raises(error):
            calculator.calculate(text)


@pytest.mark.parametrize("stop_at", [[], [0], [3], [20, 12], [5, 5, 5, 5]])
def test_turns_are_limited(stop_at):
    """Also over interruptions: a turn that was over counts once."""
    agent, sample = make_agent("qwen2.5", ["<calc>1+1</calc>"] * 9, stop_at=list(stop_at))
    assert play(agent, sample) == ("truncated", 1 + len(stop_at))
    assert agent.turns(sample) == calculator.MAX_TURNS and sample.status == "truncated" and sample.mismatch == ""
    assert sample.response == "", "a tool's text is not an answer"


def test_tokens_are_limited():
    """The budget ends within a turn, within a result, or exactly at the end of one: truncated each time, and never too long."""
    agent, whole = make_agent("qwen2.5", SAID["qwen2.5"])
    play(agent, whole)
    length, first = len(whole.response_tokens), whole.loss_mask.index(0)
    second = length - whole.loss_mask[::-1].index(0)
    for budget in range(1, length + 2):
        agent, sample = make_agent("qwen2.5", SAID["qwen2.5"], max_len=budget)
        status, _ = play(agent, sample)
        fits = budget if budget < first else first if budget <= second else min(budget, length)
        assert len(sample.response_tokens) == fits and status == ("completed" if budget >= length else "truncated"), budget
        assert sample.response_tokens == whole.response_tokens[:fits]


@pytest.mark.drill
@pytest.mark.parametrize("call, result", [
    ("<calc>1/0</calc>", "error: division by zero"), ("<calc>x</calc>", "error: numbers, brackets and + - * / // % only"),
    ("<calc>1+</calc>", "error: invalid syntax (<unknown>, line 1)")])
def test_a_tool_that_fails_tells_the_model(call, result):
    agent, sample = make_agent("qwen2.5", [call, "sorry"])
    assert play(agent, sample)[0] == "completed" and sample.messages[1]["content"] == result


def test_a_long_result_is_cut():
    agent, sample = make_agent("qwen2.5", ["a", "b"])

    async def shout(args, sample, agent):
        await agent.generate(sample)
        agent.reply(sample, "12" * 100, max_tokens=10)
        return await agent.generate(sample)

    play(agent, sample, shout)
    assert sample.messages[1]["content"] == "12" * 5 + "..." and sample.mismatch == ""


async def slow_tool():
    await asyncio.sleep(60)


@pytest.mark.drill
@pytest.mark.parametrize("tool", [slow_tool, lambda: time.sleep(1.0)])
def test_a_tool_that_hangs_is_bounded(tool):
    agent, _ = make_agent("qwen2.5", [])
    before = time.time()
    assert asyncio.run(agent.tool(tool, timeout=0.2)) == "error: no answer within 0.2 s" and time.time() - before < 0.9


@pytest.mark.drill
@pytest.mark.parametrize("error, text", [(KeyError("k"), "'k'"), (SystemExit(3), r"called exit\(3\)")])
def test_a_fault_of_the_tool_is_not_an_answer(error, text):
    def tool():
        raise error

    async def async_tool():
        raise error

    agent, _ = make_agent("qwen2.5", [])
    for function in (tool, async_tool):
        with pytest.raises((KeyError, RuntimeError), match=text):
            asyncio.run(agent.tool(function))


# ---- several samples of one attempt -----------------------------------------------------------------------
async def with_helper(args, sample, agent):
    """A sub-agent answers first, in a sample of its own; its words are the tool's answer."""
    if not agent.turns(sample):
        await agent.generate(sample)
        helper = (agent.branches(sample) or [agent.branch(sample, [{"role": "user", "content": "Help!"}])])[0]
        if helper.status == "pending":
            helper.status = await agent.generate(helper)
        agent.reply(sample, agent.turn(helper))
    return await agent.generate(sample)


def test_an_attempt_of_two_samples():
    agent, sample = make_agent("qwen2.5", ["a", "12", "It is 12."])
    play(agent, sample, with_helper)
    main, helper = agent.samples
    assert main is sample and (helper.index, helper.part, helper.group_id) == (0, 1, 0)
    assert helper.prompt.endswith("<|im_start|>user\nHelp!<|im_end|>\n<|im_start|>assistant\n") and helper.response == "12"
    assert sample.messages[1]["content"] == "12" and sample.mismatch == ""
    group = Group(0, 0, 0, agent.samples)
    assert group.attempts == [main] and Group.from_json(group.to_json()) == group
    group.reset()
    assert group.samples == [main] and not (main.response_tokens or main.messages)


def test_what_is_left_undone_is_named():
    async def forget(args, sample, agent):
        agent.branch(sample, QUESTION)
        return await agent.generate(sample)

    async def nothing(args, sample, agent):
        return "completed"

    for function, text in ((forget, "sample 0 of group 0, part 1: pending, 0 tokens"), (nothing, "part 0: completed, 0 tokens")):
        agent, sample = make_agent("qwen2.5", ["a"])
        with pytest.raises(ValueError, match=text):
            play(agent, sample, function)
    agent, sample = make_agent("qwen2.5", ["a"])
    with pytest.raises(Dropped, match=r"branch_prompt_too_long: \d+ tokens, --rollout-max-prompt-len 200"):
        agent.branch(sample, [{"role": "user", "content": "é" * 500}])


# ---- whole runs -------------------------------------------------------------------------------------------
async def research(args, sample, agent):
    """Two turns with a tool; every other attempt asks a helper, with a sample of its own, in place of the tool."""
    if not agent.turns(sample):
        await agent.generate(sample)
        if sample.index % 2:
            helper = (agent.branches(sample) or [agent.branch(sample, [{"role": "user", "content": "Help!"}])])[0]
            if helper.status == "pending":
                helper.status = await agent.generate(helper)
            result = "helped"
        else:
            result = await agent.tool(remember, f"{args.run_dir}/tool.log", f"{sample.group_id} {sample.index}")
        agent.reply(sample, result)
    return await agent.generate(sample)


def remember(path, line):
    with open(path, "a") as f:
        f.write(line + "\n")
    return "done"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine():
    servers = scripted_engine.start(1, vocab_size=250, lengths="3:1,2:4,1:14", unit_seconds=0.03)   # longer than a step trains
    yield servers[0][1]
    scripted_engine.stop(servers)


@pytest.mark.contract
def test_a_stream_of_conversations_is_interrupted_continued_trained_and_replayed(model, engine, tmp_path):
    """Partial rollout through turns, tools and helpers. No tool runs twice, nothing is lost, all columns fit; and the replay ends
    with the same weights."""
    flags = dict(staleness_threshold=1.0, partial_rollout=True, custom_generate_function_path="test_agent.research",
                 num_rollout=8, n_samples_per_prompt=4, rollout_max_response_len=120, rollout_max_prompt_len=60, max_tokens_per_gpu=512,
                 apply_chat_template=True, save_interval=8)
    light.succeed("train_fully_async.py", harness.flags(model, tmp_path, "talks", [engine], **flags))
    records = list(Ledger.read(str(tmp_path / "talks" / "ledger.jsonl")))
    interrupted = [r for r in records if r["event"] == "put_back" and any(r["tokens"])]
    assert len(interrupted) > 3 and any(len(r["tokens"]) > 4 for r in interrupted), "no helper was interrupted"
    ran = (tmp_path / "talks" / "tool.log").read_text().splitlines()
    assert len(ran) == len(set(ran)), "a tool ran twice"
    rows = harness.metrics(tmp_path, "talks")
    for step in range(8):
        for group in load_groups(str(tmp_path / "talks" / "samples" / f"step_{step:07d}.npz")):
            helpers = [s for s in group.samples if s.part]
            assert [s.index for s in group.attempts] == [0, 1, 2, 3] and sorted(s.index for s in helpers) == [1, 3]
            assert {f"{group.group_id} {i}" for i in (0, 2)} <= set(ran)
            for s in group.samples:
                assert len(s.response_tokens) == len(s.loss_mask) == len(s.rollout_logprobs) == sum(n for _, n in s.version_runs)
                assert all(logprob == 0.0 for logprob, mask in zip(s.rollout_logprobs, s.loss_mask) if not mask)
                assert all(logprob < 0.0 for logprob, mask in zip(s.rollout_logprobs, s.loss_mask) if mask)
                assert bool(s.messages) == (s.part == 0) and s.reward == group.attempts[s.index].reward
        file = tmp_path / "talks" / "samples" / f"step_{step:07d}.npz"
        whole = [s for group in load_groups(str(file)) for s in group.samples]
        engine_said, mask = (np.concatenate([getattr(s, name) for s in whole]) for name in ("rollout_logprobs", "loss_mask"))
        apart = np.abs(np.load(str(file).replace(".npz", ".trainer.npy")) - engine_said)[mask > 0].mean()
        assert apart == pytest.approx(rows[step]["train/logprob_abs_diff"], rel=1e-5), "of other tokens"
    assert all(row["rollout/turns"] == 2.0 for row in rows) and max(row["staleness/max"] for row in rows) > 0
    status, output = light.run("train_fully_async.py", ["--replay", str(tmp_path / "talks"), "--output-dir", str(tmp_path),
                                                        "--run-name", "again"])
    assert status == 0, output[-3000:]
    assert harness.same_bits(*(harness.saved_state(tmp_path, name, 8) for name in ("talks", "again")))


def train_batches(rank, world, port, job, out):
    args, batches = job
    worker, metrics = TrainWorker(args, rank, f"127.0.0.1:{port}"), []
    for step, batch in enumerate(batches):
        worker.send_weights([None])                # to no engine
        metrics.append(worker.train(step, batch))
    if rank == 0:
        torch.save(metrics, f"{out}/metrics{world}.pt")


@pytest.mark.contract
@pytest.mark.parallel
def test_samples_that_fill_up_a_step_change_nothing(model, tmp_path):
    """The same two batches, where attempts made 1, 2 or 3 samples, on one rank and on two, which need copies to fill up."""
    draw = random.Random(6)
    for step in range(2):
        groups = []
        for group_id in range(4 * step, 4 * step + 4):
            samples = [Sample(group_id, i, 0, "", "", [7, 8, 9], reward=float(draw.random() < 0.5)) for i in range(2)]
            samples += [Sample(group_id, i, 0, "", "", [7, 8], reward=samples[i].reward, part=part)
                        for i in range(2) for part in range(1, draw.randint(1, 3))]
            for sample in samples:
                length = draw.randint(1, 6)
                sample.append([draw.randint(4, 200) for _ in range(length)], [-5.5] * length, step)
                sample.status = "completed"
            groups.append(Group(group_id, 0, 0, samples))
        save_groups(str(tmp_path / f"{step}.npz"), groups)
    flags = dict(global_batch_size=4, kl_coef=0.1, debug_train_only=True, load_debug_rollout_data=str(tmp_path / "{step}.npz"))
    args = [parse_args(harness.flags(model, tmp_path, "run", actor_num_gpus_per_node=ranks, **flags)) for ranks in (1, 2)]
    batches = [[make_batch(a, step, load_groups(str(tmp_path / f"{step}.npz"))) for step in range(2)] for a in args]
    sizes = [[batch["update_sizes"] for batch in two_steps] for two_steps in batches]
    assert sizes[0] != sizes[1], "nothing had to be filled up: the test shows nothing"
    for job in zip(args, batches):
        run_ranks(train_batches, job[0].world_size, job, str(tmp_path), 120)
    one, two = (torch.load(tmp_path / f"metrics{ranks}.pt") for ranks in (1, 2))
    for name in ("train/loss", "train/grad_norm", "train/first_ppo_kl"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in two], rel=1e-4, abs=1e-6), name
    assert one[1]["train/grad_norm"] > 1e-3


def teach(folder, rows):
    """Trains the random model in `folder` on whole conversations with the calculator until it has them by heart."""
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = []
    for prompt, label in rows:
        talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"<calc>{prompt.strip('=')}</calc>"},
                {"role": "tool", "content": label}, {"role": "assistant", "content": label}]
        batch.append(tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False))
    assert len({len(ids) for ids in batch}) == 1
    ids = torch.tensor(batch)
    adam = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(150):
        loss = network(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    network.save_pretrained(folder)
    return network.eval()


@pytest.mark.contract
def test_the_calculator_with_a_real_engine(tmp_path):
    """A tiny model that has learned to call the calculator, on the real SGLang server, with over-sampling and partial rollout:
    the conversations are the template's, token by token, and the log-probs of what was sampled are Hugging Face's."""
    folder = harness.make_model(tmp_path, rows=8)
    rows = [(f"{a}+{b}=", str(a + b)) for a, b in ((11, 22), (35, 14), (40, 30), (51, 18), (23, 71), (12, 12), (67, 21), (90, 9))]
    with open(f"{folder}/train.jsonl", "w") as f:
        f.writelines(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows[:7])
    network = teach(folder, rows[:7])
    args = parse_args(harness.flags(folder, tmp_path, "run", [], custom_generate_function_path="examples.calculator.generate",
                                    custom_rm_path=None, rm_type="exact", apply_chat_template=True, rollout_max_prompt_len=60,
                                    rollout_max_response_len=100, max_tokens_per_gpu=512, partial_rollout=True,
                                    over_sampling_batch_size=6, n_samples_per_prompt=4))
    server = engine_module.Server(0, args)
    try:
        manager = RolloutManager(args)
        manager.connect([server.start()])
        samples = asyncio.run(three_batches(manager))
    finally:
        server.stop(grace=0)
    assert len(samples) == 3 * 4 * 4
    right = [s for s in samples if s.reward == 1.0]
    assert len(right) > 0.7 * len(samples) and all([m["content"] for m in s.messages][1:] == [s.label] for s in right)
    assert {s.mismatch for s in right} == {""}
    for s in samples[::4]:
        with torch.no_grad():
            logits = network(torch.tensor([s.prompt_tokens + s.response_tokens])).logits[0, len(s.prompt_tokens) - 1:-1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(s.response_tokens)[:, None])[:, 0]
        difference = (logp - torch.tensor(s.rollout_logprobs)).abs() * torch.tensor(s.loss_mask)
        assert difference.max() < 1e-4 and 0 < sum(s.loss_mask) < len(s.loss_mask) or not s.messages


async def three_batches(manager):
    await manager.publish(0, [], [])
    samples = []
    for step in range(3):
        groups, _ = await manager.next_groups(step)
        manager.buffer.trained(step)
        samples += [sample for group in groups for sample in group.samples]
    await manager.session.close()
    return samples
