"""Where, in a rendered conversation, the assistant's turns are.

A template is a program: it may drop reasoning from earlier turns, trim, add a default system message or an empty thinking
block.  So the conversation is rendered once, as inference would render it, and each turn is found in that text:

  content  Rendering again with the turn's message replaced by a probe, a character that the text does not hold,
           changes exactly the turn's own text; what both renderings share at either end lies outside.
  start    What follows the prompt that inference would use, the messages before rendered with add_generation_prompt,
           where that prompt is a prefix of the text; otherwise the content's start.
  end      The end-of-turn token, as the template puts it after a conversation's last turn: up to the first special token
           there, or without one, all but trailing white space.

A template with {% generation %} blocks says itself what is learned."""

import re

_PRIVATE_USE = range(0xE000, 0xF900)


class TurnError(Exception):
    """A sentence about the template and one conversation."""


def spans(render, messages, learn, special_tokens):
    """(text, [(start, end)]) with the character ranges to learn.  render(messages, prompt) -> (text, blocks), where blocks is
    None for a template without generation blocks; learn: indices of the assistant messages to learn."""
    text, blocks = render(messages, False)
    if not learn:
        return text, []
    if blocks is not None:
        return text, _chosen_blocks(render, messages, learn, text, blocks)
    probe = _probe(text)
    contents = [_content(render, messages, index, text, probe) for index in learn]
    end_token = _end_token(render, messages, learn[-1], text, probe, special_tokens, contents[-1])
    found = []
    for index, content in zip(learn, contents):
        if content is None:
            continue  # the template does not show this turn
        start, end = content
        if not text.startswith(end_token, end):
            raise TurnError(f"the chat template does not end message {index + 1} with {end_token!r} as it ends the last turn, "
                            "so what to learn is unclear; give the template {% generation %} blocks")
        found.append((_start(render, messages, index, text, start), end + len(end_token)))
    return text, found


def _probe(text):
    for code in _PRIVATE_USE:
        if chr(code) not in text:
            return chr(code)
    raise TurnError("the row holds every private-use character; expected text")


def _content(render, messages, index, text, probe):
    """The range of `text` that depends on a message, None when the message is not shown."""
    probed, _ = render([*messages[:index], {"role": "assistant", "content": probe}, *messages[index + 1:]], False)
    if probe not in probed:
        return None
    start = shared_prefix(text, probed)
    return start, max(start, len(text) - shared_prefix(text[::-1], probed[::-1]))


def _start(render, messages, index, text, content_start):
    try:
        prompt, _ = render(messages[:index], True)
    except Exception:  # templates may refuse a conversation that is empty, or ends here
        return content_start
    return len(prompt) if text.startswith(prompt) else content_start


def _end_token(render, messages, index, text, probe, special_tokens, content):
    """What the template writes from a last turn's content through its end-of-turn token."""
    if index + 1 < len(messages):
        messages = messages[:index + 1]
        text, _ = render(messages, False)
        content = _content(render, messages, index, text, probe)
    if content is None:
        return ""
    tail = text[content[1]:]
    found = special_tokens.search(tail)
    return tail[:found.end()] if found else tail.rstrip()


def _chosen_blocks(render, messages, learn, text, blocks):
    """A block belongs to the last turn that starts before the block's end."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == learn:
        return blocks
    probe = _probe(text)
    starts = []
    for index in turns:
        content = _content(render, messages, index, text, probe)
        if content is not None:
            starts.append((_start(render, messages, index, text, content[0]), index))
    chosen = []
    for block in blocks:
        owner = [index for start, index in starts if start < block[1]][-1:]
        if owner and owner[0] in learn:
            chosen.append(block)
    return chosen


def shared_prefix(a, b):
    """How many leading characters two strings share, by bisection: comparing slices is a memcmp."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def special_token_pattern(tokens):
    """Matches any of the tokens, the longest first; never, when there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")
