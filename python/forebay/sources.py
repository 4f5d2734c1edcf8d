"""Which files a `dataset` value names, and how their columns are called.

A value is a path (file or folder), or a comma-separated list of paths and of names in dataset_dir/dataset_info.json, whose
schema is LlamaFactory's.  Only the standard library is used: a freshness check must start quickly."""

import dataclasses
import difflib
import json
import os

from .errors import ConfigError, InputError

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_INFO = "dataset_info.json"
# Where a download would come from, or how it would be cut: without meaning for a file that is here.
_REMOTE_KEYS = {"hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "subset", "split", "folder"}
_KEYS = {"file_name", "formatting", "ranking", "columns", "tags"}
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": None, "system": None},
    "sharegpt": {"messages": "conversations", "system": None, "tools": None},
    "openai": {"messages": "messages", "system": None, "tools": None},
}
_TAGS = {
    "alpaca": {},
    "sharegpt": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
                 "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"},
    "openai": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
               "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system"},
}


@dataclasses.dataclass(frozen=True)
class Schema:
    """How a dataset_info.json entry says that rows are laid out."""
    formatting: str
    columns: dict
    tags: dict


@dataclasses.dataclass(frozen=True)
class Source:
    path: str
    item: int               # which part of the comma-separated value it belongs to; max_samples counts within it
    schema: Schema | None   # None: told from the first row's keys

    def stamp(self):
        """What a fingerprint keeps of the file: rewriting it changes at least one of these."""
        stat = os.stat(self.path)
        path = os.fsencode(os.path.abspath(self.path)).decode("utf-8", "backslashreplace")  # the provenance is UTF-8
        return {"path": path, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "item": self.item,
                "schema": dataclasses.asdict(self.schema) if self.schema else None}


def resolve(value, dataset_dir):
    """The files of a dataset value, in order."""
    items = [value] if os.path.exists(value) else [part.strip() for part in value.split(",") if part.strip()]
    if not items:
        raise ConfigError(f"dataset '{value}' names nothing; expected a path, or names from {_INFO}")
    sources = []
    for number, item in enumerate(items):
        path, schema = (item, None) if os.path.exists(item) else _from_info(item, dataset_dir)
        sources += [Source(file, number, schema) for file in _files(path)]
    return sources


def _files(path):
    if not os.path.isdir(path):
        if not path.endswith(SUFFIXES):
            raise InputError(f"{path}: not a kind of file that is read; expected one of {', '.join(SUFFIXES)}")
        if not os.path.isfile(path):
            raise InputError(f"{path}: not a regular file")
        return [path]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [os.path.join(folder, f) for f in sorted(files)
                  if f.endswith(SUFFIXES) and not f.startswith(".") and f != _INFO]
    for file in found:
        if not os.path.isfile(file):  # a pipe would be waited on for ever
            raise InputError(f"{file}: not a regular file")
    if not found:
        raise InputError(f"{path}: the folder holds no dataset; expected files ending in {', '.join(SUFFIXES)}")
    return sorted(found)


def _from_info(name, dataset_dir):
    """(path, schema) of a name in dataset_info.json."""
    info_path = os.path.join(dataset_dir, _INFO)
    if not os.path.isfile(info_path):
        raise InputError(f"{name}: no such file or folder, and {info_path}, where datasets could be named, is not there either")
    info = _read_info(info_path)
    if name not in info:
        near = difflib.get_close_matches(name, info, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise InputError(f"dataset '{name}': no such file or folder, and no such name in {info_path}{hint}")
    entry, label = info[name], f"{info_path}: dataset '{name}'"
    if not isinstance(entry, dict):
        raise InputError(f"{label} is not an object; expected one with file_name")
    for key in sorted(set(entry) - _KEYS - _REMOTE_KEYS):
        raise InputError(f"{label} has '{key}', which is not supported; expected {', '.join(sorted(_KEYS))}")
    if not isinstance(entry.get("file_name"), str):
        raise InputError(f"{label} has no file_name; forebay reads local files only, so download it and name the file")
    if entry.get("ranking"):
        raise InputError(f"{label} is a ranking dataset; expected one for stage sft or pt")
    path = os.path.join(dataset_dir, entry["file_name"])
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder; {label} names it")
    if not _is_inside(path, dataset_dir):
        raise InputError(f"{label} names '{entry['file_name']}', which lies outside {dataset_dir}; give that path as dataset "
                         "itself, if you mean it")
    return path, _schema(entry, label)


def _is_inside(path, folder):
    """With links followed: the folder may be a stranger's."""
    folder = os.path.realpath(folder)
    return os.path.commonpath([folder, os.path.realpath(path)]) == folder


def _read_info(path):
    try:
        with open(path, encoding="utf-8") as file:
            info = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(info, dict):
        raise InputError(f"{path}: expected an object of datasets by name")
    return info


def _schema(entry, label):
    if not any(key in entry for key in ("formatting", "columns", "tags")):
        return None
    formatting = entry.get("formatting", "alpaca")
    if not isinstance(formatting, str) or formatting not in _COLUMNS:
        raise InputError(f"{label} has formatting {json.dumps(formatting)}; expected alpaca, sharegpt or openai")
    given = entry.get("columns", {})
    columns = _merged(_COLUMNS[formatting], given, f"{label}, columns")
    if formatting == "alpaca" and given and "response" not in given:
        columns["response"] = None  # a column of plain text, as pre-training sets name it
    return Schema(formatting, columns, _merged(_TAGS[formatting], entry.get("tags", {}), f"{label}, tags"))


def _merged(defaults, given, label):
    if not isinstance(given, dict):
        raise InputError(f"{label}: expected an object")
    for key, value in given.items():
        if key not in defaults:
            raise InputError(f"{label}: '{key}' is not supported; expected {', '.join(defaults) or 'none'}")
        if not isinstance(value, str):
            raise InputError(f"{label}: '{key}' is {json.dumps(value)}; expected a string")
    return {**defaults, **given}
