"""forebay's text side: datasets and chat templates in, token ids out.

`python -m forebay.data` turns a dataset into token shards, `python -m forebay.text` encodes and decodes for
generation.  Both speak JSON lines and are started by the `forebay` command.  Nothing here opens a network connection or runs
code from a checkpoint."""

__version__ = "0.1.0"
