/* The simulated step against closed forms, and against what no schedule can break. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/plan/simulate.c"
#include "temp_dir.h"
#include "tiny_model.h"
#include "planning_rig.h"

static const tiny_model untied = { "llama", 32, 48, 5, 4, 2, 8, 96, false, NULL, 0 };
static const tiny_model tied = { "qwen3", 32, 48, 4, 4, 2, 8, 96, true, NULL, 0 };
static const tiny_model one_layer = { "llama", 32, 48, 1, 4, 2, 8, 96, false, NULL, 0 };
static const tiny_model *const models[] = { &untied, &tied, &one_layer };

static fb_timeline simulate(fb_plan *p, const fb_plan_request *r, const fb_layout *l, const fb_machine *m, const fb_load *load)
{
    fb_timeline t = { 0 };
    fb_costs c = fb_costs_of(r, m, load);
    fb_plan_lay_out(p, r, l);
    fb_simulate(&t, p, r->manifest, &c);
    return t;
}

static bool is_close(double a, double b, double share)
{
    return fabs(a - b) <= share * fmax(fabs(a), fabs(b));
}

/* What the compute stream has to do, added up from the costs. */
static double compute_of(const fb_plan *p, const fb_plan_request *r, const fb_costs *c)
{
    const fb_manifest *m = r->manifest;
    double sum = 0;
    for (uint32_t i = 0; i < r->n_micro; i++) {
        const fb_micro_costs *micro = fb_costs_micro(c, i);
        for (uint32_t l = 0; l < m->cfg.n_layer; l++)
            sum += micro->forward[0] + micro->backward[0][fb_plan_policy(p, m->cfg.n_layer, l)];
        sum += micro->head + micro->embed_grad + (p->layout.home_embed ? micro->look_up : 0);
    }
    for (uint32_t b = 0; b < m->n_block; b++) {
        sum += fb_cost_grad_out(c->machine, r->act, m->blocks[b].extent);
        sum += fb_plan_at_home(p, m, b) ? fb_cost_update(c->machine, r->act, m->blocks[b].extent) : 0;
    }
    sum += fb_cost_zero(c->machine, m->blocks[0].extent) + fb_cost_zero(c->machine, m->blocks[m->n_block - 1].extent);
    return sum;
}

enum { N_LAYOUT = 2 * 2 * 2 * 3 * 3 };

static fb_layout layout_number(uint32_t i, uint32_t n_layer)
{
    fb_layout l = { .n_pass = 1 + i % 2, .kept_on_host = i / 2 % 2, .acc_on_device = i / 4 % 2, .slots = 1 + i / 8 % 3 };
    uint32_t home = i / 24 % 3;
    l.home_layers = home == 2 ? n_layer : home;
    l.home_embed = l.home_head = home > 0;
    l.recompute = FB_RECOMPUTE_FULL, l.rich = FB_RECOMPUTE_NONE, l.n_rich = i % 3;
    return l;
}

/* Work and idle time are the step; nothing is busy for longer than it; moved and updated is what there is to move and update; the
 * bound is one; the same again is the same. */
static void nothing_is_lost(void **unused)
{
    (void)unused;
    for (size_t k = 0; k < FB_COUNT(models); k++) {
        fb_manifest m;
        tiny_manifest(&m, models[k]);
        for (int bits = 0; bits < 8; bits++)
            for (uint32_t i = 0; i < N_LAYOUT; i++) {
                fb_machine machine = rig_machine();
                machine.unified = bits & 4;
                fb_plan_request r = rig_request(&m, 7, 2);
                r.clip = bits & 1, r.act = bits & 2 ? FB_BF16 : FB_F32;
                fb_load load = { .rows_per_step = 7 };
                fb_layout l = layout_number(i, m.cfg.n_layer);
                fb_plan p;
                fb_timeline t = simulate(&p, &r, &l, &machine, &load), again = simulate(&p, &r, &l, &machine, &load);
                fb_costs c = fb_costs_of(&r, &machine, &load);
                assert_memory_equal(&t, &again, sizeof t);
                assert_true(is_close(t.busy[FB_RESOURCE_COMPUTE] + rig_idle(&t), t.seconds, 1e-9));
                for (int b = 0; b < FB_RESOURCE_COUNT; b++)
                    assert_true(t.busy[b] <= t.seconds * (1 + 1e-9));
                assert_true(fb_simulate_bound(&p, &m, &c) <= t.seconds * (1 + 1e-9));
                assert_int_equal(t.n_updated[0] + t.n_updated[1], m.extent);
                if (!machine.unified && p.layout.n_pass == 1) /* accumulators' restores and rows between passes come on top */
                    assert_true(is_close(t.busy[FB_RESOURCE_COMPUTE], compute_of(&p, &r, &c), 1e-9));
                if (machine.unified && p.layout.n_pass == 1) /* the cores do one after the other, or both at half the speed */
                    assert_true(compute_of(&p, &r, &c) + (double)t.n_updated[0] / c.update_rate <= t.seconds * (1 + 1e-9));
                uint64_t gradients = 0;
                for (uint32_t b = 0; b < m.n_block; b++)
                    gradients += fb_plan_at_home(&p, &m, b) ? 0 : m.blocks[b].extent * fb_dtype_size(r.act);
                if (p.layout.n_pass == 1 && !p.layout.kept_on_host)
                    assert_int_equal(t.d2h_size, gradients);
            }
        fb_manifest_free(&m);
    }
}

/* Without a link worth the name a step is its arithmetic; with everything at home too. */
static void arithmetic_alone_is_its_sum(void **unused)
{
    (void)unused;
    for (size_t k = 0; k < FB_COUNT(models); k++)
        for (int home = 0; home < 2; home++) {
            fb_manifest m;
            tiny_manifest(&m, models[k]);
            fb_machine fast = rig_no_link();
            fb_plan_request r = rig_request(&m, 6, 2);
            fb_load load = { .rows_per_step = 6 };
            fb_layout l = { .n_pass = 1, .slots = 2, .recompute = FB_RECOMPUTE_SELECTIVE, .rich = FB_RECOMPUTE_SELECTIVE,
                            .home_layers = home ? m.cfg.n_layer : 0, .home_embed = home, .home_head = home };
            fb_plan p;
            fb_timeline t = simulate(&p, &r, &l, &fast, &load);
            fb_costs c = fb_costs_of(&r, &fast, &load);
            assert_true(is_close(t.seconds, compute_of(&p, &r, &c), 1e-6));
            assert_true(rig_idle(&t) < 1e-6 * t.seconds);
            fb_manifest_free(&m);
        }
}

/* One layer, one slot, one micro-batch, no overlap: what is done is done one after the other. */
static void without_overlap_a_step_is_a_sum(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &one_layer);
    fb_machine machine = rig_machine();
    machine.dram = machine.dram_dma = 1e18; /* not what is asked here */
    fb_plan_request r = rig_request(&m, 1, 1);
    fb_load load = { .rows_per_step = 1, .no_overlap = true };
    fb_layout l = { .n_pass = 1, .slots = 1, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL };
    fb_plan p;
    fb_timeline t = simulate(&p, &r, &l, &machine, &load);
    fb_costs c = fb_costs_of(&r, &machine, &load);
    double up = (double)p.meta_size + (double)c.whole.rows_size + 2.0 * (double)(m.blocks[1].extent + m.blocks[2].extent);
    double down = 2.0 * (double)m.extent, bandwidth = 1e7;
    double sum = (double)m.extent / c.update_rate + up / bandwidth + down / bandwidth + c.whole.gather + compute_of(&p, &r, &c);
    /* Only a download still runs beside anything: beside the kernels of the visit after its own. */
    assert_true(t.seconds <= sum * (1 + 1e-9));
    assert_true(t.seconds >= (sum - fmin(t.busy[FB_RESOURCE_COMPUTE], t.busy[FB_RESOURCE_D2H])) * (1 - 1e-9));
    assert_true(is_close(t.busy[FB_RESOURCE_H2D], up / bandwidth, 1e-9));
    assert_true(is_close(t.busy[FB_RESOURCE_D2H], down / bandwidth, 1e-9));
    fb_manifest_free(&m);
}

/* A link so slow that nothing else counts: each layer up once forward and, but for those in slots, once
 * backward; gradients down. */
static void a_slow_link_is_what_it_carries(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &untied);
    fb_machine slow = rig_no_link();
    slow.matmul_peak = slow.memory_rate = slow.attention_fwd.y[0] = slow.attention_bwd.y[0] = 1e18;
    slow.h2d.y[0] = slow.h2d_both = 1e4;
    fb_plan_request r = rig_request(&m, 2, 2);
    fb_load load = { .rows_per_step = 2 };
    for (uint32_t slots = 1; slots <= 5; slots++)
        for (uint32_t home = 0; home <= 5; home++) {
            fb_layout l = { .n_pass = 1, .slots = slots, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL,
                            .home_layers = home };
            fb_plan p;
            fb_timeline t = simulate(&p, &r, &l, &slow, &load);
            uint64_t streamed = 5 - home, kept = slots < streamed ? slots : streamed;
            uint64_t size = 2 * m.extent_max_layer * (2 * streamed - kept) + 2 * m.blocks[6].extent + p.meta_size + 2u * 16 * 32
                * 2;
            assert_int_equal(t.h2d_size, size);
            assert_true(is_close(t.seconds, (double)size / 1e4, 1e-6));
        }
    fb_manifest_free(&m);
}

/* The same the other way: every streamed gradient goes down once, whole or in pieces. */
static void a_slow_way_home_is_what_it_carries(void **unused)
{
    (void)unused;
    for (int bits = 0; bits < 4; bits++) {
        fb_manifest m;
        tiny_manifest(&m, &tied);
        fb_machine slow = rig_no_link();
        slow.matmul_peak = slow.memory_rate = slow.attention_fwd.y[0] = slow.attention_bwd.y[0] = 1e18;
        slow.d2h.y[0] = slow.d2h_both = 1e4;
        fb_plan_request r = rig_request(&m, 2, 2);
        r.clip = bits & 1, r.act = bits & 2 ? FB_BF16 : FB_F32;
        for (uint32_t home = 0; home <= 4; home++) {
            fb_layout l = { .n_pass = 1, .slots = 2, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL,
                            .home_layers = home };
            fb_plan p;
            fb_timeline t = simulate(&p, &r, &l, &slow, &(fb_load){ .rows_per_step = 2 });
            uint64_t size = (m.extent - home * m.extent_max_layer) * fb_dtype_size(r.act);
            assert_int_equal(t.d2h_size, size);
            assert_true(is_close(t.seconds, (double)size / 1e4, 1e-6));
            assert_true(t.idle[FB_CAUSE_GRADIENTS] > 0.99 * t.seconds);
        }
        fb_manifest_free(&m);
    }
}

/* With one slot a layer's weights come when the one before has left it, and are used when they are there; with
 * two, while it computes. */
static void one_slot_takes_turns(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &untied);
    fb_machine machine = rig_no_link();
    machine.h2d.y[0] = machine.h2d_both = 2e6;
    fb_plan_request r = rig_request(&m, 2, 2);
    fb_load load = { .rows_per_step = 2 };
    fb_costs c = fb_costs_of(&r, &machine, &load);
    double seconds[2];
    for (uint32_t slots = 1; slots <= 2; slots++) {
        fb_layout l = { .n_pass = 1, .slots = slots, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL, .home_embed = true,
                        .home_head = true };
        fb_plan p;
        fb_timeline t = simulate(&p, &r, &l, &machine, &load);
        double turns = t.busy[FB_RESOURCE_H2D] + t.busy[FB_RESOURCE_COMPUTE], first = fb_cost_h2d(&machine, 2 * m.extent_max_layer);
        /* What the first layer's weights come beside, and, when a layer has been left, the rounding of its gradient. */
        double beside = c.whole.look_up + fb_cost_update(&machine, r.act, m.blocks[0].extent + m.blocks[6].extent);
        double rounding = 4 * fb_cost_grad_out(&machine, r.act, m.extent_max_layer);
        assert_true(beside < first);
        seconds[slots - 1] = t.seconds;
        if (slots == 1)
            assert_true(is_close(t.seconds, turns - beside - rounding, 1e-9));
    }
    assert_true(seconds[1] < 0.9 * seconds[0]);
    fb_manifest_free(&m);
}

/* Many passes are simulated by one of them: the sum is what all of them make. */
static void passes_in_the_middle_are_alike(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &untied);
    fb_machine machine = rig_machine();
    double seconds[9] = { 0 };
    for (uint32_t n = 3; n <= 8; n++) {
        fb_plan_request r = rig_request(&m, n, 1);
        fb_layout l = { .n_pass = n, .slots = 2, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL, .acc_on_device = true };
        fb_plan p;
        fb_timeline t = simulate(&p, &r, &l, &machine, &(fb_load){ .rows_per_step = n });
        fb_costs c = fb_costs_of(&r, &machine, &(fb_load){ .rows_per_step = n });
        assert_int_equal(p.layout.n_pass, n);
        assert_true(is_close(t.busy[FB_RESOURCE_COMPUTE] + rig_idle(&t), t.seconds, 1e-9));
        /* the rows of earlier passes are added again in the last: embed_grad of each once */
        assert_true(is_close(t.busy[FB_RESOURCE_COMPUTE], compute_of(&p, &r, &c), 1e-9));
        seconds[n] = t.seconds;
    }
    for (uint32_t n = 5; n <= 8; n++)
        assert_true(is_close(seconds[n] - seconds[n - 1], seconds[4] - seconds[3], 2e-2));
    fb_manifest_free(&m);
}

/* A host so slow that nothing else counts: everything waits for the update, which takes what it takes. */
static void a_slow_update_is_the_step(void **unused)
{
    (void)unused;
    for (int clip = 0; clip < 2; clip++) {
        fb_manifest m;
        tiny_manifest(&m, &untied);
        fb_machine slow = rig_no_link();
        slow.matmul_peak = slow.memory_rate = slow.attention_fwd.y[0] = slow.attention_bwd.y[0] = 1e18;
        slow.update.y[0] = 1e4;
        fb_plan_request r = rig_request(&m, 2, 2);
        r.clip = clip;
        for (uint32_t k = 0; k < 11; k++) { /* with embedding and head at home, layers alone have to be waited for */
            uint32_t home = k % 6;
            bool ends = k > 5;
            fb_layout l = { .n_pass = 1, .slots = 2, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL, .home_layers = home,
                            .home_embed = ends, .home_head = ends };
            fb_plan p;
            fb_timeline t = simulate(&p, &r, &l, &slow, &(fb_load){ .rows_per_step = 2 });
            double n = (double)(m.extent - home * m.extent_max_layer - (ends ? m.blocks[0].extent + m.blocks[6].extent : 0));
            assert_true(is_close(t.seconds, n / 1e4, 1e-6));
            assert_true(t.idle[FB_CAUSE_UPDATE] + t.idle[FB_CAUSE_GRADIENTS] > 0.99 * t.seconds);
        }
        fb_manifest_free(&m);
    }
}

/* A faster part of the machine, or a slot more, never makes a step longer. */
static void more_is_never_slower(void **unused)
{
    (void)unused;
    for (size_t k = 0; k < FB_COUNT(models); k++) {
        fb_manifest m;
        tiny_manifest(&m, models[k]);
        for (uint32_t i = 0; i < N_LAYOUT; i++)
            for (int clip = 0; clip < 2; clip++) {
                fb_plan_request r = rig_request(&m, 6, 2);
                r.clip = clip;
                fb_load load = { .rows_per_step = 6 };
                fb_layout l = layout_number(i, m.cfg.n_layer);
                fb_plan p;
                fb_machine machine = rig_machine(), faster = machine;
                machine.dram = machine.dram_dma = faster.dram = faster.dram_dma = 1e18;
                fb_timeline was = simulate(&p, &r, &l, &machine, &load);
                faster.h2d.y[0] *= 1.5, faster.d2h.y[0] *= 1.5, faster.h2d_both *= 1.5, faster.d2h_both *= 1.5;
                assert_true(simulate(&p, &r, &l, &faster, &load).seconds <= was.seconds * (1 + 1e-9));
                faster = machine, faster.update.y[0] *= 2;
                assert_true(simulate(&p, &r, &l, &faster, &load).seconds <= was.seconds * (1 + 1e-9));
                faster = machine, faster.matmul_peak *= 2;
                assert_true(simulate(&p, &r, &l, &faster, &load).seconds <= was.seconds * (1 + 1e-9));
            }
        fb_manifest_free(&m);
    }
}

/* Spans of a stream follow one another, and add up to its busy time. */
static void spans_are_the_time_line(void **unused)
{
    (void)unused;
    static fb_time_span spans[FB_TIMELINE_SPANS];
    fb_manifest m;
    tiny_manifest(&m, &tied);
    fb_machine machine = rig_machine();
    machine.d2h.y[0] = machine.d2h_both = 5e5; /* so slow that what follows waits */
    machine.update.y[0] = 1e5;
    for (uint32_t i = 0; i < N_LAYOUT; i++) {
        fb_plan_request r = rig_request(&m, 6, 2);
        fb_costs c = fb_costs_of(&r, &machine, &(fb_load){ .rows_per_step = 6 });
        fb_layout l = layout_number(i, m.cfg.n_layer);
        fb_plan p;
        fb_timeline t = { .spans = spans, .n_span_max = FB_TIMELINE_SPANS };
        fb_plan_lay_out(&p, &r, &l);
        fb_simulate(&t, &p, &m, &c);
        double end[FB_RESOURCE_COUNT] = { 0 }, sum[FB_RESOURCE_COUNT] = { 0 };
        assert_int_equal(t.n_lost, 0);
        for (uint32_t k = 0; k < t.n_span; k++) {
            fb_resource who = spans[k].resource;
            assert_true(spans[k].begin >= end[who] - 1e-12 && spans[k].end >= spans[k].begin);
            end[who] = spans[k].end;
            sum[who] += spans[k].end - spans[k].begin;
        }
        for (int k = 0; k < FB_RESOURCE_COUNT; k++)
            assert_true(fabs(sum[k] - t.busy[k]) <= 1e-9 * t.seconds);
        bool clean[16] = { 0 }; /* weights are updated before they are sent */
        for (uint32_t k = 0; k < t.n_span; k++) {
            clean[spans[k].block] |= spans[k].work == FB_WORK_HOST_UPDATE;
            assert_true(spans[k].work != FB_WORK_WEIGHTS || clean[spans[k].block]);
        }
        uint32_t left = 0; /* the gradient before, of the block behind, has left its buffer when the next one is written there */
        for (uint32_t k = 0; k < t.n_span && p.layout.n_pass == 1 && !p.layout.home_layers; k++)
            if (spans[k].work == FB_WORK_GRADIENT)
                left = spans[k].block;
            else if (spans[k].work == FB_WORK_GRAD_OUT && spans[k].block > 0 && spans[k].block < m.n_block - 1)
                assert_int_equal(left, spans[k].block + 1);
        uint32_t n = t.n_span;
        t.n_span_max = 3;
        fb_simulate(&t, &p, &m, &c);
        assert_int_equal(t.n_span, 3);
        assert_int_equal(t.n_lost, n - 3);
    }
    fb_manifest_free(&m);
}

static void the_explanation_names_what_is_waited_for(void **unused)
{
    (void)unused;
    char text[300];
    fb_timeline t = { .seconds = 10, .busy = { 9.9 }, .idle = { [FB_CAUSE_WEIGHTS] = 0.1 } };
    fb_timeline_explain(text, sizeof text, &t);
    assert_non_null(strstr(text, "arithmetic bounds"));
    t = (fb_timeline){ .seconds = 10, .busy = { 7 }, .idle = { [FB_CAUSE_WEIGHTS] = 1, [FB_CAUSE_UPDATE] = 2 } };
    fb_timeline_explain(text, sizeof text, &t);
    assert_non_null(strstr(text, "70.0%"));
    assert_non_null(strstr(text, "(20.0%) it waits for the host's update"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_lost),
        cmocka_unit_test(arithmetic_alone_is_its_sum),
        cmocka_unit_test(without_overlap_a_step_is_a_sum),
        cmocka_unit_test(a_slow_link_is_what_it_carries),
        cmocka_unit_test(a_slow_way_home_is_what_it_carries),
        cmocka_unit_test(one_slot_takes_turns),
        cmocka_unit_test(passes_in_the_middle_are_alike),
        cmocka_unit_test(a_slow_update_is_the_step),
        cmocka_unit_test(more_is_never_slower),
        cmocka_unit_test(spans_are_the_time_line),
        cmocka_unit_test(the_explanation_names_what_is_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
