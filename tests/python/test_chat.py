"""Conversations against transformers: ids and masks in expected.json are its own (make_fixtures.py)."""

import json
import os
import shutil

import pytest

from conftest import load_json, run_module
from forebay.errors import InputError

CASES, EXPECTED = load_json("cases.json"), load_json("expected.json")
CHATS = {**CASES["chats"], **CASES["system_chats"]}
FAMILIES = ("qwen3", "smollm2", "mistral")


def row(name):
    return CASES["tool_chats"][name] if name in CASES["tool_chats"] else {"messages": CHATS[name]}


def expected(family, name):
    want = EXPECTED[family]["chats"][name]
    return want["ids"], [one if learned else -100 for one, learned in zip(want["ids"], want["mask"])]


def chatml(tiny, messages, learned_roles=("assistant",)):
    """What the tiny model's ids and labels must be, put together by hand."""
    ids, labels = [], []
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
                    *messages]
    for message in messages:
        header = [tiny.IM_START, *tiny.ids(message["role"] + "\n")]
        turn = [*tiny.ids(message["content"]), tiny.IM_END]
        ids += header + turn + tiny.ids("\n")
        labels += [-100] * len(header) + (turn if message["role"] in learned_roles else [-100] * len(turn)) + [-100]
    return ids, labels


def copy_model(folder, tmp_path, template):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(copy)


@pytest.mark.parametrize("marked", (False, True), ids=("as_it_is", "generation_blocks"))
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_labels_are_those_of_transformers(prepare, models, tmp_path, family, marked):
    model = copy_model(models[family], tmp_path, EXPECTED[family]["marked"]) if marked else models[family]
    names = list(EXPECTED[family]["chats"])
    made = prepare.documents(list(map(row, names)), model_dir=model)
    assert dict(zip(names, made)) == {name: expected(family, name) for name in names}
    assert len(made) == len(names)

    last = prepare.documents([row("same_answer_thrice")], model_dir=model, mask_history=True, out_dir=str(tmp_path / "last"))
    ids, labels = expected(family, "same_answer_thrice")
    start = max(i for i in range(1, len(labels)) if labels[i] != -100 and labels[i - 1] == -100)
    assert last == [(ids, [-100] * start + labels[start:])]


@pytest.mark.parametrize("family", ("qwen3", "mistral"))
def test_texts_are_those_of_transformers_and_end(prepare, models, family):
    made = prepare.documents([{"text": text} for text in CASES["texts"]], model_dir=models[family], stage="pt")
    eos = 2 if family == "mistral" else 151645
    assert [ids for ids, _ in made] == [ids + [eos] for ids in EXPECTED[family]["texts"]]
    assert all(labels == [-100] + ids[1:] for ids, labels in made)


def test_the_prompt_is_learned_when_asked(prepare, tiny):
    (ids, labels), = prepare.documents([row("two_turns")], model_dir=tiny.folder, train_on_prompt=True)
    assert ids == chatml(tiny, CHATS["two_turns"])[0]
    assert labels == [-100] + ids[1:]


def test_a_token_that_reaches_into_a_turn_from_its_prompt_is_not_learned(prepare, models):
    """At inference the prompt ends with one line feed, given; a turn that starts with another makes both one token."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    (ids, labels), = prepare.documents([{"messages": messages}], model_dir=models["smollm2"])
    double_feed, feed, b, im_end = 271, 198, 65, 151645
    assert ids[-4:] == [double_feed, b, im_end, feed]
    assert labels[-4:] == [-100, b, im_end, -100]


def test_a_message_of_weight_zero_is_not_learned(prepare, tiny):
    messages = [dict(one) for one in CHATS["two_turns"]]
    messages[1]["weight"] = 0
    (ids, labels), = prepare.documents([{"messages": messages}], model_dir=tiny.folder)
    want_ids, want = chatml(tiny, CHATS["two_turns"])
    assert ids == want_ids
    learned = [one for one in labels if one != -100]
    assert learned == [*tiny.ids("4"), tiny.IM_END] and labels[-len(learned) - 1:] == [*learned, -100]


def test_a_turn_without_content_is_not_learned(prepare, tiny):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " "}]
    with pytest.raises(InputError, match="none of its rows"):
        prepare.ask([{"messages": messages}], model_dir=tiny.folder)


FORMS = {
    "messages": {"messages": CHATS["system"]},
    "sharegpt": {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Name a river."},
                                   {"from": "gpt", "value": "Aare."}]},
    "sharegpt, system apart": {"system": "Be brief.", "conversations": [{"from": "human", "value": "Name a river."},
                                                                        {"from": "gpt", "value": "Aare."}]},
    "alpaca": {"instruction": "Name a river.", "input": "", "output": "Aare.", "system": "Be brief."},
    "prompt, response": {"prompt": "Name a river.", "response": "Aare.", "system": "Be brief."},
    "prompt, completion": {"prompt": "Name a river.", "completion": "Aare.", "system": "Be brief."},
    "text parts": {"messages": [{"role": "system",
                                 "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
                                *CHATS["system"][1:]]},
    "nulls": {"messages": CHATS["system"], "tools": None, "input_ids": None, "system": None},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_means_the_same_conversation(prepare, tiny, name):
    assert prepare.documents([FORMS[name]], model_dir=tiny.folder) == [chatml(tiny, CHATS["system"])]


def test_the_default_system_message_is_for_rows_without_one(prepare, tiny):
    rows = [{"messages": CHATS["system"]}, {"messages": CHATS["system"][1:]}]
    made = prepare.documents(rows, model_dir=tiny.folder, system="Be long.")
    assert made == [chatml(tiny, CHATS["system"]),
                    chatml(tiny, [{"role": "system", "content": "Be long."}, *CHATS["system"][1:]])]


def test_alpaca_history_and_input(prepare, tiny):
    alpaca = {"instruction": "2 + 2", "input": "?", "output": "4", "history": [["Hi", "Hello! How can I help?"]]}
    messages = [dict(one) for one in CHATS["two_turns"]]
    messages[2]["content"] = "2 + 2\n?"
    assert prepare.documents([alpaca], model_dir=tiny.folder) == [chatml(tiny, messages)]


def test_sharegpt_function_calls_are_the_templates_tool_calls(prepare, models):
    tool = CASES["tool_chats"]["tool_call"]
    sharegpt = {"tools": json.dumps(tool["tools"]), "conversations": [
        {"from": "human", "value": "1+2?"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "It is 3."}]}
    assert prepare.documents([sharegpt], model_dir=models["qwen3"]) == [expected("qwen3", "tool_call")]


def test_the_template_may_refuse_a_row(prepare, models):
    with pytest.raises(InputError, match=r"rows\.jsonl:2: the chat template fails: Only user and assistant roles are supported!"):
        prepare.ask([row("two_turns"), row("system")], model_dir=models["mistral"])


def test_a_checkpoint_without_template_says_what_to_do(prepare, models):
    with pytest.raises(InputError, match=r"rows\.jsonl:1: a conversation needs a chat template .* has none; use an instruct"):
        prepare.ask([row("two_turns")], model_dir=models["bare"])


def test_turn_ends_that_differ_are_refused(prepare, tiny, tmp_path):
    odd = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
           "{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}{% endfor %}")
    with pytest.raises(InputError, match=r"does not end message 2 with '<\|im_end\|>' as it ends the last turn"):
        prepare.ask([row("two_turns")], model_dir=copy_model(tiny.folder, tmp_path, odd))


def test_reasoning_opened_by_the_prompt_is_not_in_the_history(prepare, tiny, tmp_path):
    """The generation prompt adds <think>, finished turns do not show it: then a turn starts at its content."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    made = prepare.documents([row("system")], model_dir=copy_model(tiny.folder, tmp_path, template))
    assert made == [chatml(tiny, CHATS["system"])]


def test_a_template_without_end_token_learns_the_content(prepare, tiny, tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    (ids, labels), = prepare.documents([row("two_turns")], model_dir=copy_model(tiny.folder, tmp_path, template))
    assert ids == tiny.ids("user: Hi\nassistant: Hello! How can I help?\nuser: 2 + 2?\nassistant: 4\n")
    assert [one for one in labels if one != -100] == tiny.ids("assistant: Hello! How can I help?assistant: 4")


def test_a_blank_that_ends_the_prompt_is_not_learned(prepare, tiny, tmp_path):
    """A tokenizer that trims offsets reports the blank as an empty range where the turn starts."""
    template = ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}assistant: {% endif %}")
    model = copy_model(tiny.folder, tmp_path, template)
    with open(os.path.join(model, "tokenizer.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    with open(os.path.join(model, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    (ids, labels), = prepare.documents([{"prompt": "Q", "response": "R"}], model_dir=model)
    assert ids == [*tiny.ids("user: Q"), tiny.IM_END, *tiny.ids("assistant: R"), tiny.IM_END]
    assert [one for one in labels if one != -100] == [*tiny.ids("R"), tiny.IM_END]


def test_named_templates(prepare, tiny, tmp_path):
    folder = tmp_path / "named"
    shutil.copytree(tiny.folder, folder)
    (folder / "chat_template.jinja").rename(folder / "kept")
    config = {"eos_token": {"content": "<|endoftext|>"}, "chat_template": [
        {"name": "other", "template": "x"}, {"name": "default", "template": (folder / "kept").read_text()}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert prepare.documents([row("system")], model_dir=str(folder)) == [chatml(tiny, CHATS["system"])]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_for_generation_are_those_of_transformers(models, family):
    system = CHATS["system"][0]["content"] if family != "mistral" else None
    name = "system" if system else "one_turn"
    user = [one["content"] for one in CHATS[name] if one["role"] == "user"][0]
    asked = [{"op": "encode", "text": user, "chat": True, "system": system},
             {"op": "decode", "ids": EXPECTED[family]["chats"][name]["prompt"], "skip_special": False},
             {"op": "encode", "text": CASES["texts"][0], "chat": False, "system": None}, {"op": "info"}, {"op": "dance"}]
    run = run_module("forebay.text", models[family], stdin="".join(json.dumps(one) + "\n" for one in asked))
    encoded, decoded, plain, info, unknown = map(json.loads, run.stdout.splitlines())
    assert run.returncode == 0
    assert encoded["ids"] == EXPECTED[family]["chats"][name]["prompt"]
    assert user in decoded["text"]
    assert plain["ids"] == EXPECTED[family]["texts"][0]
    assert info == {"has_template": True, "eos": [2] if family == "mistral" else [151645]}
    assert "expected encode, decode or info" in unknown["error"]


def test_generation_without_template_or_tokenizer(models, tmp_path):
    asked = '{"op": "encode", "text": "Hi", "chat": true, "system": null}\n{"op": "info"}\n'
    run = run_module("forebay.text", models["bare"], stdin=asked)
    assert "needs a chat template" in run.stdout.splitlines()[0]
    assert '"has_template": false' in run.stdout.splitlines()[1]
    run = run_module("forebay.text", str(tmp_path), stdin=asked)
    assert run.returncode == 3
    assert run.stderr.splitlines() == [f"{tmp_path}/tokenizer.json: no such file; text needs a tokenizer, only rows with input_ids "
                                       "do without"]
