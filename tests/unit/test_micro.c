/* Micro-batches against plain definitions of what they hold, on documents made at random. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/tokens.h"
#include "test_kit.h"
#include "train/micro.h"

enum { CAPACITY = 61, VOCAB = 13 };

static void *buffer_for(uint32_t t_max)
{
    void *buffer = aligned_alloc(256, fb_micro_size(t_max)); /* exact, so that a sanitizer sees one byte too many */
    assert_non_null(buffer);
    memset(buffer, 0xff, fb_micro_size(t_max));
    return buffer;
}

static void arrays_are_aligned_and_apart(void **unused)
{
    (void)unused;
    static const uint32_t sizes[] = { 1, 2, 63, 64, 65, 127, 4096 };
    for (size_t i = 0; i < FB_COUNT(sizes); i++) {
        uint64_t t = sizes[i], size = fb_micro_size(sizes[i]);
        unsigned char *base = aligned_alloc(256, size);
        fb_micro_arrays a = fb_micro_at(base, sizes[i]);
        const struct { const void *at; uint64_t size; } arrays[] = {
            { a.id, 4 * t }, { a.position, 4 * t }, { a.span, sizeof(fb_span) * t }, { a.learn_index, 4 * t },
            { a.target, 4 * t }, { a.embed_id, 4 * t }, { a.embed_start, 4 * (t + 1) }, { a.embed_order, 4 * t },
        };
        assert_int_equal(size % 256, 0);
        for (size_t k = 0; k < FB_COUNT(arrays); k++) {
            uint64_t from = (uint64_t)((const unsigned char *)arrays[k].at - base);
            assert_int_equal(from % 256, 0);
            assert_true(from + arrays[k].size <= size);
            for (size_t j = 0; j < k; j++) {
                uint64_t other = (uint64_t)((const unsigned char *)arrays[j].at - base);
                assert_true(from >= other + arrays[j].size || other >= from + arrays[k].size);
            }
        }
        free(base);
    }
}

static void a_document_by_hand(void **unused)
{
    (void)unused;
    void *buffer = buffer_for(8);
    fb_micro m;
    const uint32_t one[] = { 5, 9, 5 }, two[] = { 9, 2 };
    const int32_t labels_one[] = { 5, FB_LABEL_NONE, 7 }, labels_two[] = { FB_LABEL_NONE, 2 };
    fb_micro_init(&m, buffer, 8, -1);
    fb_micro_begin(&m);
    fb_micro_add_document(&m, one, labels_one, 3);
    fb_micro_add_document(&m, two, NULL, 0); /* nothing is nothing */
    fb_micro_add_document(&m, two, labels_two, 2);
    fb_micro_finish(&m);
    assert_int_equal(m.t, 5);
    assert_int_equal(m.n_span, 2);
    assert_int_equal(m.len_max, 3);
    assert_int_equal(m.n_learned, 2); /* a document's first label has nothing before it to be learned from */
    assert_memory_equal(m.host.id, ((uint32_t[]){ 5, 9, 5, 9, 2 }), 20);
    assert_memory_equal(m.host.position, ((uint32_t[]){ 0, 1, 2, 0, 1 }), 20);
    assert_memory_equal(m.host.span, ((fb_span[]){ { 0, 3, 0, 3 }, { 3, 2, 3, 2 } }), sizeof(fb_span) * 2);
    assert_memory_equal(m.host.learn_index, ((uint32_t[]){ 1, 3 }), 8); /* the shift is ours */
    assert_memory_equal(m.host.target, ((uint32_t[]){ 7, 2 }), 8);
    assert_int_equal(m.n_unique, 3);
    assert_memory_equal(m.host.embed_id, ((uint32_t[]){ 2, 5, 9 }), 12);
    assert_memory_equal(m.host.embed_start, ((uint32_t[]){ 0, 1, 3, 5 }), 16);
    assert_memory_equal(m.host.embed_order, ((uint32_t[]){ 4, 0, 2, 1, 3 }), 20);
    free(buffer);
}

static void check_random(fb_micro *m, uint64_t *seed)
{
    uint32_t ids[CAPACITY], t = 0, longest = 0, n_span = 0, n_learned = 0, order = 0, unique = 0;
    int32_t labels[CAPACITY];
    bool learned = random_under(seed, 4) != 0;
    fb_micro_begin(m);
    while (t < CAPACITY) {
        uint32_t n = 1 + random_under(seed, CAPACITY - t);
        for (uint32_t i = 0; i < n; i++) {
            ids[t + i] = random_under(seed, VOCAB);
            labels[t + i] = random_under(seed, 2) ? (int32_t)random_under(seed, VOCAB) : FB_LABEL_NONE;
        }
        fb_micro_add_document(m, ids + t, learned ? labels + t : NULL, n);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(m->host.id[t + i], ids[t + i]);
            assert_int_equal(m->host.position[t + i], i);
            if (learned && i && labels[t + i] != FB_LABEL_NONE) {
                assert_int_equal(m->host.learn_index[n_learned], t + i - 1);
                assert_int_equal(m->host.target[n_learned++], labels[t + i]);
            }
        }
        assert_memory_equal(&m->host.span[n_span++], &((fb_span){ t, n, t, n }), sizeof(fb_span));
        longest = n > longest ? n : longest;
        t += n;
        if (random_under(seed, 3) == 0)
            break;
    }
    fb_micro_finish(m);
    assert_int_equal(m->t, t);
    assert_int_equal(m->n_span, n_span);
    assert_int_equal(m->n_learned, n_learned);
    assert_int_equal(m->len_max, longest);
    for (uint32_t id = 0; id < VOCAB; id++) { /* ids ascending, positions ascending within */
        uint32_t first = order;
        for (uint32_t i = 0; i < t; i++)
            if (ids[i] == id && (int64_t)id != m->pad)
                assert_int_equal(m->host.embed_order[order++], i);
        if (order == first)
            continue;
        assert_int_equal(m->host.embed_id[unique], id);
        assert_int_equal(m->host.embed_start[unique++], first);
    }
    assert_int_equal(m->n_unique, unique);
    assert_int_equal(m->host.embed_start[unique], order);
}

static void random_documents(void **unused)
{
    (void)unused;
    uint64_t seed = 7;
    void *buffer = buffer_for(CAPACITY);
    for (int64_t pad = -1; pad < 3; pad++) {
        fb_micro m;
        fb_micro_init(&m, buffer, CAPACITY, pad);
        for (int i = 0; i < 500; i++)
            check_random(&m, &seed);
        fb_micro_begin(&m);
        fb_micro_finish(&m);
        assert_int_equal(m.t + m.n_span + m.n_learned + m.n_unique + m.len_max, 0);
        assert_int_equal(m.host.embed_start[0], 0);
    }
    free(buffer);
}

static void add_too_much(void *buffer)
{
    fb_micro m;
    uint32_t ids[CAPACITY + 1] = { 0 };
    fb_micro_init(&m, buffer, CAPACITY, -1);
    fb_micro_begin(&m);
    fb_micro_add_document(&m, ids, NULL, CAPACITY);
    fb_micro_add_document(&m, ids, NULL, 1);
}

static void more_than_it_holds_is_asserted(void **unused)
{
    (void)unused;
    void *buffer = buffer_for(CAPACITY);
    assert_true(aborts(add_too_much, buffer));
    free(buffer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arrays_are_aligned_and_apart),
        cmocka_unit_test(a_document_by_hand),
        cmocka_unit_test(random_documents),
        cmocka_unit_test(more_than_it_holds_is_asserted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
