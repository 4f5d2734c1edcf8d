/* The update workers: AdamW's closed form on every element, whatever the cut, the order and the number of threads; the
 * states on the way; slabs given back.  One place in the workers can be slowed down, so that jobs pile up. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

#include "optim/adamw.h"

static void slow_adamw_f32(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw *a, bool decay);
#define fb_adamw_f32 slow_adamw_f32
#include "../../src/train/update.c"
#undef fb_adamw_f32

#include "temp_dir.h"
#include "tiny_model.h"
#include "train/micro.h"

static const float *slow_at; /* the range with this gradient takes a while, once */

static void slow_adamw_f32(float *p, const float *g, float *m, float *v, uint64_t n, const fb_adamw *a, bool decay)
{
    const float *once = g;
    if (__atomic_compare_exchange_n(&slow_at, &once, NULL, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        nanosleep(&(struct timespec){ 0, 100000000 }, NULL);
    fb_adamw_f32(p, g, m, v, n, a, decay);
}

static const tiny_model model = { "qwen2", 48, 1200, 3, 4, 2, 12, 300, false, NULL, 0 };
static const fb_adamw first_step = { .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip = 0.5,
                                     .step = 1 };

static fb_device *device;
static fb_team *team;
static fb_manifest manifest;
static uint64_t n_elem;

static int open_all(void **state)
{
    (void)state;
    if (fb_team_new(&team, 1, "test", NULL)
        || fb_device_open(&device, &(fb_device_options){ .backend = "cpu", .n_thread = 1 }, NULL))
        return -1;
    tiny_manifest(&manifest, &model);
    n_elem = manifest.extent;
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    device->ops->close(device);
    fb_team_free(team);
    fb_manifest_free(&manifest);
    return 0;
}

/* ---- a state with random weights and gradients; padding zero ---- */

static fb_state make_state(fb_dtype act)
{
    fb_state s;
    fb_plan p;
    fb_error err;
    fb_plan_request r = { .manifest = &manifest, .act = act, .train = true, .clip = true, .row_len = 8,
                          .micro_rows = 1, .n_micro = 1, .meta_size = fb_micro_size,
                          .attention_scratch = device->kernels->attention_scratch };
    fb_layout l = { .n_pass = 1, .slots = 1 };
    if (fb_plan_build(&p, &r, &l, &err) != FB_OK || fb_state_init(&s, &manifest, &p, NULL, device, team, &err) != FB_OK)
        fail_msg("%s", err.msg);
    uint64_t seed = 99;
    for (uint32_t i = 0; i < manifest.n_param; i++) {
        const fb_param *q = &manifest.params[i];
        for (uint64_t k = 0; k < q->rows * q->cols; k++) {
            float w = (float)random_real(&seed), g = (float)random_real(&seed);
            fb_state_write(&s, q->block, q->offset + k, 1, &w);
            fb_from_f32(fb_state_at(&s, FB_HOST_GRADIENTS, q->block, q->offset + k), act, &g, 1);
        }
    }
    return s;
}

static void *gradient(const fb_state *s, uint32_t block, uint64_t first)
{
    return fb_state_at(s, FB_HOST_GRADIENTS, block, first);
}

static bool same_state(const fb_state *a, const fb_state *b)
{
    for (fb_plan_host_region c = FB_HOST_WEIGHTS; c <= FB_HOST_V; c++)
        if (a->component[c].at && memcmp(a->component[c].at, b->component[c].at, a->component[c].size))
            return false;
    return true;
}

static fb_updater *new_updater(fb_state *s, fb_pool *slabs, uint32_t n_thread)
{
    fb_updater *u;
    fb_error err;
    if (fb_updater_new(&u, s, slabs, n_thread, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return u;
}

static void update_whole_blocks(fb_state *s, uint32_t n_thread)
{
    fb_updater *u = new_updater(s, NULL, n_thread);
    fb_updater_begin(u, &first_step);
    for (uint32_t b = 0; b < manifest.n_block; b++) {
        fb_updater_expect(u, b);
        fb_updater_submit(u, b, 0, manifest.blocks[b].extent, gradient(s, b, 0), false);
    }
    fb_updater_wait_all(u);
    fb_updater_free(u);
}

/* ---- tests ---- */

/* After one step from zero moments, m^ = g and v^ = g g (test_adamw.c), so that each weight has a closed form; decay on
 * matrices only, by the manifest; padding stays zero. */
static void every_element_has_the_closed_form(void **unused)
{
    (void)unused;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        fb_state before = make_state(bf16 ? FB_BF16 : FB_F32), after = make_state(bf16 ? FB_BF16 : FB_F32);
        update_whole_blocks(&after, 3);
        uint64_t moved = 0;
        for (uint32_t i = 0; i < manifest.n_param; i++) {
            const fb_param *q = &manifest.params[i];
            assert_int_equal(q->decay, q->rank == 2);
            for (uint64_t k = 0; k < q->rows * q->cols; k++) {
                float p0, p1, g;
                fb_state_read(&before, q->block, q->offset + k, 1, &p0);
                fb_state_read(&after, q->block, q->offset + k, 1, &p1);
                fb_to_f32(&g, gradient(&before, q->block, q->offset + k), before.act, 1);
                double x = 0.5 * (double)g, want = p0 - 0.01 * (x / (fabs(x) + 1e-8) + (q->rank == 2 ? 0.1 * p0 : 0));
                assert_true(fabs(p1 - want) <= 4 * 0x1p-24); /* three roundings of numbers up to 1 */
                moved += p1 != p0;
            }
        }
        assert_true(moved > manifest.n_weight - 10);
        uint64_t zeros = 0;
        for (uint64_t k = 0; k < n_elem; k++)
            zeros += ((float *)(void *)after.component[FB_HOST_V].at)[k] == 0;
        assert_true(zeros >= n_elem - manifest.n_weight && zeros < n_elem - manifest.n_weight + 10);
        fb_state_deinit(&before);
        fb_state_deinit(&after);
    }
}

static void threads_change_no_bit(void **unused)
{
    (void)unused;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        fb_state want = make_state(bf16 ? FB_BF16 : FB_F32);
        update_whole_blocks(&want, 1);
        for (uint32_t n = 2; n <= 7; n += n == 2 ? 3 : 2) {
            fb_state got = make_state(want.act);
            update_whole_blocks(&got, n);
            assert_true(same_state(&want, &got));
            fb_state_deinit(&got);
        }
        fb_state_deinit(&want);
    }
}

/* Pieces in slabs, submitted as they land, with more pieces than slabs. */
static void pieces_in_slabs_change_no_bit(void **unused)
{
    (void)unused;
    enum { PIECE = 3001, SLABS = 3 };
    fb_state want = make_state(FB_F32);
    update_whole_blocks(&want, 1);
    for (uint32_t n_thread = 1; n_thread <= 4; n_thread += 3) {
        fb_state got = make_state(FB_F32);
        static float memory[SLABS][PIECE];
        fb_pool slabs;
        fb_pool_init(&slabs, memory, sizeof memory[0], SLABS);
        fb_updater *u = new_updater(&got, &slabs, n_thread);
        fb_updater_begin(u, &first_step);
        for (uint32_t b = manifest.n_block; b-- > 0;) {
            fb_updater_expect(u, b);
            for (uint64_t first = 0; first < manifest.blocks[b].extent; first += PIECE) {
                uint64_t left = manifest.blocks[b].extent - first, n = left < PIECE ? left : PIECE;
                float *slab = fb_pool_take(&slabs);
                memcpy(slab, gradient(&got, b, first), n * sizeof *slab);
                fb_updater_submit(u, b, first, n, slab, true);
            }
        }
        fb_updater_wait_all(u);
        assert_int_equal(slabs.here, 7);
        assert_true(same_state(&want, &got));
        fb_updater_free(u);
        fb_pool_deinit(&slabs);
        fb_state_deinit(&got);
    }
    fb_state_deinit(&want);
}

/* The oldest piece is slow while hundreds of later ones come and go: nothing is lost, nothing gives way. */
static void one_slow_worker_holds_nobody_up_for_ever(void **unused)
{
    (void)unused;
    enum { PIECE = 200, SLABS = 4 };
    fb_state want = make_state(FB_F32), got = make_state(FB_F32);
    update_whole_blocks(&want, 1);
    static float memory[SLABS][PIECE];
    fb_pool slabs;
    fb_pool_init(&slabs, memory, sizeof memory[0], SLABS);
    fb_updater *u = new_updater(&got, &slabs, 2);
    fb_updater_begin(u, &first_step);
    for (uint32_t b = 0; b < manifest.n_block; b++) {
        fb_updater_expect(u, b);
        for (uint64_t first = 0; first < manifest.blocks[b].extent; first += PIECE) {
            uint64_t left = manifest.blocks[b].extent - first, n = left < PIECE ? left : PIECE;
            float *slab = fb_pool_take(&slabs);
            if (b == 0 && first == 0)
                __atomic_store_n(&slow_at, slab, __ATOMIC_RELAXED);
            memcpy(slab, gradient(&got, b, first), n * sizeof *slab);
            fb_updater_submit(u, b, first, n, slab, true);
        }
    }
    fb_updater_wait_all(u);
    assert_true(same_state(&want, &got));
    assert_int_equal(slabs.here, 15);
    fb_updater_free(u);
    fb_pool_deinit(&slabs);
    fb_state_deinit(&want);
    fb_state_deinit(&got);
}

static void dropped_gradients_change_nothing(void **unused)
{
    (void)unused;
    fb_state want = make_state(FB_F32), got = make_state(FB_F32);
    static float memory[2][4096];
    fb_pool slabs;
    fb_pool_init(&slabs, memory, sizeof memory[0], 2);
    fb_updater *u = new_updater(&got, &slabs, 2);
    for (int round = 0; round < 2; round++) {
        fb_updater_begin(u, &first_step);
        for (uint32_t b = 0; b < manifest.n_block; b++) {
            uint64_t extent = manifest.blocks[b].extent;
            fb_updater_expect(u, b);
            assert_false(fb_updater_is_clean(u, b));
            if (round == 0)
                fb_updater_drop(u, b, 0, extent, gradient(&got, b, 0), false);
            for (uint64_t first = 0; round == 1 && first < extent; first += 4096)
                fb_updater_drop(u, b, first, extent - first < 4096 ? extent - first : 4096, fb_pool_take(&slabs), true);
            assert_true(fb_updater_is_clean(u, b));
        }
        fb_updater_wait_all(u);
    }
    assert_int_equal(slabs.here, 3);
    assert_true(same_state(&want, &got));
    fb_updater_free(u);
    update_whole_blocks(&want, 1);
    update_whole_blocks(&got, 2); /* and the next step is as if they had never been */
    assert_true(same_state(&want, &got));
    fb_pool_deinit(&slabs);
    fb_state_deinit(&want);
    fb_state_deinit(&got);
}

/* A block is clean before and after, and not clean while its gradient is on the way. */
static void a_block_is_clean_when_it_is_done(void **unused)
{
    (void)unused;
    fb_state s = make_state(FB_F32);
    fb_updater *u = new_updater(&s, NULL, 2);
    fb_updater_wait_all(u);
    fb_updater_begin(u, &first_step);
    fb_updater_expect(u, 1);
    assert_false(fb_updater_is_clean(u, 1));
    assert_true(fb_updater_is_clean(u, 0));
    uint64_t half = manifest.blocks[1].extent / 2;
    fb_updater_submit(u, 1, half, manifest.blocks[1].extent - half, gradient(&s, 1, half), false);
    assert_false(fb_updater_is_clean(u, 1)); /* half of it has not even landed */
    fb_updater_submit(u, 1, 0, half, gradient(&s, 1, 0), false);
    fb_updater_wait(u, 1);
    assert_true(fb_updater_is_clean(u, 1));
    fb_updater_free(u);

    fb_state want = make_state(FB_F32); /* free waits for the jobs in hand */
    fb_state got = make_state(FB_F32);
    update_whole_blocks(&want, 1);
    u = new_updater(&got, NULL, 2);
    fb_updater_begin(u, &first_step);
    for (uint32_t b = 0; b < manifest.n_block; b++) {
        fb_updater_expect(u, b);
        fb_updater_submit(u, b, 0, manifest.blocks[b].extent, gradient(&got, b, 0), false);
    }
    fb_updater_free(u);
    assert_true(same_state(&want, &got));
    fb_updater_free(NULL);
    fb_state_deinit(&s);
    fb_state_deinit(&want);
    fb_state_deinit(&got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_has_the_closed_form),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(pieces_in_slabs_change_no_bit),
        cmocka_unit_test(one_slow_worker_holds_nobody_up_for_ever),
        cmocka_unit_test(dropped_gradients_change_nothing),
        cmocka_unit_test(a_block_is_clean_when_it_is_done),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
