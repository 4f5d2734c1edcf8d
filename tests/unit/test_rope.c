/* The oracle is transformers' own rotary embedding: tests/ref/make_rope.py writes the fixture. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/rope.h"

typedef struct rope_case {
    const char     *name, *json;
    uint32_t        step, len, n_picked, picked[3];
    const uint32_t *freq, *cos, *sin;
} rope_case;

#include "../ref/rope_fixture.h"

static fb_model_config parse(const char *json)
{
    fb_model_config c = { 0 };
    fb_error        err = { 0 };
    if (fb_model_config_parse(&c, json, "config.json", &err) != FB_OK)
        fail_msg("%s", err.msg);
    return c;
}

/* Frequencies are the reference's, bit for bit; cosines and sines of the same angles within a rounding of each side. */
static void matches_the_reference(void **unused)
{
    (void)unused;
    fb_rope_state state = { 0 };
    for (size_t k = 0; k < FB_COUNT(rope_cases); k++) {
        const rope_case *e = &rope_cases[k];
        fb_model_config  c = parse(e->json);
        uint32_t         half = c.head_dim / 2;
        float            freq[128], scale;
        if (e->step == 0)
            state = (fb_rope_state){ 0 };
        fb_rope_advance(&state, &c, e->len);
        fb_rope_frequencies(freq, &scale, &c, &state);
        for (uint32_t i = 0; i < half; i++)
            if (fb_f32_bits(freq[i]) != e->freq[i])
                fail_msg("%s, step %u: frequency %u is %.9g, the reference %.9g", e->name, e->step, i, freq[i],
                         fb_bits_f32(e->freq[i]));
        float *cosine = malloc((size_t)e->len * half * sizeof *cosine), *sine = malloc((size_t)e->len * half * sizeof *sine);
        assert_non_null(cosine);
        assert_non_null(sine);
        fb_rope_table(cosine, sine, e->len, &c, &state);
        for (uint32_t p = 0; p < e->n_picked; p++)
            for (uint32_t i = 0; i < half; i++) {
                size_t at = (size_t)e->picked[p] * half + i;
                float  dc = cosine[at] - fb_bits_f32(e->cos[p * half + i]), ds = sine[at] - fb_bits_f32(e->sin[p * half + i]);
                if (!(fabsf(dc) <= 3e-7f && fabsf(ds) <= 3e-7f))
                    fail_msg("%s, step %u, position %u, pair %u: off by %g and %g", e->name, e->step, e->picked[p], i, dc, ds);
            }
        for (uint32_t i = 0; i < half; i++) { /* position 0 turns nothing */
            assert_true(cosine[i] == scale);
            assert_true(sine[i] == 0);
        }
        free(cosine);
        free(sine);
        fb_model_config_free(&c);
    }
}

static void only_dynamic_tables_change(void **unused)
{
    (void)unused;
    fb_rope_state   s = { 0 };
    fb_model_config c = parse("{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":8,\"num_hidden_layers\":1,"
                              "\"num_attention_heads\":4,\"vocab_size\":9,\"max_position_embeddings\":64,"
                              "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}");
    assert_false(fb_rope_advance(&s, &c, 64));
    assert_true(fb_rope_advance(&s, &c, 65));
    assert_false(fb_rope_advance(&s, &c, 65));
    assert_false(fb_rope_advance(&s, &c, 64)); /* not shorter than the original: the grown table stays */
    assert_true(fb_rope_advance(&s, &c, 63));
    assert_int_equal(s.len_cached, 64);
    assert_false(fb_rope_advance(&s, &c, 10));
    c.rope.type = FB_ROPE_LINEAR;
    assert_false(fb_rope_advance(&s, &c, 1000));
    assert_int_equal(s.len_cached, 64);
    fb_model_config_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_the_reference),
        cmocka_unit_test(only_dynamic_tables_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
