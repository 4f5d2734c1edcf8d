"""Runs the tests and counts each single one.

    python tools/run_tests.py [--programs-only] BUILD_DIR...

Runs every C program BUILD_DIR/tests/test_*, then pytest on tests/python and tests/e2e with the first BUILD_DIR's command.
The last line is `N passed, N failed, N skipped`; the exit status is 0 only when something passed and nothing failed.
A program that crashes, hangs or ends badly counts as a failure even when each of its tests had passed; exit status 77 of
a program means that it was skipped.
"""
import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM_SECONDS_MAX = 300  # only a hang takes that long
PYTEST_SECONDS_MAX = 1800
SKIPPED_EXIT = 77
VERDICTS = {"OK": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}


class Count:
    def __init__(self, passed=0, failed=0, skipped=0):
        self.passed, self.failed, self.skipped = passed, failed, skipped

    def __add__(self, other):
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_cmocka(output):
    """Counts from lines such as `[ RUN      ] name` and `[       OK ] name`.

    A test that began and has no verdict is one in which the program died; a verdict that follows no beginning is the
    list of failures at the end.
    """
    count, running = Count(), None
    for mark, name in re.findall(r"\[ +(RUN|OK|FAILED|ERROR|SKIPPED) +\] (\w+)$", output, re.MULTILINE):
        if mark == "RUN":
            running = name
        elif name == running:
            count += Count(**{VERDICTS[mark]: 1})
            running = None
    return count + Count(failed=1) if running else count


def count_program(output, exit_status):
    """(Count, what went wrong or "")."""
    count = read_cmocka(output)
    n_test = count.passed + count.failed + count.skipped
    if exit_status == SKIPPED_EXIT and n_test == 0:
        return Count(skipped=1), ""
    if exit_status == 0 and n_test == 0:
        return Count(failed=1), "ran no test"
    if exit_status == 0 and count.failed == 0:
        return count, ""
    reason = f"killed by signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
    return count if count.failed else count + Count(failed=1), reason


def run(command, env, seconds_max):
    """(exit status, output, seconds).  A hang is ended, and counts as killed by SIGKILL."""
    start = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        try:
            output, _ = child.communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            output += f"\nended after {seconds_max} s\n".encode()
    return child.returncode, output.decode(errors="replace"), time.monotonic() - start


def report(name, count, seconds, reason, output):
    print(f"{'FAIL' if count.failed else 'ok  '}  {name:<42} {str(count):<36} {seconds:6.1f} s", flush=True)
    if count.failed:
        print(f"      {reason}\n" + "\n".join("      | " + line for line in output.splitlines()[-60:]), flush=True)


def run_programs(build_dir):
    programs = sorted(p for p in (build_dir / "tests").glob("test_*") if p.is_file() and os.access(p, os.X_OK))
    total = Count()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        runs = pool.map(lambda program: run([program], os.environ, PROGRAM_SECONDS_MAX), programs)
        for program, (exit_status, output, seconds) in zip(programs, runs):
            count, reason = count_program(output, exit_status)
            report(f"{build_dir.name}/{program.name}", count, seconds, reason, output)
            total += count
    return total


def read_junit(path):
    total = Count()
    for suite in xml.etree.ElementTree.parse(path).getroot().iter("testsuite"):
        tests, failures, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
        total += Count(tests - failures - errors - skipped, failures + errors, skipped)
    return total


def run_pytest(folder, build_dir):
    """One pytest a folder.  $FOREBAY names the command under test."""
    results = build_dir / f"pytest-{folder.name}.xml"
    results.unlink(missing_ok=True)
    env = {
        **os.environ,
        "FOREBAY": str(build_dir / "forebay"),
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--junitxml={results}", folder]
    exit_status, output, seconds = run(command, env, PYTEST_SECONDS_MAX)
    count = read_junit(results) if results.exists() else Count()
    if exit_status != 0 and count.failed == 0:
        count += Count(failed=1)
    report(f"{folder.relative_to(ROOT)}", count, seconds, f"pytest's exit status {exit_status}", output)
    return count


def main():
    parser = argparse.ArgumentParser(description="Runs the tests and counts each single one.")
    parser.add_argument("--programs-only", action="store_true", help="only the C programs, no pytest")
    parser.add_argument("build_dir", nargs="+", type=lambda name: Path(name).resolve())
    arguments = parser.parse_args()

    total = Count()
    for build_dir in arguments.build_dir:
        total += run_programs(build_dir)
    if not arguments.programs_only:
        for folder in (ROOT / "tests" / "python", ROOT / "tests" / "e2e"):
            if any(folder.glob("test_*.py")):
                total += run_pytest(folder, arguments.build_dir[0])
    print(total)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
