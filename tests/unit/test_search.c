/* The search against every layout there is, on models small enough for that; and what must hold of any choice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/plan/search.c"
#include "temp_dir.h"
#include "tiny_model.h"
#include "planning_rig.h"

static const tiny_model untied = { "llama", 32, 48, 3, 4, 2, 8, 96, false, NULL, 0 };
static const tiny_model tied = { "qwen3", 32, 48, 3, 4, 2, 8, 96, true, NULL, 0 };
static const tiny_model *const models[] = { &untied, &tied };

enum { ROWS = 4 };

static const fb_wishes anything = { .load = { .rows_per_step = ROWS }, .recompute = FB_WISH_AUTO, .kept_on_host = FB_WISH_AUTO,
                                    .acc_on_device = FB_WISH_AUTO };

/* Every layout there is, with what it needs and takes. */
typedef struct one {
    uint64_t device, host;
    double   seconds;
} one;

typedef struct brute {
    one     *all;
    size_t   n;
    uint64_t least_device, least_host, most_device;
} brute;

enum { BRUTE_MAX = 1 << 17 };

static void add(brute *out, const fb_plan_request *r, const fb_costs *c, const fb_layout *l)
{
    fb_plan p;
    fb_timeline t = { 0 };
    fb_plan_lay_out(&p, r, l);
    fb_simulate(&t, &p, r->manifest, c);
    assert_true(out->n < BRUTE_MAX);
    out->all[out->n++] = (one){ p.device_bytes, p.host_bytes, t.seconds };
    out->least_device = p.device_bytes < out->least_device ? p.device_bytes : out->least_device;
    out->most_device = p.device_bytes > out->most_device ? p.device_bytes : out->most_device;
    out->least_host = p.host_bytes < out->least_host ? p.host_bytes : out->least_host;
}

/* asked: without budgets.  A block's gradient is small here, so no budget changes the buffer that it leaves from. */
static brute try_all(const fb_plan_request *asked, const fb_machine *machine)
{
    brute out = { .all = malloc(BRUTE_MAX * sizeof(one)), .least_device = UINT64_MAX, .least_host = UINT64_MAX };
    uint32_t n = asked->manifest->cfg.n_layer;
    for (uint32_t micro = 1; micro <= ROWS; micro++) {
        fb_plan_request r = *asked;
        r.micro_rows = micro, r.n_micro = (ROWS + micro - 1) / micro;
        fb_costs c = fb_costs_of(&r, machine, &anything.load);
        for (uint32_t pass = 1; pass <= r.n_micro; pass++)
            for (uint32_t home = 0; home <= n; home++)
                for (uint32_t slots = 1; slots <= n - home || slots == 1; slots++)
                    for (uint32_t bits = 0; bits < (pass > 1 ? 16 : 8); bits++)
                        for (uint32_t policies = 0; policies < 9; policies++)
                            for (uint32_t rich = 0; rich <= (policies % 4 ? n : 0); rich++) { /* 0, 4, 8: the same policy twice */
                                fb_layout l = { .n_pass = pass, .slots = slots, .home_layers = home, .n_rich = rich,
                                    .recompute = (fb_recompute)(policies / 3), .rich = (fb_recompute)(policies % 3),
                                    .home_embed = bits & 1, .home_head = bits & 2, .kept_on_host = bits & 4,
                                    .acc_on_device = bits & 8 };
                                add(&out, &r, &c, &l);
                            }
    }
    return out;
}

static void check_against_all(const brute *all, const fb_plan_request *asked, const fb_machine *machine, double *worst)
{
    fb_plan p;
    fb_timeline t = { 0 };
    fb_error err;
    fb_plan_request r = *asked;
    double best = INFINITY;
    for (size_t i = 0; i < all->n; i++) {
        const one *o = &all->all[i];
        if ((!r.hbm_budget || o->device <= r.hbm_budget) && (!r.ram_budget || o->host <= r.ram_budget) && o->seconds < best)
            best = o->seconds;
    }
    fb_status st = fb_plan_search(&p, &t, &r, machine, &anything, NULL, &err);
    assert_int_equal(st, best < INFINITY ? FB_OK : FB_NOFIT);
    if (st != FB_OK)
        return;
    assert_true(fb_plan_fits(&p, &r));
    assert_true(t.seconds >= best * (1 - 1e-5));
    *worst = t.seconds / best > *worst ? t.seconds / best : *worst;
}

/* From far too little memory to more than is of use, on links and hosts slow and fast. */
static void nothing_better_is_to_be_found(void **unused)
{
    (void)unused;
    double worst = 1;
    for (size_t k = 0; k < FB_COUNT(models); k++)
        for (int kind = k; kind < 4; kind += 1 + (int)k) { /* the tied one: 1 and 3 */
            fb_manifest m;
            fb_machine machine = rig_machine();
            if (kind & 1)
                machine.h2d.y[0] = machine.d2h.y[0] = machine.h2d_both = machine.d2h_both = 1e9;
            if (kind & 2)
                machine.update.y[0] = 1e5;
            tiny_manifest(&m, models[k]);
            fb_plan_request r = rig_request(&m, ROWS, 1);
            r.clip = kind != 1;
            brute all = try_all(&r, &machine);
            for (int step = SANITIZED ? 3 : 0; step < 7; step += SANITIZED ? 3 : 1) {
                r.hbm_budget = all.least_device + (all.most_device - all.least_device) * (uint64_t)step / 6 - (step == 0);
                check_against_all(&all, &r, &machine, &worst);
            }
            r.hbm_budget = (all.least_device + all.most_device) / 3;
            r.ram_budget = all.least_host + 10 * m.extent_max_layer;
            check_against_all(&all, &r, &machine, &worst);
            free(all.all);
            fb_manifest_free(&m);
        }
    print_message("at worst %.2f %% above the best layout there is\n", 100 * (worst - 1));
    assert_true(worst < 1.05);
}

/* A model too deep to try everything: no layout drawn at random is better by more than a fiftieth. */
static void no_random_layout_is_better(void **unused)
{
    (void)unused;
    static const tiny_model deep = { "llama", 64, 96, 12, 4, 2, 16, 128, false, NULL, 0 };
    enum { ROWS_DEEP = 8, DRAWS = SANITIZED ? 300 : 3000 };
    fb_manifest m;
    fb_error err;
    uint64_t seed = 7;
    tiny_manifest(&m, &deep);
    fb_wishes w = anything;
    w.load.rows_per_step = ROWS_DEEP;
    for (int clip = 0; clip < 2; clip++)
        for (uint64_t hbm = 3 << 20; hbm < 24 << 20; hbm *= 2) {
            fb_machine machine = rig_machine();
            fb_plan_request asked = rig_request(&m, ROWS_DEEP, 2), r = asked;
            fb_plan p;
            fb_timeline best = { 0 };
            r.clip = asked.clip = clip, r.hbm_budget = asked.hbm_budget = hbm;
            assert_int_equal(fb_plan_search(&p, &best, &r, &machine, &w, NULL, &err), FB_OK);
            for (int i = 0; i < DRAWS; i++) {
                r = asked;
                r.micro_rows = 1 + random_under(&seed, ROWS_DEEP), r.n_micro = (ROWS_DEEP + r.micro_rows - 1) / r.micro_rows;
                fb_costs c = fb_costs_of(&r, &machine, &w.load);
                uint32_t bits = random_under(&seed, 16);
                fb_layout l = { .n_pass = 1 + random_under(&seed, r.n_micro), .slots = 1 + random_under(&seed, 12),
                    .home_layers = random_under(&seed, 13), .home_embed = bits & 1, .home_head = bits & 2, .kept_on_host = bits & 4,
                    .acc_on_device = bits & 8, .recompute = (fb_recompute)random_under(&seed, 3),
                    .rich = (fb_recompute)random_under(&seed, 3), .n_rich = random_under(&seed, 13) };
                fb_timeline t = { 0 };
                fb_plan_lay_out(&p, &r, &l);
                if (!fb_plan_fits(&p, &r))
                    continue;
                fb_simulate(&t, &p, &m, &c);
                assert_true(t.seconds > best.seconds * 0.98);
            }
        }
    fb_manifest_free(&m);
}

/* What just fits is accepted, what is a byte too large is refused, with the shortfall and a key. */
static void refusal_is_exact(void **unused)
{
    (void)unused;
    fb_machine machine = rig_machine();
    for (size_t k = 0; k < FB_COUNT(models); k++) {
        fb_manifest m;
        tiny_manifest(&m, models[k]);
        fb_plan p;
        fb_error err;
        fb_plan_request asked = rig_request(&m, ROWS, 2), r = asked;
        brute all = try_all(&r, &machine);
        free(all.all);
        asked.hbm_budget = all.least_device;
        r = asked;
        assert_int_equal(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_OK);
        assert_int_equal(p.device_bytes, all.least_device);
        asked.hbm_budget--;
        r = asked;
        expect_failure(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_NOFIT, &err, "raise hbm_budget");
        assert_int_equal(p.device_bytes - r.hbm_budget, 1); /* the thriftiest layout, to be looked at */
        asked.hbm_budget = 0;
        asked.ram_budget = all.least_host;
        r = asked;
        assert_int_equal(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_OK);
        asked.ram_budget--;
        r = asked;
        expect_failure(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_NOFIT, &err, "raise ram_budget");
        fb_manifest_free(&m);
    }
}

/* What is fixed stays, whatever it costs. */
static void wishes_are_kept(void **unused)
{
    (void)unused;
    fb_machine machine = rig_machine();
    fb_manifest m;
    tiny_manifest(&m, &untied);
    for (int bits = 0; bits < 64; bits++)
        for (int place = FB_HOME_AUTO; place <= FB_HOME_LAYERS; place++) {
            fb_wishes w = anything;
            fb_plan p;
            fb_error err;
            fb_plan_request r = rig_request(&m, ROWS, 3);
            w.micro_rows = bits & 1 ? 2 : FB_AUTO, w.recompute = bits & 2 ? FB_RECOMPUTE_SELECTIVE : FB_WISH_AUTO;
            w.slots = bits & 4 ? 1 : FB_AUTO, w.n_pass = bits & 8 ? 2 : FB_AUTO;
            w.kept_on_host = bits & 16 ? bits / 32 : FB_WISH_AUTO, w.acc_on_device = bits & 32 ? bits & 1 : FB_WISH_AUTO;
            w.placement = (fb_home)place, w.home_layers = 2;
            assert_int_equal(fb_plan_search(&p, NULL, &r, &machine, &w, NULL, &err), FB_OK);
            const fb_layout *l = &p.layout;
            assert_true(r.micro_rows * r.n_micro >= ROWS && r.micro_rows * (r.n_micro - 1) < ROWS);
            if (bits & 1)
                assert_int_equal(r.micro_rows, 2);
            if (bits & 2)
                assert_true(l->recompute == FB_RECOMPUTE_SELECTIVE && l->n_rich == 0);
            if (bits & 4)
                assert_true(l->slots == (l->home_layers < 3));
            if (bits & 8)
                assert_int_equal(l->n_pass, r.n_micro < 2 ? r.n_micro : 2);
            if (bits & 16)
                assert_int_equal(l->kept_on_host, bits / 32);
            if (bits & 32)
                assert_int_equal(l->acc_on_device, l->n_pass > 1 && bits & 1);
            if (place == FB_HOME_NOTHING)
                assert_true(l->home_layers == 0 && !l->home_embed && !l->home_head);
            if (place == FB_HOME_EVERYTHING)
                assert_true(l->home_layers == 3 && l->home_embed && l->home_head);
            if (place == FB_HOME_LAYERS)
                assert_true(l->home_layers == 2 && l->home_embed && !l->home_head);
        }
    fb_manifest_free(&m);
}

/* On a unified machine the cut is the batch's, unless only a smaller one fits. */
static void the_cut_stays_where_it_buys_nothing(void **unused)
{
    (void)unused;
    fb_machine machine = rig_machine();
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    machine.unified = true;
    for (uint32_t rows = 1; rows <= ROWS; rows++) {
        fb_plan_request r = rig_request(&m, ROWS, rows);
        r.unified = true;
        assert_int_equal(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_OK);
        assert_int_equal(r.micro_rows, rows);
    }
    fb_plan_request r = rig_request(&m, ROWS, ROWS);
    r.unified = true;
    brute all = try_all(&r, &machine);
    free(all.all);
    r.hbm_budget = all.least_device;
    assert_int_equal(fb_plan_search(&p, NULL, &r, &machine, &anything, NULL, &err), FB_OK);
    assert_int_equal(r.micro_rows, 1);
    fb_manifest_free(&m);
}

/* More memory or a faster link never makes the choice slower, and the same question has the same answer. */
static void more_is_never_slower(void **unused)
{
    (void)unused;
    static const tiny_model larger = { "llama", 64, 96, 8, 4, 2, 16, 128, false, NULL, 0 };
    fb_manifest m;
    fb_error err;
    fb_plan p, q;
    tiny_manifest(&m, &larger);
    fb_wishes w = anything;
    w.load.rows_per_step = 12;
    double before = INFINITY;
    for (uint64_t hbm = 1 << 19; hbm < 1 << 25; hbm += hbm / 2) {
        fb_timeline t = { 0 }, again = { 0 }, faster = { 0 };
        fb_machine machine = rig_machine();
        fb_plan_request asked = rig_request(&m, 12, 4), r = asked;
        r.hbm_budget = asked.hbm_budget = hbm;
        if (fb_plan_search(&p, &t, &r, &machine, &w, NULL, &err) != FB_OK)
            continue;
        r = asked;
        assert_int_equal(fb_plan_search(&q, &again, &r, &machine, &w, NULL, &err), FB_OK);
        assert_memory_equal(&p, &q, sizeof p);
        assert_memory_equal(&t, &again, sizeof t);
        assert_true(t.seconds <= before * (1 + 1e-5));
        before = t.seconds;
        machine.h2d.y[0] *= 1.5, machine.d2h.y[0] *= 1.5, machine.h2d_both *= 1.5, machine.d2h_both *= 1.5;
        r = asked;
        assert_int_equal(fb_plan_search(&q, &faster, &r, &machine, &w, NULL, &err), FB_OK);
        assert_true(faster.seconds <= t.seconds * (1 + 1e-5));
    }
    assert_true(before < INFINITY);
    fb_manifest_free(&m);
}

/* The answer to a question, known to the next search for it, or for a little more memory: never a worse one, with less effort. */
static void what_is_known_shortens_the_search(void **unused)
{
    (void)unused;
    static const tiny_model deep = { "llama", 64, 96, 20, 4, 2, 16, 128, false, NULL, 0 };
    fb_manifest m;
    fb_error err;
    fb_plan p;
    fb_machine machine = rig_machine();
    uint64_t n_alone = 0, n_knowing = 0;
    tiny_manifest(&m, &deep);
    for (uint64_t hbm = 1 << 20; hbm <= 16 << 20; hbm *= 2) {
        fb_wishes w = anything;
        fb_search_effort alone = { 0 }, knowing = { 0 };
        fb_timeline t = { 0 }, again = { 0 };
        w.load.rows_per_step = 24;
        fb_plan_request r = rig_request(&m, 24, 4);
        r.hbm_budget = hbm;
        if (fb_plan_search(&p, &t, &r, &machine, &w, &alone, &err) != FB_OK)
            continue;
        w.known = p.layout, w.known_rows = r.micro_rows;
        r = rig_request(&m, 24, 4);
        r.hbm_budget = hbm + hbm / 64;
        assert_int_equal(fb_plan_search(&p, &again, &r, &machine, &w, &knowing, &err), FB_OK);
        assert_true(fb_plan_fits(&p, &r));
        assert_true(again.seconds <= t.seconds * (1 + 1e-5));
        n_alone += alone.n_simulated, n_knowing += knowing.n_simulated;
    }
    assert_true(n_alone > 0 && n_knowing < n_alone);
    fb_manifest_free(&m);
}

/* 120 layers and 96 rows: a second's worth of simulations on a core of 2020, at 0.1 ms each, and of layouts, at 5 us. */
static void the_search_is_short(void **unused)
{
    (void)unused;
    static const tiny_model deep = { "llama", 64, 96, 120, 4, 2, 16, 128, false, NULL, 0 };
    fb_manifest m;
    fb_error err;
    fb_plan p;
    fb_machine machine = rig_machine();
    tiny_manifest(&m, &deep);
    fb_wishes w = anything;
    w.load.rows_per_step = 96;
    for (uint64_t hbm = 4 << 20; hbm <= 64 << 20; hbm *= 4) {
        fb_search_effort effort = { 0 };
        fb_plan_request r = rig_request(&m, 96, 4);
        r.hbm_budget = hbm;
        fb_status st = fb_plan_search(&p, NULL, &r, &machine, &w, &effort, &err);
        print_message("%s: %u laid out, %u simulated\n", st == FB_OK ? "found" : "refused", effort.n_laid_out, effort.n_simulated);
        assert_true(effort.n_simulated < 6000 && effort.n_laid_out < 100000);
    }
    fb_manifest_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_better_is_to_be_found),
        cmocka_unit_test(no_random_layout_is_better),
        cmocka_unit_test(refusal_is_exact),
        cmocka_unit_test(wishes_are_kept),
        cmocka_unit_test(the_cut_stays_where_it_buys_nothing),
        cmocka_unit_test(more_is_never_slower),
        cmocka_unit_test(what_is_known_shortens_the_search),
        cmocka_unit_test(the_search_is_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
