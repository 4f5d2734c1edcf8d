/* The loader alone: an engine that is nothing but micro-batches takes what it serves.  Every document is made of its own
 * number, so that what arrives tells where it came from. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../src/run/loader.c"
#include "temp_dir.h"
#include "test_kit.h"

enum { DOCS_MAX = 300, ROW = 32, MICROS_MAX = 16 };

struct fb_engine {
    fb_micro micros[MICROS_MAX];
};

fb_micro *fb_engine_micro(fb_engine *e, uint32_t i)
{
    assert_true(i < MICROS_MAX);
    return &e->micros[i];
}

/* ---- a shard in memory: token = document * ROW + place, learned when it is odd ---- */

typedef struct shard {
    fb_tokens tokens;
    uint32_t  ids[DOCS_MAX * ROW];
    uint8_t   mask[DOCS_MAX * ROW];
    uint64_t  start[DOCS_MAX + 1];
} shard;

static shard data;
static fb_engine engine;
static void *buffers[MICROS_MAX];

static void make_shard(uint32_t n_doc, uint64_t seed)
{
    data.tokens = (fb_tokens){ .n_doc = n_doc, .ids = data.ids, .mask = data.mask, .doc_start = data.start };
    for (uint32_t d = 0; d < n_doc; d++) {
        uint32_t len = 1 + random_under(&seed, random_under(&seed, 3) ? ROW / 3 : ROW);
        for (uint32_t i = 0; i < len; i++) {
            data.ids[data.tokens.n_token + i] = d * ROW + i;
            data.mask[data.tokens.n_token + i] = i & 1;
        }
        data.tokens.n_token += len;
        data.start[d + 1] = data.tokens.n_token;
        data.tokens.doc_len_max = len > data.tokens.doc_len_max ? len : data.tokens.doc_len_max;
    }
}

static fb_loader *new_loader(const fb_loader_options *o)
{
    fb_loader *l;
    fb_error err;
    if (fb_loader_new(&l, &data.tokens, o, &err) != FB_OK)
        fail_msg("%s", err.msg);
    for (int i = 0; i < MICROS_MAX; i++) {
        free(buffers[i]);
        buffers[i] = aligned_alloc(256, fb_micro_size(ROW * o->rows_per_micro));
        fb_micro_init(&engine.micros[i], buffers[i], ROW * o->rows_per_micro, -1);
    }
    return l;
}

/* ---- what came: documents in order, and checks that each is whole ---- */

typedef struct served {
    uint32_t doc[DOCS_MAX * 4], n_doc;
    uint32_t rows[DOCS_MAX * 4], n_step; /* rows a step */
} served;

static void note_micro(served *s, const fb_micro *m)
{
    uint32_t n_learned = 0;
    for (uint32_t k = 0; k < m->n_span; k++) {
        const fb_span *span = &m->host.span[k];
        uint32_t d = m->host.id[span->q_start] / ROW;
        assert_int_equal(span->q_len, data.start[d + 1] - data.start[d]);
        for (uint32_t i = 0; i < span->q_len; i++)
            assert_int_equal(m->host.id[span->q_start + i], d * ROW + i);
        n_learned += span->q_len / 2;
        s->doc[s->n_doc++] = d;
    }
    assert_int_equal(m->n_learned, n_learned);
    for (uint32_t i = 0; i < m->n_learned; i++)
        assert_int_equal(m->host.target[i], m->host.id[m->host.learn_index[i]] + 1);
}

static void serve(served *s, fb_loader *l, uint64_t step)
{
    uint32_t rows, n = fb_loader_fill(l, &engine, step, &rows);
    assert_int_equal(n, (rows + l->o.rows_per_micro - 1) / l->o.rows_per_micro);
    for (uint32_t i = 0; i < n; i++)
        note_micro(s, &engine.micros[i]);
    s->rows[s->n_step++] = rows;
}

static served serve_epoch(fb_loader *l, uint64_t epoch)
{
    served s = { .n_doc = 0 };
    for (uint64_t i = 0; i < fb_loader_steps_per_epoch(l); i++)
        serve(&s, l, epoch * fb_loader_steps_per_epoch(l) + i);
    return s;
}

static void check_each_once(const served *s)
{
    uint32_t times[DOCS_MAX] = { 0 };
    for (uint32_t i = 0; i < s->n_doc; i++)
        times[s->doc[i]]++;
    for (uint32_t d = 0; d < data.tokens.n_doc; d++)
        assert_int_equal(times[d], 1);
    assert_int_equal(s->n_doc, data.tokens.n_doc);
}

static bool same_order(const served *a, const served *b)
{
    return a->n_doc == b->n_doc && !memcmp(a->doc, b->doc, a->n_doc * sizeof *a->doc);
}

static int free_buffers(void **state)
{
    (void)state;
    for (int i = 0; i < MICROS_MAX; i++) {
        free(buffers[i]);
        buffers[i] = NULL;
    }
    return 0;
}

/* ---- tests ---- */

static void every_document_once_an_epoch(void **unused)
{
    (void)unused;
    for (uint32_t n_doc = 1; n_doc <= DOCS_MAX; n_doc += 1 + n_doc / 2)
        for (int bits = 0; bits < 4; bits++)
            for (uint32_t per_step = 1; per_step <= 7; per_step += 3) {
                make_shard(n_doc, n_doc);
                fb_loader *l = new_loader(&(fb_loader_options){ .row_len = ROW, .packing = bits & 1, .shuffle = bits & 2,
                    .seed = 5, .rows_per_step = per_step, .rows_per_micro = per_step > 2 ? 2 : 1 });
                for (uint64_t epoch = 0; epoch < 3; epoch++) {
                    served s = serve_epoch(l, epoch);
                    uint64_t rows = 0;
                    check_each_once(&s);
                    for (uint32_t i = 0; i < s.n_step; i++) { /* full steps, but for the last */
                        assert_true(s.rows[i] == per_step || (i + 1 == s.n_step && s.rows[i] > 0 && s.rows[i] < per_step));
                        rows += s.rows[i];
                    }
                    assert_int_equal(rows, fb_loader_rows(l));
                    assert_true((bits & 1) || rows == n_doc);
                }
                fb_loader_free(l);
            }
}

/* A row at a time: no row holds more than row_len tokens, and packing leaves little room in them. */
static void packed_rows_fit(void **unused)
{
    (void)unused;
    for (int shuffled = 0; shuffled < 2; shuffled++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            make_shard(DOCS_MAX, seed);
            fb_loader *l = new_loader(&(fb_loader_options){ .row_len = ROW, .packing = true, .shuffle = shuffled, .seed = seed,
                .rows_per_step = 1, .rows_per_micro = 1 });
            uint64_t n_row = fb_loader_rows(l), tokens = 0;
            uint32_t before = 0;
            for (uint64_t i = 0; i < n_row; i++) {
                assert_int_equal(fb_loader_fill(l, &engine, i, NULL), 1);
                uint32_t t = engine.micros[0].t;
                assert_in_range(t, 1, ROW);
                /* In order, a row is closed only by a document that does not fit into it. */
                assert_true(shuffled || i == 0 || before + engine.micros[0].host.span[0].q_len > ROW);
                before = t;
                tokens += t;
            }
            assert_int_equal(tokens, data.tokens.n_token);
            if (shuffled) /* best fit among 64 open rows */
                assert_true(n_row * ROW <= tokens + tokens / 10 + ROW);
            fb_loader_free(l);
        }
}

static void without_shuffling_the_files_order(void **unused)
{
    (void)unused;
    make_shard(90, 1);
    for (int packing = 0; packing < 2; packing++) {
        fb_loader *l = new_loader(&(fb_loader_options){ .row_len = ROW, .packing = packing, .seed = 3, .rows_per_step = 4,
                                                        .rows_per_micro = 2 });
        for (uint64_t epoch = 0; epoch < 2; epoch++) {
            served s = serve_epoch(l, epoch);
            for (uint32_t i = 0; i < s.n_doc; i++)
                assert_int_equal(s.doc[i], i);
        }
        fb_loader_free(l);
    }
}

static void the_seed_and_the_epoch_are_the_order(void **unused)
{
    (void)unused;
    make_shard(200, 1);
    for (int packing = 0; packing < 2; packing++) {
        fb_loader_options o = { .row_len = ROW, .packing = packing, .shuffle = true, .seed = 42, .rows_per_step = 4,
                                .rows_per_micro = 2 };
        fb_loader *l = new_loader(&o);
        served first = serve_epoch(l, 0), second = serve_epoch(l, 1);
        assert_false(same_order(&first, &second));
        served again = serve_epoch(l, 0);
        assert_true(same_order(&first, &again));
        fb_loader_free(l);

        l = new_loader(&o); /* another process, that resumes in the second epoch */
        again = serve_epoch(l, 1);
        assert_true(same_order(&second, &again));
        uint64_t n = fb_loader_steps_per_epoch(l);
        served later = { .n_doc = 0 }, earlier = { .n_doc = 0 }; /* any step by itself is what it is in its turn */
        serve(&later, l, n + 3);
        for (uint64_t i = 0; i < 3; i++)
            serve(&earlier, l, n + i);
        assert_memory_equal(later.doc, second.doc + earlier.n_doc, later.n_doc * sizeof *second.doc);
        fb_loader_free(l);

        o.seed = 43;
        l = new_loader(&o);
        again = serve_epoch(l, 0);
        assert_false(same_order(&first, &again));
        fb_loader_free(l);
    }
}

/* The cut into micro-batches and steps changes nothing about which rows come in which order. */
static void batch_sizes_do_not_change_the_order(void **unused)
{
    (void)unused;
    make_shard(77, 9);
    served want = { .n_doc = 0 };
    for (uint32_t per_step = 1; per_step <= 12; per_step++)
        for (uint32_t per_micro = 1; per_micro <= per_step; per_micro++) {
            fb_loader *l = new_loader(&(fb_loader_options){ .row_len = ROW, .packing = true, .shuffle = true, .seed = 1,
                .rows_per_step = per_step, .rows_per_micro = per_micro });
            served s = serve_epoch(l, 0);
            if (per_step == 1)
                want = s;
            assert_true(same_order(&want, &s));
            fb_loader_free(l);
        }
}

/* Each order about as often as any other: 4 rows, 24 orders, 2400 seeds; the bound is 6 standard deviations. */
static void shuffles_are_fair(void **unused)
{
    (void)unused;
    uint32_t times[256] = { 0 }, seen = 0;
    for (uint64_t seed = 0; seed < 2400; seed++) {
        uint64_t items[4] = { 0, 1, 2, 3 };
        shuffle(items, 4, seed, 1);
        times[items[0] << 6 | items[1] << 4 | items[2] << 2 | items[3]]++;
    }
    for (int i = 0; i < 256; i++) {
        seen += times[i] != 0;
        assert_true(times[i] == 0 || (times[i] > 100 - 60 && times[i] < 100 + 60));
    }
    assert_int_equal(seen, 24);
}

static void describes_a_steps_rows(void **unused)
{
    (void)unused;
    char text[64], tight[12];
    make_shard(50, 4);
    fb_loader *l = new_loader(&(fb_loader_options){ .row_len = ROW, .rows_per_step = 4, .rows_per_micro = 2 });
    fb_loader_describe(l, 2, text, sizeof text);
    assert_string_equal(text, "8, 9, 10, 11");
    fb_loader_describe(l, 12, text, sizeof text); /* the last step of the epoch has two rows */
    assert_string_equal(text, "48, 49");
    fb_loader_describe(l, 13, text, sizeof text);
    assert_string_equal(text, "0, 1, 2, 3");
    for (size_t size = 5; size < sizeof tight; size++) {
        memset(tight, '!', sizeof tight);
        fb_loader_describe(l, 2, tight, size);
        assert_non_null(memchr(tight, 0, size));
        assert_non_null(strstr(tight, " ..."));
        for (size_t i = size; i < sizeof tight; i++)
            assert_int_equal(tight[i], '!');
    }
    fb_loader_free(l);
}

static void refuses_what_cannot_be_served(void **unused)
{
    (void)unused;
    fb_error err;
    fb_loader *l = NULL;
    fb_loader_options o = { .row_len = ROW, .rows_per_step = 1, .rows_per_micro = 1 };
    data.tokens = (fb_tokens){ 0 };
    expect_failure(fb_loader_new(&l, &data.tokens, &o, &err), FB_INPUT, &err, "the dataset has no rows");
    make_shard(50, 4);
    o.row_len = data.tokens.doc_len_max - 1;
    expect_failure(fb_loader_new(&l, &data.tokens, &o, &err), FB_INPUT, &err, "raise cutoff_len");
    assert_null(l);
    fb_loader_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_document_once_an_epoch),
        cmocka_unit_test(packed_rows_fit),
        cmocka_unit_test(without_shuffling_the_files_order),
        cmocka_unit_test(the_seed_and_the_epoch_are_the_order),
        cmocka_unit_test(batch_sizes_do_not_change_the_order),
        cmocka_unit_test(shuffles_are_fair),
        cmocka_unit_test(describes_a_steps_rows),
        cmocka_unit_test(refuses_what_cannot_be_served),
    };
    return cmocka_run_group_tests(tests, NULL, free_buffers);
}
