"""Bad input: one clear sentence, its exit code, and nothing in output_dir damaged."""
import json
import re
import shutil

import numpy as np
import pytest

from fb_checkpoint import (CONFIG, HF_DTYPE, entries, header_text, make_model, make_rows, random_weights, write_raw,
                           write_safetensors)
from fb_command import forebay, options, write_rows, write_yaml

FAILURE, CONFIG_BAD, INPUT_BAD, NO_FIT = 1, 2, 3, 4
WEIGHTS = random_weights(CONFIG)
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"


@pytest.fixture
def place(tmp_path):
    """A good model, good rows, and an output_dir that holds an earlier result."""
    make_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", make_rows(8))
    (tmp_path / "out").mkdir()
    for name in ("config.json", "model.safetensors", "trainer_log.jsonl", "notes.txt"):
        (tmp_path / "out" / name).write_text(f"the earlier {name}\n")
    return tmp_path


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_sentence(result, code, facts):
    assert result.code == code, f"exit {result.code}, expected {code}\n{result.out}\n{result.err}"
    for fact in facts:
        found = fact.search(result.last) if isinstance(fact, re.Pattern) else str(fact) in result.last
        assert found, f"{fact!r} is not in the sentence: {result.last}"
    assert "Traceback" not in result.err and "Assert" not in result.err
    assert len(result.last) < 800
    # One sentence: the facts are told once, not by every layer that the error passed through.
    complaints = [line for line in result.err.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]
    assert len(complaints) <= 1, result.err


def assert_refused(place, code, *facts, config=None, args=(), **more):
    config = config or write_yaml(place / "run.yaml", options(place / "model", place / "rows.jsonl", place / "out",
                                                              overwrite_output_dir=True, **more))
    before = snapshot(place / "out")
    result = forebay("train", config, *args)
    assert_sentence(result, code, facts)
    after = snapshot(place / "out")
    assert {name: data for name, data in after.items() if name in before} == before
    assert all(name.startswith("data/") for name in set(after) - set(before)), sorted(set(after) - set(before))


def line(n):
    return re.compile(rf"(?:line |:){n}\b")


# --- the command line and the YAML -----------------------------------------------------------------------------

def test_no_arguments():
    assert forebay().code == CONFIG_BAD


def test_unknown_command():
    assert_sentence(forebay("trian"), CONFIG_BAD, ["trian"])


def test_missing_config_file(place):
    assert_refused(place, CONFIG_BAD, "nowhere.yaml", config=place / "nowhere.yaml")


@pytest.mark.parametrize("key,nearest", [("lerning_rate", "learning_rate"), ("max_grad_nrom", "max_grad_norm"),
                                         ("batch_size", "batch_size"), ("slot", "slots")])
def test_unknown_key(key, nearest, place):
    # options() writes its keys in order; the unknown one comes last.
    n = len(options("", "", "", overwrite_output_dir=True, **{key: 1}))
    assert_refused(place, CONFIG_BAD, "run.yaml", line(n), key, nearest, **{key: 1})


def test_unknown_key_as_an_argument(place):
    assert_refused(place, CONFIG_BAD, "warmup_step", "warmup_steps", args=["warmup_step=3"])


@pytest.mark.parametrize("key,value", [
    ("per_device_train_batch_size", "two"), ("per_device_train_batch_size", "1.5"), ("learning_rate", "fast"),
    ("packing", "maybe"), ("max_steps", "1e"), ("seed", "-"), ("slots", "some"), ("hbm_budget", "12 parsecs"),
    ("save_steps", "[1, 2]"), ("logging_steps", "{a: 1}")
])
def test_wrong_type(key, value, place):
    assert_refused(place, CONFIG_BAD, "run.yaml", key, re.compile(r"(?:line |:)\d+\b"), **{key: value})


@pytest.mark.parametrize("key,value", [
    ("per_device_train_batch_size", "0"), ("per_device_train_batch_size", "-1"), ("gradient_accumulation_steps", "0"),
    ("per_device_train_batch_size", "99999999999999999999"), ("learning_rate", "-1e-3"), ("learning_rate", "nan"),
    ("learning_rate", "inf"), ("max_grad_norm", "-1"), ("warmup_ratio", "1.5"), ("adam_beta1", "1.0"),
    ("adam_beta2", "-0.1"), ("weight_decay", "-0.1"), ("num_train_epochs", "-1"), ("cutoff_len", "0"),
    ("logging_steps", "0"), ("recompute", "sometimes"), ("lr_scheduler_type", "polynomial"), ("stage", "rm"),
    ("compute_dtype", "float8"), ("save_strategy", "never"), ("update_kernel", "neon"), ("backend", "tpu"),
    ("hbm_budget", "-1"), ("hbm_budget", "99999999999999GiB"), ("val_size", "-2"),
])
def test_impossible_value(key, value, place):
    assert_refused(place, CONFIG_BAD, key, **{key: value})


def test_choices_are_named(place):
    assert_refused(place, CONFIG_BAD, "recompute", "sometimes", "none", "selective", "full", recompute="sometimes")


@pytest.mark.parametrize("key", ["model_name_or_path", "dataset", "output_dir"])
def test_required_key(key, place):
    given = options(place / "model", place / "rows.jsonl", place / "out", overwrite_output_dir=True)
    given.pop(key)
    assert_refused(place, CONFIG_BAD, key, config=write_yaml(place / "run.yaml", given))


@pytest.mark.parametrize("text,n", [("a: [1, 2\n", 2), ("model_name_or_path: x\nseed: 1\nseed: 2\n", 3),
                                    ("- a\n- b\n", 1), ("seed: {b: {c: 1}}\n", 1)])
def test_not_a_flat_yaml(text, n, place):
    path = place / "run.yaml"
    path.write_text(text)
    assert_refused(place, CONFIG_BAD, "run.yaml", re.compile(rf"(?:line |:)[{n - 1}{n}{n + 1}]\b"), config=path)


# --- the model folder: config.json ------------------------------------------------------------------------------

@pytest.mark.parametrize("command", [["inspect"], ["generate"], ["export"]])
def test_missing_model_elsewhere(command, place):
    rest = {"generate": ["hello"], "export": [place / "to"]}.get(command[0], [])
    assert_sentence(forebay(*command, place / "nowhere", *rest), INPUT_BAD, ["nowhere"])
    assert not (place / "to").exists()


def test_missing_model(place):
    shutil.rmtree(place / "model")
    assert_refused(place, INPUT_BAD, "model")


def test_missing_config_json(place):
    (place / "model" / "config.json").unlink()
    assert_refused(place, INPUT_BAD, "config.json")


def test_broken_config_json(place):
    (place / "model" / "config.json").write_text('{"model_type": "llama",\n"hidden_size": }\n')
    assert_refused(place, INPUT_BAD, "config.json", line(2))


@pytest.mark.parametrize("change,facts", [
    (dict(model_type="gpt_neox"), ["model_type", "gpt_neox", "llama"]),
    (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), ["longrope", "llama3"]),
    (dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)), ["proportional"]),
    (dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    (dict(hidden_size="32"), ["hidden_size"]),
    (dict(hidden_size=-32), ["hidden_size"]),
    (dict(num_hidden_layers=0), ["num_hidden_layers"]),
    (dict(num_key_value_heads=3), [re.compile("key.value"), "3", "4"]),
    (dict(num_attention_heads=0), ["num_attention_heads"]),
    (dict(vocab_size=1 << 40), ["vocab_size"]),
    (dict(head_dim=7), ["head_dim", "7"]),
    (dict(rope_scaling=dict(rope_type="linear")), ["factor"]),
    (dict(rope_scaling=dict(rope_type="linear", factor=-1)), ["factor"]),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), [re.compile("(low|high)_freq_factor|original_max")]),
    (dict(rope_theta=0), ["rope_theta"]),
    (dict(tie_word_embeddings="yes"), ["tie_word_embeddings"]),
], ids=lambda value: json.dumps(value) if isinstance(value, dict) else "")
def test_config_json(change, facts, place):
    (place / "model" / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert_refused(place, INPUT_BAD, "config.json", *facts)


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                 "vocab_size", "intermediate_size"])
def test_config_json_lacks(key, place):
    (place / "model" / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    assert_refused(place, INPUT_BAD, "config.json", key)


# --- the model folder: safetensors ------------------------------------------------------------------------------

def table_of(name, table):
    return next(row for row in table if row[0] == name)


def overlapping(table, data):
    at = [row[0] for row in table].index(DOWN)
    size = table[at][4] - table[at][3]
    table[at][3] = table[at - 1][3]
    table[at][4] = table[at][3] + size
    return table, data


def duplicate(table, data):
    return table + [list(table_of(DOWN, table))], data


def hole(table, data):
    for row in table[3:]:
        row[3] += 8
        row[4] += 8
    return table, data[:table[3][3] - 8] + b"\0" * 8 + data[table[3][3] - 8:]


def trailing(table, data):
    return table, data + b"\0" * 16


def past_the_end(table, data):
    table[-1][4] += 2
    return table, data


def backwards(table, data):
    row = table_of(DOWN, table)
    row[3], row[4] = row[4], row[3]
    return table, data


def size_is_not_shape(table, data):
    table_of(DOWN, table)[2][1] -= 1
    return table, data


def huge_shape(table, data):
    table_of(DOWN, table)[2] = [1 << 32, 1 << 32]
    return table, data


def negative_shape(table, data):
    table_of(DOWN, table)[2] = [-32, -40]
    return table, data


def wrong_dtype(table, data):
    row = table_of(DOWN, table)
    row[1], row[2] = "I64", [8, 40]             # as many bytes as the table says, of integers
    return table, data


def unknown_dtype(table, data):
    table_of(DOWN, table)[1] = "F7"
    return table, data


@pytest.mark.parametrize("bend,facts", [
    (overlapping, [DOWN]), (duplicate, [DOWN, re.compile("twice|duplicate")]), (hole, []), (trailing, []),
    (past_the_end, []), (backwards, [DOWN]), (size_is_not_shape, [DOWN]), (huge_shape, [DOWN]),
    (negative_shape, [DOWN]), (wrong_dtype, [DOWN, "I64"]), (unknown_dtype, [DOWN, "F7"]),
], ids=lambda value: value.__name__ if callable(value) else "")
def test_bent_header(bend, facts, place):
    table, data = bend(*entries(WEIGHTS))
    write_raw(place / "model" / "model.safetensors", header_text(table), data)
    assert_refused(place, INPUT_BAD, "model.safetensors", *facts)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_truncated(keep, place):
    path = place / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(place, INPUT_BAD, "model.safetensors")


@pytest.mark.parametrize("length", [1 << 20, 1 << 62, (1 << 64) - 8, 10])
def test_header_length_lies(length, place):
    table, data = entries(WEIGHTS)
    write_raw(place / "model" / "model.safetensors", header_text(table), data, length=length)
    assert_refused(place, INPUT_BAD, "model.safetensors")


@pytest.mark.parametrize("header", ["", "[]", "{", '{"a": 1}', '{"a": {"dtype": "F32"}}', "\0\0", "not json"])
def test_header_is_no_header(header, place):
    write_raw(place / "model" / "model.safetensors", header, b"")
    assert_refused(place, INPUT_BAD, "model.safetensors")


def test_missing_weights(place):
    (place / "model" / "model.safetensors").unlink()
    assert_refused(place, INPUT_BAD, "model.safetensors")


@pytest.mark.parametrize("name,array,facts", [
    (DOWN, None, []),
    (DOWN, np.zeros((32, 41), np.float32), ["41", "40"]),
    (DOWN, np.zeros((40, 32), np.float32), ["40", "32"]),
    (DOWN, np.zeros(32 * 40, np.float32), ["1280"]),
    (NORM, np.zeros((32, 1), np.float32), []),
    ("lm_head.weight", None, []),
    ("model.layers.4.mlp.down_proj.weight", WEIGHTS[DOWN], []),
    ("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32), []),
    (DOWN, np.full((32, 40), np.nan, np.float32), [re.compile("finite|nan", re.IGNORECASE)]),
    (NORM, np.full(32, np.inf, np.float32), [re.compile("finite|inf", re.IGNORECASE)]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_tensors_are_not_the_models(name, array, facts, place):
    weights = {**WEIGHTS, name: array}
    write_safetensors(place / "model" / "model.safetensors", {k: v for k, v in weights.items() if v is not None},
                      "F32")
    assert_refused(place, INPUT_BAD, name, *facts)


def test_tied_head_that_differs(place):
    """Beside tied embeddings a head may lie only if it equals them."""
    (place / "model" / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert_refused(place, INPUT_BAD, "lm_head.weight")


def write_sharded(folder, change=lambda weight_map: None):
    """The weights in two files; change bends the index's map."""
    (folder / "model.safetensors").unlink()
    names = list(WEIGHTS)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for i, file in enumerate(files):
        write_safetensors(folder / file, {name: WEIGHTS[name] for name in names[i::2]}, HF_DTYPE[CONFIG["torch_dtype"]])
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    change(weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    return files


def test_good_shards_are_taken(place):
    """What the refusals below start from is accepted."""
    write_sharded(place / "model")
    config = write_yaml(place / "run.yaml", options(place / "model", place / "rows.jsonl", place / "new"))
    result = forebay("train", config)
    assert result.code == 0, result.err


def test_index_names_a_missing_shard(place):
    write_sharded(place / "model")
    (place / "model" / "model-00002-of-00002.safetensors").unlink()
    assert_refused(place, INPUT_BAD, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", ""])
def test_index_names_a_path_outside(path, place):
    write_safetensors(place / "outside.safetensors", {DOWN: WEIGHTS[DOWN]})
    write_sharded(place / "model", lambda weight_map: weight_map.update({DOWN: path}))
    assert_refused(place, INPUT_BAD, "model.safetensors.index.json", path)


def test_index_places_a_tensor_where_it_is_not(place):
    def swap(weight_map):
        weight_map[DOWN] = next(file for file in weight_map.values() if file != weight_map[DOWN])
    write_sharded(place / "model", swap)
    assert_refused(place, INPUT_BAD, DOWN)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_broken_index(text, place):
    write_sharded(place / "model")
    (place / "model" / "model.safetensors.index.json").write_text(text)
    assert_refused(place, INPUT_BAD, "model.safetensors.index.json")


# --- the dataset ---------------------------------------------------------------------------------------------------

def test_missing_dataset(place):
    (place / "rows.jsonl").unlink()
    assert_refused(place, INPUT_BAD, "rows.jsonl")


@pytest.mark.parametrize("rows", [[([1, 2, 3], [-100] * 3)] * 4, [([5], [5])] * 4, []],
                         ids=["all masked", "one token a row", "empty file"])
def test_nothing_to_learn(rows, place):
    write_rows(place / "rows.jsonl", rows)
    assert_refused(place, INPUT_BAD, "rows.jsonl", re.compile("learn|row|empty"))


def replace_line(path, n, text):
    lines = path.read_text().splitlines()
    lines[n - 1] = text
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("text", ['{"input_ids": [1, 2', "input_ids", '{"input_ids": [1, 2]}}', "[1, 2", "\x00"])
def test_broken_json_line(text, place):
    replace_line(place / "rows.jsonl", 5, text)
    assert_refused(place, INPUT_BAD, "rows.jsonl", line(5))


@pytest.mark.parametrize("row,facts", [
    (dict(input_ids=[1, 96, 2]), ["96"]),
    (dict(input_ids=[1, 4294967297, 2]), ["4294967297"]),
    (dict(input_ids=[1, -3, 2]), ["-3"]),
    (dict(input_ids=[1, 2, 3], labels=[1, 2, 96]), ["96"]),
    (dict(input_ids=[1, 2, 3], labels=[1, 2, -5]), ["-5"]),
    (dict(input_ids=[1, 2, 3], labels=[1, 2]), ["labels"]),
    (dict(input_ids=[1, 2.5]), ["input_ids"]),
    (dict(input_ids=[1, "2"]), ["input_ids"]),
    (dict(input_ids=[1, True]), ["input_ids"]),
    (dict(input_ids="12"), ["input_ids"]),
    (dict(input_ids=[1, 2], labels="12"), ["labels"]),
    (dict(labels=[1, 2]), [re.compile("input_ids|format|fields")]),
], ids=lambda value: json.dumps(value) if isinstance(value, dict) else "")
def test_bad_row(row, facts, place):
    replace_line(place / "rows.jsonl", 3, json.dumps(row))
    assert_refused(place, INPUT_BAD, "rows.jsonl", line(3), *facts)


# --- what does not fit ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key,value", [("hbm_budget", "16KiB"), ("ram_budget", "64KiB")])
def test_does_not_fit(key, value, place):
    size = re.compile(r"\d[\d.]* ?(?:[KMG]iB|bytes|B)\b")
    assert_refused(place, NO_FIT, key, size, **{key: value})
    result = forebay("plan", place / "run.yaml")
    assert_sentence(result, NO_FIT, [key, size])


def test_neither_memory_fits(place):
    assert_refused(place, NO_FIT, "hbm_budget", "ram_budget", hbm_budget="16KiB", ram_budget="64KiB")
