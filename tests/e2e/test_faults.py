"""Whatever fails, the run ends in a sentence or as if nothing had been, and goes on; fault_campaign.py does this at length."""
import pytest

from fault_campaign import Campaign, Verdict
from fb_command import FOREBAY, forebay, options, run, write_yaml

FAULTS, SEED, JOBS = 40, 7, 2


def test_faults_at_many_points(tmp_path):
    bad, outcomes = [], set()
    for fault, verdict in Campaign(tmp_path, SEED).run(FAULTS, JOBS):
        outcomes.add(verdict.outcome)
        bad += [f"{verdict.fault}: {complaint}" for complaint in verdict.complaints]
    assert not bad, "\n".join(bad)
    assert outcomes == {"recovered", "a sentence", "killed"}


def test_the_campaign_sees_what_is_wrong(tmp_path):
    """A judge that never finds fault would prove nothing."""
    campaign = Campaign(tmp_path, SEED)
    out = tmp_path / "out"
    config = campaign.config(out, 0)
    assert campaign.start(config)[0] == 0

    def complaints(judge, *args):
        verdict = Verdict("")
        judge(verdict, *args)
        return verdict.complaints
    assert not complaints(campaign.judge_folder, out, 0) and not complaints(campaign.judge_resumed, out, 0, 0, "")
    with open(out / "checkpoint-4" / "config.json", "r+b") as f:
        f.write(b" ")
    assert len(complaints(campaign.judge_folder, out, 0)) == 1
    (out / "checkpoint-4" / "config.json").unlink()
    assert len(complaints(campaign.judge_folder, out, 0)) == 1
    (out / "checkpoint-8.tmp").mkdir()
    assert any("left behind" in c for c in complaints(campaign.judge_resumed, out, 0, 0, ""))
    fault = campaign.draw(1)[0][2]
    for code, err in (None, ""), (1, ""), (1, "forebay: a\nforebay: b\n"), (-6, "forebay: a\n"), (0, "forebay: a\n"), \
            (99, "forebay: a\n==1==ERROR: LeakSanitizer\n"), (1, "Traceback\nforebay: a\n"):
        assert complaints(campaign.judge_end, fault, code, err), (code, err)
    assert not complaints(campaign.judge_end, fault, 1, "step 1\nforebay: a\n")


@pytest.mark.parametrize("how", [dict(), dict(compute_dtype="bfloat16", max_grad_norm="0"),
                                 dict(compute_dtype="bfloat16", slots=1)])
def test_nothing_is_read_before_it_is_written(models, rows24, tmp_path, how):
    """Memory of the device and of the host's allocator is filled with one byte or another, and no bit depends on it."""
    made = {}
    for byte in 0, 127, 255:
        out = tmp_path / f"out-{byte}"
        config = write_yaml(tmp_path / f"{byte}.yaml", options(models["untied"], rows24, out,
                                                               backend=f"fault:poison={byte}", **how))
        result = run(FOREBAY, "train", config, env={"MALLOC_PERTURB_": str(byte)})
        assert result.code == 0, result.err
        made[byte] = (out / "model.safetensors").read_bytes()
    assert made[0] == made[127] == made[255]


@pytest.mark.parametrize("spec", ["fail=wrote:1", "full=0", "later"])
def test_a_fault_that_is_not_understood_is_refused(models, rows24, tmp_path, spec):
    config = write_yaml(tmp_path / "run.yaml", options(models["tied"], rows24, tmp_path / "out"))
    result = forebay("train", config, env={"FOREBAY_FAULT_IO": spec})
    assert result.code == 2 and "FOREBAY_FAULT_IO" in result.last and "unset it" in result.last
