"""Templates are programs by strangers: they may not hang, exhaust memory or reach Python's internals."""

import os
import subprocess
import sys

import pytest

from conftest import PACKAGE
from forebay.errors import InputError
from forebay.formats import Chat
from forebay.render import Renderer
from forebay.turns import shared_prefix, special_token_pattern

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def render(template, seconds=1, memory_size=256 << 20):
    renderer = Renderer("model", template, {"bos_token": "<s>"}, ["<s>", "</s>"], seconds, memory_size)
    try:
        return renderer.spans(Chat("row", MESSAGES, None, [1]))
    finally:
        renderer.close()


@pytest.mark.parametrize("template, sentence", (
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for more than 1 s"),
    ("{{ 7 ** (10 ** 8) % 9 }}", "ran for more than 1 s"),  # one operation of C code, maybe while compiling
    ("{{ 'x' * messages[0].content | length * 10 ** 11 }}", "needs too much memory"),
    ("{{ 'x' | center(10 ** 10) }}", "needs too much memory"),
    ("{% set n = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "needs too much memory"),
    ("{{ messages.__class__.__mro__ }}", "fails: access to attribute '__class__' of 'list' object is unsafe"),
    ("{{ ''.__class__.__base__.__subclasses__() }}", "__class__"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "__init__"),
    ("{{ messages.append(1) }}", "fails: access to attribute 'append' of 'list' object is unsafe"),
    ("{% include '/etc/passwd' %}", "fails: no loader for this environment specified"),
    ("{{ raise_exception('no such role') }}", "fails: no such role"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    ("{% for %}", "not valid Jinja, line 1"),
    ("{{ nothing.at.all }}", "is undefined"),
))
def test_hostile_templates_end_in_a_sentence(template, sentence):
    with pytest.raises(InputError) as caught:
        render(template)
    assert sentence in str(caught.value)


def test_a_renderer_works_again_after_a_death():
    renderer = Renderer("model", "{% if messages[0].content == 'Hi' %}{% for a in range(99999) %}{% for b in range(99999) %}"
                        "{% endfor %}{% endfor %}{% endif %}{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}, [], 1)
    with pytest.raises(InputError, match="^row 1: the chat template ran for more than 1 s"):
        renderer.prompt("row 1", MESSAGES)
    assert renderer.prompt("row 2", [{"role": "user", "content": "Ho"}]) == "<s>Ho"
    renderer.close()


def test_the_environment_is_that_of_transformers():
    template = ("{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}{% break %}\n{% endfor "
                "%}"
                "{{ {'b': '<é>', 'a': 1} | tojson }}{{ tools is none }}{{ strftime_now('%%') }}")
    text, spans = render(template)
    assert text == '{"role": "assistant", "content": "Hello"}{"b": "<é>", "a": 1}True%'


def test_a_turn_that_is_not_shown_is_not_learned():
    assert render("{{ messages[0].content }}") == ("Hi", [])


def test_generation_blocks_survive_capture_and_trim():
    template = ("{% set text %}  {% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
                "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}  {% endset %}{{ text | trim }}")
    assert render(template) == ("Hi|Hello</s>", [[3, 12]])


@pytest.mark.parametrize("a, b", (("", ""), ("", "x"), ("abc", "abc"), ("abc", "abd"), ("abc", "ab"), ("x", "y"),
                                  ("aaaa" * 99, "aaaa" * 98 + "b")))
def test_shared_prefix(a, b):
    n = shared_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_special_tokens_match_the_longest_first_and_literally():
    assert special_token_pattern(["<|a|>", "<|a|>b", "."]).search("x<|a|>bc").group() == "<|a|>b"
    assert special_token_pattern([]).search("x") is None


@pytest.mark.parametrize("attempt", ["open('/etc/passwd')", "__import__('socket').socket()", "__import__('os').pipe()"])
def test_behind_the_limits_nothing_can_be_opened(attempt):
    """Whatever got out of Jinja's sandbox would still be here."""
    program = f"import socket\nfrom forebay import sandbox\nsandbox._limit(1 << 30)\n{attempt}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": PACKAGE})
    assert done.returncode == 1 and "Too many open files" in done.stderr, done.stderr
