"""What the plan says a run will hold, and what the operating system saw it hold."""
import json
import subprocess
import time

import pytest

from fb_checkpoint import make_model, make_rows
from fb_command import FOREBAY, forebay, options, train, write_rows, write_yaml

MIB = 1 << 20
LENGTH = 96      # tokens in every row of the big run
LAYER_BYTES = 4 * (4 * 256 * 256 + 3 * 256 * 1024)   # its matrices in one layer


def plan(config, code=0):
    result = forebay("plan", config, "--json")
    assert result.code == code, result.err
    return json.loads(result.out)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """10.5 million parameters: any one component of their state, forgotten, exceeds the tolerance."""
    at = tmp_path_factory.mktemp("big")
    model = make_model(at / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6, vocab_size=8192,
                       num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512)
    return model, write_rows(at / "rows.jsonl", make_rows(16, vocab=8192, length=(LENGTH, LENGTH + 1)))


def big_options(big, out, **more):
    """The plan goes by cutoff_len, the run by the longest row: made equal."""
    return options(*big, out, cutoff_len=LENGTH, **more)


def held(config):
    """Runs `train` and returns the most anonymous and shared memory that it was seen to hold (page cache of mapped
    files is not its own)."""
    process = subprocess.Popen([FOREBAY, "train", config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    peak = 0
    while process.poll() is None:
        try:
            status = dict(line.split(":", 1) for line in open(f"/proc/{process.pid}/status"))
            peak = max(peak, sum(int(status[key].split()[0]) for key in ("RssAnon", "RssShmem")) * 1024)
        except (FileNotFoundError, KeyError, ProcessLookupError):
            pass                                    # it ended between the two looks
        time.sleep(0.005)
    text = process.stdout.read().decode()
    assert process.returncode == 0, text
    return peak


@pytest.mark.parametrize("more", [dict(), dict(compute_dtype="bfloat16", recompute="none"),
                                  dict(slots="all", recompute="full"), dict(max_grad_norm="0")], ids=str)
def test_planned_bytes_are_measured_bytes(more, big, tmp_path):
    config = write_yaml(tmp_path / "run.yaml", big_options(big, tmp_path / "out", **more))
    ledger = plan(config)
    assert ledger["fits"] is True
    planned = ledger["host_bytes"] + ledger["device_bytes"]     # the cpu back end's arena is host memory too
    measured = held(config)
    assert abs(measured - planned) <= max(32 * MIB, 0.02 * planned), \
        f"planned {planned / MIB:.1f} MiB, measured {measured / MIB:.1f} MiB"


def test_the_run_reports_planned_against_measured(big, tmp_path):
    config = write_yaml(tmp_path / "run.yaml", big_options(big, tmp_path / "out", max_steps=1))
    result = forebay("train", config)
    assert result.code == 0, result.err
    said = (result.out + result.err + (tmp_path / "out" / "trainer_log.jsonl").read_text()).lower()
    assert "planned" in said and "measured" in said


def test_ledger(models, rows24, big, tmp_path):
    config = write_yaml(tmp_path / "small.yaml", options(models["tied"], rows24, tmp_path / "out"))
    small = plan(config)
    assert small["fits"] is True
    assert small["step_seconds"] is None or small["step_seconds"] > 0   # null where the machine was not measured
    assert not list((tmp_path / "out").glob("*.safetensors"))      # a plan trains nothing
    large = plan(write_yaml(tmp_path / "large.yaml", big_options(big, tmp_path / "out2")))
    assert large["host_bytes"] > 12 * 10.5e6 > small["host_bytes"]      # 12 bytes of state a parameter at the least
    assert large["device_bytes"] > small["device_bytes"] > 0


def test_a_slot_holds_a_layer(big, tmp_path):
    need = {slots: plan(write_yaml(tmp_path / "run.yaml", big_options(big, tmp_path / "out", slots=slots)))
            for slots in (2, 3, "all")}
    two, three, every = (need[slots]["device_bytes"] for slots in (2, 3, "all"))
    assert LAYER_BYTES <= three - two <= 1.1 * LAYER_BYTES
    assert 4 * LAYER_BYTES <= every - two <= 1.1 * 4 * LAYER_BYTES


def test_a_budget_just_large_enough_is_enough(big, tmp_path):
    """The same run fits in what the plan asks for, and is refused well below."""
    need = plan(write_yaml(tmp_path / "any.yaml", big_options(big, tmp_path / "out")))["device_bytes"]
    train(tmp_path / "out", *big, max_steps=1, cutoff_len=LENGTH, hbm_budget=need)
    less = write_yaml(tmp_path / "less.yaml", big_options(big, tmp_path / "less", hbm_budget=need // 4))
    assert plan(less, code=4)["fits"] is False
