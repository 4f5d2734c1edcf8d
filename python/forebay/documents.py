"""Rows to documents: ids and labels, cut to cutoff_len.

Labels are aligned with ids, NOT_LEARNED where nothing is learned; the first token of a document never is."""

import dataclasses
import math

import numpy

from . import formats, readers
from .checkpoint import Checkpoint
from .errors import ConfigError, InputError
from .render import Renderer
from .shard import NOT_LEARNED
from .tokenizer import Tokenizer

TEXT_MAX = 16 << 20      # characters in one row
_BATCH_ROWS = 512
_BATCH_TEXT = 1 << 20    # characters tokenized at once
_U64 = (1 << 64) - 1


def all_rows(sources, max_samples):
    """(source, where, row) in order; max_samples counts within each item of the dataset value."""
    taken = {}
    for source in sources:
        left = max_samples - taken.get(source.item, 0) if max_samples else None
        if left == 0:
            continue
        for number, (where, row) in enumerate(readers.rows(source.path), 1):
            taken[source.item] = taken.get(source.item, 0) + 1
            yield source, where, row
            if number == left:
                break


def count_rows(sources, max_samples):
    counts = {}
    for source in sources:
        if not max_samples or counts.get(source.item, 0) < max_samples:
            counts[source.item] = counts.get(source.item, 0) + readers.count(source.path)
    return sum(min(n, max_samples) if max_samples else n for n in counts.values())


def held_out(n_row, val_size, seed):
    """The row numbers that go to evaluation: those with the smallest hashes, so that the choice is defined by
    this file and not by a library's random numbers."""
    n_held = int(val_size) if val_size >= 1 else math.ceil(val_size * n_row - 1e-9)  # 0.1 of 30 is 3, not 4
    if not 0 < n_held < n_row:
        raise ConfigError(f"val_size {val_size:g} of {n_row} rows leaves {n_row - n_held} to train and {n_held} to evaluate; "
                          "expected at least one each")
    keys = _mix(numpy.arange(n_row, dtype=numpy.uint64) + numpy.uint64(_mix_seed(seed)))
    return set(numpy.argsort(keys, kind="stable")[:n_held].tolist())


def _mix_seed(seed):
    return int(_mix(numpy.array([seed & _U64], dtype=numpy.uint64))[0])


def _mix(x):
    """splitmix64's step (Steele, Lea, Flood 2014), on an array; wraps modulo 2^64."""
    x = x + numpy.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


class TextTools:
    """The checkpoint's tokenizer and chat template, loaded when a row first needs them; rows with input_ids never do."""

    def __init__(self, model_dir):
        self.model_dir = model_dir
        self._checkpoint = self._tokenizer = None
        self._renderers = {}

    @property
    def checkpoint(self):
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self.model_dir)
        return self._checkpoint

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.checkpoint)
        return self._tokenizer

    def renderer(self, where, tools=None):
        template = self.checkpoint.template(tools)
        if template is None:
            raise InputError(f"{where}: a conversation needs a chat template and {self.model_dir} has none; use an instruct "
                             "checkpoint, add chat_template.jinja to the folder, or give rows with text or input_ids")
        if template not in self._renderers:
            self._renderers[template] = Renderer(self.model_dir, template, self.checkpoint.special,
                                                 self.tokenizer.special_tokens)
        return self._renderers[template]

    def close(self):
        for renderer in self._renderers.values():
            renderer.close()


@dataclasses.dataclass
class _Item:
    """A row on its way: example.ids, or a text to tokenize."""
    example: object
    text: str | None = None
    whole: bool = False          # tokenize with the post-processor's tokens, and end with eos
    spans: list | None = None    # character ranges to learn; None: all


class Documents:
    """Turns rows into (where, ids, labels) and counts what it cut and dropped."""

    def __init__(self, request, tools):
        self.request, self.tools = request, tools
        self.n_truncated = self.n_dropped = 0

    def of(self, rows):
        """rows: (source, where, row).  Yields documents in the rows' order."""
        for batch in _batches(self._prepared(rows)):
            encoded = {}
            for whole in {item.whole for item in batch if item.text is not None}:
                texts = [item.text for item in batch if item.text is not None and item.whole == whole]
                encoded[whole] = iter(self.tools.tokenizer.encode(texts, whole))
            for item in batch:
                if item.text is None:
                    ids, labels = self._given(item.example)
                else:
                    ids, labels = self._labelled(item, *next(encoded[item.whole]))
                yield from self._fitted(item, ids, labels)

    def _prepared(self, rows):
        """An _Item for each row that holds something."""
        reader, reader_of = None, None
        for source, where, row in rows:
            if source is not reader_of:
                reader, reader_of = formats.reader(source.schema), source
            example = reader(where, row)
            if example is None:
                self.n_dropped += 1
            elif isinstance(example, formats.Tokens):
                yield _Item(example)
            elif isinstance(example, formats.Text):
                yield _Item(example, _checked_text(where, example.text), whole=True)
            else:
                yield self._rendered(example)

    def _rendered(self, chat):
        everything = self.request.train_on_prompt or self.request.stage == "pt"
        chat = chat.with_system(self.request.system)
        if everything:
            chat.learn = []
        elif self.request.mask_history:
            chat.learn = chat.learn[-1:]
        text, spans = self.tools.renderer(chat.where, chat.tools).spans(chat)
        return _Item(chat, _checked_text(chat.where, text), spans=None if everything else spans)

    def _labelled(self, item, ids, starts, ends):
        where, vocab = item.example.where, self.request.vocab
        if item.whole:  # a document of plain text ends with the end-of-text token
            eos = self.tools.tokenizer.eos_id
            if eos is None:
                raise InputError(f"{where}: a text ends with an end-of-text token and {self.tools.model_dir} names none; "
                                 "expected eos_token in tokenizer_config.json or eos_token_id in config.json")
            if not len(ids) or ids[-1] != eos:
                ids = numpy.append(ids, eos)
        if len(ids) and ids.max() >= vocab:
            raise InputError(f"{where}: the tokenizer gives id {ids.max()}, past the model's vocabulary of {vocab}; expected the "
                             "tokenizer that belongs to the model")
        if item.spans is None:
            return ids, ids
        learned = numpy.zeros(len(ids), dtype=bool)
        for start, end in item.spans:
            # By where a token starts: one that reaches into a turn from the prompt is given at inference, not made.
            # A tokenizer that trims offsets reports a prompt's last blank as empty, at the turn's start: hence `ends`.
            learned |= (starts >= start) & (starts < end) & (ends > start)
        return ids, numpy.where(learned, ids, NOT_LEARNED)

    def _given(self, example):
        ids = _integers(example.where, "input_ids", example.ids, 0, self.request.vocab)
        if example.labels is None:
            return ids, ids
        labels = _integers(example.where, "labels", example.labels, NOT_LEARNED, self.request.vocab)
        wrong = labels[(labels < 0) & (labels != NOT_LEARNED)]
        if len(wrong):
            raise InputError(f"{example.where}: labels holds {wrong[0]}; expected {NOT_LEARNED} or an id")
        return ids, labels

    def _fitted(self, item, ids, labels):
        """sft: one document, its tail cut; pt: as many as it takes.  A row with nothing to learn is dropped, but not one
        that came as ids: whoever made those counts on its place in a batch."""
        cutoff = self.request.cutoff_len
        kept = 0
        stop = len(ids) if self.request.stage == "pt" else min(len(ids), cutoff)
        for start in range(0, stop, cutoff):
            piece, learned = ids[start:start + cutoff], labels[start:start + cutoff].copy()
            learned[0] = NOT_LEARNED
            if (learned != NOT_LEARNED).any() or item.text is None and self.request.stage == "sft":
                kept += 1
                yield item.example.where, piece, learned
        if not kept:
            self.n_dropped += 1
        elif stop < len(ids):
            self.n_truncated += 1


def _batches(prepared):
    batch, size = [], 0
    for one in prepared:
        batch.append(one)
        size += len(one.example.ids if one.text is None else one.text)
        if size >= _BATCH_TEXT or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked_text(where, text):
    if len(text) > TEXT_MAX:
        raise InputError(f"{where}: the text has {len(text)} characters; expected at most {TEXT_MAX}, so split the row")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the text has half of a surrogate pair at character {error.start}; "
                         "expected valid Unicode") from None
    return text


def _integers(where, name, values, least, vocab):
    """A list from a row as int64, each in [least, vocab)."""
    if not set(map(type, values)) <= {int}:
        number, value = next((i, v) for i, v in enumerate(values) if type(v) is not int)
        raise InputError(f"{where}: {name}[{number}] is {value!r:.40}; expected an integer")
    for value in (min(values), max(values)):
        if not least <= value < vocab:
            side = "past" if value > 0 else "not in"
            raise InputError(f"{where}: {name}[{values.index(value)}] is {value}, {side} the vocabulary; expected {least} to "
                             f"{vocab - 1}")
    return numpy.array(values, dtype=numpy.int64)
