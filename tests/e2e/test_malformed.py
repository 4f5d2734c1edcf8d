"""Every file of tests/malformed is refused by the command, with its own sentence, and nothing is written."""
import json
import os
import shutil
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from fb_checkpoint import CONFIG, make_model, write_safetensors
from fb_command import forebay, options, write_yaml

HERE = Path(__file__).resolve().parents[1] / "malformed"
EXPECTED = json.loads((HERE / "expected.json").read_text())
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
said = {}  # sentence without its path: which file it was said of


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A setting that trains."""
    import tokenizers
    place = tmp_path_factory.mktemp("good")
    make_model(place / "model", vocab_size=300, num_hidden_layers=1)
    vocab = {char: number for number, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    core.save(str(place / "model" / "tokenizer.json"))
    (place / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (place / "data").mkdir()
    (place / "data" / "rows.jsonl").write_text('{"text": "some text"}\n')
    (place / "outside.jsonl").write_text('{"text": "some text"}\n')
    return place


def config(place, **more):
    given = {"dataset": place / "data" / "rows.jsonl", "out": place / "out", "dataset_dir": place / "data", **more}
    return write_yaml(place / "run.yaml", options(place / "model", **given))


def snapshot(place):
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def stand_in(place, shard):
    """A stand-in for the Python that makes token shards, which would notice that this one is not its own and make it anew."""
    program = place / "python"
    tokens, rows = struct.unpack("<2Q", shard.read_bytes()[16:32].ljust(16, b"\0"))
    reply = {"train": str(shard), "eval": None, "rows": rows % 2**63, "tokens": tokens % 2**63}
    program.write_text(f"#!/bin/sh\nread request\necho '{json.dumps(reply)}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"FOREBAY_PYTHON": str(program)}


def put(place, file, target):
    """The file's name in the setting, for the sentence."""
    shutil.copyfile(file, place / target)
    return place / target


def sign(checkpoint):
    """A manifest.json that agrees with what the folder holds."""
    files = [{"name": path.name, "size": path.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
             for path in checkpoint.iterdir()]
    text = json.dumps({"format": "forebay checkpoint", "version": 2, "files": files}, indent=2)[:-2]
    (checkpoint / "manifest.json").write_text(f'{text},\n  "sum": "{xxhash.xxh3_128_hexdigest(text)}"\n}}\n')


# Each puts a file in its place and returns the command's words, its environment, and the path that the sentence must name.

def as_safetensors(place, file):
    return ["inspect", place / "model"], None, put(place, file, "model/model.safetensors")


def as_index(place, file):
    (place / "model" / "model.safetensors").unlink()
    for number, name in enumerate("ab", 1):
        write_safetensors(place / "model" / f"model-0000{number}-of-00002.safetensors", {name: np.zeros(2, np.float32)})
    write_safetensors(place / "outside.safetensors", {"c": np.zeros(2, np.float32)})
    (place / "model" / "link.safetensors").symlink_to("../outside.safetensors")
    return ["inspect", place / "model"], None, put(place, file, "model/model.safetensors.index.json")


def as_config(place, file):
    return ["inspect", place / "model"], None, put(place, file, "model/config.json")


def as_yaml(place, file):
    path = put(place, file, "run.yaml")
    return ["plan", path], None, path


def as_tokens(place, file):
    path = put(place, file, "data/train.fbt")
    return ["train", config(place)], stand_in(place, path), path


def as_progress(place, file):
    (place / "out" / "checkpoint-3").mkdir(parents=True)
    path = put(place, file, "out/checkpoint-3/trainer_state.json")
    sign(path.parent)
    return ["train", config(place, resume_from_checkpoint="true")], stand_in(place, good_shard(place)), path


def as_dataset_info(place, file):
    (place / "data" / "link.jsonl").symlink_to("../outside.jsonl")
    return ["train", config(place, dataset="d")], None, put(place, file, "data/dataset_info.json")


def as_rows(place, file):
    path = put(place, file, "data/" + file.name)
    return ["train", config(place, dataset=path)], None, path


def as_template(place, file):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (place / "data" / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    put(place, file, "model/chat_template.jinja")
    return ["train", config(place)], None, place  # the row, or the template, or the checkpoint


def as_tokenizer(place, file):
    put(place, file, "model/tokenizer.json")
    (place / "model" / "tokenizer_config.json").write_text('{}')
    return ["train", config(place)], None, place


def as_tokenizer_config(place, file):
    put(place, file, "model/tokenizer_config.json")
    return ["train", config(place)], None, place / "model"


PLACES = {name[3:]: function for name, function in list(globals().items()) if name.startswith("as_")}


def good_shard(place):
    from forebay.shard import Writer
    writer = Writer(str(place / "data" / "train.fbt"))
    writer.add(np.array([1, 2, 3]), np.array([-100, 2, 3]))
    writer.finish({})
    return place / "data" / "train.fbt"


@pytest.mark.parametrize("name", EXPECTED)
def test_is_refused(name, good, tmp_path):
    expected = EXPECTED[name]
    place = tmp_path / "place"
    shutil.copytree(good, place)
    words, env, path = PLACES[expected["kind"]](place, HERE / name)
    before = snapshot(place)
    result = forebay(*words, env=env)
    assert result.code == expected["exit"], f"exit {result.code}\n{result.out}\n{result.err}"
    assert str(path) in result.last, f"{path} is not in: {result.last}"
    for part in expected["says"]:
        assert part in result.last, f"{part!r} is not in: {result.last}"
    assert result.last.isprintable() and "Traceback" not in result.err and len(result.last) < 700
    written = {name for name, content in snapshot(place).items() if before.get(name) != content}
    assert written <= {"out/data/.lock"}, written
    sentence = result.last.replace(str(place), "")
    assert said.setdefault(sentence, name) == name, f"{name} and {said[sentence]} share: {sentence}"


def test_weights_cut_before_they_are_read(good, tmp_path):
    """The stand-in runs after the weights' tables were checked and before the weights are read."""
    place = tmp_path / "place"
    shutil.copytree(good, place)
    weights = place / "model" / "model.safetensors"
    env = stand_in(place, good_shard(place))
    program = Path(env["FOREBAY_PYTHON"])
    program.write_text(program.read_text().replace("read request\n", f"read request\n: > {weights}\n"))
    (place / "out").mkdir()
    result = forebay("train", config(place), env=env)
    assert result.code == 1 and str(weights) in result.last and "became shorter" in result.last, result.err
    assert "'model.embed_tokens.weight' has" in result.last and ", 0 of them are left" in result.last
    assert {path.name for path in (place / "out").iterdir()} <= {".forebay.lock"}  # which the next run takes over


@pytest.mark.parametrize("command", ["export", "train"])
def test_a_link_out_of_the_folder_is_not_exported(command, good, tmp_path):
    place = tmp_path / "place"
    shutil.copytree(good, place)
    (place / "secret").write_text("mine")
    (place / "model" / "merges.txt").symlink_to("../secret")
    before = snapshot(place)
    result = forebay("export", place / "model", place / "to") if command == "export" else forebay("train", config(place))
    assert result.code == 3 and str(place / "secret") in result.last and "leads out of its folder" in result.last, result.err
    assert set(snapshot(place)) - set(before) <= {"run.yaml"}


@pytest.mark.parametrize("name", ["model/config.json", "model/model.safetensors", "model/tokenizer.json",
                                  "model/tokenizer_config.json", "model/chat_template.jinja", "data/rows.jsonl", "data/more.jsonl",
                                  "run.yaml"])
def test_a_pipe_is_refused_not_waited_on(name, good, tmp_path):
    place = tmp_path / "place"
    shutil.copytree(good, place)
    path = config(place, dataset=place / "data" if name == "data/more.jsonl" else place / "data" / "rows.jsonl")
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    result = forebay("train", path)
    assert result.code == (2 if name == "run.yaml" else 3) and Path(name).name in result.last, result.err


def test_the_hubs_links_are_followed(good, tmp_path):
    """.../snapshots/REVISION holds links into .../blobs."""
    snapshot_dir, blobs = tmp_path / "snapshots" / "revision", tmp_path / "blobs"
    shutil.copytree(good / "model", blobs)
    snapshot_dir.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot_dir / blob.name).symlink_to(f"../../blobs/{blob.name}")
    result = forebay("export", snapshot_dir, tmp_path / "to")
    assert result.code == 0, result.err
    assert (tmp_path / "to" / "tokenizer.json").read_bytes() == (blobs / "tokenizer.json").read_bytes()


def test_every_file_is_expected():
    files = {str(path.relative_to(HERE)) for path in HERE.glob("*/*") if path.is_file() and path.parent.name != "__pycache__"}
    assert files == set(EXPECTED) and len(files) >= 60
    assert {fact["kind"] for fact in EXPECTED.values()} == set(PLACES)


def test_the_setting_is_good(good, tmp_path):
    """What is refused above is refused for the file's sake."""
    place = tmp_path / "place"
    shutil.copytree(good, place)
    (place / "data" / "dataset_info.json").write_text('{"d": {"file_name": "rows.jsonl"}}')
    assert forebay("inspect", place / "model").code == 0
    result = forebay("train", config(place, dataset="d", max_steps=1))
    assert result.code == 0, result.err
    shutil.rmtree(place / "out")
    (place / "out").mkdir()  # the stand-in does not
    result = forebay("train", config(place, max_steps=1), env=stand_in(place, good_shard(place)))
    assert result.code == 0, result.err
