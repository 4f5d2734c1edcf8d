/* Conversions, exhaustively over 16-bit patterns.  A 16-bit float's value has a closed form; what a float32 rounds to
 * follows from the two neighbours and the exact midpoint between them, which double holds. */
#include "base/dtype.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/error.h"

/* IEEE 754-2008, 3.4: the value of a finite pattern with this many exponent and mantissa bits. */
static double value_of(uint32_t bits, int n_exponent, int n_mantissa)
{
    int bias = (1 << (n_exponent - 1)) - 1;
    int exponent = (int)(bits >> n_mantissa) & ((1 << n_exponent) - 1);
    double mantissa = bits & ((1u << n_mantissa) - 1);
    double size = exponent == 0 ? ldexp(mantissa, 1 - bias - n_mantissa)
                                : ldexp(mantissa + ldexp(1, n_mantissa), exponent - bias - n_mantissa);
    return bits >> (n_exponent + n_mantissa) ? -size : size;
}

typedef struct half_kind {
    int       n_exponent, n_mantissa;
    float   (*widen)(uint16_t);
    uint16_t (*narrow)(float);
} half_kind;

static float widen_bf16(uint16_t h)
{
    return fb_bf16_f32(h);
}

static uint16_t narrow_bf16(float f)
{
    return fb_f32_bf16(f);
}

static const half_kind f16 = { 5, 10, fb_f16_f32, fb_f32_f16 };
static const half_kind bf16 = { 8, 7, widen_bf16, narrow_bf16 };

static uint16_t infinity_of(const half_kind *k)
{
    return (uint16_t)(((1u << k->n_exponent) - 1) << k->n_mantissa);
}

static void check_widening(const half_kind *k)
{
    uint16_t infinity = infinity_of(k);
    for (uint32_t h = 0; h <= 0xffff; h++) {
        float f = k->widen((uint16_t)h);
        if ((h & 0x7fff) < infinity)
            assert_true(f == value_of(h, k->n_exponent, k->n_mantissa));
        else if ((h & 0x7fff) == infinity)
            assert_true(isinf(f));
        else
            assert_true(isnan(f));
        assert_int_equal(!!signbit(f), h >> 15);
        if (isnan(f))
            assert_true(isnan(k->widen(k->narrow(f))));
        else
            assert_int_equal(k->narrow(f), h);
    }
}

/* Between each finite pattern and the next, infinity standing for the value that would come next (IEEE 754, 4.3.1). */
static void check_rounding(const half_kind *k)
{
    for (uint32_t h = 0; h < infinity_of(k); h++) {
        double middle = (value_of(h, k->n_exponent, k->n_mantissa) + value_of(h + 1, k->n_exponent, k->n_mantissa)) / 2;
        if (h + 1 == infinity_of(k))
            middle = (value_of(h, k->n_exponent, k->n_mantissa) + ldexp(1, 1 << (k->n_exponent - 1))) / 2;
        float f = (float)middle;
        assert_true(f == middle);
        for (uint16_t sign = 0; sign < 2; sign++) {
            uint16_t minus = (uint16_t)(sign << 15);
            float s = sign ? -1.0f : 1.0f;
            assert_int_equal(k->narrow(s * f), minus | (h & 1 ? h + 1 : h));
            assert_int_equal(k->narrow(s * nextafterf(f, 0)), minus | h);
            assert_int_equal(k->narrow(s * nextafterf(f, INFINITY)), minus | (h + 1));
        }
    }
    assert_int_equal(k->narrow(INFINITY), infinity_of(k));
    assert_int_equal(k->narrow(-INFINITY), 0x8000 | infinity_of(k));
    assert_int_equal(k->narrow(fb_bits_f32(0x7f7fffff)), infinity_of(k));
}

static void f16_widens_exactly(void **state)
{
    (void)state;
    check_widening(&f16);
}

static void bf16_widens_exactly(void **state)
{
    (void)state;
    check_widening(&bf16);
}

static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    check_rounding(&f16);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    check_rounding(&bf16);
}

static void every_nan_stays_a_nan(void **state)
{
    (void)state;
    for (uint32_t payload = 1; payload < 1u << 23; payload += payload < 70000 ? 1 : 997)
        for (uint32_t sign = 0; sign < 2; sign++) {
            float f = fb_bits_f32(sign << 31 | 0x7f800000u | payload);
            assert_true(isnan(fb_bf16_f32(fb_f32_bf16(f))));
            assert_true(isnan(fb_f16_f32(fb_f32_f16(f))));
        }
}

static void arrays_convert_element_by_element(void **state)
{
    (void)state;
    static const float from[] = { 0, -0.0f, 1, -2.5f, 65504, 0x1p-24f, 3.14159274f, INFINITY };
    enum { N = FB_COUNT(from) };
    for (int t = 0; t < FB_DTYPE_COUNT; t++) {
        unsigned char narrow[4 * N + 4];
        float back[N + 1];
        memset(narrow, 0xa5, sizeof narrow);
        back[N] = 7;
        fb_from_f32(narrow, (fb_dtype)t, from, N);
        fb_to_f32(back, narrow, (fb_dtype)t, N);
        for (int i = 0; i < N; i++) {
            float want = t == FB_F32 ? from[i]
                       : t == FB_F16 ? fb_f16_f32(fb_f32_f16(from[i]))
                                     : fb_bf16_f32(fb_f32_bf16(from[i]));
            assert_int_equal(fb_f32_bits(back[i]), fb_f32_bits(want));
        }
        assert_int_equal(narrow[fb_dtype_size((fb_dtype)t) * N], 0xa5);
        assert_true(back[N] == 7);
    }
}

static void names_are_those_of_safetensors_and_hugging_face(void **state)
{
    (void)state;
    assert_string_equal(fb_dtype_str(FB_F32), "F32");
    assert_string_equal(fb_dtype_str(FB_F16), "F16");
    assert_string_equal(fb_dtype_str(FB_BF16), "BF16");
    assert_string_equal(fb_dtype_hf_str(FB_F32), "float32");
    assert_string_equal(fb_dtype_hf_str(FB_F16), "float16");
    assert_string_equal(fb_dtype_hf_str(FB_BF16), "bfloat16");
    assert_int_equal(fb_dtype_size(FB_F32), 4);
    assert_int_equal(fb_dtype_size(FB_F16), 2);
    assert_int_equal(fb_dtype_size(FB_BF16), 2);
}

static void what_is_not_finite_is_found(void **state)
{
    (void)state;
    static const uint32_t bad[] = { 0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu };
    enum { N = 37 };
    for (uint64_t n = 0; n <= N; n++) {
        float f[N];
        for (uint64_t i = 0; i < N; i++)
            f[i] = fb_bits_f32(i % 3 == 0 ? 0xff7fffffu : i % 3 == 1 ? 0 : 0x7f7fffffu); /* the largest there are */
        assert_int_equal(fb_find_nonfinite(f, n), n);
        for (uint64_t i = n; i-- > 0;) { /* those behind it are not the first */
            f[i] = fb_bits_f32(bad[i % FB_COUNT(bad)]);
            assert_int_equal(fb_find_nonfinite(f, n), i);
            assert_int_equal(fb_find_nonfinite(f, i), i);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_widens_exactly),
        cmocka_unit_test(bf16_widens_exactly),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(every_nan_stays_a_nan),
        cmocka_unit_test(arrays_convert_element_by_element),
        cmocka_unit_test(what_is_not_finite_is_found),
        cmocka_unit_test(names_are_those_of_safetensors_and_hugging_face),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
