#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "sched/pool.h"
#include "test_kit.h"

enum { SLAB = 48 };

static unsigned char memory[64 * SLAB];

static void hands_out_each_slab_once(void **unused)
{
    (void)unused;
    for (uint32_t count = 1; count <= 64; count += count == 1 ? 2 : count == 3 ? 60 : 1) {
        fb_pool p;
        bool seen[64] = { false };
        fb_pool_init(&p, memory, SLAB, count);
        for (uint32_t i = 0; i < count; i++) {
            unsigned char *slab = fb_pool_take(&p);
            assert_int_equal((slab - memory) % SLAB, 0);
            assert_in_range((slab - memory) / SLAB, 0, count - 1);
            assert_false(seen[(slab - memory) / SLAB]);
            seen[(slab - memory) / SLAB] = true;
        }
        assert_int_equal(p.here, 0);
        fb_pool_give(&p, memory + (count / 2) * SLAB);
        assert_ptr_equal(fb_pool_take(&p), memory + (count / 2) * SLAB);
        fb_pool_deinit(&p);
    }
    fb_pool never = { 0 };
    fb_pool_deinit(&never);
}

static void *give_later(void *pool)
{
    nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
    fb_pool_give(pool, memory + SLAB);
    return NULL;
}

/* Without the wait, take on an empty pool would compute a slab from no bit at all. */
static void an_empty_pool_makes_take_wait(void **unused)
{
    (void)unused;
    fb_pool p;
    pthread_t giver;
    fb_pool_init(&p, memory, SLAB, 2);
    fb_pool_take(&p);
    fb_pool_take(&p);
    assert_int_equal(pthread_create(&giver, NULL, give_later, &p), 0);
    assert_ptr_equal(fb_pool_take(&p), memory + SLAB);
    pthread_join(giver, NULL);
    fb_pool_deinit(&p);
}

enum { THREADS = 4, ROUNDS = 2000 };

static void *use_slabs(void *pool)
{
    for (unsigned i = 0; i < ROUNDS; i++) {
        unsigned char *slab = fb_pool_take(pool);
        memset(slab, (int)(i & 0xff), SLAB);
        for (int k = 0; k < SLAB; k++)
            if (slab[k] != (i & 0xff))
                return (void *)1; /* someone else has it too */
        fb_pool_give(pool, slab);
    }
    return NULL;
}

static void no_slab_has_two_holders(void **unused)
{
    (void)unused;
    fb_pool p;
    pthread_t threads[THREADS];
    fb_pool_init(&p, memory, SLAB, 3);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, use_slabs, &p), 0);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    assert_int_equal(p.here, 7);
    fb_pool_deinit(&p);
}

static void give_at(void *offset)
{
    fb_pool p;
    fb_pool_init(&p, memory + SLAB, SLAB, 2);
    fb_pool_take(&p);
    fb_pool_give(&p, memory + SLAB + *(const int *)offset);
}

static void wrong_gifts_are_asserted(void **unused)
{
    (void)unused;
    int right = 0, below = -SLAB, past = 2 * SLAB, inside = 1, twice = SLAB;
    assert_false(aborts(give_at, &right));
    assert_true(aborts(give_at, &below));
    assert_true(aborts(give_at, &past));
    assert_true(aborts(give_at, &inside));
    assert_true(aborts(give_at, &twice)); /* slab 1 was never taken */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hands_out_each_slab_once),
        cmocka_unit_test(an_empty_pool_makes_take_wait),
        cmocka_unit_test(no_slab_has_two_holders),
        cmocka_unit_test(wrong_gifts_are_asserted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
