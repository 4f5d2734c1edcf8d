"""tests/fuzz/fuzz_data.py sees what it is there to see, and a short run of it finds nothing."""
import json
import sys
from pathlib import Path

import pytest

from forebay import readers

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import fuzz_data

N_INPUT = 200  # the long runs are `make fuzz`


@pytest.fixture
def setting(tmp_path):
    return fuzz_data.Setting(tmp_path)


def test_good_inputs_and_the_corpus(setting):
    for kind, contents in fuzz_data.seeds().items():
        for content in contents:
            assert setting.try_input(kind, content) is None
    for kind, content in fuzz_data.stored():
        assert setting.try_input(kind, content) is None


@pytest.mark.parametrize("error,part", [(KeyError("planted"), "KeyError"), (fuzz_data.ForebayError("planted"), "exit code 1"),
                                        (fuzz_data.InputError("planted"), "names no file")])
def test_a_planted_fault_is_found(error, part, setting, monkeypatch):
    def broken(path):
        raise error
    monkeypatch.setattr(readers, "rows", broken)
    assert part in setting.try_input("rows.jsonl", b"{}")


def test_a_planted_crash_is_found(setting, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(readers, "rows", lambda path: fuzz_data.os.kill(fuzz_data.os.getpid(), 9))
    assert fuzz_data.in_child(setting, [("rows.jsonl", b"{}")], tmp_path / "findings") == 1
    assert [path.read_bytes() for path in (tmp_path / "findings").iterdir()] == [b"{}"]


def test_a_short_run_finds_nothing(capfd):
    arguments = ["fuzz_data.py", "--rounds", str(N_INPUT), "--seed", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        status = fuzz_data.main()
    assert status == 0, capfd.readouterr().out


def test_inputs_vary(setting):
    random_ = fuzz_data.random.Random(1)
    made = {fuzz_data.mutate(random_, "rows.jsonl", json.dumps(fuzz_data.ROWS[1]).encode()) for _ in range(100)}
    assert len(made) > 50
