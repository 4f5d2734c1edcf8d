"""`python -m forebay.text MODEL_DIR`: encodes and decodes for generation.

A request as a line of JSON on stdin, a reply as a line of JSON on stdout, until stdin ends:
  {"op": "encode", "text", "chat", "system"} -> {"ids"}     chat: as one user message, up to where the assistant begins
  {"op": "decode", "ids", "skip_special"}    -> {"text"}
  {"op": "info"}                             -> {"has_template", "eos"}   eos: ids that end a turn or a text
What a request asks that cannot be done is {"error": sentence}; a checkpoint that cannot be used ends the process."""

import json
import sys

from . import formats
from .documents import TextTools
from .errors import ConfigError, ForebayError, InputError, run, sentence


class Text:
    def __init__(self, model_dir):
        self.tools = TextTools(model_dir)
        self.tokenizer = self.tools.tokenizer

    def answer(self, line):
        try:
            request = json.loads(line)
            operation = {"encode": self.encode, "decode": self.decode, "info": self.info}.get(request["op"])
            if operation is None:
                raise ConfigError(f"op is '{request['op']}'; expected encode, decode or info")
            return operation(request)
        except ForebayError as error:
            return {"error": sentence(error)}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return {"error": sentence(f"the request is malformed: {type(error).__name__}: {error}")}

    def encode(self, request):
        text = request["text"]
        if not isinstance(text, str):
            raise ConfigError("text is not a string")
        if not request["chat"]:
            return {"ids": self.tokenizer.ids(text, True)}
        messages = [{"role": "user", "content": text}]
        if request.get("system") is not None:
            messages.insert(0, {"role": "system", "content": request["system"]})
        rendered = self.tools.renderer("the prompt").prompt("the prompt", messages)
        return {"ids": self.tokenizer.ids(rendered, False)}

    def decode(self, request):
        ids = request["ids"]
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise ConfigError("ids is not an array of token ids")
        return {"text": self.tokenizer.text(ids, bool(request["skip_special"]))}

    def info(self, _):
        ends = self.tools.checkpoint.end_ids()
        for one in (self.tokenizer.eos_id, self._turn_end()):
            if one is not None and one not in ends:
                ends.append(one)
        return {"has_template": self.tools.checkpoint.template(None) is not None, "eos": ends}

    def _turn_end(self):
        """The token that the chat template ends an assistant's turn with, None without one."""
        if self.tools.checkpoint.template(None) is None:
            return None
        chat = formats.Chat("the chat template", [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
                            None, [1])
        try:
            text, spans = self.tools.renderer(chat.where).spans(chat)
        except InputError:  # said when a prompt is encoded
            return None
        ids = self.tokenizer.ids(text[:spans[-1][1]], False) if spans else []
        return ids[-1] if ids and self.tokenizer.is_special(ids[-1]) else None


def main():
    if len(sys.argv) != 2:
        raise ConfigError("usage: python -m forebay.text MODEL_DIR")
    text = Text(sys.argv[1])
    try:
        for line in sys.stdin:
            print(json.dumps(text.answer(line)), flush=True)
    finally:
        text.tools.close()


if __name__ == "__main__":
    sys.exit(run(main))
