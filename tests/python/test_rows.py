"""Files and rows, good and broken: every sentence names the file and the row."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from conftest import ids_row
from forebay import readers, sources
from forebay.errors import InputError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def fails(prepare, content, sentence, name="rows.jsonl", **keys):
    path = prepare.write(name, content)
    with pytest.raises(InputError) as caught:
        prepare.ask(path, **keys)
    message = str(caught.value)
    assert message.startswith(path) and re.search(sentence, message), message


@pytest.mark.parametrize("row, sentence", (
    ({"input_ids": 3}, ":2: input_ids is 3; expected an array"),
    ({"input_ids": [1, 100]}, r":2: input_ids\[1\] is 100, past the vocabulary; expected 0 to 99"),
    ({"input_ids": [1, -1]}, r":2: input_ids\[1\] is -1, not in the vocabulary"),
    ({"input_ids": [1, 10**30]}, r":2: input_ids\[1\] is 1000"),
    ({"input_ids": [1, 2.0]}, r":2: input_ids\[1\] is 2.0; expected an integer"),
    ({"input_ids": [True, 2]}, r":2: input_ids\[0\] is True; expected an integer"),
    ({"input_ids": [[1, 2]]}, r":2: input_ids\[0\] is \[1, 2\]; expected an integer"),
    ({"input_ids": [1, 2], "labels": [1]}, ":2: labels has 1 entries; expected an array of 2"),
    ({"input_ids": [1, 2], "labels": "x"}, ":2: labels has 'x'; expected an array of 2"),
    ({"input_ids": [1, 2], "labels": [-100, 100]}, r":2: labels\[1\] is 100, past the vocabulary"),
    ({"input_ids": [1, 2], "labels": [-100, -1]}, ":2: labels holds -1; expected -100 or an id"),
    ({"input_ids": [1, 2], "labels": [-100, -101]}, r":2: labels\[1\] is -101"),
    ({"input_ids": [1, 2], "labels": [-100, None]}, r":2: labels\[1\] is None; expected an integer"),
    ({"input_ids": [1, 0], "attention_mask": [1, 0]}, ":2: attention_mask is not all 1"),
    ({"text": "x"}, ":2: input_ids is None; expected an array of token ids"),
    ([1, 2], ":2: the row is a JSON array; expected an object"),
))
def test_broken_rows_of_ids(prepare, row, sentence):
    fails(prepare, [ids_row(1, 2), row], sentence, vocab=100)


@pytest.mark.parametrize("row, sentence", (
    ({"messages": "Hi"}, ":2: 'messages' is 'Hi'; expected an array of messages"),
    ({"messages": ["Hi"]}, ":2: message 1 is 'Hi'; expected an object with 'role' and 'content'"),
    ({"messages": [{"role": "boss", "content": "x"}]},
     ":2: message 1 has role 'boss'; expected one of system, user, assistant, tool"),
    ({"messages": [{"content": "x"}]}, ":2: message 1 has role None"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r":2: message 1 has role \['user'\]"),
    ({"messages": [{"role": "user", "content": 7}]}, ":2: message 1 has content 7; expected a string or an array of text parts"),
    ({"messages": [{"role": "user"}]}, ":2: message 1 has content None"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     ":2: message 1 has the content part .*; expected text parts only"),
    ({"messages": [{"role": "user", "content": "x", "weight": 2}]}, ":2: message 1 has weight 2; expected 0 or 1"),
    ({**CHAT, "tools": "{"}, ":2: 'tools' is not JSON"),
    ({**CHAT, "tools": [1]}, r":2: 'tools' is \[1\]; expected an array of tool descriptions"),
    ({"prompt": "x"}, ":2: 'messages' is None"),
    ({"messages": [{"role": "user", "content": "\ud800"}, CHAT["messages"][1]]}, ":2: the text has half of a surrogate pair"),
))
def test_broken_conversations(prepare, tiny, row, sentence):
    fails(prepare, [CHAT, row], sentence, model_dir=tiny.folder)


@pytest.mark.parametrize("row, sentence", (
    ({"instruction": "x"}, ":1: the row has no 'output'"),
    ({"instruction": 1, "output": "x"}, ":1: 'instruction' is 1; expected a string"),
    ({"instruction": "x", "output": "y", "history": [["a"]]}, ":1: 'history' is .*; expected an array of .question, answer. pairs"),
    ({"conversations": [{"from": "function_call", "value": "x"}]},
     ":1: message 1 is the function call 'x'; expected a JSON object"),
    ({"text": 1}, ":1: 'text' is 1; expected a string"),
    ({"question": "x", "answer": "y"}, ":1: the keys 'question', 'answer' are no known format; expected input_ids"),
))
def test_other_broken_rows(prepare, tiny, row, sentence):
    fails(prepare, [row], sentence, model_dir=tiny.folder)


def test_ids_from_the_wrong_tokenizer(prepare, tiny):
    fails(prepare, [{"text": "é"}], r":1: the tokenizer gives id 256, past the model's vocabulary of 100", model_dir=tiny.folder,
          vocab=100)


def test_a_text_needs_an_end_token(prepare, tiny, tmp_path):
    folder = tmp_path / "endless"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(open(f"{tiny.folder}/tokenizer.json", "rb").read())
    fails(prepare, [{"text": "a"}], "expected eos_token in tokenizer_config.json", model_dir=str(folder))
    (folder / "config.json").write_text('{"eos_token_id": [258, 256]}')
    assert prepare.documents([{"text": "a"}], model_dir=str(folder))[0][0][-1] == tiny.IM_END


@pytest.mark.parametrize("content", ("{", '{"model": {"type": "BPE"}}', "[]", '{"truncation": 1}'))
def test_broken_tokenizers(prepare, tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="tokenizer.json: not a tokenizer that can be read"):
        prepare.ask([{"text": "a"}], model_dir=str(tmp_path))


@pytest.mark.parametrize("name, content, sentence", (
    ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
    ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
    ("tokenizer_config.json", '{"chat_template": 1}', "tokenizer_config.json: chat_template is neither"),
    ("tokenizer_config.json", '{"chat_template": [1]}', "tokenizer_config.json: chat_template is neither"),
    ("tokenizer_config.json", '{"eos_token": "<x>"}', "eos_token '<x>' of tokenizer_config.json is not in the vocabulary"),
    ("chat_template.jinja", "x" * (2 << 20), "longer than 1 MiB"),
))
def test_broken_checkpoint_files(prepare, tiny, tmp_path, name, content, sentence):
    (tmp_path / "tokenizer.json").write_bytes(open(f"{tiny.folder}/tokenizer.json", "rb").read())
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=sentence):
        prepare.ask([{"text": "a"} if "eos" in sentence else CHAT], model_dir=str(tmp_path))


def test_truncation_and_padding_of_a_tokenizer_are_not_ours(prepare, tiny, tmp_path):
    config = json.loads(open(f"{tiny.folder}/tokenizer.json").read())
    config["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    config["padding"] = {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                         "pad_token": "!"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert prepare.documents([{"text": "abcd"}], model_dir=str(tmp_path))[0][0] == [*tiny.ids("abcd"), tiny.EOS]


@pytest.mark.parametrize("content, sentence", (
    ('{"input_ids": [1, 2]}\n\n{"input_ids": [1,\n', r":3: broken JSON at column \d+: .*; expected one object a line"),
    ('{"input_ids": [1, 2]} x\n', ":1: broken JSON at column 23: Extra data"),
    (b'{"input_ids": [1, 2]}\n{"a": "\xff"}\n', ":2: not UTF-8 at byte 7"),
    ('{"input_ids": [1, 2]}\n"x"\n', ":2: the row is a JSON string; expected an object"),
    ('{"input_ids": [1, ' + "9" * 5000 + "]}\n", ":1: JSON that cannot be read"),
    ('{"a": ' + "[" * 100000 + "\n", ":1: (JSON that cannot be read|broken JSON)"),
))
def test_broken_json_lines(prepare, content, sentence):
    fails(prepare, content, sentence)


@pytest.mark.parametrize("content, sentence", (
    ('[{"input_ids": [1, 2]},\n{"input_ids": [1 2]}]', ":2: broken JSON: Expecting ',' delimiter"),
    ('[{"input_ids": [1, 2]},\n', ":2: broken JSON"),
    ('[{"input_ids": [1, 2]}\n', ":2: broken JSON: expected ',' or ']' after a row, found the end of the file"),
    ('[{"input_ids": [1, 2]}\n{}]', ":2: broken JSON: expected ',' or ']' after a row, found '{'"),
    ('[{"input_ids": [1, 2]},\n]', ":2: broken JSON: expected a row after ','"),
    ('[\n\n{"input_ids": "', ":3: broken JSON: Unterminated string"),
    ("[1]", ":1: the array holds something that is not an object"),
    ('[{"input_ids": [1, 2]}]\n[]', ":2: more text after the array's end"),
    (b'[{"a": "\xff"}]', ": not UTF-8"),
))
def test_broken_json_arrays(prepare, content, sentence):
    fails(prepare, content, sentence, name="rows.json")


@pytest.mark.parametrize("read_size", (1, 3, 64, 1 << 20))
def test_arrays_are_read_in_pieces(prepare, monkeypatch, read_size):
    monkeypatch.setattr(readers, "_READ_SIZE", read_size)
    rows = [{"n": n, "é\"[]": "x" * n, "deep": [{"a": [True, None, -1.5e-3]}]} for n in range(40)]
    path = prepare.write("rows.json", "\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False))
    made = list(readers.rows(path))
    assert [row for _, row in made] == rows and readers.count(path) == 40
    lines = open(path, encoding="utf-8").read().split("\n")
    assert all(lines[int(where.rpartition(":")[2]) - 1] == " {" for where, _ in made)
    assert list(readers.rows(prepare.write("none.json", " [ \n ] "))) == []


def test_json_that_holds_lines(prepare):
    path = prepare.write("rows.json", [ids_row(1, 2), ids_row(3, 4)])
    assert prepare.documents(path) == [([1, 2], [-100, 2]), ([3, 4], [-100, 4])]


def test_parquet(prepare, tiny):
    path = str(prepare.folder / "rows.parquet")
    rows = [{"input_ids": [n, n + 1], "labels": [-100, n + 1], "text": None} for n in range(700)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    assert prepare.documents(path) == [([n, n + 1], [-100, n + 1]) for n in range(700)]
    assert readers.count(path) == 700
    rows[300]["input_ids"] = [1, 151936]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(InputError, match=r"rows\.parquet: row 301: input_ids\[1\] is 151936, past the vocabulary"):
        prepare.ask(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT, CHAT]), path)
    assert prepare.documents(path, model_dir=tiny.folder) == prepare.documents([CHAT, CHAT], model_dir=tiny.folder)


def test_broken_parquet(prepare):
    fails(prepare, "PAR1", "not a readable Parquet file", name="rows.parquet")
    path = prepare.folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ids_row(*range(1000))] * 50), path)
    data = bytearray(path.read_bytes())
    data[8:200] = b"\xff" * 192
    fails(prepare, bytes(data), "broken Parquet data after row 0", name="rows.parquet")


def test_text_files_are_documents_cut_at_line_ends(prepare, tiny, monkeypatch):
    monkeypatch.setattr(readers, "_TEXT_SIZE", 10)
    path = prepare.write("a.txt", "first é\nsecond\nthird line\n")
    made = list(readers.rows(path))
    assert made == [(f"{path}:1", {"text": "first é\nsecond\n"}), (f"{path}:3", {"text": "third line\n"})]
    assert readers.count(path) == 2
    assert prepare.documents(path, model_dir=tiny.folder, stage="pt")[1][0] == [*tiny.ids("third line\n"), tiny.EOS]
    fails(prepare, b"good\nbad \xff\n", ":2: not UTF-8", name="a.txt", model_dir=tiny.folder)


def test_formats_may_differ_between_files(prepare, tiny):
    prepare.write("b.jsonl", [ids_row(1, 2)])
    prepare.write("a.txt", "x")
    prepare.write("c.json", json.dumps([{"text": "y"}]))
    prepare.write("README.md", "not data")
    made = prepare.documents(str(prepare.folder), model_dir=tiny.folder)
    assert [ids for ids, _ in made] == [[*tiny.ids("x"), tiny.EOS], [1, 2], [*tiny.ids("y"), tiny.EOS]]


def test_paths_that_are_no_dataset(prepare):
    for name, sentence in (("rows.csv", "not a kind of file that is read; expected one of .json"),):
        fails(prepare, "x", sentence, name=name)
    (prepare.folder / "empty").mkdir()
    with pytest.raises(InputError, match="the folder holds no dataset"):
        prepare.ask(str(prepare.folder / "empty"))
    (prepare.folder / "dir.json").mkdir()
    with pytest.raises(InputError, match="the folder holds no dataset"):
        prepare.ask(str(prepare.folder / "dir.json"))


class TestDatasetInfo:
    """LlamaFactory's dataset_info.json."""

    def info(self, prepare, **entries):
        (prepare.folder / "data").mkdir(exist_ok=True)
        prepare.write("data/dataset_info.json", json.dumps(entries))
        return {"dataset_dir": str(prepare.folder / "data")}

    def test_names_columns_and_tags(self, prepare, tiny):
        keys = self.info(prepare, plain={"file_name": "plain.jsonl"},
                         pairs={"file_name": "pairs.json", "columns": {"prompt": "q", "response": "a", "system": "s"}},
                         talk={"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"messages": "turns"},
                               "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A",
                                        "system_tag": "S"}},
                         books={"file_name": "books.jsonl", "columns": {"prompt": "content"}})
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "R"}]
        prepare.write("data/plain.jsonl", [{"messages": messages}])
        prepare.write("data/pairs.json", json.dumps([{"q": "Q", "a": "R", "s": "S"}]))
        prepare.write("data/talk.jsonl",
                      [{"turns": [{"who": "S", "what": "S"}, {"who": "U", "what": "Q"}, {"who": "A", "what": "R"}]}])
        prepare.write("data/books.jsonl", [{"content": "once"}])
        one, two, three, four = prepare.documents("plain, pairs,talk,books", model_dir=tiny.folder, **keys)
        assert one == two == three and four[0] == [*tiny.ids("once"), tiny.EOS]

    @pytest.mark.parametrize("entry, sentence", (
        ({"hf_hub_url": "a/b"}, "'x' has no file_name; forebay reads local files only"),
        ({"file_name": "gone.json"}, "gone.json: no such file or folder"),
        ({"file_name": "x.jsonl", "ranking": True}, "'x' is a ranking dataset"),
        ({"file_name": "x.jsonl", "formatting": "pairs"}, 'formatting "pairs"; expected alpaca, sharegpt or openai'),
        ({"file_name": "x.jsonl", "formatting": ["x"]}, "formatting .*; expected alpaca"),
        ({"file_name": "x.jsonl", "columns": {"chosen": "c"}}, "columns: 'chosen' is not supported"),
        ({"file_name": "x.jsonl", "columns": {"images": "c"}}, "columns: 'images' is not supported"),
        ({"file_name": "x.jsonl", "tags": {"role_tag": "c"}}, "tags: 'role_tag' is not supported; expected none"),
        ({"file_name": "x.jsonl", "columns": {"prompt": 1}}, "columns: 'prompt' is 1; expected a string"),
        ({"file_name": "x.jsonl", "num_samples": 3}, "'num_samples', which is not supported"),
        (1, "'x' is not an object"),
    ))
    def test_broken_entries(self, prepare, entry, sentence):
        keys = self.info(prepare, x=entry)
        prepare.write("data/x.jsonl", [{"instruction": "a", "output": "b"}])
        with pytest.raises(InputError, match=sentence):
            prepare.ask("x", **keys)

    def test_unknown_names(self, prepare):
        keys = self.info(prepare, alpaca_en={"file_name": "x.jsonl"})
        with pytest.raises(InputError, match="dataset 'alpaca_em': no such file .* did you mean 'alpaca_en'?"):
            prepare.ask("alpaca_em", **keys)
        prepare.write("data/dataset_info.json", "{")
        with pytest.raises(InputError, match="dataset_info.json: not valid JSON"):
            prepare.ask("alpaca_en", **keys)

    def test_a_path_with_a_comma_is_a_path(self, prepare):
        path = prepare.write("a,b.jsonl", [ids_row(1, 2)])
        assert [source.path for source in sources.resolve(path, "data")] == [path]
