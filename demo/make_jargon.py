"""Instruct rows from the Jargon File: a term is asked, its definition answered.

    python make_jargon.py DICTD_DIR OUT_DIR

DICTD_DIR holds jargon.dict.dz and jargon.index (Debian's dict-jargon; the Jargon File 4.4.7 is in the public domain).
OUT_DIR gets train.jsonl and eval.jsonl, rows of the form
{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": definition}]}.
Which rows are held out depends on the term alone, so that the two files never mix, whatever else changes.
"""
import gzip
import hashlib
import json
import re
import sys
from pathlib import Path

QUESTION = "What does '{}' mean in hacker jargon?"
ANSWER_MIN, ANSWER_MAX = 60, 400  # characters
HELD_OUT_ONE_IN = 32

BASE64 = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
LEADING_NOTE = re.compile(
    r"""^( \[[^\]]*\]                                   # [common; from the PDP-10]
        | \((?i:also|alt|var|pl|often|rarely)\b[^()]*\)  # (also frobnicate)
        | 1\.
        | (n|v|vt|vi|adj|adv|interj)\.(?=\s[A-Z\[])
        )\s*""",
    re.VERBOSE,
)
SENTENCE_END = re.compile(
    r"""(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!Syn\.)(?<!vs\.) \s+ (?=[A-Z"'({])
      | (?<=[.!?]["')]) \s+ (?=[A-Z"'({])""",
    re.VERBOSE,
)
CROSS_REFERENCE = re.compile(r"\(?(See|Compare|Contrast|Cf\.|Syn\.|Oppose|Opposed?|Also|Antonym)\b.*\{")
TABLE_OR_ADDRESS = re.compile("[\u2500-\u257f]|http|@")
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "´": "'", "\xa0": " ", "\xad": None})


def dictd_number(text):
    """dictd's index counts in base 64, most significant digit first."""
    value = 0
    for c in text:
        value = value * 64 + BASE64[c]
    return value


def read_entries(dictd_dir):
    """Yields every entry's text.  A .dict.dz file is gzip with an index that a sequential reader may ignore."""
    data = gzip.decompress((dictd_dir / "jargon.dict.dz").read_bytes())
    extents = set()
    for line in (dictd_dir / "jargon.index").read_text(encoding="utf-8").splitlines():
        word, offset, size = line.split("\t")
        if not word.startswith("00-database"):
            extents.add((dictd_number(offset), dictd_number(size)))
    for offset, size in sorted(extents):
        yield data[offset : offset + size].decode("utf-8")


def first_sense(body):
    """The first paragraph that defines something, unwrapped and without its leading notes and its number."""
    for paragraph in re.split(r"\n\s*\n", body):
        text = " ".join(paragraph.split())
        while True:
            shorter = LEADING_NOTE.sub("", text)
            if shorter == text:
                break
            text = shorter
        if len(text) > 1:  # a lone letter heads the next section
            return text
    return ""


def is_whole(text):
    """Every bracket and double quote that opens also closes."""
    return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}")) and text.count('"') % 2 == 0


def definition(body):
    """Whole sentences up to ANSWER_MAX characters; None where the entry holds no short definition."""
    if TABLE_OR_ADDRESS.search(body):
        return None
    text = ""
    for sentence in SENTENCE_END.split(first_sense(body)):
        if CROSS_REFERENCE.match(sentence):
            continue
        if len(text) + len(sentence) > ANSWER_MAX:
            break
        text = f"{text} {sentence}".strip()
    text = re.sub(r"\{\s*([^{}]*?)\s*\}", r"\1", text) if is_whole(text) else ""
    starts_well = re.match(r"[A-Z\"'(]", text)
    return text if len(text) >= ANSWER_MIN and starts_well and text[-1] in ".!?\"')" else None


def make_rows(dictd_dir):
    """term -> definition.  An entry is its term, a line of pronunciation and part of speech, and indented paragraphs."""
    rows = {}
    for entry in read_entries(dictd_dir):
        term, _, rest = entry.translate(PLAIN).partition("\n")
        _, _, body = rest.partition("\n")
        answer = definition(body)
        if answer and len(term) <= 40 and term not in rows:
            rows[term] = answer
    return rows


def is_held_out(term):
    return int.from_bytes(hashlib.sha256(term.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def write_rows(path, rows):
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": QUESTION.format(term)},
                    {"role": "assistant", "content": answer},
                ]
            },
            ensure_ascii=False,
        )
        for term, answer in rows
    ]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)


def main(dictd_dir, out_dir):
    rows = sorted(make_rows(dictd_dir).items())
    train = [row for row in rows if not is_held_out(row[0])]
    held_out = [row for row in rows if is_held_out(row[0])]
    if len(train) < 1000 or len(held_out) < 30:
        sys.exit(f"make_jargon: {dictd_dir} gave {len(train)} + {len(held_out)} rows, at least 1000 + 30 are expected")
    out_dir.mkdir(parents=True, exist_ok=True)
    write_rows(out_dir / "train.jsonl", train)
    write_rows(out_dir / "eval.jsonl", held_out)
    print(f"{out_dir}: {len(train)} rows to learn, {len(held_out)} held out")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_jargon.py DICTD_DIR OUT_DIR")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
