"""The chat formats of Llama 3, Qwen2.5 and Qwen3 as Jinja templates, and a tokenizer with real merges for each.

They render what the models' own templates render for messages of system, user, assistant and tool without a list of tools:
Llama 3.1 and 3.2 (trims, quotes a tool's text as JSON, has a dated system message), Qwen2.5 (a default system message, a tool's
text as a user's), Qwen3 (thinking: kept behind the last question of the user, dropped before it, empty where an answer has none).
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA3 = r"""
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- set rules = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- bos_token + head('system') + 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' + rules + '<|eot_id|>' }}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if message.role == 'tool' %}
        {{- head('ipython') + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

TOOL_TURNS = r"""
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN25 = r"""
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'tool' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}""" + TOOL_TURNS

QWEN3 = r"""
{%- set last = namespace(question=messages | length - 1) %}
{%- for message in messages %}
    {%- set wrapped = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not wrapped %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set parts = message.content.split('</think>') %}
        {%- set thought = parts[0].rstrip('\n').split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
        {%- set said = parts[-1].lstrip('\n') if parts | length > 1 else message.content %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' + said.lstrip('\n') }}
        {%- else %}
            {{- said }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role != 'tool' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}""" + TOOL_TURNS + r"""
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\n\n</think>\n\n' }}
{%- endif %}"""

SPECIAL = {"llama3": (["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], LLAMA3),
           "qwen2.5": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], QWEN25),
           "qwen3": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], QWEN3)}
# how all three cut a text before merging: newlines by themselves, digits up to three (Llama) or one at a time (Qwen)
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CORPUS = ["the answer is twelve and the result of the calculation is 12", "<calc>12+30</calc> <think>\nlet me see\n</think>\n\n",
          "<tool_response>\n42\n</tool_response>", "user assistant system tool ipython",
          "What is the sum of the numbers, please?"] * 20


def make_tokenizer(name):
    """A byte-level BPE of a few hundred entries with the family's special tokens and template; `eos_token` ends a turn."""
    special, template = SPECIAL[name]
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS.replace("DIGITS", "1,3" if name == "llama3" else "1")), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1],
                                   additional_special_tokens=special[2:], chat_template=template)
