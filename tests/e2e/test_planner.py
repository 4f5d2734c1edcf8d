"""`forebay plan` for machines that are not here: what was measured there is foreseen, refusals are exact, more is never slower."""
import json
import math
from html.parser import HTMLParser

import pytest

from fb_command import ROOT, forebay, options, write_yaml

MIB, GIB = 1 << 20, 1 << 30
SHAPE = ("--preset", "qwen2.5-7b", "--machine", "h200", "cutoff_len=1024")


def plan(*words, code=0, env=None):
    result = forebay("plan", *words, "--json", env=env)
    assert result.code == code, result.err
    return json.loads(result.out)


def rows(n, micro=16):
    return f"per_device_train_batch_size={micro}", f"gradient_accumulation_steps={n // micro}"


# Seconds a step, everything in host memory, full recompute, 16 rows a micro-batch: bench/results/h200.txt, medians.
MEASURED = [(96, "1", 8.61), (32, "1", 3.84), (32, "0", 2.99)]


@pytest.mark.parametrize("n, clip, seconds", MEASURED, ids=str)
def test_what_was_measured_is_foreseen(n, clip, seconds):
    seen = plan(*SHAPE, *rows(n), "micro_batch=16", f"max_grad_norm={clip}", "recompute=full", "placement=stream", "slots=2",
                "activations=host", "hbm_budget=16GiB")
    assert abs(seen["step_seconds"] / seconds - 1) < 0.1


def test_the_whole_memory_is_worth_its_while():
    """With 139 GiB all of a 7B's state lives on the device, and the step is within 3 % of its arithmetic."""
    seen = plan(*SHAPE, *rows(32))
    time = seen["prediction"]
    assert time["busy"]["compute"] > 0.97 * seen["step_seconds"]
    assert time["tflops"] > 600
    assert seen["device_bytes"] > 100 * GIB
    assert seen["host_bytes"] - seen["host"]["save buffer"] < 32 * GIB    # which takes what is left


def test_figures_add_up():
    seen = plan(*SHAPE, *rows(32), "hbm_budget=24GiB")
    time = seen["prediction"]
    assert sum(seen["device"].values()) == seen["device_bytes"] and sum(seen["host"].values()) == seen["host_bytes"]
    assert math.isclose(time["busy"]["compute"] + sum(time["idle"].values()), seen["step_seconds"], rel_tol=1e-9)
    assert time["timeline_lost"] == 0
    for resource, busy in time["busy"].items():
        spans = [s for s in time["timeline"] if s["resource"] == resource]
        assert math.isclose(sum(s["end"] - s["begin"] for s in spans), busy, rel_tol=1e-6, abs_tol=1e-9)
        assert all(a["end"] <= b["begin"] + 1e-9 for a, b in zip(spans, spans[1:]))
    layout = seen["layout"]
    assert layout["micro_batch"] * layout["micro_batches"] >= 32 > layout["micro_batch"] * (layout["micro_batches"] - 1)


def test_more_is_never_slower():
    hbm = [plan(*SHAPE, *rows(32), "--hbm", f"{n}GiB")["step_seconds"] for n in (12, 24, 96, 141)]
    assert all(more <= less * (1 + 1e-5) for less, more in zip(hbm, hbm[1:]))
    assert hbm[-1] < 0.7 * hbm[0]
    link = [plan(*SHAPE, *rows(32), "--hbm", "24GiB", "--link", str(n))["step_seconds"] for n in (12, 55, 110)]
    assert all(more <= less * (1 + 1e-5) for less, more in zip(link, link[1:]))


@pytest.mark.parametrize("preset, words", [("llama-3.1-70b", ()), ("qwen2.5-14b", ("placement=stream",))], ids=str)
def test_refusal_is_exact(preset, words):
    """One percent too large is refused, with the shortfall and a key; what just fits is accepted."""
    job = ("--preset", preset, "--machine", "h200", "cutoff_len=1024", *rows(16), *words)
    short = plan(*job, "--ram", "64GiB", code=4)
    assert short["fits"] is False and "ram_budget" in short["reason"]
    need = short["host_bytes"]
    assert f"{(need - 64 * GIB) / MIB:.1f} MiB are short" in short["reason"]
    assert plan(*job, "--ram", need)["fits"] is True
    refused = forebay("plan", *job, "--ram", int(need * 0.99))
    assert refused.code == 4 and "raise ram_budget" in refused.last and "MiB are short" in refused.last


def test_refusal_for_the_device():
    job = (*SHAPE, *rows(16))
    short = plan(*job, "--hbm", "2GiB", code=4)
    assert "hbm_budget" in short["reason"] and "cutoff_len" in short["reason"]
    overhead = json.loads((ROOT / "profiles" / "h200.json").read_text())["overhead"]
    need = short["device_bytes"] + overhead
    assert plan(*job, "--hbm", need)["device_bytes"] <= short["device_bytes"]
    assert plan(*job, "--hbm", need - 4096, code=4)["fits"] is False


@pytest.mark.parametrize("placement", ["auto", "stream"])
def test_refusal_for_both(placement):
    """Neither memory is enough: one sentence names both shortfalls and both keys, and with these there is a plan."""
    job = ("--preset", "llama-3.1-70b", "--machine", "h200", "cutoff_len=1024", *rows(16), f"placement={placement}")
    refused = forebay("plan", *job, "--hbm", "1GiB", "--ram", "64GiB")
    device, host = refused.last.split("; and ")
    assert refused.code == 4 and "raise hbm_budget" in device and "raise ram_budget" in host, refused.last
    short = plan(*job, "--hbm", "1GiB", "--ram", "64GiB", code=4)
    assert short["reason"] in refused.last
    overhead = json.loads((ROOT / "profiles" / "h200.json").read_text())["overhead"]
    hbm, ram = short["device_bytes"] + overhead, short["host_bytes"]
    for text, need, have in (device, hbm, GIB), (host, ram, 64 * GIB):
        assert f"{(need - have) / MIB:.1f} MiB are short" in text
    assert plan(*job, "--hbm", hbm, "--ram", ram)["fits"] is True
    assert "; and " not in plan(*job, "--hbm", hbm, "--ram", "64GiB", code=4)["reason"]
    assert "; and " not in plan(*job, "--hbm", "1GiB", "--ram", ram, code=4)["reason"]


def test_what_is_fixed_stays():
    seen = plan(*SHAPE, *rows(32), "micro_batch=2", "recompute=selective", "slots=3", "passes=2", "placement=layers:4",
                "activations=host", "accumulators=host", "--ram", "256GiB")
    want = dict(micro_batch=2, micro_batches=16, passes=2, slots=3, home_layers=4, home_embedding=True, home_head=False,
                recompute="selective", activations="host", accumulators="host")
    assert {key: seen["layout"][key] for key in want} == want


def test_the_largest_fit_and_a_little_more_does_not():
    job = ("--preset", "qwen2.5-1.5b", "--machine", "rtx4090", "cutoff_len=4096", "per_device_train_batch_size=4")
    largest = plan(*job)["largest"]
    assert plan(*job, f"cutoff_len={largest['cutoff_len']}")["fits"]
    assert not plan(*job, f"cutoff_len={largest['cutoff_len'] + 64}", code=4)["fits"]
    assert plan(*job, f"per_device_train_batch_size={largest['rows_per_step']}")["fits"]


def test_the_page_stands_alone(tmp_path):
    class Page(HTMLParser):
        open, tags, text = [], {}, ""

        def handle_starttag(self, tag, attrs):
            self.tags[tag] = self.tags.get(tag, 0) + 1
            assert not {"src", "href", "onclick"} & dict(attrs).keys()
            if tag not in ("meta", "rect") or self.get_starttag_text().endswith("/>"):
                self.open.append(tag)

        def handle_startendtag(self, tag, attrs):
            self.tags[tag] = self.tags.get(tag, 0) + 1

        def handle_endtag(self, tag):
            if self.open and self.open[-1] == tag:
                self.open.pop()
            else:
                assert tag == "rect"

        def handle_data(self, data):
            self.text += data

    path = tmp_path / "plan.html"
    seen = plan(*SHAPE, *rows(32), "hbm_budget=24GiB", "--html", path)
    page = Page()
    page.feed(path.read_text())
    assert page.open == [] and page.tags["svg"] == 1 and page.tags["rect"] > 50
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    for name in [*seen["device"], *seen["host"]]:
        assert name in page.text
    assert f"{seen['step_seconds']:.3f} s" in page.text


def test_the_text_says_it_all():
    result = forebay("plan", *SHAPE, *rows(32), "hbm_budget=16GiB")
    assert result.code == 0, result.err
    for part in ("weights, low halves", "layer slots", "s foreseen", "compute", "host to device", "device to host", "host update",
                 "largest, all else the same", "with a link 1.5 times as fast", "rates of H200", "MiB of"):
        assert part in result.out
    bars = [line for line in result.out.splitlines() if line.startswith("  compute")]
    assert len(bars) == 1 and {"F", "B"} <= set(bars[0])


def test_the_same_question_has_the_same_answer():
    words = (*SHAPE, *rows(32), "hbm_budget=24GiB")
    assert forebay("plan", *words, "--json").out == forebay("plan", *words, "--json").out


def test_this_machine_by_its_measured_profile_or_a_guess(models, tmp_path):
    config = write_yaml(tmp_path / "run.yaml", options(models["tied"], None, None, hbm_budget="1GiB"))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    guessed = plan(config, env=env)
    assert "guessed" in guessed["machine"]["note"] and "forebay probe" in guessed["machine"]["note"]
    profile = json.loads((ROOT / "profiles" / "h200.json").read_text()) | {"name": "mine", "device": "cpu", "unified": True}
    (tmp_path / "cache" / "forebay").mkdir(parents=True)
    (tmp_path / "cache" / "forebay" / "machine.json").write_text(json.dumps(profile))
    measured = plan(config, env=env)
    assert measured["machine"]["name"] == "mine" and "measured on this machine" in measured["machine"]["note"]
    assert measured["step_seconds"] < guessed["step_seconds"]


@pytest.mark.parametrize("words, code, part", [
    ((*SHAPE, "--ram", "much"), 2, "--ram"), ((*SHAPE, "--link", "-3"), 2, "--link"), ((*SHAPE, "--hbm", "0"), 2, "--hbm"),
    (("--preset", "qwen9", "--machine", "h200"), 2, "qwen2.5-7b"), (("--preset", "qwen2.5-7b", "--machine", "h9000"), 3, "h9000"),
    (("--preset",), 2, "nothing follows"), (("--machine", "h200"), 2, "a word is missing"),
    ((*SHAPE, "placement=layers:99"), 2, "28 layers"),
    ((*SHAPE, "--html", "/nowhere/at/all.html"), 1, "/nowhere/at/all.html")], ids=str)
def test_bad_words(words, code, part):
    result = forebay("plan", *words)
    assert result.code == code and part in result.last, result.err
