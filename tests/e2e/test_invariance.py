"""What decides how a run goes, but not what is learned, changes no bit of the final weights."""
import numpy as np
import pytest

from fb_checkpoint import make_rows, read_model
from fb_command import cpu_has, steps, train, write_rows

VARIANTS = {
    "slots 3": dict(slots=3), "slots all": dict(slots="all"),
    "no overlap": dict(overlap=False),
    "1 update thread": dict(update_threads=1), "2 update threads": dict(update_threads=2),
    "5 update threads": dict(update_threads=5),
    "1 compute thread": dict(compute_threads=1), "2 compute threads": dict(compute_threads=2),
    "keep all": dict(recompute="none"), "recompute all": dict(recompute="full"),
    "scalar": dict(update_kernel="scalar"), "avx2": dict(update_kernel="avx2"), "avx512": dict(update_kernel="avx512"),
    "everything else": dict(slots="all", overlap=False, update_threads=1, compute_threads=1, recompute="full",
                            update_kernel="scalar"),
}
BASE = dict(slots=2, overlap=True, recompute="selective")
FLAG = {"avx2": "avx2", "avx512": "avx512f"}
KINDS = [(dtype, model) for dtype in ("float32", "bfloat16") for model in ("tied", "untied")]


def final_bytes(out, models, rows, dtype, model, **more):
    train(out, models[model], rows, compute_dtype=dtype, **{**BASE, **more})
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def base(tmp_path_factory, models, rows24):
    """The run that the others must equal, made once for each dtype and model."""
    made = {}

    def get(dtype, model):
        if (dtype, model) not in made:
            out = tmp_path_factory.mktemp("base") / "out"
            made[dtype, model] = final_bytes(out, models, rows24, dtype, model)
            before, after = read_model(models[model]), read_model(out)
            assert all(not np.array_equal(before[name], after[name]) for name in before)
        return made[dtype, model]
    return get


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype,model", KINDS)
def test_same_bits(dtype, model, variant, base, models, rows24, tmp_path):
    if variant in FLAG and not cpu_has(FLAG[variant]):
        pytest.skip(f"this processor has no {variant}")
    assert final_bytes(tmp_path / "out", models, rows24, dtype, model, **VARIANTS[variant]) == base(dtype, model)


@pytest.mark.parametrize("dtype,model", KINDS)
def test_update_under_the_backward_or_the_next_forward(dtype, model, base, models, rows24, tmp_path):
    off, never = (final_bytes(tmp_path / f"clip{clip}", models, rows24, dtype, model, max_grad_norm=clip)
                  for clip in ("0", "1e9"))
    assert off == never
    assert off != base(dtype, model)        # clipping at 1 does something here


@pytest.mark.parametrize("dtype,model", KINDS)
def test_only_the_cut_into_micro_batches_counts(dtype, model, base, models, rows24, tmp_path):
    cut = dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, micro_batch=2)
    assert final_bytes(tmp_path / "out", models, rows24, dtype, model, **cut) == base(dtype, model)


CUTS = {"4 x 2": dict(per_device_train_batch_size=4, gradient_accumulation_steps=2),
        "2 x 4": dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
        **{f"micro_batch {n}": dict(micro_batch=n) for n in (4, 2, 1)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models):
    """Three steps of eight rows, each step in one piece."""
    at = tmp_path_factory.mktemp("whole")
    rows = write_rows(at / "rows.jsonl", make_rows(24, seed=3))
    kind = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1)
    return rows, {model: steps(train(at / model, models[model], rows, **kind)) for model in models}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_accumulation_is_one_batch(model, cut, whole, models, tmp_path):
    rows, want = whole
    kind = {**dict(per_device_train_batch_size=8, gradient_accumulation_steps=1), **CUTS[cut]}
    log = steps(train(tmp_path / "out", models[model], rows, **kind))
    assert len(log) == len(want[model]) == 3
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([line[key] for line in log], [line[key] for line in want[model]], rtol=1e-6, atol=0)
    assert [line["tokens"] for line in log] == [line["tokens"] for line in want[model]]
