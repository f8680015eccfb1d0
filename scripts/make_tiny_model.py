"""Make a tiny Qwen3-shaped model that is half good at arithmetic, and the data to train it further
with RL.

    python scripts/make_tiny_model.py OUT_DIR --seed 0 [--num-experts 8]

OUT_DIR becomes a Hugging Face checkpoint (config.json, model.safetensors in fp32, a tokenizer with
one token per byte and a chat template) beside train.jsonl and eval.jsonl, whose rows are {"prompt":
"17+25=", "label": "42"}. No prompt of eval.jsonl is in train.jsonl or among the demonstrations.

The model first learns the task from right demonstrations, then imitates noisy ones, most of which
have a wrong digit. So it knows the sums, but a sample at temperature 1 is right only three times in
ten: a policy that an exact-match reward can improve within a few dozen steps. It takes about a
minute. The same seed on the same kind of CPU makes the same files, and an OUT_DIR that this same
script completed with the same seed is kept as it is.
"""
import argparse
import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>"]      # ids 0..3; <|im_end|> ends a turn
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
MAX_NUMBER = 49             # operands are 0..49: 3,775 sums and differences, few enough to master within a minute
EVAL_ROWS = 128             # held out; with 8 samples each the standard error of the evaluation's mean is about 0.015
BATCH_SIZE = 128
PHASES = (                  # (name, steps, peak learning rate, share of right demonstrations)
    ("right demonstrations", 1000, 5e-3, 1.0),
    ("noisy demonstrations", 200, 2e-3, 0.36),
)


# ---------------------------------------------------------------- tokenizer and model

def build_tokenizer():
    """One token per byte after the special tokens: any text can be encoded, ASCII is one token per character."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, start = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos,
                                   additional_special_tokens=[start], chat_template=CHAT_TEMPLATE, model_max_length=512)


def build_model(tokenizer, seed, hidden_size=64, num_layers=2, num_experts=0):
    """A random Qwen3 of 0.16 M parameters, fp32. Grouped-query attention: 4 heads of 32, 2 key-value heads. With experts a
    Qwen3-MoE, each token of which goes through 2 of them, half as wide as the one MLP is; its head is
    its own (SGLang has no tied one for it)."""
    torch.manual_seed(seed)
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden_size,
               "norm_topk_prob": True} if num_experts else {}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        **experts, vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, tie_word_embeddings=not num_experts, initializer_range=0.05, dtype="float32",
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    return (Qwen3MoeForCausalLM if num_experts else Qwen3ForCausalLM)(config)


# ---------------------------------------------------------------- task

def make_rows(seed):
    """All sums, and all differences that are not negative, in a random order -> (train rows, held-out rows)."""
    numbers = range(MAX_NUMBER + 1)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in numbers for b in numbers]
    rows += [{"prompt": f"{a}-{b}=", "label": str(a - b)} for a in numbers for b in range(a + 1)]
    random.Random(seed).shuffle(rows)
    return rows[EVAL_ROWS:], rows[:EVAL_ROWS]


def wrong_digit(label, rng):
    """`label` with one digit replaced by another."""
    i = rng.randrange(len(label))
    return label[:i] + rng.choice([d for d in "0123456789" if d != label[i]]) + label[i + 1:]


def demonstration_batch(rows, tokens, pad, eos, right_share, rng):
    """-> (ids, labels), both [BATCH_SIZE, T]; labels are -100 on prompt and padding. Right padding needs no mask."""
    ids, labels = [], []
    for row in rng.choices(rows, k=BATCH_SIZE):
        answer = row["label"] if rng.random() < right_share else wrong_digit(row["label"], rng)
        prompt, response = [tokens[c] for c in row["prompt"]], [tokens[c] for c in answer] + [eos]
        ids.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    width = max(map(len, ids))
    return (torch.tensor([row + [pad] * (width - len(row)) for row in ids]),
            torch.tensor([row + [-100] * (width - len(row)) for row in labels]))


# ---------------------------------------------------------------- pre-training

def pretrain(model, tokenizer, rows, seed):
    """Imitate the demonstrations of each phase with Adam, linear warm-up and linear decay."""
    rng = random.Random(seed)
    tokens = {c: tokenizer.convert_tokens_to_ids(c) for c in "0123456789+-="}
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    for name, steps, learning_rate, right_share in PHASES:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 50, (steps - i) / steps))
        bar = tqdm(range(steps), desc=f"pre-train on {name}", unit="step", mininterval=1.0, file=sys.stderr)
        for step in bar:
            ids, labels = demonstration_batch(rows, tokens, pad, eos, right_share, rng)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 20 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def mean_reward(model, tokenizer, rows, samples, temperature):
    """Exact-match share of `samples` answers per row. Prompts are batched by length, so none needs padding."""
    by_length, right = {}, 0
    for row in rows:
        by_length.setdefault(len(row["prompt"]), []).append(row)
    for group in by_length.values():
        prompts = torch.tensor([tokenizer.encode(r["prompt"]) for r in group]).repeat_interleave(samples, 0)
        out = model.generate(prompts, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=8)
        texts = tokenizer.batch_decode(out[:, prompts.shape[1]:], skip_special_tokens=True)
        right += sum(text == group[i // samples]["label"] for i, text in enumerate(texts))
    return right / (len(rows) * samples)


# ---------------------------------------------------------------- files

def is_complete(out_dir, settings):
    """True: made by this script with these settings. False: nothing, or ours and outdated. Else refused."""
    done = out_dir / "tiny_model.json"
    if done.exists():
        return json.loads(done.read_text()) == settings
    if out_dir.exists() and any(out_dir.iterdir()):
        sys.exit(f"OUT_DIR {out_dir} holds files that this script did not make; name a new folder")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="folder of the checkpoint and the data")
    parser.add_argument("--seed", type=int, default=0, help="seeds weights, demonstrations, and the split of the data")
    parser.add_argument("--num-experts", type=int, default=0,
                        help="of a mixture of experts, at least 2; the default is a dense model")
    args = parser.parse_args()
    if args.num_experts == 1 or args.num_experts < 0:
        parser.error(f"--num-experts {args.num_experts}: each token goes through 2 of them")
    settings = {"seed": args.seed, "num_experts": args.num_experts, "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if is_complete(args.out_dir, settings):
        print(f"tiny model: {args.out_dir} is complete, kept")
        return

    torch.set_num_threads(1)        # the order of sums, and so the weights, must not depend on the number of cores
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed, num_experts=args.num_experts)
    train_rows, eval_rows = make_rows(args.seed)
    pretrain(model, tokenizer, train_rows, args.seed)
    sampled, sharp = (mean_reward(model, tokenizer, eval_rows, samples=8, temperature=t) for t in (1.0, 0.05))

    partial = args.out_dir.with_name(f"{args.out_dir.name}.partial-{os.getpid()}")   # a kill leaves no half OUT_DIR
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for name, rows in (("train.jsonl", train_rows), ("eval.jsonl", eval_rows)):
        (partial / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (partial / "tiny_model.json").write_text(json.dumps(settings) + "\n")
    shutil.rmtree(args.out_dir, ignore_errors=True)
    partial.rename(args.out_dir)
    print(f"tiny model: {args.out_dir}, {model.num_parameters():,} parameters, {len(train_rows)} training and "
          f"{len(eval_rows)} held-out prompts, reward {sampled:.2f} at temperature 1 (near-greedy {sharp:.2f})")


if __name__ == "__main__":
    main()
