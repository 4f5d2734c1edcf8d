"""Writes the malformed files and expected.json: python tests/malformed/make.py

A file lies in the folder of its kind; tests/e2e/test_malformed.py puts it in its place in a good setting.  For each, `says` has
parts of the one sentence that the command must end with.  Edit here, not there."""
import io
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import xxhash

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "e2e"), str(HERE.parents[1] / "python")]
from fb_checkpoint import CONFIG
from forebay.shard import HEADER, HEADER_SIZE, MAGIC

CONFIG_BAD, INPUT_BAD = 2, 3
GOOD_CONFIG = {**CONFIG, "vocab_size": 300}
expected = {}


def case(kind, name, content, *says, code=INPUT_BAD):
    path = HERE / kind / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    expected[f"{kind}/{name}"] = {"kind": kind, "exit": code, "says": says}


# --- safetensors -------------------------------------------------------------------------------------------------

def safetensors(name, header, *says, data=bytes(8), length=None):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    case("safetensors", name, struct.pack("<Q", len(text) if length is None else length) + text + data, *says)


def one(**change):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}
    return {"a": {key: value for key, value in entry.items() if value is not None}}


def two(second, **change):
    return {**one(), "b": {"dtype": "F32", "shape": [2], "data_offsets": second, **change}}


def make_safetensors():
    case("safetensors", "empty", b"", "is empty")
    case("safetensors", "short", bytes(9), "9 bytes", "at least 10")
    safetensors("header_past_the_end", one(), "claims a header of 1000 bytes", "truncated", length=1000)
    safetensors("header_beyond_all_files", one(), "claims a header of 4611686018427387904 bytes", "at most", length=1 << 62)
    safetensors("not_json", "{tensor: 1}", "is not JSON")
    safetensors("too_deep", "[" * 4000, "is not JSON", "depth")
    safetensors("array", "[]", "not a JSON object of tensors")
    safetensors("blank_first", " {}", "does not begin with '{'", data=b"")
    safetensors("nul_in_a_name", '{"a\\u0000b": {}}', "is not JSON", "NUL")
    safetensors("entry_is_a_list", {"a": []}, "'a'", "is not an object")
    safetensors("no_dtype", one(dtype=None), "'a' has no dtype")
    safetensors("foreign_dtype", one(dtype="I64", shape=[1]), "'a' is I64", "convert")
    safetensors("unknown_dtype", one(dtype="F7"), "unknown dtype 'F7'")
    safetensors("no_shape", one(shape=None), "'a' has no shape")
    safetensors("negative_dimension", one(shape=[-2]), "dimension 0 of tensor 'a'")
    safetensors("broken_dimension", one(shape=[1, 2.5]), "dimension 1 of tensor 'a'")
    safetensors("nine_dimensions", one(shape=[1] * 8 + [2]), "9 dimensions", "at most 8")
    safetensors("shape_overflows", one(shape=[1 << 32, 1 << 32]), "more bytes than 64 bits can count")
    safetensors("three_offsets", one(data_offsets=[0, 4, 8]), "data_offsets of tensor 'a'")
    safetensors("backwards", one(data_offsets=[8, 0]), "ends at 0, before its start at 8")
    safetensors("past_the_end", one(shape=[4], data_offsets=[0, 16]), "ends at byte 16", "the file holds 8")
    safetensors("size_is_not_shape", one(shape=[1]), "has 8 bytes of data", "need 4")
    safetensors("overlap", two([4, 12]), "'a' and 'b' overlap", data=bytes(12))
    safetensors("hole", two([12, 20]), "4 bytes before tensor 'b'", "no holes", data=bytes(20))
    safetensors("data_at_the_end", one(), "3 bytes at the end", data=bytes(11))
    safetensors("twice", '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {}}', "'a' stands twice")
    safetensors("metadata_is_a_list", {"__metadata__": [], **one()}, "__metadata__ is not an object")
    safetensors("metadata_is_a_number", {"__metadata__": {"format": 1}, **one()}, "__metadata__ key 'format'")
    safetensors("control_characters", {"a\x1b[2J\x9b1m\u202ea": 1}, "a?[2J", "is not an object")
    case("safetensors", "pickle", b"PK\x03\x04\x00\x00archive/data.pkl", "claims a header")


# --- index -------------------------------------------------------------------------------------------------------

def make_index():
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    good = {"a": files[0], "b": files[1]}

    def index(name, weight_map, *says):
        case("index", name, json.dumps({"weight_map": weight_map}), *says)

    case("index", "not_json", '{"weight_map":\n{', "is not JSON", "line 2")
    case("index", "twice", '{"weight_map": {"a": "x", "a": "y"}}', "unique keys", "duplicate")
    case("index", "no_map", '{"metadata": {}}', "has no weight_map")
    index("map_to_number", {"a": 1}, "maps 'a' to something that is not a file name")
    index("folder_above", {**good, "a": "../outside.safetensors"}, "'../outside.safetensors'", "plain name")
    index("absolute", {**good, "a": "/etc/passwd"}, "'/etc/passwd'", "plain name")
    index("a_folder", {**good, "a": ".."}, "'..'", "plain name")
    index("missing_file", {**good, "a": "gone.safetensors"}, "'gone.safetensors'", "not in its folder")
    index("link_outside", {**good, "c": "link.safetensors"}, "'link.safetensors'", "leads out of the folder")
    index("lacks_a_tensor", {"a": files[0], "x": files[1]}, "does not name the tensor 'b'")
    index("wrong_place", {"a": files[1], "b": files[0]}, "places 'a' in", "holds it")
    index("tensor_that_is_not_there", {**good, "x": files[0]}, "places 'x' in", "lacks it")


# --- config.json -------------------------------------------------------------------------------------------------

def make_config():
    def config(name, *says, **change):
        merged = {**GOOD_CONFIG, **change}
        case("config", name, json.dumps({key: value for key, value in merged.items() if value is not ...}), *says)

    case("config", "empty", b"", "is not JSON")
    case("config", "not_json", '{"model_type": "llama",\n"hidden_size": }', "is not JSON", "line 2")
    case("config", "array", "[]", "is not a JSON object")
    case("config", "nul", b'{"model_type": "llama"}\0', "holds a NUL byte")
    case("config", "twice", '{"vocab_size": 1, "vocab_size": 2}', "unique keys", "vocab_size")
    config("no_family", "has no 'model_type'", model_type=...)
    config("unknown_family", "model_type 'gpt_neox' is not known", "llama", model_type="gpt_neox")
    config("other_class", "'architectures' is", "LlamaForCausalLM", architectures=["LlamaForSequenceClassification"])
    config("no_hidden_size", "has no 'hidden_size'", hidden_size=...)
    config("size_is_text", "'hidden_size' is \"32\"", hidden_size="32")
    config("no_layers", "'num_hidden_layers' is 0", num_hidden_layers=0)
    config("too_many_layers", "'num_hidden_layers' is 513", num_hidden_layers=513)
    config("heads", "not a multiple of 'num_key_value_heads', 3", num_key_value_heads=3)
    config("odd_head", "the head size is 7", head_dim=7)
    config("rope_type", "rope type 'longrope' is not known", rope_scaling={"rope_type": "longrope"})
    config("rope_factor", "has no 'factor'", rope_scaling={"rope_type": "linear"})
    config("rope_list", "'rope_scaling' is not an object", rope_scaling=[1])
    config("rope_theta", "'rope_theta' is 1;", rope_theta=1)
    config("activation", "hidden_act 'gelu'", "silu", hidden_act="gelu")
    config("dropout", "'attention_dropout' is 0.1", attention_dropout=0.1)
    config("quantised", "'quantization_config'", quantization_config={"bits": 4})
    config("dtype", "dtype 'float8' is not supported", torch_dtype="float8")
    config("end_token", "'eos_token_id' holds 300", "0 to 299", eos_token_id=300)
    config("layer_types", "'layer_types' is not a list of 4 names", layer_types=["full_attention"])
    config("tied_is_text", "'tie_word_embeddings' is \"yes\"", tie_word_embeddings="yes")
    config("beyond_all_machines", "more than 2^56 parameters", hidden_size=2**31 - 2, intermediate_size=2**31 - 1,
           num_hidden_layers=512, num_attention_heads=1, num_key_value_heads=1)


# --- YAML --------------------------------------------------------------------------------------------------------

def make_yaml():
    def yaml(name, text, line, *says):
        case("yaml", name, text, f":{line}: ", *says, code=CONFIG_BAD)

    yaml("tab", "seed: 1\n\tslots: 2\n", 2, "a tab is used as indentation")
    yaml("list", "- a\n- b\n", 1, "found a list")
    yaml("lone_value", "seed\n", 1, "found a lone value")
    yaml("unclosed", "dataset: [a, b\nseed: 1\n", 2, "not valid YAML")
    yaml("anchor", "seed: &x 1\n", 1, "anchors")
    yaml("alias", "seed: 1\nslots: *x\n", 2, "aliases")
    yaml("tag", "seed: !!python/object:os.system 1\n", 1, "tags")
    yaml("second_document", "seed: 1\n---\nseed: 2\n", 2, "second YAML document")
    yaml("not_utf8", b"seed: 1\noutput_dir: \xff\xfe\n", 2, "not UTF-8")
    yaml("nul", "seed: \"1\\0\"\n", 1, "NUL character")
    yaml("mapping", "seed: {a: 1}\n", 1, "'seed' holds a mapping")
    yaml("list_of_lists", "dataset: [[a]]\n", 1, "not lists or mappings")
    yaml("key_is_a_list", "? [a]\n: 1\n", 1, "a key must be a name")
    yaml("twice", "seed: 1\nslots: 2\nseed: 3\n", 3, "seed is given twice", "line 1")
    yaml("unknown_key", "lerning_rate: 1\n", 1, "did you mean 'learning_rate'")
    yaml("wrong_value", "learning_rate: fast\n", 1, "learning_rate must be", "'fast'")
    yaml("out_of_range", "adam_beta1: 1.5\n", 1, "adam_beta1 must be", "'1.5'")
    yaml("two_evals", "dataset: a\neval_dataset: b\nval_size: 0.5\n", 3, "eval_dataset is given too")


# --- token shard -------------------------------------------------------------------------------------------------

def make_tokens():
    ids, starts, meta = [1, 2, 3, 4, 5], [0, 3, 5], b'{"fingerprint": "0"}'
    at = {"labels_at": 192, "docs_at": 256, "meta_at": 320}

    def shard(name, *says, ids=ids, mask=(0, 1, 1, 0, 1), starts=starts, meta=meta, cut=None, reserved=b"",
              flip=None, labels=None, **change):
        label_bytes = bytes(mask) if labels is None else np.array(labels, "<i4").tobytes()
        sections = [np.array(ids, "<u4").tobytes(), label_bytes, np.array(starts, "<u8").tobytes()]
        body = b"".join(section.ljust(64, b"\0") for section in sections) + meta
        h = dict(magic=MAGIC, version=1, header_size=HEADER_SIZE, n_token=5, n_doc=2, n_learned=3, ids_at=128, **at,
                 meta_size=len(meta), file_size=128 + len(body), checksum=xxhash.xxh3_64_intdigest(body),
                 label_kind=0 if labels is None else 1, id_max=5, doc_len_max=3)
        h.update(change)
        content = bytearray(HEADER.pack(*h.values()).ljust(HEADER_SIZE - len(reserved), b"\0") + reserved + body)
        if flip is not None:
            content[flip] ^= 1
        case("tokens", name, bytes(content[:cut]), *says)

    shard("short", "127 bytes", "at least 128", cut=127)
    shard("magic", "does not begin with FBTOKENS", magic=b"FBTOKENZ")
    shard("version", "has version 2", version=2)
    shard("header_size", "claims a header of 64 bytes", header_size=64)
    shard("cut", "was written with 340 bytes and now has 339", cut=-1)
    shard("label_kind", "label kind 2", label_kind=2)
    shard("largest_id", "largest id of 4294967295", id_max=2**32 - 1)
    shard("reserved", "reserved header byte", reserved=b"x")
    shard("metadata_size", "bytes of metadata, at most", meta_size=1 << 40)
    shard("misaligned", "section labels starts at byte 193", labels_at=193)
    shard("in_the_header", "section ids starts at byte 64, inside the header", ids_at=64)
    shard("section_past_the_end", "section metadata", "passes the file's end", meta_at=1 << 20)
    shard("count_overflows", "section ids (4611686018427387905 entries", n_token=(1 << 62) + 1)
    shard("sections_overlap", "sections ids and labels overlap", labels_at=128)
    shard("checksum", "checksum does not match", flip=130)
    shard("first_document", "first document starts at token 1", starts=[1, 3, 5])
    shard("documents_fall", "document 1 starts at token 6 and ends at 5", starts=[0, 6, 5])
    shard("documents_end", "documents end at token 4 of 5", starts=[0, 3, 4])
    shard("longest", "longest document has 3 tokens, the header says 4", doc_len_max=4)
    shard("id_past_largest", "token 4 has id 9", ids=[1, 2, 3, 4, 9])
    shard("mask", "label mask 2", mask=(0, 2, 1, 0, 1))
    shard("label", "token 1 has label -7", labels=[-100, -7, 3, -100, 5])
    shard("first_is_learned", "first token of document 1 is marked as learned", mask=(0, 1, 1, 1, 1))
    shard("learned", "3 tokens are learned, the header says 4", n_learned=4)
    shard("metadata_is_a_list", "metadata is not a JSON object", "list", meta=b"[]")
    shard("metadata_is_not_json", "metadata is not a JSON object", "expected", meta=b"{,}")
    shard("id_past_the_vocabulary", "token id 300 is past the model's vocabulary of 300", ids=[1, 2, 3, 4, 300], id_max=300)


# --- trainer_state.json of a checkpoint ----------------------------------------------------------------------------

def make_progress():
    ours = {"data_step": 3, "update_step": 2, "rows_per_epoch": 8, "steps_per_epoch": 4, "rope_len": 0, "nonfinite_in_a_row": 1,
            "loss_sum": 0.0, "n_learned": 0, "elapsed": 1.5, "finished": False, "run": {}}

    def progress(name, *says, **change):
        case("progress", name, json.dumps({"max_steps": 12, "forebay": {**ours, **change}}), *says)

    case("progress", "empty", b"", "is not JSON")
    case("progress", "not_json", '{"max_steps": 1,\n}', "is not JSON", "line 2")
    case("progress", "of_another_trainer", '{"max_steps": 1, "log_history": []}', "not a state that forebay wrote", "forebay")
    progress("step_is_text", "not a state that forebay wrote", "Expected integer", data_step="3")
    progress("finished_is_a_number", "not a state that forebay wrote", "Expected true or false", finished=1)
    progress("negative", "out of range", data_step=-1)


# --- dataset_info.json ---------------------------------------------------------------------------------------------

def make_info():
    def info(name, entry, *says):
        case("dataset_info", name, json.dumps({"d": entry}), *says)

    case("dataset_info", "not_json", '{"d": ', "not valid JSON")
    case("dataset_info", "not_utf8", b'{"d": "\xff"}', "not valid JSON", "utf-8")
    case("dataset_info", "array", "[]", "expected an object of datasets")
    case("dataset_info", "other_name", '{"e": {"file_name": "rows.jsonl"}}', "dataset 'd'", "no such name")
    info("entry_is_text", "rows.jsonl", "is not an object")
    info("no_file", {"hf_hub_url": "x/y"}, "has no file_name")
    info("unknown_key", {"file_name": "rows.jsonl", "weight": 2}, "has 'weight', which is not supported")
    info("ranking", {"file_name": "rows.jsonl", "ranking": True}, "is a ranking dataset")
    info("formatting", {"file_name": "rows.jsonl", "formatting": "xml"}, "has formatting \"xml\"")
    info("columns", {"file_name": "rows.jsonl", "columns": []}, "columns: expected an object")
    info("column", {"file_name": "rows.jsonl", "columns": {"prompt": 1}}, "'prompt' is 1")
    info("column_name", {"file_name": "rows.jsonl", "columns": {"images": "x"}}, "'images' is not supported")
    info("missing_file", {"file_name": "gone.jsonl"}, "gone.jsonl: no such file")
    info("nul", {"file_name": "a\0b"}, "no such file")
    info("folder_above", {"file_name": "../outside.jsonl"}, "'../outside.jsonl'", "outside")
    info("absolute", {"file_name": "/etc/passwd"}, "'/etc/passwd'", "outside")
    info("link_outside", {"file_name": "link.jsonl"}, "'link.jsonl'", "outside")


# --- rows ------------------------------------------------------------------------------------------------------------

def parquet(table):
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def make_rows():
    def row(name, value, *says):
        case("rows", f"{name}.jsonl", json.dumps(value), ":1: ", *says)

    case("rows", "not_json.jsonl", '{"text": "a"}\n{"text": \n', ":2: broken JSON at column")
    case("rows", "not_an_object.jsonl", '{"text": "a"}\n[1]\n', ":2: the row is a JSON array")
    case("rows", "not_utf8.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2: not UTF-8 at byte 10")
    case("rows", "too_deep.jsonl", '{"text": ' + "[" * 9000, ":1: JSON that cannot be read", "recursion")
    case("rows", "other_format.jsonl", '{"text": "a"}\n{"prompt": "a"}\n', ":2: the row has no 'text'")
    case("rows", "empty.jsonl", "\n\n", "none of its rows")
    row("no_format", {"question": "a"}, "'question'", "no known format")
    row("ids_are_text", {"input_ids": "12"}, "input_ids is '12'")
    row("id_is_a_fraction", {"input_ids": [1, 2.5]}, "input_ids[1] is 2.5")
    row("id_is_true", {"input_ids": [1, True]}, "input_ids[1] is True")
    row("id_past_the_vocabulary", {"input_ids": [1, 300]}, "input_ids[1] is 300, past the vocabulary")
    row("id_is_negative", {"input_ids": [1, -3]}, "input_ids[1] is -3")
    row("labels_are_fewer", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries")
    row("label", {"input_ids": [1, 2], "labels": [1, -5]}, "labels holds -5")
    row("padding", {"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask is not all 1")
    row("text_is_a_number", {"text": 3}, "'text' is 3")
    row("surrogate", {"text": "ab\ud800"}, "half of a surrogate pair at character 2")
    row("messages_are_text", {"messages": "hello"}, "'messages' is 'hello'")
    row("message_is_text", {"messages": ["hello"]}, "message 1 is 'hello'")
    row("role", {"messages": [{"role": "king", "content": "a"}]}, "role 'king'")
    row("content", {"messages": [{"role": "user", "content": 7}]}, "content 7")
    row("image", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content part")
    row("weight", {"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "weight 2")
    row("function_call", {"conversations": [{"from": "function_call", "value": "f(x)"}]}, "function call 'f(x)'")
    row("tools", {"messages": [{"role": "user", "content": "a"}], "tools": "{"}, "'tools' is not JSON")
    row("tool", {"messages": [{"role": "user", "content": "a"}], "tools": [1]}, "'tools' is [1]")
    row("history", {"instruction": "a", "output": "b", "history": [["a"]]}, "'history' is [['a']]")
    row("no_output", {"instruction": "a"}, "the row has no 'output'")
    case("rows", "unclosed.json", '[{"text": "a"}', "found the end of the file")
    case("rows", "no_comma.json", '[{"text": "a"}\n{"text": "b"}]', ":2: ", "expected ',' or ']'")
    case("rows", "comma_last.json", '[{"text": "a"},\n]', "expected a row after ','")
    case("rows", "more_behind.json", '[{"text": "a"}]\n[', ":2: more text after the array's end")
    case("rows", "number_in_array.json", '[1]', "not an object; expected rows")
    case("rows", "cut_string.json", '[{"text": "a', "Unterminated string")
    case("rows", "not_utf8.txt", b"one\ntwo \xff\n", ":2: not UTF-8; expected plain text")
    case("rows", "not_parquet.parquet", b"PAR0" + bytes(20), "not a readable Parquet file")
    case("rows", "broken_page.parquet", broken_page(), "broken Parquet data after row 0")
    case("rows", "text_not_utf8.parquet", not_utf8_parquet(), "broken Parquet data after row 0", "utf-8")
    case("rows", "ids_are_floats.parquet", parquet(pyarrow.table({"input_ids": [[1.0, 2.0]]})), "input_ids[0] is 1.0")


def not_utf8_parquet():
    table = pyarrow.table({"text": ["a text of some length"]})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression="NONE", use_dictionary=False, write_statistics=False)
    return file.getvalue().replace(b"a text of", b"a \xfft of")


def broken_page():
    good = parquet(pyarrow.table({"text": ["a" * 50]}))
    return good[:4] + bytes(40) + good[44:]


# --- chat templates, tokenizers ----------------------------------------------------------------------------------------

def make_templates():
    case("template", "not_jinja", "{% for m in messages %}\n{{ m.content }", "not valid Jinja, line 2")
    case("template", "unknown_tag", "{% load x %}", "not valid Jinja, line 1", "load")
    case("template", "not_utf8", b"{{ '\xff' }}", "chat_template.jinja", "not UTF-8")
    case("template", "refuses", "{{ raise_exception('no thanks') }}", "the chat template fails: no thanks")
    case("template", "undefined", "{{ messages[0].nothing.at_all }}", "the chat template fails", "has no attribute 'nothing'")
    case("template", "reaches_for_python", "{{ ''.__class__.__mro__ }}", "the chat template fails", "unsafe")
    case("template", "reaches_for_a_function", "{{ raise_exception.__globals__['json'] }}",
         "the chat template fails", "'__globals__'")
    case("template", "changes_a_list", "{{ messages.append(1) }}", "the chat template fails", "'append'")
    case("template", "includes_a_file", "{% include '/etc/passwd' %}", "the chat template fails", "loader")
    case("template", "all_memory", "{{ 'a' * 10**12 }}", "too much memory")
    case("template", "without_end", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the chat template fails", "recursion")


def make_tokenizers():
    case("tokenizer", "empty", b"", "tokenizer.json", "not a tokenizer that can be read")
    case("tokenizer", "array", "[]", "tokenizer.json", "not a tokenizer that can be read", "invalid")
    case("tokenizer", "no_model", '{"version": "1.0"}', "not a tokenizer that can be read", "Model missing")
    case("tokenizer", "model_type", '{"version": "1.0", "added_tokens": [], "model": {"type": "Neural"}}',
         "not a tokenizer that can be read")
    case("tokenizer", "not_utf8", b'{"version": "\xff"}', "not a tokenizer that can be read", "UTF-8")
    words = {"type": "WordLevel", "vocab": {"some": 0, "text": 4000}, "unk_token": "text"}
    case("tokenizer", "other_models", json.dumps({"version": "1.0", "added_tokens": [], "model": words}),
         "past the model's vocabulary of 300")


def make_tokenizer_configs():
    case("tokenizer_config", "not_json", "{", "tokenizer_config.json", "not valid JSON")
    case("tokenizer_config", "array", "[1]", "tokenizer_config.json: expected a JSON object")
    case("tokenizer_config", "surrogate", '{"eos_token": "\\ud800"}', "tokenizer_config.json: not valid JSON",
         "surrogates not allowed")
    case("tokenizer_config", "end_token", '{"eos_token": "<gone>"}', "eos_token '<gone>'", "not in the vocabulary")
    case("tokenizer_config", "template_is_a_number", '{"eos_token": "<|endoftext|>", "chat_template": 7}',
         "neither a string nor a list")


def main():
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    for make in (make_safetensors, make_index, make_config, make_yaml, make_tokens, make_progress, make_info, make_rows,
                 make_templates, make_tokenizers, make_tokenizer_configs):
        make()
    lines = [f'  {json.dumps(name)}: {json.dumps(fact, ensure_ascii=False)}' for name, fact in expected.items()]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
