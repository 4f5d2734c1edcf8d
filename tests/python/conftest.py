import json
import lzma
import os
import shutil
import struct
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "..", "..", "python")
sys.path.insert(0, PACKAGE)


def load_json(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Checkpoint folders by name, with real tokenizers; 'bare' has no chat template."""
    folders = {}
    for name, tokenizer, template in (("qwen3", "qwen3", None), ("smollm2", "qwen3", "smollm2"),
                                      ("mistral", "mistral", "mistral"), ("bare", "mistral", None)):
        folder = tmp_path_factory.mktemp(name)
        with lzma.open(os.path.join(HERE, "assets", tokenizer, "tokenizer.json.xz")) as packed:
            (folder / "tokenizer.json").write_bytes(packed.read())
        shutil.copy(os.path.join(HERE, "assets", tokenizer, "tokenizer_config.json"), folder)
        if template:
            shutil.copy(os.path.join(HERE, "assets", template, "chat_template.jinja"), folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A checkpoint whose tokens are bytes, so that ids are plain to see, with SmolLM2's template; quick to load."""
    import tokenizers
    folder = tmp_path_factory.mktemp("tiny")
    vocab = {char: number for number, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])  # 256, 257, 258
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    shutil.copy(os.path.join(HERE, "assets", "smollm2", "chat_template.jinja"), folder)
    return Tiny(str(folder))


class Tiny:
    EOS, IM_START, IM_END, SIZE = 256, 257, 258, 259

    def __init__(self, folder):
        import tokenizers
        self.folder = folder
        self.core = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))

    def ids(self, text):
        return self.core.encode(text, add_special_tokens=False).ids


def run_module(module, *args, stdin, environment=()):
    return subprocess.run([sys.executable, "-m", module, *args], input=stdin, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": PACKAGE, **dict(environment)})


class Preparation:
    """Calls forebay.data's functions as its main does, with the dataset's rows given in place."""

    def __init__(self, folder):
        self.folder = folder
        self.defaults = {"model_dir": str(folder / "no-model"), "vocab": 151936, "out_dir": str(folder / "out"), "cutoff_len": 512}

    def write(self, name, content):
        """A file beside the run's: a string as it is, rows as JSON lines; its path."""
        path = self.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        return str(path)

    def request(self, dataset, **keys):
        if isinstance(dataset, list):
            dataset = self.write("rows.jsonl", dataset)
        return json.dumps({**self.defaults, "dataset": dataset, **keys})

    def ask(self, dataset, op="build", **keys):
        from forebay import data, request
        parsed = request.parse(self.request(dataset, op=op, **keys))
        return data.build(parsed) if op == "build" else data.preview(parsed)

    def documents(self, dataset, **keys):
        """[(ids, labels)] of the train shard."""
        return Shard(self.ask(dataset, **keys)["train"]).documents

    def preview(self, dataset, **keys):
        return self.ask(dataset, op="preview", **keys)["rows"]


@pytest.fixture
def prepare(tmp_path):
    return Preparation(tmp_path)


class Shard:
    """A token shard parsed from docs/FORMATS.md with struct alone."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = data = file.read()
        self.magic, self.version, self.header_size = struct.unpack_from("<8sII", data)
        (self.n_token, self.n_doc, self.n_learned, self.ids_offset, self.label_offset, self.doc_offset, self.meta_offset,
         self.meta_size, self.file_size, self.checksum) = struct.unpack_from("<10Q", data, 16)
        self.label_kind, self.id_max, self.doc_len_max = struct.unpack_from("<3I", data, 96)
        self.ids = list(struct.unpack_from(f"<{self.n_token}I", data, self.ids_offset))
        if self.label_kind:
            self.labels = list(struct.unpack_from(f"<{self.n_token}i", data, self.label_offset))
        else:
            mask = data[self.label_offset:self.label_offset + self.n_token]
            self.labels = [one if learned else -100 for one, learned in zip(self.ids, mask)]
        self.starts = list(struct.unpack_from(f"<{self.n_doc + 1}Q", data, self.doc_offset))
        self.meta = json.loads(data[self.meta_offset:self.meta_offset + self.meta_size])
        self.documents = [(self.ids[a:b], self.labels[a:b]) for a, b in zip(self.starts, self.starts[1:])]


def ids_row(*ids, **more):
    return {"input_ids": list(ids), **more}
