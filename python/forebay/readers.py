"""Rows out of files, one at a time: whatever the size of a file, one row (or one Parquet batch) is in memory.

Each reader yields (where, row): `where` is how an error names the row, `row` a dict without its null values."""

import codecs
import json
import os
import re

from . import parquet
from .errors import InputError

ROW_SIZE_MAX = 256 << 20  # bytes of JSON in one row
_HEAD_SIZE = 1 << 12      # where a file's first character that is not blank is looked for
_READ_SIZE = 1 << 20
_TEXT_SIZE = 1 << 20      # bytes of a .txt file in one document
_SPACE = re.compile(r"[ \t\n\r]*")


def rows(path):
    kind = os.path.splitext(path)[1]
    if kind == ".parquet":
        return _parquet(path)
    if kind == ".txt":
        return _text(path)
    return _json(path) if _is_array(path) else _json_lines(path)


def count(path):
    """How many rows rows(path) yields, without parsing them where the format allows."""
    kind = os.path.splitext(path)[1]
    if kind == ".parquet":
        return parquet.count(path)
    if kind != ".txt" and not _is_array(path):
        return sum(1 for _ in _lines(path))
    return sum(1 for _ in rows(path))


def _is_array(path):
    """A .json file is one array, or, as some tools write it, a row a line."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_SIZE)
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _row(value, where):
    if not isinstance(value, dict):
        raise InputError(f"{where}: the row is a JSON {_json_name(value)}; expected an object")
    return {key: item for key, item in value.items() if item is not None}


def _json_name(value):
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), "object")


def _lines(path):
    """(line number, bytes) of each line that is not blank."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(ROW_SIZE_MAX + 1):
            number += 1
            if len(line) > ROW_SIZE_MAX:
                raise InputError(f"{path}:{number}: the line is longer than {ROW_SIZE_MAX >> 20} MiB; expected a row a line")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def _json_lines(path):
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 at byte {error.start} of the line") from None
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: broken JSON at column {error.colno}: {error.msg}; expected one object a line") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: JSON that cannot be read: {error}") from None
        yield where, _row(value, where)


class _ArrayText:
    """The text of a JSON array, read as far as needed: text[pos:] has been read and not yet consumed."""

    def __init__(self, path, file):
        self.path, self.file = path, file
        self.utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self.json = json.JSONDecoder()
        self.text, self.pos, self.line, self.ended = "", 0, 1, False

    def more(self, size):
        data = self.file.read(size)
        self.ended = not data
        try:
            self.text = self.text[self.pos:] + self.utf8.decode(data, final=self.ended)
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: not UTF-8 within the {len(data)} bytes before byte {self.file.tell()}") from None
        self.pos = 0

    def consume(self, end):
        self.line += self.text.count("\n", self.pos, end)
        self.pos = end

    def next_char(self):
        """The next character that is not white space, '' at the end of the file."""
        while True:
            self.consume(_SPACE.match(self.text, self.pos).end())
            if self.pos < len(self.text) or self.ended:
                return self.text[self.pos:self.pos + 1]
            self.more(_READ_SIZE)

    def next_value(self):
        """Decodes one value.  When the text ends within it, as much again is read and decoding starts over: twice
        the work of one pass at most, and an error well before the end is reported without reading on."""
        while True:
            try:
                value, end = self.json.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                size = len(self.text) - self.pos
                cut = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if not cut or self.ended or size > ROW_SIZE_MAX:
                    line = self.line + self.text.count("\n", self.pos, error.pos)
                    raise InputError(f"{self.path}:{line}: broken JSON: {error.msg}; expected an array of objects") from None
                self.more(max(_READ_SIZE, size))
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self.path}:{self.line}: JSON that cannot be read: {error}") from None
            else:
                self.consume(end)
                return value


def _json(path):
    with open(path, "rb") as file:
        array = _ArrayText(path, file)
        array.next_char()
        array.consume(array.pos + 1)  # the [ that _is_array saw
        char = array.next_char()
        while char != "]":
            where = f"{path}:{array.line}"
            if char not in ("{", ""):  # '' is left to next_value, which says that the text ends
                raise InputError(f"{where}: the array holds something that is not an object; expected rows")
            yield where, _row(array.next_value(), where)
            char = array.next_char()
            if char not in (",", "]"):
                found = repr(char) if char else "the end of the file"
                raise InputError(f"{path}:{array.line}: broken JSON: expected ',' or ']' after a row, found {found}")
            if char == ",":
                array.consume(array.pos + 1)
                char = array.next_char()
                if char == "]":
                    raise InputError(f"{path}:{array.line}: broken JSON: expected a row after ','")
        array.consume(array.pos + 1)
        if array.next_char():
            raise InputError(f"{path}:{array.line}: more text after the array's end; expected one array of rows")


def _text(path):
    """One document, cut at line ends into several where it is long: an end-of-text token a megabyte apart does not
    matter to training, and holding a whole corpus would."""
    with open(path, "rb") as file:
        number = 1
        while data := file.read(_TEXT_SIZE):
            data += file.readline(_TEXT_SIZE)
            where = f"{path}:{number}"
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                line = number + data.count(b"\n", 0, error.start)
                raise InputError(f"{path}:{line}: not UTF-8; expected plain text in lines shorter than 1 MiB") from None
            number += data.count(b"\n")
            yield where, {"text": text}


def _parquet(path):
    number = 0
    for batch in parquet.batches(path):
        for row in batch:
            number += 1
            where = f"{path}: row {number}"
            yield where, _row(row, where)
