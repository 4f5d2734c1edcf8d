"""`forebay bench`: the figures agree with one another and with a count by hand, and the trace with the figures."""
import json

import pytest

from fb_command import GOLDEN, forebay, options, read_log, steps, write_yaml

MODEL = GOLDEN / "qwen2-default" / "model"
ROWS, LENGTH = 8, 64
BATCH = [f"cutoff_len={LENGTH}", "per_device_train_batch_size=2", "gradient_accumulation_steps=4", "backend=cpu"]


def bench(*args, code=0):
    result = forebay("bench", *args)
    assert result.code == code, f"exit {result.code}, expected {code}\n{result.out}\n{result.err}"
    return result


def report(*args):
    return json.loads(bench("--model", MODEL, "--json", *BATCH, *args).out)


def config():
    return json.loads((MODEL / "config.json").read_text())


def close(a, b, tolerance=1e-6):
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def events(path):
    """{track name: its complete events, in file order}"""
    trace = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for e in trace:
        if e["ph"] == "X":
            tracks[names[e["pid"], e["tid"]]].append(e)
    return tracks


MANY_WAYS = [
    [],
    ["compute_dtype=bfloat16", "recompute=full"],
    ["max_grad_norm=0", "recompute=none", "slots=all"],
    ["overlap=false"],
    ["micro_batch=3", "update_threads=3"],
    ["backend=fault:seed=3,delay=300"],
    ["placement=resident", "passes=2"],
    ["placement=layers:1", "max_grad_norm=0", "backend=fault:seed=4,delay=300"],
]


@pytest.mark.parametrize("more", MANY_WAYS, ids=" ".join)
def test_time_is_accounted_for(more, tmp_path):
    r = report("--steps", "3", "--trace", tmp_path / "trace.json", *more)
    assert r["tokens_per_step"] == ROWS * LENGTH
    assert r["spans_lost"] == 0
    assert [s["counted"] for s in r["steps"]] == [False, False, True]
    for s in r["steps"] + [r["median"]]:
        assert s["seconds"] > 0
        assert close(s["tokens_per_second"] * s["seconds"], ROWS * LENGTH)
        assert close(sum(s["idle_percent_by_cause"].values()), s["idle_percent"])
        assert 0 <= s["idle_percent"] <= 100
        assert all(value >= 0 for value in s["idle_percent_by_cause"].values())
    assert r["median"]["seconds"] == r["steps"][2]["seconds"]
    assert r["start_up_seconds"] >= r["steps"][0]["seconds"]
    tracks = events(tmp_path / "trace.json")
    for track in tracks.values():
        for before, after in zip(track, track[1:]):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.002     # spans are rounded to a nanosecond
    # What the trace shows of computing, over the steps, is what the figures say.
    computing = sum(e["dur"] for e in tracks["compute"] if e["cat"] == "compute")
    said = sum(s["window_seconds"] * (1 - s["idle_percent"] / 100) for s in r["steps"])
    assert abs(computing * 1e-6 - said) < 1e-5 + 1e-6 * len(tracks["compute"])


def test_everything_that_runs_is_in_the_trace(tmp_path):
    n_step = 3
    report("--steps", n_step, "--trace", tmp_path / "trace.json", "recompute=full")
    tracks = events(tmp_path / "trace.json")
    layers, micros = config()["num_hidden_layers"], 4

    def count(track, name):
        return sum(e["name"].startswith(name) for e in tracks[track])
    assert count("compute", "forward") == count("compute", "backward") == n_step * layers * micros
    for track, name in ("compute", "head and loss"), ("compute", "embedding gradient"), ("h2d", "embedding rows"), ("h2d", "batch"):
        assert count(track, name) == n_step * micros
    assert {e["args"].get("micro_batch") for e in tracks["compute"] if e["name"] == "forward, layer 0"} == set(range(micros))
    # Every weight goes up at least once a step and not twice where its slot is kept; every gradient comes down.
    blocks = layers + 2
    assert n_step * (layers + 1) <= count("h2d", "weights") <= n_step * (2 * layers + 2)
    assert count("d2h", "gradient") >= n_step * blocks
    # The update of the last step may not be in: its span ends after the step.
    updated = {e["name"] for name in tracks if name.startswith("update worker") for e in tracks[name]}
    assert updated == {"update, embedding", "update, head"} | {f"update, layer {i}" for i in range(layers)}
    held = [e for name in tracks if name.startswith("slot") for e in tracks[name]]
    assert {e["name"] for e in held} == {f"layer {i}" for i in range(layers)}
    assert len(held) == sum(e["name"].startswith("weights, layer") for e in tracks["h2d"])


def test_operations_are_counted_right():
    """Against a count by hand: 6 for each weight and token, and the products' own sizes."""
    c = config()
    h, f, v, n = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_hidden_layers"]
    head = c.get("head_dim") or h // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    tables = 1 if c["tie_word_embeddings"] else 2
    weights = n * (h * (q + 2 * kv) + q + 2 * kv + q * h + 3 * h * f + 2 * h) + tables * v * h + h
    tokens, learned = ROWS * LENGTH, ROWS * (LENGTH - 1)
    scores = n * 2 * 2 * q * LENGTH / 2                      # q k^T and p v, a token, half masked
    forward = 2 * n * (h * (q + 2 * kv) + q * h + 3 * h * f) + scores
    loss = 3 * 2 * h * v * learned
    down = 2 * n * h * f                                     # its result is the next block's input, and is kept
    for recompute, again in dict(none=0, selective=0, full=forward - down).items():
        r = report("--steps", "1", f"recompute={recompute}")
        s = r["steps"][0]
        assert r["parameters"] == weights
        assert close(s["tflops"] * s["seconds"], 6e-12 * weights * tokens)
        assert close(s["tflops_with_attention"] * s["seconds"], 1e-12 * (6 * weights + 3 * scores) * tokens)
        assert close(s["tflops_hardware"] * s["seconds"], 1e-12 * ((3 * forward + again) * tokens + loss))


@pytest.mark.parametrize("activations, recompute, copies", [("device", "full", 0), ("host", "full", 1), ("host", "none", 2)])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_block_inputs_on_the_host_and_several_passes(passes, activations, recompute, copies, tmp_path):
    """Inputs, and what a layer saves beside its own, that leave the device; micro-batches in turns: all of it is traced."""
    r = report("--steps", "1", "--trace", tmp_path / "trace.json", f"passes={passes}", f"activations={activations}",
               f"recompute={recompute}", "placement=stream", "accumulators=host")
    assert (r["passes"], r["block_inputs_on_host"]) == (passes, activations == "host")
    assert r["spans_lost"] == 0
    tracks = events(tmp_path / "trace.json")
    for way in "h2d", "d2h":
        assert sum(e["name"].startswith("block input") for e in tracks[way]) == copies * config()["num_hidden_layers"] * 4
        for name in "accumulator", "row gradients":
            assert any(e["name"].startswith(name) for e in tracks[way]) == (passes > 1)


def test_the_same_seed_is_the_same_run():
    """Figures aside: losses do not depend on tracing, slots or threads."""
    def losses(*more):
        return [(s["loss"], s["grad_norm"]) for s in report("--steps", "3", *more)["steps"]]
    first = losses("seed=3")
    assert first == losses("seed=3", "slots=all", "overlap=false", "update_threads=1")
    assert first != losses("seed=4")


def test_memory_is_what_was_planned():
    """Resident: with the libraries' files."""
    memory = report("--steps", "2", "placement=stream")["memory"]
    assert memory["device"]["measured"] == memory["device"]["planned"]
    assert abs(memory["host"]["measured"] - memory["host"]["planned"]) <= 0.02 * memory["host"]["planned"] + (32 << 20)
    assert memory["host"]["resident"] >= memory["host"]["measured"]


def test_text_says_the_same(tmp_path):
    out = bench("--model", MODEL, "--steps", "3", *BATCH).out
    for part in ("step 1/3 (not counted)", "step 3/3", "median of 1", "TFLOPS", "idle", "bytes a parameter", "start-up:", "6 P T"):
        assert part in out
    json_run = bench("--model", MODEL, "--steps", "1", "--json", *BATCH)
    assert "step 1/1" in json_run.err       # one object on standard output, progress beside it


@pytest.mark.parametrize("args, code, part", [
    (["--preset", "qwen9"], 2, "preset 'qwen9' is not known; known are: qwen2.5-0.5b"),
    ([], 2, "--preset NAME, one of qwen2.5-0.5b"),
    (["--preset", "smollm2-135m", "--model", "x"], 2, "give one"),
    (["--preset"], 2, "nothing follows --preset"),
    (["--preset", "smollm2-135m", "--steps", "0"], 2, "--steps wants a number"),
    (["--preset", "smollm2-135m", "cutoff_len=1"], 2, "at least 2"),
    (["--preset", "smollm2-135m", "cutof_len=1"], 2, "cutoff_len"),
    (["--model", "no-such-folder"], 3, "no-such-folder"),
    (["--preset", "qwen2.5-72b", "backend=cpu", "ram_budget=1GiB"], 4, "are short"),
    (["--preset", "smollm2-135m", "stray"], 2, "one word too many"),
], ids=str)
def test_what_cannot_be_is_one_sentence(args, code, part):
    result = bench(*args, code=code)
    assert part in result.last and len(result.err.splitlines()) == 1


def test_a_trace_that_cannot_be_written(tmp_path):
    result = bench("--model", MODEL, "--steps", "1", "--trace", tmp_path / "none" / "trace.json", *BATCH, code=1)
    assert "cannot be written" in result.last


def test_training_is_traced_and_not_changed(models, rows24, tmp_path):
    for name, more in dict(plain={}, traced=dict(trace=tmp_path / "trace.json")).items():
        result = forebay("train", write_yaml(tmp_path / f"{name}.yaml", options(models["tied"], rows24, tmp_path / name, **more)))
        assert result.code == 0, result.err
    plain, traced = (tmp_path / name / "model.safetensors" for name in ("plain", "traced"))
    assert plain.read_bytes() == traced.read_bytes()
    assert len(steps(read_log(tmp_path / "traced"))) == 6
    tracks = events(tmp_path / "trace.json")
    assert sum(e["name"] == "loss and norms, head" for e in tracks["d2h"]) >= 6
