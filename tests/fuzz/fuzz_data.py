"""Fuzzes what python/forebay reads: rows in each format, dataset_info.json, tokenizer files, chat templates.

    python tests/fuzz/fuzz_data.py [--seconds N | --rounds N] [--seed N] [--kinds rows.jsonl,...] [--findings FOLDER] [INPUT...]

An input is bytes of a kind, the part of its file name before the first '-': it takes that file's place in a small good setting, and
shards are built from it as `forebay data` does.  Right is a shard, or an InputError, which is exit code 3, whose sentence names the
file's folder; anything else is a finding, and so are a crash, a hang and growth past MEMORY_SIZE.  With INPUTs, each is tried once.
Mutation works on bytes, and on the JSON tree where there is one.  Batches run in a child, which is what a crash ends."""

import argparse
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
import pyarrow
import pyarrow.parquet
import tokenizers

from forebay import data, documents, request
from forebay.errors import ForebayError, InputError, sentence

CORPUS = Path(__file__).resolve().parent / "corpus" / "data"
BATCH = 100
HANG_SECONDS = 40        # above what the sandbox grants a template
MEMORY_SIZE = 4 << 30
SIZE_MAX = 1 << 14
ROWS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"},
                  {"role": "assistant", "content": [{"type": "text", "text": "A"}], "weight": 1}], "tools": None},
    {"messages": [{"role": "user", "content": "Q"},
                  {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
                  {"role": "tool", "content": "4"}, {"role": "assistant", "content": "A"}], "tools": '[{"name": "f"}]'},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                       {"from": "observation", "value": "4"}, {"from": "gpt", "value": "A"}]},
    {"instruction": "I", "input": "X", "output": "O", "history": [["a", "b"]], "system": ""},
    {"prompt": "P", "completion": "C"},
    {"text": "some text \u00e9\U0001f600"},
]
INFO = {"d": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system"},
              "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}}}
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
BLOCKS = ("{%- for m in messages if m.role != 'tool' %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ tools | tojson }}{% endif %}{% endfor %}")
WORDS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"18446744073709551616",
         b"\\ud800", b"\\u0000", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"\0", b"[" * 3000, b"9" * 5000, b"{%", b"%}", b"{{",
         b"}}", b"{#",
         b"{% for i in range(9**9) %}", b"{{ messages | tojson }}", b"{{ ''.__class__.__mro__ }}", b"{{ 'a' * 9**9 }}", b"**9**9",
         b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", b"raise_exception('x')", b"strftime_now('%Y')", b"{% include 'x' %}",
         *(json.dumps(key).encode() for key in sorted({key for row in ROWS for key in row}))]
VALUES = [None, True, False, 0, -1, 1.5, 1e308, float("nan"), 2**31, 2**63, 2**64, -100, 10**400, "", "x", "\ud800", "\0",
          "a" * 1000, [], {}, [[]], [None], {"a": {}}, [1] * 100, "assistant", "user", "input_ids", "\ue000", "<|im_end|>"]


def tokenizer_json():
    vocab = {char: number for number, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return core.to_str().encode()


def parquet(rows):
    """None for rows that are no table."""
    file = io.BytesIO()
    try:
        table = pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)])
        pyarrow.parquet.write_table(table, file, compression="NONE")
    except (pyarrow.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        return None
    return file.getvalue()


def seeds():
    """{kind: [bytes]}"""
    lines = [json.dumps(row).encode() for row in ROWS]
    return {
        "rows.jsonl": [line + b"\n" + line for line in lines],
        "rows.json": [b"[" + line + b",\n" + line + b"]" for line in lines],
        "rows.txt": ["a text\nof lines \u00e9\n".encode()],
        "rows.parquet": [table for row in ROWS if (table := parquet([row]))],
        "dataset_info.json": [json.dumps(INFO).encode()],
        "tokenizer.json": [tokenizer_json()],
        "tokenizer_config.json": [json.dumps({"eos_token": {"content": "<|endoftext|>"}, "chat_template": [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": BLOCKS}]}).encode()],
        "chat_template.jinja": [TEMPLATE.encode(), BLOCKS.encode()],
    }


class Setting:
    """A good checkpoint and dataset, of which one file at a time is replaced."""

    def __init__(self, folder):
        self.folder = folder
        self.model, self.data, self.out = (folder / name for name in ("model", "data", "out"))
        self.kept = None
        self.restore()

    def restore(self):
        """As it was before the first input, also where a child died over one."""
        for one in (self.model, self.data, self.out):
            shutil.rmtree(one, ignore_errors=True)
        self.model.mkdir()
        self.data.mkdir()
        (self.model / "tokenizer.json").write_bytes(tokenizer_json())
        (self.model / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        (self.model / "chat_template.jinja").write_text(TEMPLATE)
        (self.data / "rows.jsonl").write_text(json.dumps(ROWS[3]) + "\n" + json.dumps(ROWS[4]) + "\n")

    def tools(self, kind):
        """What stands for documents.TextTools: where the checkpoint is the good one, its template's process is kept."""
        if not kind.startswith(("rows.", "dataset_info")):
            return documents.TextTools
        if self.kept is None:
            self.kept = documents.TextTools(str(self.model))
            self.kept.close = lambda: None
        return lambda model_dir: self.kept

    def try_input(self, kind, content):
        """None, or what is wrong."""
        place = (self.data if kind.startswith(("rows.", "dataset_info")) else self.model) / kind
        before = place.read_bytes() if place.exists() else None
        # Beside an own chat_template.jinja the config's template would not be looked at.
        template = self.model / "chat_template.jinja"
        if kind == "tokenizer_config.json":
            template.unlink()
        place.write_bytes(content)
        dataset = "d" if kind == "dataset_info.json" else str(self.data / (kind if kind.startswith("rows.") else "rows.jsonl"))
        asked = {"op": "build", "model_dir": str(self.model), "dataset": dataset, "dataset_dir": str(self.data), "vocab": 300,
                 "out_dir": str(self.out), "cutoff_len": 64, "stage": "sft"}
        try:
            with unittest.mock.patch.object(documents, "TextTools", self.tools(kind)):
                return self._build(asked)
        finally:
            place.unlink() if before is None else place.write_bytes(before)
            template.write_text(TEMPLATE)
            shutil.rmtree(self.out, ignore_errors=True)

    def _build(self, asked):
        signal.alarm(HANG_SECONDS)
        try:
            data.build(request.parse(json.dumps(asked)))
        except InputError as error:
            said = sentence(error)
            if not said.isprintable() or str(self.folder) not in said:
                return f"the sentence names no file: {said}"
        except ForebayError as error:
            return f"exit code {error.exit_code}, expected 3: {error}"
        except BaseException:  # a panic of the Rust library is not an Exception
            return traceback.format_exc()
        finally:
            signal.alarm(0)
        return None


def mutate_bytes(random_, content):
    out = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4, 8))):
        at, end = sorted(random_.randrange(len(out) + 1) for _ in range(2))
        end = min(end, at + random_.choice((1, 4, 64)))
        choice = random_.randrange(6)
        if choice == 0 and out:
            out[min(at, len(out) - 1)] = random_.randrange(256)
        elif choice == 1 and out:
            out[min(at, len(out) - 1)] ^= 1 << random_.randrange(8)
        elif choice == 2:
            del out[at:end]
        elif choice == 3:
            out[at:at] = random_.choice(WORDS)
        elif choice == 4:
            out[at:end] = random_.choice(WORDS)
        else:
            out[at:at] = out[at:end]
    return bytes(out)


def mutate_tree(random_, value, chance=0.15):
    if random_.random() < chance:
        return random_.choice(VALUES)
    if isinstance(value, list):
        value = [mutate_tree(random_, one, chance) for one in value]
        if value and random_.random() < chance:
            value.insert(random_.randrange(len(value)), random_.choice(value))
        return value
    if isinstance(value, dict):
        value = {key: mutate_tree(random_, one, chance) for key, one in value.items() if random_.random() > chance / 2}
        if random_.random() < chance:
            value[random_.choice(("x", *(key for row in ROWS for key in row)))] = random_.choice(VALUES)
        return value
    return value


def mutate(random_, kind, content):
    if random_.random() < 0.5:
        if kind == "rows.parquet":
            content = parquet([mutate_tree(random_, random_.choice(ROWS), 0.1) for _ in range(2)]) or content
        elif kind.endswith(("json", "jsonl")):
            try:
                lines = content.splitlines() if kind == "rows.jsonl" else [content]
                return b"\n".join(json.dumps(mutate_tree(random_, json.loads(line), 0.05)).encode() for line in lines)
            except (ValueError, RecursionError):
                pass
    return mutate_bytes(random_, content)


def batch(setting, inputs, current, findings):
    """In a child: tries inputs, each written to `current` first.  The exit status is how many were found wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_SIZE, MEMORY_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = 0
    for kind, content in inputs:
        current.write_bytes(kind.encode() + b"\n" + content)
        said = setting.try_input(kind, content)
        if said:
            wrong += 1
            report(findings, kind, content, said)
    return wrong


def report(findings, kind, content, said):
    name = f"{kind}-{abs(hash(content)):016x}"
    if findings:
        findings.mkdir(parents=True, exist_ok=True)
        (findings / name).write_bytes(content)
    print(f"finding {name}: {said}\n{content[:300]!r}", flush=True)


def in_child(setting, inputs, findings):
    """How many were found wrong."""
    current = setting.folder / "current"
    child = os.fork()
    if child == 0:
        status = 255
        try:
            status = min(batch(setting, inputs, current, findings), 254)
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kind, _, content = current.read_bytes().partition(b"\n")
        report(findings, kind.decode(), content, f"ended by signal {os.WTERMSIG(status)}")
        setting.restore()
        return 1
    return os.WEXITSTATUS(status)


def stored():
    """[(kind, content)] of the corpus."""
    return [(path.name.partition("-")[0], path.read_bytes()) for path in sorted(CORPUS.glob("*-*"))]


def run(setting, arguments):
    """(inputs tried, found wrong)"""
    pool = seeds()
    for kind, content in stored():
        pool[kind].append(content)
    kinds = arguments.kinds.split(",") if arguments.kinds else list(pool)
    # Templates and Parquet files cost the start of a process, the others a millisecond.
    weights = [1 if kind in ("tokenizer_config.json", "chat_template.jinja", "rows.parquet") else 10 for kind in kinds]
    random_ = random.Random(arguments.seed)
    tried = wrong = 0
    end = time.monotonic() + arguments.seconds
    first = [(kind, content) for kind in kinds for content in pool[kind]]
    while first or (tried < arguments.rounds if arguments.rounds else time.monotonic() < end):
        inputs = first
        for _ in range(0 if first else BATCH):
            kind, = random_.choices(kinds, weights)
            content = random_.choice(pool[kind])
            inputs.append((kind, mutate(random_, kind, content)[:SIZE_MAX]))
        first = []
        wrong += in_child(setting, inputs, arguments.findings)
        tried += len(inputs)
    return tried, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=0, help="so many inputs instead of a time")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--findings", type=Path)
    parser.add_argument("input", nargs="*", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-fuzz-", dir=os.environ.get("FUZZ_TMP", "/dev/shm")) as folder:
        setting = Setting(Path(folder))
        if arguments.input:
            inputs = [(path.name.partition("-")[0], path.read_bytes()) for path in arguments.input]
            tried, wrong = len(inputs), sum(in_child(setting, [one], None) for one in inputs)
        else:
            tried, wrong = run(setting, arguments)
    print(f"{tried} inputs, {wrong} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
