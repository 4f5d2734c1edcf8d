"""`python -m forebay.doctor`: which Python this is and which of the packages that forebay needs it has, as one JSON line."""

import importlib.metadata
import json
import platform
import sys

PACKAGES = ("tokenizers", "jinja2", "pyarrow", "numpy", "xxhash")


def version(package):
    """None when the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    sys.stdin.readline()
    print(json.dumps({"python": f"{platform.python_version()} ({sys.executable})", **{name: version(name) for name in PACKAGES}}))


if __name__ == "__main__":
    main()
