"""A calculator as a tool: the model writes <calc>2+3*4</calc>, reads the result in the next message, and then answers.

    python train_async.py --custom-generate-function-path examples.calculator.generate --apply-chat-template ...

Copy it and put your own tool into `calculate`. What `agent` can do stands in agent.py.
"""

import ast
import operator
import re

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
MAX_TURNS = 4               # of the model; the last one must be the answer
TOOL_SECONDS = 5.0
RESULT_TOKENS = 64
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculate(expression):
    """The value of a Python expression of numbers, brackets and + - * / // %, and no powers: they can take for ever. ValueError,
    SyntaxError or ZeroDivisionError for any other; the model gets to read what they say."""
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    return int(value) if value == int(value) else value


def evaluate(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand))
    raise ValueError("numbers, brackets and + - * / // % only")


async def generate(args, sample, agent):
    """--custom-generate-function-path. Called again after an interruption: `agent.turns` says how many turns are behind it."""
    for _ in range(agent.turns(sample), MAX_TURNS):
        status = await agent.generate(sample)                   # the turn, or what is left of it
        call = CALL.search(agent.turn(sample))
        if call is None or status == "truncated":
            return status                                       # an answer, or no tokens left
        result = await agent.tool(calculate, call[1], timeout=TOOL_SECONDS)
        if not agent.reply(sample, result, role="tool", max_tokens=RESULT_TOKENS):
            return "truncated"                                  # the result does not fit
    return "truncated"                                          # calls to the end, no answer
