"""The text files of a checkpoint folder: special tokens, chat template, end tokens.  Standard library only."""

import hashlib
import json
import os

from .errors import InputError

TEMPLATE_SIZE_MAX = 1 << 20
# All that decides how rows become ids.  A code file that auto_map may name is not among them, and is never run.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "chat_template.json", "config.json")


def _is_there(path):
    """False for what is absent; a pipe would be waited on for ever, and is refused as a folder is."""
    if os.path.isfile(path):
        return True
    if os.path.lexists(path):
        raise InputError(f"{path}: not a regular file")
    return False


def content_hash(model_dir):
    """SHA-256 over the files that the text side reads; one that is absent counts as absent."""
    total = hashlib.sha256()
    for name in _FILES:
        path = os.path.join(model_dir, name)
        if _is_there(path):
            with open(path, "rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


class Checkpoint:
    """special: {'bos_token': '<s>', ...}; templates: {'default': jinja source, ...}, maybe empty."""

    def __init__(self, model_dir):
        self.dir = model_dir
        if not os.path.isdir(model_dir):
            raise InputError(f"{model_dir}: no such folder; expected a checkpoint's")
        config = self._json("tokenizer_config.json")
        self.special = _special_tokens({**self._json("special_tokens_map.json"), **config})
        self.templates = self._templates(config)

    def template(self, tools):
        """The chat template's source for a row with or without tools; None when there is none."""
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")

    def end_ids(self):
        """The end-of-sequence ids that generation_config.json and config.json name."""
        ids = []
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, int) and not isinstance(one, bool) and one >= 0 and one not in ids:
                    ids.append(one)
        return ids

    def _json(self, name):
        path = os.path.join(self.dir, name)
        if not _is_there(path):
            return {}
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
            json.dumps(value, ensure_ascii=False).encode()  # JSON can spell half of a surrogate pair, which is no text
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise InputError(f"{path}: expected a JSON object")
        return value

    def _templates(self, config):
        """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
        path = os.path.join(self.dir, "chat_template.jinja")
        if _is_there(path):
            try:
                with open(path, encoding="utf-8") as file:
                    value = file.read(TEMPLATE_SIZE_MAX + 1)
            except UnicodeDecodeError:
                raise InputError(f"{path}: not UTF-8; expected a chat template") from None
        else:
            path = os.path.join(self.dir, "tokenizer_config.json")
            value = config.get("chat_template")
            if value is None:
                path = os.path.join(self.dir, "chat_template.json")
                value = self._json("chat_template.json").get("chat_template")
        return _named_templates(path, value)


def _named_templates(path, value):
    if value is None:
        return {}
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        pairs = [(one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None) for one in value]
        value = {name: template for name, template in pairs if isinstance(name, str)} if all(
            isinstance(name, str) for name, _ in pairs) else None
    if not isinstance(value, dict) or not all(isinstance(template, str) for template in value.values()):
        raise InputError(f"{path}: chat_template is neither a string nor a list of names and templates")
    if any(len(template) > TEMPLATE_SIZE_MAX for template in value.values()):
        raise InputError(f"{path}: the chat template is longer than {TEMPLATE_SIZE_MAX >> 20} MiB")
    return value


def _special_tokens(config):
    """Tokens are written as strings, or as objects with their content."""
    special = {}
    for key, value in config.items():
        if key.endswith("_token"):
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[key] = value
    return special
