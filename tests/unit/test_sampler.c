/* Which tokens can come, from the definitions; how often, from the softmax. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "run/sampler.h"

enum { V = 6, DRAWS = 20000 };

static fb_sampler sampler;

static int open_sampler(void **state)
{
    (void)state;
    memset(&sampler, 0, sizeof sampler);
    sampler.top_p = 1;
    return fb_sampler_init(&sampler, V, NULL) == FB_OK ? 0 : -1;
}

static int close_sampler(void **state)
{
    (void)state;
    fb_sampler_deinit(&sampler);
    fb_sampler_deinit(&sampler);
    return 0;
}

static void draw(const float *logits, uint32_t *times)
{
    memset(times, 0, V * sizeof *times);
    for (int i = 0; i < DRAWS; i++) {
        uint32_t t = fb_sampler_next(&sampler, logits);
        assert_true(t < V);
        times[t]++;
    }
}

/* Within 5 standard deviations of a binomial; a fixed seed makes it a fact, not a chance. */
static void check_shares(const uint32_t *times, const double *p)
{
    for (int i = 0; i < V; i++)
        assert_true(fabs(times[i] - DRAWS * p[i]) <= 5 * sqrt(DRAWS * p[i] * (1 - p[i])));
}

static void softmax(double *p, const float *logits, double temperature, const int *keep)
{
    double sum = 0;
    for (int i = 0; i < V; i++)
        sum += p[i] = keep[i] ? exp(logits[i] / temperature) : 0;
    for (int i = 0; i < V; i++)
        p[i] /= sum;
}

static const float logits[V] = { 0.5f, 2.0f, -1.0f, 1.5f, 2.0f, -INFINITY };

static void greedy_takes_the_first_largest(void **unused)
{
    (void)unused;
    sampler.random = 1;
    for (int i = 0; i < 10; i++)
        assert_int_equal(fb_sampler_next(&sampler, logits), 1);
    assert_int_equal(sampler.random, 1); /* and uses no random number */
    assert_int_equal(fb_sampler_next(&sampler, (float[V]){ -3, -3, -3, -3, -3, -2 }), 5);
}

static void temperature_is_a_softmax(void **unused)
{
    (void)unused;
    for (double t = 0.25; t <= 4; t *= 2) {
        uint32_t times[V];
        double p[V];
        sampler.temperature = t;
        draw(logits, times);
        softmax(p, logits, t, (int[]){ 1, 1, 1, 1, 1, 1 });
        check_shares(times, p);
    }
}

static void top_k_keeps_k(void **unused)
{
    (void)unused;
    uint32_t times[V];
    double p[V];
    sampler.temperature = 1;
    sampler.top_k = 3;
    draw(logits, times);
    softmax(p, logits, 1, (int[]){ 0, 1, 0, 1, 1, 0 });
    check_shares(times, p);
    sampler.top_k = 1;
    draw(logits, times);
    assert_int_equal(times[1], DRAWS);
    sampler.top_k = V + 10;
    draw(logits, times);
    softmax(p, logits, 1, (int[]){ 1, 1, 1, 1, 1, 1 });
    check_shares(times, p);
}

/* p = 0.5, 0.25, 0.125, 0.0625, ...: the fewest that reach top_p. */
static void top_p_keeps_the_nucleus(void **unused)
{
    (void)unused;
    const float halves[V] = { logf(1), logf(2), logf(4), logf(8), logf(16), logf(32) };
    static const struct { double top_p; int n; } cases[] = { { 1e-9, 1 }, { 0.5, 1 }, { 0.52, 2 }, { 0.7, 2 }, { 0.8, 3 },
                                                             { 0.97, 5 }, { 1, 6 } };
    sampler.temperature = 1;
    for (size_t c = 0; c < FB_COUNT(cases); c++) {
        uint32_t times[V];
        double p[V];
        int keep[V];
        sampler.top_p = cases[c].top_p;
        for (int i = 0; i < V; i++)
            keep[i] = i >= V - cases[c].n;
        draw(halves, times);
        softmax(p, halves, 1, keep);
        check_shares(times, p);
    }
    /* top-k comes first: of the two that it leaves, the larger has 2/3. */
    sampler.top_k = 2;
    sampler.top_p = 0.6;
    uint32_t times[V];
    draw(halves, times);
    assert_int_equal(times[5], DRAWS);
}

static void the_seed_is_the_sequence(void **unused)
{
    (void)unused;
    uint32_t first[50], differs = 0;
    sampler.temperature = 1;
    for (uint64_t seed = 1; seed <= 2; seed++)
        for (int round = 0; round < 2; round++) {
            sampler.random = seed;
            for (int i = 0; i < 50; i++) {
                uint32_t t = fb_sampler_next(&sampler, logits);
                if (seed == 1 && round == 0)
                    first[i] = t;
                else if (seed == 1)
                    assert_int_equal(t, first[i]);
                else
                    differs += t != first[i];
            }
        }
    assert_true(differs > 0);
}

static void large_logits_do_not_overflow(void **unused)
{
    (void)unused;
    sampler.temperature = 1e-3;
    for (int i = 0; i < 100; i++)
        assert_int_equal(fb_sampler_next(&sampler, (float[V]){ 1e4f, 3e4f, 1e30f, -1e30f, 0, 3e38f }), 5);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_sampler, close_sampler)
    const struct CMUnitTest tests[] = {
        TEST(greedy_takes_the_first_largest),
        TEST(temperature_is_a_softmax),
        TEST(top_k_keeps_k),
        TEST(top_p_keeps_the_nucleus),
        TEST(the_seed_is_the_sequence),
        TEST(large_logits_do_not_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
