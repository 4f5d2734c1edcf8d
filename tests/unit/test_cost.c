/* Seconds against closed forms: FLOP over rate, bytes over rate, for a machine whose every rate is a round number. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/plan/cost.c"
#include "temp_dir.h"
#include "tiny_model.h"
#include "planning_rig.h"

static const tiny_model plain = { "llama", 32, 48, 3, 4, 2, 8, 96, false, NULL, 0 };
static const tiny_model sliding = { "mistral", 32, 48, 3, 4, 2, 8, 96, false, ", \"sliding_window\": 4", 0 };

static bool is_close(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b));
}

static fb_machine nothing_costs(void)
{
    fb_machine m = rig_machine();
    m.matmul_peak = m.memory_rate = m.attention_fwd.y[0] = m.attention_bwd.y[0] = 1e30;
    return m;
}

static fb_costs costs(const fb_plan_request *r, const fb_machine *m, uint32_t rows)
{
    return fb_costs_of(r, m, &(fb_load){ .rows_per_step = rows });
}

/* Of a layer's matrices: 2 FLOP a weight and token forward, 4 backward, 2 of the matrices whose result is not kept again; the down
 * projection's result is the next block's input, so nothing runs it again. */
static void products_are_counted(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_machine machine = nothing_costs();
    machine.matmul_peak = 1e9;
    fb_plan_request r = rig_request(&m, 2, 2);
    fb_costs c = costs(&r, &machine, 2);
    double t = 32, attn = 32 * (32 + 2 * 16) + 32 * 32, mlp = 3 * 32 * 48, gate_up = 2 * 32 * 48;
    assert_true(is_close(c.whole.forward[0], 2 * t * (attn + mlp) / 1e9));
    assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_NONE], 4 * t * (attn + mlp) / 1e9));
    assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_SELECTIVE], 4 * t * (attn + mlp) / 1e9));
    assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_FULL], (4 * t * (attn + mlp) + 2 * t * (attn + gate_up)) / 1e9));
    assert_true(is_close(c.whole.head, 6 * t * 32 * 96 / 1e9));
    /* at a side of 8192 the sum takes as long as its product; 8 bytes an element whatever t, at 0.7 of that */
    machine.matmul_accumulate = 0.5;
    double sum = 8 * (attn + mlp) / (0.7 * 8 * 8192.0 * 8192 / (2 * 8192.0 * 8192 * 8192 / 1e9));
    fb_costs slower = costs(&r, &machine, 2);
    assert_true(is_close(slower.whole.backward[0][FB_RECOMPUTE_NONE], 4 * t * (attn + mlp) / 1e9 + sum));
    assert_true(is_close(slower.whole.forward[0], c.whole.forward[0]));
    fb_manifest_free(&m);
}

/* Thin products run at the rate that the curve gives for their least dimension: 16 (kv) < 32 (hidden, tokens). */
static void thin_products_are_slower(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_machine machine = nothing_costs();
    machine.matmul_peak = 1e9;
    machine.matmul_rows = (fb_curve){ 2, { 8, 32 }, { 0.25, 1 } };
    fb_plan_request r = rig_request(&m, 2, 2), one = rig_request(&m, 2, 1);
    one.row_len = 8;
    fb_costs whole = costs(&r, &machine, 2), thin = costs(&one, &machine, 2);
    /* a quarter of the tokens at a quarter of the rate */
    assert_true(is_close(thin.whole.forward[0], whole.whole.forward[0]));
    fb_manifest_free(&m);
}

/* Two products over the pairs that the mask leaves; five of that size in the backward; documents and windows cut the pairs. */
static void attention_is_counted_by_documents(void **unused)
{
    (void)unused;
    for (int slides = 0; slides < 2; slides++) {
        fb_manifest m;
        tiny_manifest(&m, slides ? &sliding : &plain);
        fb_machine machine = nothing_costs();
        machine.attention_fwd.y[0] = 1e9, machine.attention_bwd.y[0] = 5e8;
        fb_plan_request r = rig_request(&m, 2, 2);
        for (uint32_t len = 8; len <= 16; len += 8) {
            fb_costs c = fb_costs_of(&r, &machine, &(fb_load){ .rows_per_step = 2, .doc_len = len });
            double all = 32 * len / 2.0, near = 32 * (4 - 16 / (2.0 * len)); /* pairs: T (w - w^2 / 2 L) */
            assert_true(is_close(c.whole.forward[0], 4 * 32 * all / 1e9));
            assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_NONE], 10 * 32 * all / 5e8));
            assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_FULL], 10 * 32 * all / 5e8 + 4 * 32 * all / 1e9));
            assert_true(is_close(c.whole.forward[1], 4 * 32 * (slides ? near : all) / 1e9));
        }
        fb_manifest_free(&m);
    }
}

/* More is kept, less is run again. */
static void keeping_more_is_never_dearer(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_machine machine = rig_machine();
    fb_plan_request r = rig_request(&m, 6, 2);
    fb_costs c = costs(&r, &machine, 6);
    assert_true(c.whole.backward[0][FB_RECOMPUTE_NONE] < c.whole.backward[0][FB_RECOMPUTE_SELECTIVE]);
    assert_true(c.whole.backward[0][FB_RECOMPUTE_SELECTIVE] < c.whole.backward[0][FB_RECOMPUTE_FULL]);
    /* A full recompute is the forward again, but for the down projection. */
    double down = 2.0 * 32 * 32 * 48 / machine.matmul_peak;
    assert_true(is_close(c.whole.backward[0][FB_RECOMPUTE_FULL] - c.whole.backward[0][FB_RECOMPUTE_NONE],
                         c.whole.forward[0] - down));
    fb_manifest_free(&m);
}

/* The last micro-batch holds what is left of the step. */
static void the_last_micro_batch_may_be_smaller(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_machine machine = rig_machine();
    fb_plan_request r = rig_request(&m, 7, 3), single = rig_request(&m, 1, 1);
    fb_costs c = costs(&r, &machine, 7), one = costs(&single, &machine, 1);
    assert_int_equal(c.n_micro, 3);
    assert_memory_equal(&c.last, &one.whole, sizeof c.last);
    assert_int_equal(c.whole.rows_size, 3 * 16 * 32 * 2);
    assert_ptr_equal(fb_costs_micro(&c, 1), &c.whole);
    assert_ptr_equal(fb_costs_micro(&c, 2), &c.last);
    fb_manifest_free(&m);
}

/* Bytes a parameter: 26 of the host's update in bfloat16 (hi, lo, m, v both ways, the gradient once), 28 in float32; on the device
 * two more in bfloat16, as a gradient may come in float32; 4 + 2 to round one. */
static void bytes_a_parameter(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_machine machine = rig_machine();
    fb_plan_request r = rig_request(&m, 2, 2);
    fb_costs c = costs(&r, &machine, 2);
    assert_true(c.element == 26 && is_close(c.update_rate, 2e6));
    r.act = FB_F32;
    c = costs(&r, &machine, 2);
    assert_true(c.element == 28 && is_close(c.update_rate, 2e6 * 26 / 28));
    assert_true(is_close(fb_cost_update(&machine, FB_BF16, 1000), 28e3 / 1e9));
    assert_true(is_close(fb_cost_update(&machine, FB_F32, 1000), 28e3 / 1e9));
    assert_true(is_close(fb_cost_grad_out(&machine, FB_BF16, 1000), 6e3 / 1e9));
    assert_true(is_close(fb_cost_zero(&machine, 1000), 4e3 / 1e9));
    fb_manifest_free(&m);
}

static void nothing_takes_less_than_its_launch(void **unused)
{
    (void)unused;
    fb_machine machine = nothing_costs();
    machine.launch = 1e-3, machine.copy_latency = 2e-3;
    fb_manifest m;
    tiny_manifest(&m, &plain);
    fb_plan_request r = rig_request(&m, 2, 2);
    fb_costs c = costs(&r, &machine, 2);
    assert_true(is_close(c.whole.forward[0], 9e-3)); /* norm, qkv, rope, attention, out, norm, gate and up, act, down */
    assert_true(is_close(fb_cost_zero(&machine, 1), 1e-3));
    assert_true(is_close(fb_cost_h2d(&machine, 1), 2e-3) && is_close(fb_cost_d2h(&machine, 1), 2e-3));
    assert_true(is_close(fb_cost_h2d(&machine, 1u << 30), 0x1p30 / 1e7));
    fb_manifest_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_counted),
        cmocka_unit_test(thin_products_are_slower),
        cmocka_unit_test(attention_is_counted_by_documents),
        cmocka_unit_test(keeping_more_is_never_dearer),
        cmocka_unit_test(the_last_micro_batch_may_be_smaller),
        cmocka_unit_test(bytes_a_parameter),
        cmocka_unit_test(nothing_takes_less_than_its_launch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
