"""forebay probe: what it writes reads back, and is of a possible order.  Nothing here judges how fast the machine is."""
import json

import pytest

from fb_command import ROOT, forebay


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    at = tmp_path_factory.mktemp("probe")
    result = forebay("probe", "--out", at / "here.json", "--disk", at, "backend=cpu")
    assert result.code == 0, result.err
    assert [path.name for path in at.iterdir()] == ["here.json"]        # the disk's file is gone
    return result, json.loads((at / "here.json").read_text())


def rates(curve):
    xs, ys = zip(*curve)
    assert list(xs) == sorted(set(xs)) and min(ys) > 0
    return ys


def test_the_profile_is_complete_and_possible(probed):
    result, profile = probed
    shipped = json.loads((ROOT / "profiles" / "h200.json").read_text())
    assert set(shipped) - {"sources", "notes"} <= set(profile)          # all that a shipped one has
    assert profile["measured"] is True and profile["unified"] is True and profile["device"] == "cpu"
    assert profile["measurement"]["backend"] == "cpu" and profile["measurement"]["forebay"]
    assert max(rates(profile["matmul_rows"])) == 1 and 0 < profile["matmul_accumulate"] <= 1
    # Threads that copy share the cores and the memory: both at once are no faster than each alone, but for what drifts.
    for way in ("h2d", "d2h"):
        assert 0 < profile[way + "_both"] <= 1.5 * max(rates(profile[way]))
    assert 0 < profile["dram_dma"] <= 1.5 * profile["dram"]
    for name in ("attention_fwd", "attention_bwd", "update"):
        rates(profile[name])
    assert profile["update"][-1][0] == profile["cores"]
    assert max(rates(profile["attention_fwd"])) < 2 * profile["matmul_peak"]
    assert 0 < profile["launch"] < 0.01 and 0 < profile["copy_latency"] < 0.01
    assert profile["disk_write"] > 0 and profile["disk_read"] > 0
    physical = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    assert 0 < profile["ram"] <= physical
    for word in ("products, warm", "AdamW, by threads", "host to device", "disk, written and read"):
        assert word in result.out


def test_what_it_does_not_take_is_refused(tmp_path):
    for words, code, sentence in ((["learning_rate=1"], 2, "'learning_rate=1' says nothing about a machine"),
                                  (["--out"], 2, "nothing follows --out"),
                                  (["backend=gpu"], 2, "backend"),
                                  (["--json"], 2, "unknown option --json")):
        result = forebay("probe", *words)
        assert result.code == code and sentence in result.last, result.err


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    for words in (["--out", tmp_path / "none" / "f.json"], ["--disk", tmp_path / "none"]):
        result = forebay("probe", *words, "backend=cpu")
        assert result.code == 1 and str(tmp_path / "none") in result.last, result.err
        assert "matrix products" not in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["alloc:9", "record:60"])
def test_a_failing_device_ends_it_with_its_sentence(fault, tmp_path):
    result = forebay("probe", "--out", tmp_path / "f.json", f"backend=fault:fail={fault}")
    name, count = fault.split(":")
    assert result.code == 1 and f"injected failure of {name}, call {count}" in result.last, result.err
    assert not list(tmp_path.iterdir())
