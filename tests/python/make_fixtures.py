"""Writes expected.json: what transformers makes of cases.json.  Run by hand, where transformers is installed:

    python tests/python/make_fixtures.py

Ids are apply_chat_template's.  Masks are transformers' own too (return_assistant_tokens_mask), from each template with
{% generation %} put around what the assistant makes, which is checked to render the same text."""

import json
import lzma
import os
import shutil
import tempfile

import tokenizers
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))

# (found, put in its place): where a family's template gets its generation blocks
MARKS = {
    "qwen3": [
        ('{%- elif message.role == "assistant" %}',
         '{%- elif message.role == "assistant" %}{{- "<|im_start|>assistant\\n" }}{%- generation %}'),
        ("'<|im_start|>' + message.role + '\\n<think>\\n'", "'<think>\\n'"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}"),
        ("{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
         "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == \"tool\""),
    ],
    "smollm2": [
        ("{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
         "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
         "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
         "{{ '\n' }}"),
    ],
    "mistral": [
        ("{{- ' ' + message.content | trim + eos_token }}",
         "{%- generation %}{{- ' ' + message.content | trim + eos_token }}{%- endgeneration %}"),
    ],
}


def load(name, folder):
    assets = os.path.join(HERE, "assets")
    tokenizer = "qwen3" if name == "smollm2" else name  # the same markup; SmolLM2's own tokenizer is not kept here
    with lzma.open(os.path.join(assets, tokenizer, "tokenizer.json.xz")) as packed, \
            open(os.path.join(folder, "tokenizer.json"), "wb") as out:
        shutil.copyfileobj(packed, out)
    shutil.copy(os.path.join(assets, tokenizer, "tokenizer_config.json"), folder)
    template = os.path.join(assets, name, "chat_template.jinja")
    if os.path.exists(template):
        shutil.copy(template, folder)
    # Not AutoTokenizer: for some classes transformers 5 builds a tokenizer of its own in place of tokenizer.json's.
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def chat(tokenizer, marked, messages, tools=None):
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=marked)
    plain = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)
    masked = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True,
                                           chat_template=marked)
    assert plain["input_ids"] == masked["input_ids"]
    prompt = tokenizer.apply_chat_template(messages[:-1], tools=tools, add_generation_prompt=True, return_dict=True)
    return {"ids": plain["input_ids"], "mask": masked["assistant_masks"], "prompt": prompt["input_ids"]}


def main():
    with open(os.path.join(HERE, "cases.json"), encoding="utf-8") as file:
        cases = json.load(file)
    out = {"versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}}
    for name, marks in MARKS.items():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = load(name, folder)
            marked = tokenizer.chat_template
            for found, put in marks:
                assert found in marked, found
                marked = marked.replace(found, put)
            chats = {**cases["chats"], **(cases["system_chats"] if name != "mistral" else {})}
            made = {key: chat(tokenizer, marked, messages) for key, messages in chats.items()}
            if name == "qwen3":
                made |= {key: chat(tokenizer, marked, one["messages"], one["tools"]) for key, one in cases["tool_chats"].items()}
            out[name] = {"chats": made, "texts": [tokenizer(text)["input_ids"] for text in cases["texts"]], "marked": marked}
    with open(os.path.join(HERE, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
