"""Prompt data: rows of a file become prompt tokens when they are drawn, not before."""

import hashlib
import json
import os
from urllib.parse import parse_qsl

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
GYM = "reasoning-gym:"
HUB_SECONDS = 10                       # in which the hub must answer


class PromptRows:
    """A sequence of prompts. `rows[i]` -> {"prompt": text, "prompt_tokens": ids, "label": text, "metadata": dict}.

    Nothing is tokenized at start and nothing is copied: a million rows are as quick to open as a hundred.
    """

    def __init__(self, path, args, tokenizer):
        self.rows = load_rows(path, args, "data")
        self.args, self.tokenizer = args, tokenizer
        self.metadata_key = args.metadata_key or ("metadata" if path.startswith(GYM) else None)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        args, row = self.args, self.rows[i]
        prompt = row[args.input_key]
        metadata = self.metadata(row[self.metadata_key]) if self.metadata_key else {}
        if args.apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = render(args, self.tokenizer, messages, add_generation_prompt=True)
            metadata["prompt_messages"] = [dict(message) for message in messages]       # an agent loop goes on from them
        if not isinstance(prompt, str):            # an empty text is dropped when it is drawn, and counted
            raise ValueError(f"--prompt-data: row {i} has no text in column {args.input_key!r} (it holds {str(prompt)[:60]!r}); "
                             f"lists of messages need --apply-chat-template")
        return {"prompt": prompt,
                "prompt_tokens": self.tokenizer.encode(prompt, add_special_tokens=False),
                "label": "" if row.get(args.label_key) is None else str(row[args.label_key]),
                "metadata": metadata}

    def metadata(self, value):
        """A dict, or its JSON: what differs from row to row in its types fits no column of a table."""
        return json.loads(value) if isinstance(value, str) else dict(value or {})


def file_digest(path):
    """Of a file's bytes, about a GB a second: a resume notices that they were changed. "" for what is not a file."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "blake2b").hexdigest()[:32]


def render(args, tokenizer, messages, add_generation_prompt=False):
    """The chat template's text of the messages, [{"role", "content"}, ...]."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt,
                                         **args.apply_chat_template_kwargs)


def load_rows(path, args, flag):
    """A `datasets.Dataset`: of a file; of a generated task (gym_rows); or of the hub, or a folder laid out as there, with the
    options of datasets.load_dataset behind a question mark: 'openai/gsm8k?name=main&split=test' (the default is split=train;
    split=train[:1000] takes a part). ValueError in one line, naming the flag, for a missing file, column, label or prompt, or no
    rows."""
    import datasets   # takes a second or two: only those who read data pay for it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)   # its errors reach the user below, in one line
    suffix = os.path.splitext(path)[1]
    try:
        if suffix in FORMATS:
            if not os.path.exists(path):
                raise ValueError("no such file")
            if os.path.getsize(path) == 0:
                raise ValueError("the file is empty")
            rows = datasets.load_dataset(FORMATS[suffix], data_files=path, split="train")
        elif path.startswith(GYM):
            rows = gym_rows(path)
        else:
            rows = hub_rows(path)
    except Exception as error:   # whatever the library raises, the user needs the file's name and the reason in one line
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{flag} {path}: {reason}") from None
    needed = [args.input_key, None if args.custom_rm_path else args.label_key, args.metadata_key]
    missing = [key for key in needed if key and key not in rows.column_names]
    if missing:
        raise ValueError(f"{flag} {path}: there is no column {missing[0]!r}; there are {', '.join(rows.column_names)} "
                         f"(see --input-key, --label-key, --metadata-key)")
    if len(rows) == 0:
        raise ValueError(f"{flag} {path}: no rows")
    for key in needed[:2]:                 # a row without it is read as null: never the text 'None'
        if key and (count := rows.data.column(key).null_count):
            first = rows.data.column(key).is_null().index(True).as_py()
            raise ValueError(f"{flag} {path}: {count} of {len(rows)} rows have nothing in column {key!r}, "
                             f"the first is row {first}")
    return rows


def hub_rows(path):
    """Asked first whether the hub answers within HUB_SECONDS: the libraries try again for up to minutes. Where it does not, what
    was downloaded once is taken from the cache."""
    import datasets
    import requests
    from huggingface_hub import constants

    name, _, options = path.partition("?")
    options = {"split": "train", **dict(parse_qsl(options, strict_parsing=bool(options)))}
    problem, offline = None, datasets.config.HF_HUB_OFFLINE
    if not (os.path.isdir(name) or offline):
        try:
            requests.head(constants.ENDPOINT, timeout=HUB_SECONDS)
        except requests.RequestException as error:
            problem = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    try:
        datasets.config.HF_HUB_OFFLINE = bool(offline or problem)
        return datasets.load_dataset(name, **options)
    except ConnectionError:            # of the libraries: nothing in the cache
        problem = problem or ("HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" if offline else f"{constants.ENDPOINT} failed")
        raise ValueError(f"{problem}, and {name!r} is neither a folder here nor in the cache {datasets.config.HF_DATASETS_CACHE}: "
                         f"load it once where there is a network, set HF_ENDPOINT to a mirror, or name a file or folder") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def gym_rows(path):
    """A generated task: 'reasoning-gym:chain_sum?size=500&seed=1&max_terms=2', the options being those of its config in
    reasoning-gym (https://github.com/open-thought/reasoning-gym). Columns prompt, label and metadata, which --rm-type
    reasoning_gym scores with."""
    import datasets
    import reasoning_gym

    task, _, options = path.removeprefix(GYM).partition("?")
    options = {name: json.loads(value) for name, value in parse_qsl(options, strict_parsing=bool(options))}
    entries = reasoning_gym.create_dataset(task, **{"seed": 0, **options})       # else new ones at each start
    return datasets.Dataset.from_list([{"prompt": entry["question"], "label": str(entry["answer"]),
                                        "metadata": json.dumps(entry["metadata"])} for entry in entries])
