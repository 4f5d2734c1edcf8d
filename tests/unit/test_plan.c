/* The ledger: sums, formulas of DESIGN's bytes a parameter, and budgets at the very byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/plan/plan.c"
#include "temp_dir.h"
#include "tiny_model.h"
#include "train/micro.h"

static const tiny_model untied = { "llama", 32, 48, 5, 4, 2, 8, 96, false, NULL, 0 };
static const tiny_model tied = { "qwen3", 32, 48, 5, 4, 2, 8, 96, true, NULL, 0 };
static const tiny_model dynamic = { "llama", 32, 48, 3, 4, 2, 8, 96, false,
    ", \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2.0}", 0 };

static uint64_t scratch_4096(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    (void)t_max, (void)n_head, (void)head_dim;
    return 4096;
}

static fb_layout layout; /* that build asks for */

static fb_plan_request request_for(const fb_manifest *m)
{
    layout = (fb_layout){ .n_pass = 1, .slots = 2, .recompute = FB_RECOMPUTE_SELECTIVE, .rich = FB_RECOMPUTE_SELECTIVE };
    return (fb_plan_request){ .manifest = m, .act = FB_F32, .train = true, .clip = true,
        .row_len = 24, .micro_rows = 2, .n_micro = 6, .unified = true, .attention_scratch = scratch_4096,
        .meta_size = fb_micro_size, .logits_size = 64u << 20, .runtime_bytes = 12345 };
}

static fb_plan build(const fb_plan_request *r)
{
    fb_plan p;
    fb_error err;
    if (fb_plan_build(&p, r, &layout, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return p;
}

static void check_ledger(const fb_plan *p)
{
    uint64_t at = 0, host = 0;
    for (int i = 0; i < FB_DEV_COUNT; i++) {
        assert_non_null(p->device[i].name);
        assert_int_equal(p->device[i].offset, at); /* no gap, no overlap */
        assert_int_equal(p->device[i].offset % 256, 0);
        assert_int_equal(p->device[i].size % 256, 0);
        at += p->device[i].size;
    }
    for (int i = 0; i < FB_HOST_COUNT; i++) {
        assert_non_null(p->host[i].name);
        host += p->host[i].size;
    }
    assert_int_equal(p->device_bytes, at);
    assert_int_equal(p->host_bytes, host);
}

static void the_ledger_adds_up(void **unused)
{
    (void)unused;
    const tiny_model *models[] = { &untied, &tied, &dynamic };
    for (size_t i = 0; i < FB_COUNT(models); i++) {
        fb_manifest m;
        tiny_manifest(&m, models[i]);
        for (int bits = 0; bits < 8; bits++)
            for (int policy = 0; policy < 3; policy++)
                for (uint32_t n_micro = 1; n_micro < 8; n_micro += 3) {
                    fb_plan_request r = request_for(&m);
                    r.train = bits & 1, r.clip = bits & 2, r.act = bits & 4 ? FB_BF16 : FB_F32;
                    layout.recompute = layout.rich = (fb_recompute)policy, r.n_micro = n_micro, layout.slots = 1 + n_micro;
                    r.cache_len = r.train ? 0 : 40;
                    fb_plan p = build(&r);
                    check_ledger(&p);
                    assert_int_equal(p.layout.n_pass, 1);
                    assert_int_equal(p.micro_per_pass, n_micro);
                    assert_int_equal(p.layout.slots, layout.slots < m.cfg.n_layer ? layout.slots : m.cfg.n_layer);
                    assert_int_equal(p.t_max, 48);
                }
        fb_manifest_free(&m);
    }
}

/* 12 bytes a parameter, 14 (bfloat16) or 16 (float32) with stored gradients; forward only, the weights alone. */
/* Where a block's own things lie, and what streams, against sums over blocks one by one. */
static void what_blocks_own_lies_end_to_end(void **unused)
{
    (void)unused;
    for (uint32_t bits = 0; bits < 1 << 8; bits++) {
        fb_manifest m;
        tiny_manifest(&m, bits & 1 ? &tied : &untied);
        fb_plan_request r = request_for(&m);
        r.act = bits & 2 ? FB_BF16 : FB_F32;
        r.clip = bits & 4;
        for (uint32_t home = 0; home <= m.cfg.n_layer; home++) {
            fb_layout l = layout;
            fb_plan p;
            l.home_layers = home, l.home_embed = bits & 8, l.home_head = bits & 16;
            l.n_pass = bits & 32 ? 3 : 1, l.acc_on_device = bits & 64, l.kept_on_host = bits & 128;
            fb_plan_lay_out(&p, &r, &l);
            for (fb_own what = FB_OWN_STATE; what <= FB_OWN_ACCUMULATOR; what++) {
                uint64_t n = 0;
                for (uint32_t b = 0; b <= m.n_block; b++) {
                    assert_int_equal(fb_plan_owned_before(&p, &m, what, b), n);
                    n += b < m.n_block && fb_plan_owns(&p, &m, what, b) ? (m.blocks[b].extent + 127) / 128 * 128 : 0;
                }
            }
            uint64_t most = 0;
            for (uint32_t b = 0; b < m.n_block; b++)
                if (!fb_plan_at_home(&p, &m, b) && m.blocks[b].extent > most)
                    most = m.blocks[b].extent;
            assert_int_equal(largest_streamed(&p, &m), most);
        }
        fb_manifest_free(&m);
    }
}

static void host_bytes_a_parameter(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &tied);
    static const struct { bool train, clip; fb_dtype act; uint64_t bytes; } want[] = {
        { true, false, FB_F32, 12 }, { true, true, FB_F32, 16 }, { true, false, FB_BF16, 12 }, { true, true, FB_BF16, 14 },
        { false, true, FB_F32, 4 }, { false, true, FB_BF16, 2 },
    };
    for (size_t i = 0; i < FB_COUNT(want); i++) {
        fb_plan_request r = request_for(&m);
        r.train = want[i].train, r.clip = want[i].clip, r.act = want[i].act;
        fb_plan p = build(&r);
        uint64_t state = 0;
        for (int c = FB_HOST_WEIGHTS; c <= FB_HOST_ACCUMULATORS; c++)
            state += p.host[c].size;
        assert_int_equal(state, want[i].bytes * m.extent);
        assert_int_equal(p.host[FB_HOST_SLABS].size != 0, r.train && !r.clip);
        assert_int_equal(p.host[FB_HOST_RUNTIME].size, 12345);
    }
    fb_manifest_free(&m);
}

/* Device bytes of every layout, in the order in which they are to be preferred: block inputs on the device or on the
 * host, then a pass more. */
enum { LAYOUTS_MAX = 14 };

static uint32_t layouts(uint64_t *size, const fb_plan_request *r)
{
    uint32_t n = 0;
    for (uint32_t n_pass = 1; n_pass <= r->n_micro; n_pass++)
        for (int on_host = 0; on_host < 2; on_host++) {
            fb_plan p;
            fb_layout l = layout;
            l.n_pass = n_pass, l.kept_on_host = on_host;
            fb_plan_lay_out(&p, r, &l);
            size[n++] = p.device_bytes;
        }
    return n;
}

/* For budgets at, and a byte to either side of, what any layout needs: the first that fits, or a refusal. */
static void budgets_at_the_byte(void **unused)
{
    (void)unused;
    const tiny_model *models[] = { &untied, &tied, &dynamic };
    for (size_t i = 0; i < FB_COUNT(models); i++)
        for (int bf16 = 0; bf16 < 2; bf16++)
            for (uint32_t n_micro = 1; n_micro <= 7; n_micro++) {
                fb_manifest m;
                tiny_manifest(&m, models[i]);
                fb_plan_request r = request_for(&m);
                r.act = bf16 ? FB_BF16 : FB_F32;
                r.n_micro = n_micro;
                uint64_t size[LAYOUTS_MAX];
                uint32_t n = layouts(size, &r);
                for (uint32_t k = 0; k < 3 * n; k++) {
                    uint32_t first = 0;
                    fb_plan p = { 0 };
                    fb_error err;
                    r.hbm_budget = size[k / 3] + k % 3 - 1;
                    while (first < n && size[first] > r.hbm_budget)
                        first++;
                    fb_status st = fb_plan_build(&p, &r, &layout, &err);
                    check_ledger(&p);
                    if (first == n) {
                        expect_failure(st, FB_NOFIT, &err, "hbm_budget allows");
                        assert_non_null(strstr(err.msg, "are short; raise hbm_budget"));
                        assert_true(p.device_bytes > r.hbm_budget); /* the plan that does not fit can be looked at */
                        continue;
                    }
                    assert_int_equal(st, FB_OK);
                    assert_int_equal(p.device_bytes, size[first]);
                    assert_int_equal(p.layout.n_pass, 1 + first / 2);
                    assert_int_equal(p.layout.kept_on_host, first % 2);
                    /* no idle pass */
                    assert_true((p.layout.n_pass - 1) * p.micro_per_pass < n_micro
                                && p.layout.n_pass * p.micro_per_pass >= n_micro);
                }
                fb_manifest_free(&m);
            }
}

/* Fewer micro-batches a pass need less. */
static void more_passes_need_less(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &untied);
    fb_plan_request r = request_for(&m);
    uint64_t size[LAYOUTS_MAX];
    layouts(size, &r);
    for (uint32_t n_pass = 2; n_pass <= 6; n_pass++)
        for (uint32_t on_host = 0; on_host < 2; on_host++) {
            bool fewer = (6 + n_pass - 1) / n_pass < (6 + n_pass - 2) / (n_pass - 1);
            assert_int_equal(size[2 * (n_pass - 1) + on_host] < size[2 * (n_pass - 2) + on_host], fewer);
        }
    fb_manifest_free(&m);
}

static void host_budget_at_the_byte(void **unused)
{
    (void)unused;
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    for (int unified = 0; unified < 2; unified++) {
        fb_plan_request r = request_for(&m);
        r.unified = unified;
        p = build(&r);
        r.ram_budget = p.host_bytes + (unified ? p.device_bytes : 0);
        build(&r);
        r.ram_budget--;
        expect_failure(fb_plan_build(&p, &r, &layout, &err), FB_NOFIT, &err, "ram_budget allows");
        assert_int_equal(strstr(err.msg, "device arena included") != NULL, unified);
        assert_non_null(strstr(err.msg, "max_grad_norm: 0"));
    }
    fb_manifest_free(&m);
}

/* Neither side alone would do: the sentence names both, and is whole however long the limit's name is. */
static void both_sides_are_named_where_both_are_short(void **unused)
{
    (void)unused;
    char limit[160] = "";
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    memset(limit, 'x', sizeof limit - 1);
    for (int bits = 0; bits < 4; bits++) {
        fb_plan_request r = request_for(&m);
        char part[200];
        r.unified = bits & 1;
        r.ram_limit = bits & 2 ? limit : NULL;
        r.hbm_budget = 1 << 10, r.ram_budget = 2 << 10;
        assert_int_equal(fb_plan_build(&p, &r, &layout, &err), FB_NOFIT);
        uint64_t host = p.host_bytes + (r.unified ? p.device_bytes : 0);
        snprintf(part, sizeof part,
                 "plan: the device needs %.1f MiB, hbm_budget allows 0.0 MiB, %.1f MiB are short; raise hbm_budget",
                 (double)p.device_bytes / 0x1p20, (double)(p.device_bytes - r.hbm_budget) / 0x1p20);
        expect_failure(err.status, FB_NOFIT, &err, part);
        snprintf(part, sizeof part, "; and host memory needs %.1f MiB", (double)host / 0x1p20);
        expect_failure(err.status, FB_NOFIT, &err, part);
        snprintf(part, sizeof part, " %.1f MiB are short; %s", (double)(host - r.ram_budget) / 0x1p20,
                 r.ram_limit ? "free memory or raise that limit" : "raise ram_budget");
        expect_failure(err.status, FB_NOFIT, &err, part);
        assert_string_equal(err.msg + strlen(err.msg) - strlen("smaller model"), "smaller model");
        r.hbm_budget = p.device_bytes, r.ram_budget = host; /* as much as was said to be short, and no more */
        p = build(&r);
    }
    fb_manifest_free(&m);
}

/* Accumulators rest on the host only where several passes need them and no gradient buffer of their kind is there. */
static void several_passes_need_room_on_the_host(void **unused)
{
    (void)unused;
    fb_manifest m;
    tiny_manifest(&m, &untied);
    for (int bits = 0; bits < 4; bits++) {
        fb_plan_request r = request_for(&m);
        r.clip = bits & 1, r.act = bits & 2 ? FB_BF16 : FB_F32;
        fb_plan p = build(&r);
        assert_int_equal(p.host[FB_HOST_ACCUMULATORS].size, 0);
        while (p.layout.n_pass == 1) {
            r.hbm_budget = p.device_bytes - 1;
            p = build(&r);
        }
        assert_int_equal(p.host[FB_HOST_ACCUMULATORS].size, r.clip && r.act == FB_F32 ? 0 : 4 * m.extent);
        assert_int_equal(p.host[FB_HOST_INPUTS].size, p.layout.kept_on_host ? p.input_size * p.micro_per_pass * m.cfg.n_layer : 0);
    }
    fb_manifest_free(&m);
}

static void the_remedy_names_what_can_be_changed(void **unused)
{
    (void)unused;
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    fb_plan_request r = request_for(&m);
    r.hbm_budget = 1;
    layout.slots = 4;
    fb_plan_build(&p, &r, &layout, &err);
    assert_non_null(strstr(err.msg, "lower slots (4), set recompute: full, lower micro_batch (2) or lower cutoff_len (24)"));
    layout.slots = 2, layout.recompute = layout.rich = FB_RECOMPUTE_FULL, r.micro_rows = 1;
    fb_plan_build(&p, &r, &layout, &err);
    assert_null(strstr(err.msg, "slots"));
    assert_null(strstr(err.msg, "recompute"));
    assert_null(strstr(err.msg, "micro_batch"));
    fb_manifest_free(&m);
}

static void impossible_batches_are_refused(void **unused)
{
    (void)unused;
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    static const uint32_t rows[][2] = { { 0, 1 }, { 1, 0 }, { 1u << 31, 1u << 31 }, { 1u << 16, 1u << 16 }, { 1u << 30, 1 },
                                        { UINT32_MAX, UINT32_MAX } };
    for (size_t i = 0; i < FB_COUNT(rows); i++) {
        fb_plan_request r = request_for(&m);
        r.row_len = rows[i][0], r.micro_rows = rows[i][1];
        expect_failure(fb_plan_build(&p, &r, &layout, &err), FB_CONFIG, &err, "tokens");
    }
    fb_manifest_free(&m);
}

/* The sum of a plan that is far too large has not come round to a small one. */
static void needs_do_not_wrap(void **unused)
{
    (void)unused;
    fb_manifest m;
    fb_error err;
    fb_plan p;
    tiny_manifest(&m, &untied);
    for (uint32_t shift = 0; shift < 32; shift++) { /* from 2^41 bytes to 2^72 */
        fb_plan_request r = request_for(&m);
        r.row_len = 1u << 20, r.micro_rows = 1u << 9, r.n_micro = 1u << shift;
        double inputs = 0x1p29 * m.cfg.hidden * 4.0 * r.n_micro * (m.cfg.n_layer + 1);
        if (fb_plan_build(&p, &r, &layout, &err) == FB_OK)
            assert_true((double)p.device_bytes > inputs);
        else
            expect_failure(err.status, FB_CONFIG, &err, "more memory than any machine has");
    }
    fb_manifest_free(&m);
}

/* The cut of the head's rows is part of the sums: it depends on the vocabulary, never on budget, slots or passes. */
static void the_cut_of_the_head_is_the_vocabularys(void **unused)
{
    (void)unused;
    static const uint32_t want[][2] = { { 96, 4096 }, { 4096, 4096 }, { 4097, 2048 }, { 32000, 512 }, { 151936, 64 },
                                        { 600000, 32 } };
    for (size_t i = 0; i < FB_COUNT(want); i++) {
        fb_manifest m;
        tiny_model t = untied;
        t.vocab = want[i][0];
        tiny_manifest(&m, &t);
        fb_plan_request r = request_for(&m);
        r.row_len = 8192;
        assert_int_equal(build(&r).loss_rows, want[i][1]);
        layout.slots = FB_SLOTS_ALL, r.n_micro = 1, r.train = false;
        assert_int_equal(build(&r).loss_rows, want[i][1]);
        fb_manifest_free(&m);
    }
}

/* A budget that grows gives the gradients' buffer more room, up to the largest gradient, before anything else changes. */
static void the_gradient_buffer_takes_what_is_left(void **unused)
{
    (void)unused;
    fb_manifest m;
    const tiny_model large = { "llama", 1024, 4096, 2, 8, 8, 128, 200000, false, NULL, 0 };
    tiny_manifest(&m, &large);
    fb_plan_request r = request_for(&m);
    r.act = FB_BF16, r.unified = false;
    fb_plan most = build(&r);
    assert_int_equal(most.out_elems, (m.blocks[3].extent + NORM_TILE - 1) / NORM_TILE * NORM_TILE); /* the head's */
    uint64_t rest = most.device_bytes - most.device[FB_DEV_GRAD_OUT].size;
    for (uint64_t out = most.out_elems; out > OUT_ELEMS_LEAST;) {
        uint64_t next = norm_tiles(max_u64(out / 2, OUT_ELEMS_LEAST));
        r.hbm_budget = rest + 2 * out - 1;
        fb_plan p = build(&r);
        check_ledger(&p);
        assert_false(p.layout.kept_on_host);
        assert_in_range(p.out_elems, next - NORM_TILE, next);
        assert_int_equal(p.out_elems % NORM_TILE, 0);
        out = p.out_elems;
    }
    r.hbm_budget = rest + 2 * OUT_ELEMS_LEAST - 1;
    assert_true(build(&r).layout.kept_on_host);
    r.hbm_budget = 0, r.unified = true;
    assert_int_equal(build(&r).out_elems, OUT_ELEMS_LEAST); /* a copy within one memory needs no more */
    fb_manifest_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ledger_adds_up),
        cmocka_unit_test(what_blocks_own_lies_end_to_end),
        cmocka_unit_test(host_bytes_a_parameter),
        cmocka_unit_test(budgets_at_the_byte),
        cmocka_unit_test(more_passes_need_less),
        cmocka_unit_test(host_budget_at_the_byte),
        cmocka_unit_test(several_passes_need_room_on_the_host),
        cmocka_unit_test(the_remedy_names_what_can_be_changed),
        cmocka_unit_test(both_sides_are_named_where_both_are_short),
        cmocka_unit_test(impossible_batches_are_refused),
        cmocka_unit_test(needs_do_not_wrap),
        cmocka_unit_test(the_cut_of_the_head_is_the_vocabularys),
        cmocka_unit_test(the_gradient_buffer_takes_what_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
