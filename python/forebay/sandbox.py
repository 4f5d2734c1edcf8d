"""Runs a checkpoint's chat template, which is a program by a stranger, in a process of its own.

Jinja's sandbox keeps the template from Python's internals; this process's limits keep it from time, memory, files and
children even where a single operation never returns to the interpreter.  First line in: the template and its
special tokens; then a conversation a line.  Each line out is {"text", "spans"} or {"error"}.  When a limit is passed the
kernel ends this process, and the other side (render.py) says so."""

import contextlib
import datetime
import json
import resource
import secrets
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

from . import turns

TEXT_MAX = 64 << 20  # characters of one rendered conversation


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: the output between is the assistant's.  It is put between two marks that no
    row can contain, so that the template may still trim, capture or reorder what it made."""

    tags = {"generation"}
    open, close = f"\x02{secrets.token_hex(8)}<", f"\x03{secrets.token_hex(8)}>"

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        return f"{self.open}{caller()}{self.close}"

    @classmethod
    def split(cls, marked):
        """(text without marks, the ranges between them)"""
        text, blocks = "", []
        for piece in marked.split(cls.open):
            inner, closed, outer = piece.partition(cls.close)
            if closed:
                blocks.append((len(text), len(text) + len(inner)))
            text += inner + outer
        return text, blocks


def _refuse(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Template:
    """A compiled chat template with the environment that transformers gives it."""

    def __init__(self, source, special):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.template = environment.from_string(source)
        self.has_blocks = any(token == "generation" for _, kind, token in environment.lex(source) if kind == "name")
        self.special = special

    def render(self, messages, tools, prompt):
        """(text, blocks): blocks is None when the template has no generation blocks."""
        text = self.template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
                                    **self.special)
        if len(text) > TEXT_MAX:
            raise jinja2.TemplateError(f"it made more than {TEXT_MAX >> 20} Mi characters")
        if not self.has_blocks:
            return text, None
        return _Generation.split(text)


def _warm_up():
    """What Python and jinja open only when it is first needed: modules, codecs, the time zone's file."""
    import jinja2.constants
    import jinja2.debug
    import pprint
    import textwrap
    assert jinja2.constants and jinja2.debug and pprint and textwrap
    datetime.datetime.now().astimezone()
    Template("{{ 'a\\n' | wordwrap(5) | pprint }}{{ strftime_now('%c') }}", {}).render([], None, False)
    for source in ("{{ a.b.c }}", "{% a %}"):
        with contextlib.suppress(jinja2.TemplateError):
            Template(source, {}).render([], None, False)


def _limit(memory_size):
    resource.setrlimit(resource.RLIMIT_AS, (memory_size, memory_size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # the standard streams: no file and no socket can be opened


def _answer(work, seconds):
    signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time; the default action ends the process
    try:
        answer = work()
    except MemoryError:
        answer = {"error": "the chat template needs too much memory"}
    except turns.TurnError as error:
        answer = {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        answer = {"error": f"the chat template is not valid Jinja, line {error.lineno}: {error}"}
    except Exception as error:
        answer = {"error": f"the chat template fails: {str(error) or type(error).__name__}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(answer), flush=True)


def main():
    setup = json.loads(sys.stdin.readline())
    special_tokens = turns.special_token_pattern(setup["special_tokens"])
    _warm_up()
    _limit(setup["memory_size"])
    template = None

    def compile_template():
        nonlocal template
        template = Template(setup["template"], setup["special"])
        return {}

    def render_one(request):
        def render(messages, prompt):
            return template.render(messages, request["tools"], prompt)
        if request["prompt"]:
            return {"text": render(request["messages"], True)[0], "spans": []}
        text, spans = turns.spans(render, request["messages"], request["learn"], special_tokens)
        return {"text": text, "spans": spans}

    _answer(compile_template, setup["seconds"])
    for line in sys.stdin:
        request = json.loads(line)
        _answer(lambda: render_one(request), setup["seconds"])


if __name__ == "__main__":
    main()
