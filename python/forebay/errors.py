"""One sentence for what went wrong, and the exit code that `forebay` passes on."""

import sys
import traceback

SENTENCE_MAX = 480  # bytes; the C side keeps 511


class ForebayError(Exception):
    exit_code = 1


class ConfigError(ForebayError):
    """What the user asked for is wrong."""
    exit_code = 2


class InputError(ForebayError):
    """A model, tokenizer or dataset file is missing or malformed."""
    exit_code = 3


def sentence(text):
    """`text` as one printable line of at most SENTENCE_MAX bytes."""
    line = " ".join(str(text).encode("utf-8", "backslashreplace").decode("utf-8").split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    data = line.encode("utf-8")
    if len(data) <= SENTENCE_MAX:
        return line
    return data[:SENTENCE_MAX - 3].decode("utf-8", "ignore") + "..."


def run(main):
    """Calls main() and returns the exit code; the last line on stderr is the sentence."""
    try:
        main()
        return 0
    except ForebayError as error:
        code, text = error.exit_code, error
    except KeyboardInterrupt:
        code, text = 1, "interrupted"
    except MemoryError:
        code, text = 1, "not enough memory to prepare the data"
    except ImportError as error:
        code, text = 1, (f"{sys.executable}: {error}; install requirements.txt there, or point FOREBAY_PYTHON at a "
                         "Python that has it")
    except OSError as error:
        code, text = 1, f"{error.filename or 'i/o'}: {error.strerror or error}"
    except SystemExit:
        raise
    except BaseException as error:  # ours to mend: the trace first, then the sentence.  Rust's panics are no Exception
        traceback.print_exc()
        code, text = 1, f"unexpected {type(error).__name__}: {error}"
    print(sentence(text), file=sys.stderr, flush=True)
    return code
