"""The token shard: its bytes, what goes in, and when it is made anew."""

import json
import os
import subprocess
import sys
import time

import pytest
import xxhash

from conftest import PACKAGE, Shard, ids_row, run_module
from forebay import documents, shard
from forebay.errors import ConfigError, InputError


def test_bytes_of_a_shard(prepare):
    reply = prepare.ask([ids_row(5, 6, 7), ids_row(9, 151935, labels=[-100, 151935])])
    made = Shard(reply["train"])
    assert (made.magic, made.version, made.header_size) == (b"FBTOKENS", 1, 128)
    assert (made.n_token, made.n_doc, made.n_learned, made.label_kind) == (5, 2, 3, 0)
    assert (made.id_max, made.doc_len_max) == (151935, 3)
    assert made.ids == [5, 6, 7, 9, 151935] and made.starts == [0, 3, 5]
    assert made.labels == [-100, 6, 7, -100, 151935]
    offsets = [made.ids_offset, made.label_offset, made.doc_offset, made.meta_offset]
    assert offsets == [128, 192, 256, 320]  # each aligned to 64 bytes
    assert made.file_size == len(made.data) == made.meta_offset + made.meta_size
    assert made.checksum == xxhash.xxh3_64_intdigest(made.data[128:])
    assert made.data[108:128] == bytes(20)
    assert reply == {"train": reply["train"], "eval": None, "built": True, "rows": 2, "tokens": 5, "learned": 3, "truncated": 0,
                     "dropped": 0}


def test_labels_that_are_not_the_ids_are_kept(prepare):
    reply = prepare.ask([ids_row(1, 2, 3, labels=[1, 9, -100])])
    made = Shard(reply["train"])
    assert (made.label_kind, made.labels, made.id_max) == (1, [-100, 9, -100], 9)
    assert made.checksum == xxhash.xxh3_64_intdigest(made.data[128:])


def test_many_documents_pass_every_buffer(prepare):
    rows = [ids_row(*range(n % 97 + 2)) for n in range(3000)]
    assert [ids for ids, _ in prepare.documents(rows)] == [row["input_ids"] for row in rows]


def test_rows_of_ids_load_no_text_library(prepare):
    request = prepare.request([ids_row(1, 2)], op="build")
    script = ("import io, sys; sys.stdin = io.StringIO(sys.argv[1]); from forebay import data; data.main()\n"
              "print(*sorted({'tokenizers', 'jinja2', 'pyarrow', 'numpy', 'xxhash'} & set(sys.modules)))")
    loaded = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", script, request], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": PACKAGE})
        assert run.returncode == 0, run.stderr
        loaded.append(run.stdout.splitlines()[-1])
    assert loaded == ["numpy xxhash", ""]  # made; then found fresh


def test_a_fresh_shard_is_kept(prepare):
    path = prepare.write("a.jsonl", [ids_row(1, 2)])
    first = prepare.ask(path)
    stamp = os.stat(first["train"]).st_mtime_ns
    second = prepare.ask(path)
    assert second == {**first, "built": False}
    assert os.stat(first["train"]).st_mtime_ns == stamp
    assert sorted(os.listdir(prepare.folder / "out")) == [".lock", "train.fbt"]


def _other_rows(prepare, path):
    with open(path, "a") as file:
        file.write('{"input_ids": [7, 8]}\n')


def _same_size_later(prepare, path):
    os.utime(path, ns=(1, time.time_ns()))


def _other_tokenizer(prepare, path):
    os.makedirs(prepare.folder / "no-model", exist_ok=True)
    (prepare.folder / "no-model" / "chat_template.jinja").write_text("x")


@pytest.mark.parametrize("change", (_other_rows, _same_size_later, _other_tokenizer))
def test_a_shard_is_stale_when_its_sources_change(prepare, change):
    path = prepare.write("a.jsonl", [ids_row(1, 2)])
    prepare.ask(path)
    change(prepare, path)
    assert prepare.ask(path)["built"] is True
    assert prepare.ask(path)["built"] is False


@pytest.mark.parametrize("keys", ({"cutoff_len": 9}, {"stage": "pt"}, {"seed": 1}, {"max_samples": 1}, {"vocab": 100},
                                  {"train_on_prompt": True}, {"system": "x"}, {"mask_history": True}, {"val_size": 1}))
def test_a_shard_is_stale_when_the_request_changes(prepare, keys):
    path = prepare.write("a.jsonl", [ids_row(1, 2), ids_row(3, 4)])
    prepare.ask(path)
    assert prepare.ask(path, **keys)["built"] is True


def test_a_damaged_shard_is_stale(prepare):
    path = prepare.write("a.jsonl", [ids_row(1, 2, 3)])
    whole = Shard(prepare.ask(path)["train"])
    train = prepare.folder / "out" / "train.fbt"
    header = [n for n in range(128) if not 88 <= n < 96]  # the checksum of the sections is the trainer's to check
    for n in header:
        train.write_bytes(whole.data[:n] + bytes([whole.data[n] ^ 0x41]) + whole.data[n + 1:])
        assert shard.read_meta(str(train)) is None, f"byte {n} of the header was changed"
    for size in (0, 7, 127, 128, 300, len(whole.data) - 1):
        train.write_bytes(whole.data[:size])
        assert shard.read_meta(str(train)) is None
    assert prepare.ask(path)["built"] is True
    assert train.read_bytes() == whole.data


def test_a_failed_build_leaves_the_old_shard_and_no_litter(prepare):
    train = prepare.ask(prepare.write("a.jsonl", [ids_row(1, 2)]))["train"]
    before = open(train, "rb").read()
    with pytest.raises(InputError):
        prepare.ask(prepare.write("b.jsonl", [ids_row(1, 2), ids_row(1, -1)]))
    assert open(train, "rb").read() == before
    assert sorted(os.listdir(prepare.folder / "out")) == [".lock", "train.fbt"]


def test_long_rows_lose_their_tail_in_sft(prepare):
    rows = [ids_row(*range(10, 19)), ids_row(1, 2, 3, 4), ids_row(*range(9), labels=[-100] * 8 + [8])]
    reply = prepare.ask(rows, cutoff_len=4)
    assert Shard(reply["train"]).documents == [([10, 11, 12, 13], [-100, 11, 12, 13]), ([1, 2, 3, 4], [-100, 2, 3, 4]),
                                                ([0, 1, 2, 3], [-100] * 4)]  # nothing left to learn, but it keeps its place
    assert (reply["rows"], reply["truncated"], reply["dropped"]) == (3, 2, 0)


def test_long_rows_are_split_in_pt(prepare):
    reply = prepare.ask([ids_row(*range(10, 19)), ids_row(7)], cutoff_len=4, stage="pt")
    made = Shard(reply["train"]).documents
    assert made == [([10, 11, 12, 13], [-100, 11, 12, 13]), ([14, 15, 16, 17], [-100, 15, 16, 17])]  # 18 alone teaches nothing
    assert (reply["rows"], reply["truncated"], reply["dropped"]) == (2, 0, 1)


def test_plain_text_ends_with_eos(prepare, tiny):
    (ids, labels), = prepare.documents([{"text": "añ"}], model_dir=tiny.folder, stage="pt")
    assert ids == [*tiny.ids("a"), *tiny.ids("ñ"), tiny.EOS] and len(ids) == 4
    assert labels == [-100, *ids[1:]]


def test_empty_rows_are_dropped_and_counted(prepare, tiny):
    path = prepare.write("a.jsonl", '{}\n\n{"text": ""}\n{"text": "ab"}\n{"text": " \\n"}\n')
    reply = prepare.ask(path, model_dir=tiny.folder)
    assert (reply["rows"], reply["dropped"]) == (1, 3)


def test_no_learnable_token(prepare):
    for rows in ([ids_row(1, 2, labels=[1, -100])], [ids_row(1)], [{}], "\n"):
        with pytest.raises(InputError, match="has a token to learn"):
            prepare.ask(prepare.write("a.jsonl", rows))


def test_val_size_splits_rows(prepare):
    rows = [ids_row(n, n) for n in range(40)]
    path = prepare.write("a.jsonl", rows)
    seen = {}
    for name, keys in {"tenth": {"val_size": 0.1}, "seven": {"val_size": 7}, "other": {"val_size": 7, "seed": 1}}.items():
        reply = prepare.ask(path, **keys)
        train, held = ([ids[0] for ids, _ in Shard(reply[part]).documents] for part in ("train", "eval"))
        assert sorted(train + held) == list(range(40)) and train == sorted(train) and held == sorted(held)
        assert (reply["rows"], reply["eval_rows"]) == (len(train), len(held))
        seen[name] = held
    assert [len(held) for held in seen.values()] == [4, 7, 7]
    assert set(seen["tenth"]) < set(seen["seven"]) and seen["other"] != seen["seven"]
    assert not prepare.ask(path, val_size=7, seed=1)["built"]


def test_the_split_is_the_hash_that_is_documented():
    def mix(x):  # splitmix64 in Python's integers
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    assert mix(0) == 0xE220A8397B1DCDAF  # the reference implementation's first value for seed 0
    for seed in (0, 42, 2**64 - 1):
        keys = sorted(range(100), key=lambda n: mix((n + mix(seed)) % 2**64))
        assert documents.held_out(100, 10, seed) == set(keys[:10])


@pytest.mark.parametrize("val_size", (2, 5))
def test_val_size_must_leave_rows_on_both_sides(prepare, val_size):
    with pytest.raises(ConfigError, match="expected at least one each"):
        prepare.ask([ids_row(1, 2), ids_row(3, 4)], val_size=val_size)


def test_eval_dataset_and_max_samples(prepare):
    train, held = prepare.write("a.jsonl", [ids_row(n, n) for n in range(9)]), prepare.write("b.jsonl", [ids_row(50, 51)])
    reply = prepare.ask(f"{train},{held}", eval_dataset=held, max_samples=3)
    assert [ids[0] for ids, _ in Shard(reply["train"]).documents] == [0, 1, 2, 50]  # the first rows of each
    assert [ids[0] for ids, _ in Shard(reply["eval"]).documents] == [50]


def test_preview(prepare, tiny):
    rows = [{"text": "hé"}, {"text": "two"}]
    assert prepare.preview(rows, model_dir=tiny.folder, preview=1) == [
        {"text": "hé<|endoftext|>", "tokens": [
            {"id": tiny.ids("h")[0], "text": "h", "learned": False},
            {"id": tiny.ids("é")[0], "text": "\ufffd", "learned": True},
            {"id": tiny.ids("é")[1], "text": "\ufffd", "learned": True},
            {"id": tiny.EOS, "text": "<|endoftext|>", "learned": True}]}]
    assert prepare.preview([ids_row(3, 4, labels=[-100, 4])], out_dir=None) == [
        {"text": "", "tokens": [{"id": 3, "text": "", "learned": False}, {"id": 4, "text": "", "learned": True}]}]


@pytest.mark.parametrize("keys, code, sentence", (
    ({"dataset": "gone.jsonl"}, 3, "gone.jsonl: no such file or folder"),
    ({"stage": "rl"}, 2, "stage is 'rl'; expected 'sft' or 'pt'"),
    ({"vocab": "many"}, 2, 'vocab is "many"; expected an integer'),
    ({"cutoff_len": 1}, 2, "cutoff_len is 1; expected at least 2"),
    ({"val_size": 1.5}, 2, "val_size is 1.5; expected a fraction below 1"),
    ({"val_size": 0.5, "eval_dataset": "x"}, 2, "val_size and eval_dataset are both given"),
    ({"colour": 1}, 2, "the request has the unknown key 'colour'"),
))
def test_errors_are_an_exit_code_and_one_sentence(prepare, keys, code, sentence):
    request = json.loads(prepare.request([ids_row(1, 2)], op="build"))
    run = run_module("forebay.data", stdin=json.dumps({**request, **keys}) + "\n")
    assert (run.returncode, run.stdout) == (code, "")
    assert len(run.stderr.splitlines()) == 1 and sentence in run.stderr


def test_a_build_over_the_pipe(prepare):
    run = run_module("forebay.data", stdin=prepare.request([ids_row(1, 2)], op="build") + "\n")
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["rows"] == 1 and run.stdout.count("\n") == 1
