/* The table of what a layer computes: sizes against their formulas, places against one another. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "plan/values.h"

enum { HIDDEN = 24, HEADS = 6, KV = 2, HEAD = 10, FFN = 56, POLICIES = 3 };

static const fb_model_config cfg = { .hidden = HIDDEN, .n_head = HEADS, .n_kv_head = KV, .head_dim = HEAD, .ffn_dim = FFN };

static uint64_t pad(uint64_t n)
{
    return n % 256 ? n + 256 - n % 256 : n;
}

static void sizes_are_width_times_tokens(void **unused)
{
    (void)unused;
    static const struct { fb_value v; uint64_t width; bool f32; } want[] = {
        { FB_V_X, HIDDEN, false }, { FB_V_N1, HIDDEN, false }, { FB_V_RSTD1, 1, true },
        { FB_V_QKV, (HEADS + 2 * KV) * HEAD, false }, { FB_V_Q, HEADS * HEAD, false }, { FB_V_K, KV * HEAD, false },
        { FB_V_O, HEADS * HEAD, false }, { FB_V_LSE, HEADS, true }, { FB_V_H, HIDDEN, false }, { FB_V_N2, HIDDEN, false },
        { FB_V_RSTD2, 1, true }, { FB_V_GU, 2 * FFN, false }, { FB_V_ACT, FFN, false },
    };
    assert_int_equal(FB_COUNT(want), FB_V_COUNT);
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (uint64_t t = 1; t < 300; t += 37) {
            fb_layer_shape s = { &cfg, bf16 ? FB_BF16 : FB_F32, 0 };
            for (size_t i = 0; i < FB_COUNT(want); i++)
                assert_int_equal(fb_value_size(&s, want[i].v, t), pad(t * want[i].width * (bf16 && !want[i].f32 ? 2 : 4)));
        }
}

/* A thriftier policy keeps a part of what a freer one keeps; the input is always there. */
static void policies_are_nested(void **unused)
{
    (void)unused;
    fb_layer_shape s = { &cfg, FB_F32, 0 };
    for (fb_value v = FB_V_X; v < FB_V_COUNT; v++) {
        assert_true(fb_value_kept(v, FB_RECOMPUTE_NONE));
        assert_true(fb_value_kept(v, FB_RECOMPUTE_SELECTIVE) || !fb_value_kept(v, FB_RECOMPUTE_FULL));
        assert_true(fb_value_kept(v, FB_RECOMPUTE_FULL) == (v == FB_V_X));
        assert_non_null(fb_value_str(v));
    }
    /* Selective keeps what matrix products and attention made, and nothing that is cheap to make again. */
    assert_int_equal(fb_layer_saved_size(&s, FB_RECOMPUTE_SELECTIVE, 7),
                     fb_value_size(&s, FB_V_QKV, 7) + fb_value_size(&s, FB_V_O, 7) + fb_value_size(&s, FB_V_LSE, 7)
                     + fb_value_size(&s, FB_V_H, 7) + fb_value_size(&s, FB_V_GU, 7));
    assert_int_equal(fb_layer_saved_size(&s, FB_RECOMPUTE_FULL, 7), 0);
}

static void values_lie_side_by_side(void **unused)
{
    (void)unused;
    for (int policy = 0; policy < POLICIES; policy++)
        for (uint64_t t = 1; t < 300; t += 37) {
            fb_layer_shape s = { &cfg, FB_BF16, 1000 };
            uint64_t used[2] = { 0, 0 };
            for (fb_value v = FB_V_N1; v < FB_V_COUNT; v++) {
                bool kept = fb_value_kept(v, (fb_recompute)policy);
                assert_int_equal(fb_value_offset(&s, (fb_recompute)policy, t, v), used[kept]);
                used[kept] += fb_value_size(&s, v, t);
            }
            assert_int_equal(fb_layer_saved_size(&s, (fb_recompute)policy, t), used[1]);
            assert_int_equal(fb_layer_temporaries_at(&s, (fb_recompute)policy, t).d_act, used[0]);
            assert_true(fb_layer_scratch_size(&s, (fb_recompute)policy, t) >= used[0]);
        }
}

typedef struct stretch {
    uint64_t at, size;
} stretch;

static void check_apart(const stretch *s, size_t n, uint64_t end)
{
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(s[i].at % 256, 0);
        assert_true(s[i].at + s[i].size <= end);
        for (size_t j = 0; j < i; j++)
            assert_true(s[i].at >= s[j].at + s[j].size || s[j].at >= s[i].at + s[i].size);
    }
}

/* What one operation of the backward reads and writes at once does not overlap, nor any recomputed value that is still read. */
static void temporaries_alive_together_are_apart(void **unused)
{
    (void)unused;
    static const fb_model_config shapes[] = {
        { .hidden = HIDDEN, .n_head = HEADS, .n_kv_head = KV, .head_dim = HEAD, .ffn_dim = FFN },
        { .hidden = 640, .n_head = 1, .n_kv_head = 1, .head_dim = 16, .ffn_dim = 8 },   /* hidden the widest */
        { .hidden = 8, .n_head = 16, .n_kv_head = 16, .head_dim = 64, .ffn_dim = 8 },  /* heads the widest */
    };
    for (size_t k = 0; k < FB_COUNT(shapes); k++)
        for (int policy = 0; policy < POLICIES; policy++)
            for (uint64_t t = 1; t < 300; t += 37) {
                const fb_model_config *c = &shapes[k];
                fb_layer_shape s = { c, FB_F32, 999 };
                fb_layer_temporaries x = fb_layer_temporaries_at(&s, (fb_recompute)policy, t);
                uint64_t base = 0, q = 4 * t * c->n_head * c->head_dim, kv = 4 * t * c->n_kv_head * c->head_dim;
                uint64_t hidden = 4 * t * c->hidden, f = 4 * t * c->ffn_dim,
                    end = fb_layer_scratch_size(&s, (fb_recompute)policy, t);
                for (fb_value v = FB_V_N1; v < FB_V_COUNT; v++)
                    base += fb_value_kept(v, (fb_recompute)policy) ? 0 : fb_value_size(&s, v, t);
                stretch values = { 0, base };
                assert_int_equal(x.end, end);
                check_apart((stretch[]){ values, { x.d_act, f }, { x.d_gu, 2 * f } }, 3, end);
                check_apart((stretch[]){ values, { x.d_gu, 2 * f }, { x.d_n2, hidden } }, 3, end);
                check_apart((stretch[]){ values, { x.d_o, q }, { x.d_q, q }, { x.d_k, kv }, { x.d_qkv, q + 2 * kv },
                                         { x.attention, 999 } }, 6, end);
                check_apart((stretch[]){ values, { x.d_q, q }, { x.d_k, kv }, { x.d_qkv, q + 2 * kv } }, 4, end);
                check_apart((stretch[]){ values, { x.d_qkv, q + 2 * kv }, { x.d_n1, hidden } }, 3, end);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_width_times_tokens),
        cmocka_unit_test(policies_are_nested),
        cmocka_unit_test(values_lie_side_by_side),
        cmocka_unit_test(temporaries_alive_together_are_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
