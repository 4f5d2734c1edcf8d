"""The token shard (.fbt): written here, read by src/io/tokens.h, laid out in docs/FORMATS.md.

Reading the header and the provenance needs only the standard library, so that a fresh shard is recognised quickly."""

import array
import json
import os
import struct
import tempfile

MAGIC = b"FBTOKENS"
VERSION = 1
HEADER = struct.Struct("<8sII10QIII")  # through doc_len_max; zero from there to HEADER_SIZE
HEADER_SIZE = 128
ALIGN = 64
LABEL_MASK, LABEL_IDS = 0, 1
NOT_LEARNED = -100
_META_SIZE_MAX = 64 << 20
_COPY_SIZE = 1 << 22


def _aligned(offset):
    return -(-offset // ALIGN) * ALIGN


def _layout(n_token, n_doc, label_kind):
    """(labels, docs, meta): where each section after the ids starts; a shard has no other layout."""
    labels = _aligned(HEADER_SIZE + 4 * n_token)
    docs = _aligned(labels + n_token * (4 if label_kind == LABEL_IDS else 1))
    return labels, docs, _aligned(docs + 8 * (n_doc + 1))


def read_meta(path):
    """A shard's provenance, or None when the file is absent, is cut, or has a header that does not agree with the
    provenance and the file's size.  The sections are not read: the trainer checks the checksum when it opens the file."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_SIZE)
            if len(head) != HEADER_SIZE:
                return None
            (magic, version, header_size, n_token, n_doc, n_learned, ids_at, labels_at, docs_at, meta_at, meta_size,
             file_size, _, label_kind, id_max, doc_len_max) = HEADER.unpack_from(head)
            if (magic, version, header_size, ids_at) != (MAGIC, VERSION, HEADER_SIZE, HEADER_SIZE) or any(head[HEADER.size:]):
                return None
            if label_kind not in (LABEL_MASK, LABEL_IDS):
                return None
            if (labels_at, docs_at, meta_at) != _layout(n_token, n_doc, label_kind):
                return None
            if file_size != meta_at + meta_size or file_size != os.fstat(file.fileno()).st_size or meta_size > _META_SIZE_MAX:
                return None
            file.seek(meta_at)
            meta = json.loads(file.read(meta_size))
    except (OSError, ValueError, RecursionError):
        return None
    counts = {"n_token": n_token, "n_doc": n_doc, "n_learned": n_learned, "id_max": id_max, "doc_len_max": doc_len_max}
    return meta if isinstance(meta, dict) and meta.get("shard") == counts else None


class Writer:
    """Writes a shard front to back.  Ids go straight to the file and labels to a spool beside it, so that memory holds only
    the documents' starts, 8 bytes each.  The caller renames the finished file into place."""

    def __init__(self, path):
        import xxhash
        self.path = path
        self.file = open(path, "wb")
        self.spool = tempfile.TemporaryFile(dir=os.path.dirname(path) or ".")
        self.hash = xxhash.xxh3_64()
        self.file.write(bytes(HEADER_SIZE))
        self.starts = array.array("Q", [0])
        self.n_learned = self.id_max = self.doc_len_max = 0
        self.label_kind = LABEL_MASK

    def add(self, ids, labels):
        """One document: numpy integers, labels NOT_LEARNED or an id."""
        learned = labels != NOT_LEARNED
        assert not learned[0]
        if (labels[learned] != ids[learned]).any():
            self.label_kind = LABEL_IDS
        self._put(ids.astype("<u4"))
        self.spool.write(labels.astype("<i4"))
        self.starts.append(self.starts[-1] + len(ids))
        self.n_learned += int(learned.sum())
        self.id_max = max(self.id_max, int(ids.max()), int(labels.max()))
        self.doc_len_max = max(self.doc_len_max, len(ids))

    @property
    def counts(self):
        return {"n_token": self.starts[-1], "n_doc": len(self.starts) - 1, "n_learned": self.n_learned, "id_max": self.id_max,
                "doc_len_max": self.doc_len_max}

    def finish(self, meta):
        """Writes the rest and the header, and flushes to the disk; adds the counts to meta."""
        import numpy
        counts = self.counts
        labels_at, docs_at, meta_at = _layout(counts["n_token"], counts["n_doc"], self.label_kind)
        self._pad(labels_at)
        self.spool.seek(0)
        while chunk := self.spool.read(_COPY_SIZE):
            labels = numpy.frombuffer(chunk, dtype="<i4")
            self._put(labels if self.label_kind == LABEL_IDS else (labels != NOT_LEARNED).astype(numpy.uint8))
        self._pad(docs_at)
        self._put(numpy.frombuffer(self.starts, dtype=numpy.uint64).astype("<u8"))
        self._pad(meta_at)
        text = json.dumps({**meta, "shard": counts}, ensure_ascii=True, indent=1).encode()
        self._put(text)
        self.file.seek(0)
        self.file.write(HEADER.pack(MAGIC, VERSION, HEADER_SIZE, counts["n_token"], counts["n_doc"], counts["n_learned"],
                                    HEADER_SIZE, labels_at, docs_at, meta_at, len(text), meta_at + len(text),
                                    self.hash.intdigest(), self.label_kind, self.id_max, self.doc_len_max))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.spool.close()

    def abandon(self):
        """Removes what was written; fine after finish, as long as the file has not been renamed."""
        self.file.close()
        self.spool.close()
        if os.path.exists(self.path):
            os.unlink(self.path)

    def _put(self, data):
        self.hash.update(data)
        self.file.write(data)

    def _pad(self, offset):
        self._put(bytes(offset - self.file.tell()))
