"""Chat templates at arm's length: asks sandbox.py, a child process with limits, to render conversations."""

import json
import os
import signal
import subprocess
import sys

from .errors import InputError

SECONDS = 10           # processor time for one conversation
MEMORY_SIZE = 1 << 30  # address space of the child


class Renderer:
    """One template's child process.  It starts at the first use, and again after a death."""

    def __init__(self, path, template, special, special_tokens, seconds=SECONDS, memory_size=MEMORY_SIZE):
        self.path = path  # the checkpoint folder, for messages
        self.setup = {"template": template, "special": special, "special_tokens": special_tokens, "seconds": seconds,
                      "memory_size": memory_size}
        self.child = None

    def spans(self, chat):
        """(text, [(start, end)]): the conversation and the character ranges of its turns in chat.learn."""
        answer = self._ask(chat.where, {"messages": chat.messages, "tools": chat.tools, "learn": chat.learn, "prompt": False})
        return answer["text"], answer["spans"]

    def prompt(self, where, messages):
        """The conversation up to where the assistant's turn begins."""
        return self._ask(where, {"messages": messages, "tools": None, "learn": [], "prompt": True})["text"]

    def close(self):
        """Returns the child's exit code, None when there was no child."""
        if self.child:
            child, self.child = self.child, None
            return _reap(child)
        return None

    def _ask(self, where, request):
        if not self.child:
            self._start()
        answer = self._exchange(where, request)
        if "error" in answer:
            raise InputError(f"{where}: {answer['error']}")
        return answer

    def _start(self):
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen([sys.executable, "-m", "forebay.sandbox"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
        answer = self._exchange(self.path, self.setup)
        if "error" in answer:
            self.close()
            raise InputError(f"{self.path}: {answer['error']}")

    def _exchange(self, where, message):
        try:
            self.child.stdin.write(json.dumps(message).encode() + b"\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.close()
        if code == -signal.SIGPROF:
            raise InputError(f"{where}: the chat template ran for more than {self.setup['seconds']} s; expected one that ends")
        raise InputError(f"{where}: the chat template ended its process ({_cause(code)}); "
                         f"it may use {self.setup['memory_size'] >> 20} MiB")


def _reap(child):
    """Ends the conversation with a child and returns its exit code."""
    try:
        child.stdin.close()
    except BrokenPipeError:  # a dead child left a line unread
        pass
    child.stdout.close()
    return child.wait()


def _cause(code):
    return f"signal {-code}" if code < 0 else f"exit code {code}"
