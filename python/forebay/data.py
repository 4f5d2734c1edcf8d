"""`python -m forebay.data`: a dataset to token shards.

One request as a line of JSON on stdin (request.py), one reply as a line of JSON on stdout.  A shard that is there and was
made from the same request, files and tokenizer is kept, which is found out without loading any library."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import signal
import sys

from . import __version__, checkpoint, request as requests, shard, sources
from .errors import InputError, run

FORMAT_VERSION = 1  # raised when the same request would give other bytes than before


class Part:
    """One shard to be: which rows it takes."""

    def __init__(self, request, name, value, held):
        self.request, self.name, self.held = request, name, held
        self.sources = sources.resolve(value, request.dataset_dir)
        self.path = os.path.join(request.out_dir, f"{name}.fbt") if request.out_dir else None

    def provenance(self, tokenizer_hash):
        """What the shard's bytes depend on, with its SHA-256 as fingerprint."""
        facts = {"format": FORMAT_VERSION, "part": self.name, "request": self.request.meaning(), "tokenizer": tokenizer_hash,
                 "sources": [source.stamp() for source in self.sources]}
        text = json.dumps(facts, sort_keys=True)
        return {"generator": f"forebay.data {__version__}", **facts, "fingerprint": hashlib.sha256(text.encode()).hexdigest()}

    def rows(self):
        from . import documents
        taken = documents.all_rows(self.sources, self.request.max_samples)
        if not self.request.val_size or self.held is None:
            return taken
        n_row = documents.count_rows(self.sources, self.request.max_samples)
        held = documents.held_out(n_row, self.request.val_size, self.request.seed)
        return (row for number, row in enumerate(taken) if (number in held) == self.held)


def _parts(request):
    split = bool(request.val_size)
    parts = [Part(request, "train", request.dataset, False if split else None)]
    if split:
        parts.append(Part(request, "eval", request.dataset, True))
    elif request.eval_dataset:
        parts.append(Part(request, "eval", request.eval_dataset, None))
    return parts


def build(request):
    """Makes the shards that are not there or stale, all of them before the first is renamed into place."""
    parts = _parts(request)
    os.makedirs(request.out_dir, exist_ok=True)
    with _only_one(request.out_dir):
        tokenizer_hash = checkpoint.content_hash(request.model_dir)
        wanted = {part.name: part.provenance(tokenizer_hash) for part in parts}
        metas = {part.name: shard.read_meta(part.path) for part in parts}
        stale = [part for part in parts if not _is_fresh(metas[part.name], wanted[part.name])]
        if stale:
            metas.update(_make(request, stale, wanted))
    train, evaluation = metas["train"], metas.get("eval")
    reply = {"train": parts[0].path, "eval": parts[1].path if evaluation else None, "built": bool(stale), **_counts(train)}
    if evaluation:
        reply.update({f"eval_{key}": value for key, value in _counts(evaluation).items()})
    return reply


def _is_fresh(meta, wanted):
    return meta is not None and meta.get("fingerprint") == wanted["fingerprint"]


def _counts(meta):
    return {"rows": meta["shard"]["n_doc"], "tokens": meta["shard"]["n_token"], "learned": meta["shard"]["n_learned"],
            "truncated": meta["truncated"], "dropped": meta["dropped"]}


@contextlib.contextmanager
def _only_one(out_dir):
    """Of two processes that want the same shards, the second waits and then finds them fresh."""
    with open(os.path.join(out_dir, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:    # a file system without locks: the command has said so
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
        yield


def _make(request, parts, wanted):
    from . import documents
    tools = documents.TextTools(request.model_dir)
    metas, writers = {}, []
    try:
        for part in parts:
            made = documents.Documents(request, tools)
            writer = shard.Writer(part.path + ".part")
            writers.append(writer)
            for _, ids, labels in made.of(part.rows()):
                writer.add(ids, labels)
            if not writer.n_learned:
                raise InputError(_nothing_learned(request, part))
            meta = {**wanted[part.name], "truncated": made.n_truncated, "dropped": made.n_dropped}
            metas[part.name] = {**meta, "shard": writer.counts}
            writer.finish(meta)
        for part in reversed(parts):
            os.replace(part.path + ".part", part.path)
    finally:
        tools.close()
        for writer in writers:
            writer.abandon()
    return metas


def _nothing_learned(request, part):
    value = request.eval_dataset if part.name == "eval" and request.eval_dataset else request.dataset
    return (f"dataset '{value}': none of its rows for {part.name} has a token to learn within cutoff_len "
            f"{request.cutoff_len}; expected assistant turns, text, or labels that are not all -100 past the first token")


def preview(request):
    """The first documents as the trainer will see them."""
    from . import documents
    tools = documents.TextTools(request.model_dir)
    part = _parts(request)[0]
    made = documents.Documents(request, tools)
    try:
        rows = [_shown(tools, ids.tolist(), labels.tolist())
                for _, ids, labels in itertools.islice(made.of(part.rows()), request.preview)]
        if not rows:
            raise InputError(_nothing_learned(request, part))
    finally:
        tools.close()
    return {"rows": rows}


def _shown(tools, ids, labels):
    """Rows of ids can be shown without a tokenizer; then there is no text."""
    if os.path.isfile(os.path.join(tools.model_dir, "tokenizer.json")):
        texts = [tools.tokenizer.text([one], False) for one in ids]
        whole = tools.tokenizer.text(ids, False)
    else:
        texts, whole = [""] * len(ids), ""
    return {"text": whole, "tokens": [{"id": one, "text": text, "learned": label != shard.NOT_LEARNED}
                                      for one, text, label in zip(ids, texts, labels)]}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that unfinished files are removed
    request = requests.parse(sys.stdin.readline())
    reply = build(request) if request.op == "build" else preview(request)
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
