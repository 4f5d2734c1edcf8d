"""tools/run_tests.py counts what really happened."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import run_tests

GOOD = "[ RUN      ] a\n[       OK ] a\n"
BAD = "[ RUN      ] b\n[  ERROR   ] --- 0x1 != 0x2\n[  FAILED  ] b\n"
SKIPPED = "[ RUN      ] c\n[  SKIPPED ] c\n"
SUMMARY = "[  PASSED  ] 1 test(s).\n[  FAILED  ] 1 test(s), listed below:\n[  FAILED  ] b\n"


@pytest.mark.parametrize(
    "output, exit_status, counted",
    [
        (GOOD, 0, "1 passed, 0 failed, 0 skipped"),
        (GOOD + GOOD, 0, "2 passed, 0 failed, 0 skipped"),
        (GOOD + BAD + SKIPPED + SUMMARY, 1, "1 passed, 1 failed, 1 skipped"),
        (GOOD + "[ RUN      ] d\n", -11, "1 passed, 1 failed, 0 skipped"),  # died inside d
        (GOOD, 23, "1 passed, 1 failed, 0 skipped"),  # a sanitizer spoke after the last test
        ("", 0, "0 passed, 1 failed, 0 skipped"),  # ran no test
        ("no such thing here\n", 77, "0 passed, 0 failed, 1 skipped"),
        ("error while loading shared libraries\n", 127, "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_a_program_is_counted_test_by_test(output, exit_status, counted):
    count, reason = run_tests.count_program(output, exit_status)
    assert str(count) == counted
    assert bool(reason) == bool(count.failed)


def test_a_hang_is_ended():
    exit_status, output, _ = run_tests.run([sys.executable, "-c", "import time; time.sleep(600)"], None, 1)
    assert exit_status == -9
    assert "ended after 1 s" in output
