"""What a row means: token ids, a text, or a conversation in the roles that chat templates know.

A file's format is told from the keys of its first row that is not empty, or named by dataset_info.json."""

import dataclasses
import json

from .errors import InputError

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass
class Tokens:
    where: str
    ids: list
    labels: list | None


@dataclasses.dataclass
class Text:
    where: str
    text: str


@dataclasses.dataclass
class Chat:
    where: str
    messages: list
    tools: list | None
    learn: list  # indices of the messages to be learned

    def with_system(self, system):
        if system is None or self.messages[0]["role"] == "system":
            return self
        return Chat(self.where, [{"role": "system", "content": system}, *self.messages], self.tools,
                    [index + 1 for index in self.learn])


def reader(schema):
    """A function (where, row) -> Tokens, Text, Chat, or None for a row that holds nothing; one a file."""
    convert = _by_schema(schema) if schema else None

    def read(where, row):
        nonlocal convert
        if not row:
            return None
        if convert is None:
            convert = _by_keys(where, row)
        return convert(where, row)
    return read


def _by_keys(where, row):
    if "input_ids" in row:
        return _tokens
    if "messages" in row:
        return _openai
    if "conversations" in row:
        return _sharegpt
    if "instruction" in row:
        return _alpaca
    if "text" in row:
        return lambda where, row: _text(where, row, "text")
    for response in ("response", "completion"):
        if "prompt" in row and response in row:
            return lambda where, row: _pair(where, row, "prompt", None, response, None, "system")
    raise InputError(f"{where}: the keys {_listed(row)} are no known format; expected input_ids, messages, conversations, "
                     "instruction with output, prompt with response or completion, or text")


def _by_schema(schema):
    columns, tags = schema.columns, schema.tags
    if schema.formatting == "alpaca":
        if columns["response"] is None:
            return lambda where, row: _text(where, row, columns["prompt"])
        return lambda where, row: _pair(where, row, columns["prompt"], columns["query"], columns["response"],
                                        columns["history"], columns["system"])
    roles = {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant", tags["observation_tag"]: "tool",
             tags["system_tag"]: "system", tags["function_tag"]: "call"}
    return lambda where, row: _turns(where, row, columns["messages"], tags["role_tag"], tags["content_tag"], roles,
                                     columns["system"], columns["tools"])


def _openai(where, row):
    return _turns(where, row, "messages", "role", "content", {role: role for role in ROLES}, "system", "tools")


_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
                   "observation": "tool", "tool": "tool", "function_call": "call"}


def _sharegpt(where, row):
    return _turns(where, row, "conversations", "from", "value", _SHAREGPT_ROLES, "system", "tools")


def _alpaca(where, row):
    return _pair(where, row, "instruction", "input", "output", "history", "system")


def _listed(row):
    return ", ".join(f"'{key}'" for key in list(row)[:8]) or "(none)"


def _string(where, row, key, default=None):
    if key not in row and default is not None:
        return default
    if key not in row:
        raise InputError(f"{where}: the row has no '{key}' (it has {_listed(row)}); expected a row like the file's first")
    if not isinstance(row[key], str):
        raise InputError(f"{where}: '{key}' is {_shown(row[key])}; expected a string")
    return row[key]


def _shown(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _tokens(where, row):
    ids, labels = row.get("input_ids"), row.get("labels")
    if not isinstance(ids, list):
        raise InputError(f"{where}: input_ids is {_shown(ids)}; expected an array of token ids")
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(ids)):
        found = f"{len(labels)} entries" if isinstance(labels, list) else _shown(labels)
        raise InputError(f"{where}: labels has {found}; expected an array of {len(ids)}, as long as input_ids")
    padding = row.get("attention_mask")
    if padding is not None and (not isinstance(padding, list) or any(one != 1 for one in padding)):
        raise InputError(f"{where}: attention_mask is not all 1; expected rows without padding")
    return Tokens(where, ids, labels) if ids else None


def _text(where, row, key):
    text = _string(where, row, key)
    return Text(where, text) if text.strip() else None


def _pair(where, row, prompt_key, query_key, response_key, history_key, system_key):
    """One question and its answer, maybe with a further input, earlier pairs and a system message."""
    prompt = _string(where, row, prompt_key, "" if query_key else None)
    query = _string(where, row, query_key, "") if query_key else ""
    messages = []
    if system_key and (system := _string(where, row, system_key, "")):
        messages.append({"role": "system", "content": system})
    history = row.get(history_key, []) if history_key else []
    if not isinstance(history, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(s, str) for s in pair) for pair in history):
        raise InputError(f"{where}: '{history_key}' is {_shown(history)}; expected an array of [question, answer] pairs")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = "\n".join(part for part in (prompt, query) if part)
    messages += [{"role": "user", "content": asked},
                 {"role": "assistant", "content": _string(where, row, response_key)}]
    return _chat(where, messages, None)


def _turns(where, row, list_key, role_key, content_key, roles, system_key, tools_key):
    turns = row.get(list_key)
    if not isinstance(turns, list):
        raise InputError(f"{where}: '{list_key}' is {_shown(turns)}; expected an array of messages")
    messages = [_message(f"{where}: message {number}", turn, role_key, content_key, roles)
                for number, turn in enumerate(turns, 1)]
    if system_key and messages and messages[0]["role"] != "system" and (system := _string(where, row, system_key, "")):
        messages.insert(0, {"role": "system", "content": system})
    return _chat(where, messages, _tools(where, row, tools_key))


def _message(where, turn, role_key, content_key, roles):
    if not isinstance(turn, dict):
        raise InputError(f"{where} is {_shown(turn)}; expected an object with '{role_key}' and '{content_key}'")
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn.pop(role_key, None)
    if not isinstance(role, str) or role not in roles:
        raise InputError(f"{where} has {role_key} {_shown(role)}; expected one of {', '.join(roles)}")
    content = turn.pop(content_key, None)
    if isinstance(content, list):
        content = _joined(where, content)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InputError(f"{where} has {content_key} {_shown(content)}; expected a string or an array of text parts")
    if turn.get("weight", 1) not in (0, 1):
        raise InputError(f"{where} has weight {_shown(turn['weight'])}; expected 0 or 1")
    if roles[role] == "call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(where, content)}
    return {"role": roles[role], "content": content, **turn}


def _joined(where, parts):
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"{where} has the content part {_shown(part)}; expected text parts only")
    return "".join(part["text"] for part in parts)


def _calls(where, content):
    """sharegpt writes tool calls as JSON text; templates take them as objects and render their own syntax."""
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(f"{where} is the function call {_shown(content)}; expected a JSON object with name and arguments")
    return [{"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}} for call in calls]


def _tools(where, row, key):
    tools = row.get(key) if key else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise InputError(f"{where}: '{key}' is not JSON; expected an array of tool descriptions") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: '{key}' is {_shown(tools)}; expected an array of tool descriptions")
    return tools


def _chat(where, messages, tools):
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        return None
    learn = [index for index, message in enumerate(messages)
             if message["role"] == "assistant" and message.pop("weight", 1)
             and (message["content"].strip() or message.get("tool_calls"))]
    return Chat(where, messages, tools, learn)
