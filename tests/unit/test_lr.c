/* Schedules against the rates that transformers gives (ref/make_lr.py), and against what the words promise. */
#include "optim/lr.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../ref/lr_fixture.h"
#include "base/error.h"

static void rates_equal_those_of_transformers(void **state)
{
    (void)state;
    for (size_t i = 0; i < FB_COUNT(lr_fixture); i++) {
        const fb_lr *s = &lr_fixture[i].schedule;
        for (uint64_t step = 0; step < LR_FIXTURE_STEPS; step++) {
            double want = lr_fixture[i].rate[step], got = fb_lr_at(s, step);
            /* Near a cosine's zero, 1 + cos(x) keeps only cos's absolute error: half an ulp of 1, of the base. */
            if (!(fabs(got - want) <= 1e-12 * fabs(want) + 0x1p-52 * s->base))
                fail_msg("case %zu (%s), step %u: %.17g, expected %.17g", i, fb_lr_type_str(s->type), (unsigned)step,
                         got, want);
        }
    }
}

static void no_schedule_leaves_0_to_base(void **state)
{
    (void)state;
    for (int type = 0; type < FB_LR_COUNT; type++)
        for (uint64_t n_warmup = 0; n_warmup < 6; n_warmup++)
            for (uint64_t step = 0; step < 50; step++) {
                fb_lr s = { .type = (fb_lr_type)type, .base = 1e-3, .n_warmup = n_warmup, .n_total = 20,
                            .n_cycle = 0.5, .min_lr = 1e-4, .n_stable = 3, .n_decay = 7, .min_ratio = 0.2,
                            .warmup_shape = (int)(step % FB_LR_SHAPE_COUNT),
                            .decay_shape = (int)(step % FB_LR_SHAPE_COUNT) };
                double rate = fb_lr_at(&s, step);
                assert_true(rate >= 0 && rate <= 1e-3);
                s.base = 0;
                assert_true(fb_lr_at(&s, step) == 0);
            }
}

static void huge_counts_stay_finite(void **state)
{
    (void)state;
    for (int type = 0; type < FB_LR_COUNT; type++) {
        fb_lr s = { .type = (fb_lr_type)type, .base = 1, .n_warmup = 1, .n_total = UINT64_MAX, .n_cycle = 0.5,
                    .n_stable = UINT64_MAX, .n_decay = UINT64_MAX };
        assert_true(isfinite(fb_lr_at(&s, 0)));
        assert_true(isfinite(fb_lr_at(&s, UINT64_MAX)));
    }
}

static void names_lead_back_to_types(void **state)
{
    (void)state;
    for (int type = 0; type < FB_LR_COUNT; type++)
        assert_int_equal(fb_lr_type_find(fb_lr_type_str((fb_lr_type)type)), type);
    assert_int_equal(fb_lr_type_find("warmup_stable_decay"), FB_LR_WARMUP_STABLE_DECAY);
    assert_int_equal(fb_lr_type_find("cosine_with_restarts"), -1);
    assert_int_equal(fb_lr_type_find(""), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_equal_those_of_transformers),
        cmocka_unit_test(no_schedule_leaves_0_to_base),
        cmocka_unit_test(huge_counts_stay_finite),
        cmocka_unit_test(names_lead_back_to_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
