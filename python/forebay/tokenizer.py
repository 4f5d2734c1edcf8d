"""tokenizer.json through Hugging Face's `tokenizers`: the same ids that transformers gives, because it is the same library.

Special tokens written in a text become those tokens, as in transformers; docs/FORMATS.md says what follows from that."""

import os

import numpy

from .errors import InputError


class Tokenizer:
    def __init__(self, checkpoint):
        import tokenizers
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.path = os.path.join(checkpoint.dir, "tokenizer.json")
        if not os.path.isfile(self.path):
            raise InputError(f"{self.path}: no such file; text needs a tokenizer, only rows with input_ids do without")
        try:
            self.core = tokenizers.Tokenizer.from_file(self.path)
            self.core.no_truncation()
            self.core.no_padding()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the Rust library is not an Exception
            raise InputError(f"{self.path}: not a tokenizer that can be read: {error}") from None
        self._special = {id: token.content for id, token in self.core.get_added_tokens_decoder().items() if token.special}
        self.special_tokens = list(self._special.values())
        self.eos_id = self._eos_id(checkpoint)

    def _eos_id(self, checkpoint):
        """The end-of-text id, None when the checkpoint names none."""
        named = checkpoint.special.get("eos_token")
        if named is not None:
            found = self.core.token_to_id(named)
            if found is None:
                raise InputError(f"{self.path}: the eos_token '{named}' of tokenizer_config.json is not in the vocabulary")
            return found
        return next(iter(checkpoint.end_ids()), None)

    def encode(self, texts, whole):
        """An (ids, starts, ends) for each text, with the character range of each token.  whole: with the tokens that the
        post-processor puts around a text, such as bos; a rendered conversation has its own."""
        encoded = self.core.encode_batch(texts, add_special_tokens=whole)
        out = []
        for one in encoded:
            offsets = numpy.array(one.offsets, dtype=numpy.int64).reshape(-1, 2)
            out.append((numpy.array(one.ids, dtype=numpy.int64), offsets[:, 0], offsets[:, 1]))
        return out

    def ids(self, text, whole):
        return self.core.encode(text, add_special_tokens=whole).ids

    def text(self, ids, skip_special):
        return self.core.decode(ids, skip_special_tokens=skip_special)

    def is_special(self, id):
        return id in self._special
