"""The agent loop: one sample of several turns with tools, driven by a function of the user's.

`--custom-generate-function-path module.function` names an `async def function(args, sample, agent)`. It is called once for each
attempt at a prompt, and again after each interruption of it: then the sample has the tokens that it had, ends within a turn, and
the function must go on from there. Nothing but `agent.generate` is interrupted, so a tool whose answer was appended is not run
again. It returns "completed" or "truncated", or None to end as its last turn did. examples/calculator.py is one to copy.

Token-in, token-out: what the model sampled is never decoded and encoded again. Around it stand the tokens that the chat template
puts there, and `compare` finds out whether the whole is what the template would have made of the conversation.
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from buffer import Dropped, Sample
from data import render
from fleet import Aborted


ANSWER = "(an answer)"      # stands for a turn of the model where only what the template writes behind it is wanted
FAULTS = (ValueError, ArithmeticError, SyntaxError, OSError)    # of a tool's input, and an answer to the model; others are bugs


@dataclass
class Agent:
    """What a generate function works with. Of these it may use: generate, turn, turns, tool, reply, append, branch, branches,
    gather, tokenizer."""
    args: object
    tokenizer: object
    samples: list                # of the group: branches are added to them
    max_len: int                 # tokens of a response, tools' included
    stops: list                  # ids of the tokens that end a turn
    threads: object              # where tools run
    ask: Callable                # async (sample) -> "completed" | "truncated"; raises Aborted
    over: bool = False           # the function has returned, or was interrupted: what it may have left running changes nothing

    # ---- turns --------------------------------------------------------------------------------------------
    async def generate(self, sample):
        """The model's turn, or the rest of one that was interrupted. Returns "completed" (a stop token), or "truncated" where the
        budget (--rollout-max-response-len, tools' tokens included) is used up."""
        if self.over:
            raise Aborted
        return await self.ask(sample)

    def turns(self, sample):
        """How many turns of the model are over: each has a tool's or the user's tokens behind it."""
        mask = [1, *sample.loss_mask]
        return sum(before and not here for before, here in zip(mask, mask[1:]))

    def turn(self, sample):
        """The text of the turn that the model has just ended, without the stop token; "" behind a tool's tokens."""
        tokens = sample.response_tokens[turn_start(sample):]
        tokens = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        return self.decode(tokens)

    def decode(self, tokens, skip_special_tokens=False):
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    # ---- what the model did not write ---------------------------------------------------------------------
    async def tool(self, function, *arguments, timeout=10.0):
        """What function(*arguments) returns, as text; it may be async, else it runs in a thread. "error: ..." for the model to
        read where it raises one of FAULTS or takes longer than `timeout` seconds; any other exception ends the run. (A thread
        cannot be stopped: a tool that may hang for ever should be async, or end by itself.)"""
        if inspect.iscoroutinefunction(function):
            call = no_exit_async(function(*arguments))
        else:
            call = asyncio.get_running_loop().run_in_executor(self.threads, no_exit, function, *arguments)
        try:
            return str(await asyncio.wait_for(call, timeout))
        except asyncio.TimeoutError:
            return f"error: no answer within {timeout:g} s"
        except FAULTS as error:
            return f"error: {error}"

    def reply(self, sample, content, role="tool", max_tokens=256):
        """Appends a message to the conversation, or several of a list, each cut to `max_tokens`, with all that the chat template
        puts between two turns of the model. False, with nothing appended, where that would leave no budget for another turn."""
        contents = [self.cut(text, max_tokens) for text in ([content] if isinstance(content, str) else content)]
        said = [{"role": "assistant", "content": self.turn(sample)}, *({"role": role, "content": text} for text in contents)]
        if not self.append(sample, self.between(said[1:], sample.response_tokens[-1])):
            return False
        sample.messages += said
        return True

    def cut(self, text, max_tokens):
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return text if len(tokens) <= max_tokens else self.decode(tokens[:max_tokens]) + "..."

    def between(self, messages, last):
        """The template's text from the end of the model's turn, whose last token is `last`, to where the model speaks again."""
        messages = [{"role": "user", "content": "(a question)"}, {"role": "assistant", "content": ANSWER}, *messages]
        text = render(self.args, self.tokenizer, messages, add_generation_prompt=True).split(ANSWER, 1)[1]
        return text.removeprefix(self.decode([last])) if last in self.stops else text

    def append(self, sample, text):
        """Appends plain text: mask 0, log-probs 0.0. False, with nothing appended, where no budget would be left."""
        if self.over:
            raise Aborted
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if len(sample.response_tokens) + len(tokens) >= self.max_len:
            return False
        sample.append(tokens, [0.0] * len(tokens), sample.version_runs[-1][0], mask=0)
        return True

    # ---- several training samples -------------------------------------------------------------------------
    def branch(self, sample, messages):
        """Another training sample of the same attempt, from a prompt of its own: of a sub-agent, or of a turn before which the
        context was rewritten. It shares the attempt's reward and advantage, which weighs in its group as one. The function
        generates it, and sets its `status` to what `generate` returned."""
        prompt = render(self.args, self.tokenizer, messages, add_generation_prompt=True)
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False)
        if not 0 < len(tokens) <= self.args.rollout_max_prompt_len:
            raise Dropped(f"branch_prompt_too_long: {len(tokens)} tokens, --rollout-max-prompt-len "
                          f"{self.args.rollout_max_prompt_len}")
        part = Sample(sample.group_id, sample.index, sample.row, prompt, sample.label, tokens,
                      {**sample.metadata, "prompt_messages": messages}, part=len(self.branches(sample)) + 1)
        self.samples.append(part)
        return part

    def branches(self, sample):
        """The attempt's other samples in the order of their making; after an interruption those made before it."""
        return [part for part in self.samples if part.index == sample.index and part.part > 0]

    async def gather(self, *coroutines):
        """Runs coroutines beside each other, sub-agents say, and returns their results. Unlike asyncio.gather it waits for all
        of them also when one is interrupted, so that a tool that runs meanwhile gets its answer into its sample."""
        results = await asyncio.gather(*coroutines, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error
        return results

    # ---- the end ------------------------------------------------------------------------------------------
    def finish(self, sample, status):
        """The attempt is over; its `response`, for the reward, is what the model said last: what a tool said earns nothing.
        ValueError where the function left something undone."""
        sample.status = status
        for part in [sample, *self.branches(sample)]:
            if part.status not in ("completed", "truncated") or not part.response_tokens:
                raise ValueError(f"--custom-generate-function-path returned with {part.name}, part {part.part}: {part.status}, "
                                 f"{len(part.response_tokens)} tokens: generate it, and return or set its status")
            part.response = self.decode(part.response_tokens[turn_start(part):], skip_special_tokens=True)
            part.mismatch = self.compare(part)

    def compare(self, sample):
        """Whether the conversation's token ids are those of the chat template's own rendering: "" if they are, or if there is no
        conversation; "tokens" for the same text cut into other tokens; "text: ..." for another text, and where it begins: the
        template dropped or added something (Qwen3 drops earlier thinking, Llama 3 trims)."""
        if not sample.messages or "prompt_messages" not in sample.metadata:
            return ""
        messages = sample.metadata["prompt_messages"] + sample.messages
        tokens = sample.prompt_tokens + sample.response_tokens
        ended = sample.loss_mask[-1] and sample.status == "completed"
        if ended:
            messages = [*messages, {"role": "assistant", "content": self.turn(sample)}]
        else:                  # nothing ends a truncated turn: up to it
            tokens = tokens[:len(sample.prompt_tokens) + turn_start(sample)]
        text = render(self.args, self.tokenizer, messages, add_generation_prompt=not ended)
        if self.tokenizer.encode(text, add_special_tokens=False)[:len(tokens)] == tokens:
            return ""
        said = self.decode(tokens)
        if text.startswith(said):
            return "tokens"
        i = next((i for i, (a, b) in enumerate(zip(said, text)) if a != b), min(len(said), len(text)))
        here, there = (whole[max(0, i - 20):i + 20] for whole in (said, text))
        return f"text: {here!r} is in the sample where the chat template has {there!r}"


def turn_start(sample):
    """Where the last turn of the model begins in the response: behind the last token that it did not sample."""
    return len(sample.loss_mask) - sample.loss_mask[::-1].index(0) if 0 in sample.loss_mask else 0


async def gather(coroutines):
    """asyncio.gather that cancels the others when one fails, so that no request runs on behind an error."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def no_exit(function, *arguments):
    """Calls a user's function. Its sys.exit() must become an error of the run, not the silent end of this process's loop."""
    try:
        return function(*arguments)
    except SystemExit as error:
        said = RuntimeError(f"{function.__module__}.{function.__qualname__} called exit({error})")
        raise said.with_traceback(error.__traceback__) from None


async def no_exit_async(coroutine):
    try:
        return await coroutine
    except SystemExit as error:
        said = RuntimeError(f"{coroutine.__qualname__} called exit({error})")
        raise said.with_traceback(error.__traceback__) from None


async def plain_generate(args, sample, agent):
    """One turn: what a run without an own function does."""
    return await agent.generate(sample)
