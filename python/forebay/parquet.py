"""`python -m forebay.parquet count|rows FILE`: a Parquet file's number of rows, or the rows as an Arrow stream, on stdout.

A damaged file may make pyarrow end the process it is in (release 22: an uncaught std::length_error), so it is read in one of
its own.  `count` and `batches` are the other side."""

import os
import signal
import subprocess
import sys
import tempfile

from .errors import ForebayError, InputError, run

_ROWS = 256  # in a batch


def faults():
    """What pyarrow raises over a damaged file: beside its own errors Python's, over names that are not UTF-8, dates past the year
    9999, time zones that nobody knows."""
    import pyarrow
    return pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError


def count(path):
    with _Child("count", path) as child:
        answer = child.out.read()
        child.expect_success(0)
    return int(answer)


def batches(path):
    """Lists of rows."""
    import pyarrow
    n_row = 0
    with _Child("rows", path) as child:
        try:
            with pyarrow.ipc.open_stream(child.out) as stream:
                for batch in stream:
                    rows = batch.to_pylist()
                    n_row += len(rows)
                    yield rows
        except faults() as error:
            child.expect_success(n_row)
            raise _broken(path, n_row, error) from None
        child.expect_success(n_row)


def _broken(path, n_row, why):
    return InputError(f"{path}: broken Parquet data after row {n_row}: {why}")


class _Child:
    def __init__(self, operation, path):
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        search = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.path, self.said = path, tempfile.TemporaryFile()
        self.process = subprocess.Popen([sys.executable, "-m", "forebay.parquet", operation, path], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=self.said, env={**os.environ, "PYTHONPATH": search})
        self.out = self.process.stdout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Whoever wants no more rows does not wait for the rest."""
        self.out.close()
        self.process.kill()
        self.process.wait()
        self.said.close()

    def expect_success(self, n_row):
        """Raises what the child said, or what it died of."""
        self.out.close()
        code = self.process.wait()
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").splitlines()
        if code == InputError.exit_code and lines:
            raise InputError(lines[-1])
        if code < 0:
            raise _broken(self.path, n_row, f"it ended the process that read it ({signal.Signals(-code).name})")
        if code:
            raise ForebayError(lines[-1] if lines else f"{self.path}: its reader ended with exit code {code}")


def _open(path):
    import pyarrow.parquet
    try:
        return pyarrow.parquet.ParquetFile(path)
    except faults() as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from None


def _write_rows(path):
    import pyarrow
    n_row, file = 0, _open(path)
    try:
        with pyarrow.ipc.new_stream(sys.stdout.buffer, file.schema_arrow) as stream:
            for batch in file.iter_batches(batch_size=_ROWS):
                stream.write_batch(batch)
                n_row += batch.num_rows
    except BrokenPipeError:  # the other side wants no more
        os._exit(0)
    except faults() as error:
        raise _broken(path, n_row, error) from None


def main():
    operation, path = sys.argv[1:]
    if operation == "count":
        print(_open(path).metadata.num_rows)
    else:
        _write_rows(path)


if __name__ == "__main__":
    sys.exit(run(main))
