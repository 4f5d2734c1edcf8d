/* The update: a closed form, a model in double, torch's own steps; then that every implementation gives the same bits
 * on anything at all. */
#include "optim/adamw.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../ref/adamw_fixture.h"
#include "base/dtype.h"
#include "base/error.h"

static const char *const kernels[] = { "scalar", "avx2", "avx512" };

/* xorshift64*: the same data on every machine. */
static uint64_t seed = 88172645463325252u;

static uint32_t random_bits(void)
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return (uint32_t)(seed * 2685821657736338717u >> 32);
}

static float uniform(void) /* -1..1 */
{
    return (float)((int32_t)random_bits() >> 8) * 0x1p-23f;
}

/* After one step from zero moments bias correction cancels beta exactly: m^ = g and v^ = g*g (Kingma & Ba 2015,
 * alg. 1; decoupled decay: Loshchilov & Hutter 2019, alg. 2), whatever the betas. */
static void first_step_has_a_closed_form(void **state)
{
    (void)state;
    static const float before[] = { 1.0f, -2.0f, 0.5f, 0.0f, 1.5f }, g[] = { 0.1f, -3.0f, 1e-8f, 0.0f, 1e6f };
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        for (double clip = 1; clip > 0.2; clip /= 2) {
            float p[5], m[5] = { 0 }, v[5] = { 0 };
            memcpy(p, before, sizeof p);
            fb_adamw a = { .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip = clip,
                           .step = 1 };
            fb_adamw_f32(p, g, m, v, 5, &a, true);
            for (int i = 0; i < 5; i++) {
                double clipped = g[i] * clip;
                double want = before[i] - 0.01 * (clipped / (fabs(clipped) + 1e-8) + 0.1 * before[i]);
                /* Three roundings at p's size (shrink, product, sum), a dozen at the step's. */
                assert_true(fabs(p[i] - want) <= 0x1p-24 * (3 * fabs((double)before[i]) + 12 * 0.01));
            }
        }
    }
}

/* Each float operation errs by at most 2^-24 of its result.  In m and v an error fades as beta^t, so that no more than
 * 3 / (1 - beta) gather, and v's count half under the root.  Each step so errs by less than 40 roundings of m (against
 * the scale of g, which is the scale of d) and 100 of d: 150 * 2^-24 * lr at a ratio |m/d| up to 1, and p rounds
 * thrice a step. */
static void fifty_steps_follow_a_model_in_double(void **state)
{
    (void)state;
    enum { N = 257, N_STEP = 50 };
    static float p[N], g[N], m[N], v[N];
    static double P[N], M[N], V[N];
    for (int i = 0; i < N; i++) {
        P[i] = p[i] = uniform();
        m[i] = v[i] = 0;
        M[i] = V[i] = 0;
    }
    fb_adamw a = { .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.05, .clip = 0.7 };
    for (a.step = 1; a.step <= N_STEP; a.step++) {
        double t = (double)a.step;
        for (int i = 0; i < N; i++) {
            g[i] = uniform() * ldexpf(1, i % 30 - 20);
            double clipped = g[i] * a.clip;
            M[i] = a.beta1 * M[i] + (1 - a.beta1) * clipped;
            V[i] = a.beta2 * V[i] + (1 - a.beta2) * clipped * clipped;
            double m_hat = M[i] / (1 - pow(a.beta1, t)), v_hat = V[i] / (1 - pow(a.beta2, t));
            P[i] -= a.lr * a.weight_decay * P[i];
            P[i] -= a.lr * m_hat / (sqrt(v_hat) + a.eps);
        }
        fb_adamw_f32(p, g, m, v, N, &a, true);
    }
    for (int i = 0; i < N; i++)
        assert_true(fabs(p[i] - P[i]) <= N_STEP * 0x1p-24 * (3 * 1.5 + 150 * a.lr));
}

/* torch rounds lerp, addcmul and addcdiv elsewhere than fma does: per step a few roundings apart, as above. */
static void eight_steps_agree_with_torch(void **state)
{
    (void)state;
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        float p[ADAMW_FIXTURE_N], m[ADAMW_FIXTURE_N] = { 0 }, v[ADAMW_FIXTURE_N] = { 0 };
        memcpy(p, adamw_fixture_before, sizeof p);
        fb_adamw a = adamw_fixture_hyper;
        for (a.step = 1; a.step <= ADAMW_FIXTURE_STEPS; a.step++)
            fb_adamw_f32(p, adamw_fixture_gradient[a.step - 1], m, v, ADAMW_FIXTURE_N, &a, true);
        for (int i = 0; i < ADAMW_FIXTURE_N; i++) {
            double largest = 0;
            for (int t = 0; t < ADAMW_FIXTURE_STEPS; t++)
                largest = fmax(largest, fabs((double)adamw_fixture_gradient[t][i]));
            double one = ADAMW_FIXTURE_STEPS * 0x1p-24;
            assert_true(fabs(p[i] - adamw_fixture_after[i]) <= one * (4 * fabs((double)p[i]) + 20 * a.lr));
            assert_true(fabs(m[i] - adamw_fixture_m[i]) <= one * 3 * largest);
            assert_true(fabs(v[i] - adamw_fixture_v[i]) <= one * 3 * v[i]);
        }
    }
}

enum { LENGTH_MAX = 70, SHIFT_MAX = 16, ROOM = LENGTH_MAX + SHIFT_MAX + 16 };

typedef struct arrays {
    float    p[ROOM], g[ROOM], m[ROOM], v[ROOM];
    uint16_t hi[ROOM], g16[ROOM];
    int16_t  lo[ROOM];
} arrays;

/* Any bits at all, or one of the values that start trouble, or something ordinary. */
static float wild(void)
{
    static const uint32_t special[] = {
        0, 0x80000000u, 1, 0x80000001u, 0x007fffff, 0x00800000, 0x7f7fffff, 0xff7fffffu, 0x7f800000, 0xff800000u,
        0x7fc00000, 0x7fa00000, 0x21800000 /* 2^-60 */, 0xa17fffffu, 0x0d800000 /* 2^-100 */, 0x0d7fffff,
        0x03800000 /* 2^-120 */, 0x037fffff, 0x3f800000,
    };
    switch (random_bits() % 4) {
    case 0:
        return fb_bits_f32(random_bits());
    case 1:
        return fb_bits_f32(special[random_bits() % FB_COUNT(special)]);
    default:
        return uniform() * ldexpf(1, (int)(random_bits() % 40) - 35);
    }
}

static void fill(arrays *x)
{
    for (int i = 0; i < ROOM; i++) {
        x->p[i] = wild();
        x->g[i] = wild();
        x->m[i] = wild();
        x->v[i] = random_bits() % 8 ? fabsf(wild()) : wild();
        x->g16[i] = (uint16_t)(fb_f32_bits(wild()) >> 16);
    }
    fb_split_f32(x->hi, x->lo, x->p, ROOM);
}

static fb_adamw some_hyper(void)
{
    static const double beta1[] = { 0.9, 0, 0.5 }, beta2[] = { 0.999, 0.95, 0 }, eps[] = { 1e-8, 0, 1e-3 };
    return (fb_adamw){ .lr = 1e-3 * (random_bits() % 4), .beta1 = beta1[random_bits() % 3],
                       .beta2 = beta2[random_bits() % 3], .eps = eps[random_bits() % 3], .weight_decay = 0.1,
                       .clip = random_bits() % 2 ? 1 : 0.37, .step = 1 + random_bits() % 1000 };
}

static void assert_same(const char *what, const char *kernel, const float *a, const float *b, int n)
{
    for (int i = 0; i < n; i++)
        if (fb_f32_bits(a[i]) != fb_f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("%s[%d]: %s gives %a, scalar %a", what, i, kernel, b[i], a[i]);
}

/* On the whole arrays, so that what lies outside the range must be untouched too. */
static void check_kernel_against_scalar(const char *kernel)
{
    static arrays start, a, b;
    static float pa[ROOM], pb[ROOM];
    for (int n = 0; n <= LENGTH_MAX; n++)
        for (int shift = 0; shift < SHIFT_MAX; shift++) {
            fill(&start);
            fb_adamw h = some_hyper();
            bool decay = random_bits() % 2;
            int s = shift, s2 = (shift * 7 + 3) % SHIFT_MAX; /* arrays misaligned against one another */
            a = b = start;

            assert_true(fb_adamw_select("scalar"));
            fb_adamw_f32(a.p + s, a.g + s2, a.m + s, a.v + s2, (uint64_t)n, &h, decay);
            assert_true(fb_adamw_select(kernel));
            assert_string_equal(fb_adamw_selected(), kernel);
            fb_adamw_f32(b.p + s, b.g + s2, b.m + s, b.v + s2, (uint64_t)n, &h, decay);
            assert_same("p", kernel, a.p, b.p, ROOM);
            assert_same("m", kernel, a.m, b.m, ROOM);
            assert_same("v", kernel, a.v, b.v, ROOM);

            a = b = start;
            assert_true(fb_adamw_select("scalar"));
            fb_adamw_split(a.hi + s, a.lo + s2, a.g16 + s, a.m + s2, a.v + s, (uint64_t)n, &h, decay);
            assert_true(fb_adamw_select(kernel));
            fb_adamw_split(b.hi + s, b.lo + s2, b.g16 + s, b.m + s2, b.v + s, (uint64_t)n, &h, decay);
            fb_join_f32(pa, a.hi + s, a.lo + s2, (uint64_t)n);
            fb_join_f32(pb, b.hi + s, b.lo + s2, (uint64_t)n);
            assert_same("split p", kernel, pa, pb, n);
            assert_same("split m", kernel, a.m, b.m, ROOM);
            assert_same("split v", kernel, a.v, b.v, ROOM);
            for (int i = 0; i < ROOM; i++) {
                if (i < s || i >= s + n)
                    assert_int_equal(b.hi[i], start.hi[i]);
                if (i < s2 || i >= s2 + n)
                    assert_int_equal(b.lo[i], start.lo[i]);
            }
        }
}

static void avx2_gives_the_bits_of_scalar(void **state)
{
    (void)state;
    if (!fb_adamw_select("avx2"))
        skip();
    for (int repeat = 0; repeat < 8; repeat++)
        check_kernel_against_scalar("avx2");
}

static void avx512_gives_the_bits_of_scalar(void **state)
{
    (void)state;
    if (!fb_adamw_select("avx512"))
        skip();
    for (int repeat = 0; repeat < 8; repeat++)
        check_kernel_against_scalar("avx512");
}

/* Splitting the master changes where its bits lie, and nothing else. */
static void split_masters_follow_whole_ones(void **state)
{
    (void)state;
    static arrays x, y;
    static float g[ROOM], joined[ROOM];
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        for (int repeat = 0; repeat < 200; repeat++) {
            fill(&x);
            y = x;
            for (int i = 0; i < ROOM; i++)
                g[i] = fb_bf16_f32(x.g16[i]);
            fb_adamw h = some_hyper();
            fb_adamw_f32(x.p, g, x.m, x.v, ROOM, &h, true);
            fb_adamw_split(y.hi, y.lo, y.g16, y.m, y.v, ROOM, &h, true);
            fb_join_f32(joined, y.hi, y.lo, ROOM);
            assert_same("joined", kernels[k], x.p, joined, ROOM);
            assert_same("m", kernels[k], x.m, y.m, ROOM);
            assert_same("v", kernels[k], x.v, y.v, ROOM);
        }
    }
}

static void a_range_may_be_cut_anywhere(void **state)
{
    (void)state;
    static arrays x, y;
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        for (uint64_t cut = 0; cut <= ROOM; cut++) {
            fill(&x);
            y = x;
            fb_adamw h = some_hyper();
            fb_adamw_f32(x.p, x.g, x.m, x.v, ROOM, &h, true);
            fb_adamw_f32(y.p + cut, y.g + cut, y.m + cut, y.v + cut, ROOM - cut, &h, true);
            fb_adamw_f32(y.p, y.g, y.m, y.v, cut, &h, true);
            assert_same("p", kernels[k], x.p, y.p, ROOM);
            assert_same("m", kernels[k], x.m, y.m, ROOM);
            assert_same("v", kernels[k], x.v, y.v, ROOM);
        }
    }
}

static void without_decay_is_as_with_none(void **state)
{
    (void)state;
    static arrays x, y;
    fill(&x);
    y = x;
    fb_adamw h = some_hyper();
    fb_adamw_f32(x.p, x.g, x.m, x.v, ROOM, &h, false);
    h.weight_decay = 0;
    fb_adamw_f32(y.p, y.g, y.m, y.v, ROOM, &h, true);
    assert_same("p", "weight_decay 0", x.p, y.p, ROOM);
}

/* hi is the bf16 nearest to the float, the one further from zero on a tie; hi and lo give back every pattern. */
static void split_is_exact_and_rounds_ties_away(void **state)
{
    (void)state;
    static const uint16_t lows[] = { 0, 1, 2, 0x00ff, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xff00, 0xfffe, 0xffff };
    enum { N = FB_COUNT(lows) + 5 };
    for (uint32_t high = 0; high <= 0xffff; high++) {
        float p[N], back[N];
        uint16_t hi[N];
        int16_t lo[N];
        for (size_t i = 0; i < N; i++)
            p[i] = fb_bits_f32(high << 16 | (i < FB_COUNT(lows) ? lows[i] : random_bits() & 0xffffu));
        fb_split_f32(hi, lo, p, N);
        fb_join_f32(back, hi, lo, N);
        assert_memory_equal(p, back, sizeof p); /* NaNs and infinities too, although only finite ones are promised */
        if ((high & 0x7fff) >= 0x7f7f) /* not finite, or beyond the largest bf16 */
            continue;
        double toward_zero = fb_bf16_f32((uint16_t)high), away = fb_bf16_f32((uint16_t)(high + 1));
        for (size_t i = 0; i < N; i++) {
            bool up = fabs(away - p[i]) <= fabs(p[i] - toward_zero);
            assert_int_equal(hi[i], high + up);
        }
    }
}

/* Betas of a half keep every product exact, so that a value lands exactly on its threshold or one ulp below. */
static void tiny_values_become_zero_at_the_stated_thresholds(void **state)
{
    (void)state;
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        for (int sign = -1; sign <= 1; sign += 2) {
            float s = (float)sign;
            float p[] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
            float g[16] = { s * 0x1p-60f, s * nextafterf(0x1p-60f, 0), s * 0x1p-149f };
            float m[16] = { [3] = s * 0x1p-99f, [4] = s * nextafterf(0x1p-99f, 0), [5] = s * 0.0f, [6] = s * 0x1p-149f };
            float v[16] = { [7] = 0x1p-119f, [8] = nextafterf(0x1p-119f, 0), [9] = 0x1p-149f, [10] = -0.0f };
            fb_adamw a = { .lr = 0.5, .beta1 = 0.5, .beta2 = 0.5, .eps = 1, .clip = 1, .step = 1 };
            fb_adamw_f32(p, g, m, v, 16, &a, true);
            const float want_m[16] = { s * 0x1p-61f, 0, 0, s * 0x1p-100f };
            const float want_v[16] = { [7] = 0x1p-120f }; /* of g = 2^-60: v = 2^-121, too small */
            assert_memory_equal(m, want_m, sizeof m); /* bits: zero is +0 */
            assert_memory_equal(v, want_v, sizeof v);
        }
    }
}

static void what_is_not_finite_is_not_hidden(void **state)
{
    (void)state;
    for (size_t k = 0; k < FB_COUNT(kernels); k++) {
        if (!fb_adamw_select(kernels[k]))
            continue;
        float p[20], g[20], m[20] = { 0 }, v[20] = { 0 };
        for (int i = 0; i < 20; i++) {
            p[i] = 1;
            g[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? -INFINITY : 1.0f;
        }
        fb_adamw a = { .lr = 0.5, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .clip = 1, .step = 1 };
        fb_adamw_f32(p, g, m, v, 20, &a, true);
        for (int i = 0; i < 20; i++) {
            assert_int_equal(isnan(p[i]) != 0, i % 3 != 2);
            if (i % 3 == 0)
                assert_true(isnan(m[i]) && isnan(v[i]));
            if (i % 3 == 1)
                assert_true(m[i] == -INFINITY && v[i] == INFINITY);
        }
    }
}

static void unknown_kernels_are_refused_and_change_nothing(void **state)
{
    (void)state;
    assert_true(fb_adamw_select("scalar"));
    assert_false(fb_adamw_select("avx1024"));
    assert_false(fb_adamw_select(""));
    assert_string_equal(fb_adamw_selected(), "scalar");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_step_has_a_closed_form),
        cmocka_unit_test(fifty_steps_follow_a_model_in_double),
        cmocka_unit_test(eight_steps_agree_with_torch),
        cmocka_unit_test(avx2_gives_the_bits_of_scalar),
        cmocka_unit_test(avx512_gives_the_bits_of_scalar),
        cmocka_unit_test(split_masters_follow_whole_ones),
        cmocka_unit_test(a_range_may_be_cut_anywhere),
        cmocka_unit_test(without_decay_is_as_with_none),
        cmocka_unit_test(split_is_exact_and_rounds_ties_away),
        cmocka_unit_test(tiny_values_become_zero_at_the_stated_thresholds),
        cmocka_unit_test(what_is_not_finite_is_not_hidden),
        cmocka_unit_test(unknown_kernels_are_refused_and_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
